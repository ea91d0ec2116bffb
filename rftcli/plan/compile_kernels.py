"""Fused kernels: what `auto` comes to, and what the machine rules out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import MachineFacts, ModelFacts

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

# How to add one: its architecture as config.json names it (and a GGUF file), once `tests/with_cuda` has it and has passed on a GPU.
PROVED = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "llama", "qwen2", "qwen3", "gemma2"})
"""Families that `auto` takes the kernels for."""


def with_kernels(
    recipe: Recipe, models: Iterable[ModelFacts | None], machine: MachineFacts, problems: list[PlanProblem], notes: list[str]
) -> Recipe:
    """The recipe with a value for `train.kernels`. `models`: facts of all that get them, where they are known."""
    kernels = recipe.train.kernels
    if kernels == "liger" and not machine.gpus:
        problems.append(
            PlanProblem(
                path="train.kernels",
                message=f"`{kernels}` needs a GPU, and this run is on a CPU",
                reason="its kernels are written in Triton, which compiles them for GPUs",
                hint="leave `train.kernels` out here, or plan for another machine with `rft plan --machine 8xH100`",
            )
        )
    if kernels != "auto":
        return recipe
    known = all(model is None or model.architecture in PROVED for model in models)
    chosen = machine.gpus > 0 and machine.liger and known and not recipe.train.compile and not recipe.models.policy.trust_remote_code
    if chosen:
        notes.append("train.kernels liger: the package is installed, and faster; the last bits of numbers are other ones than without it")
    train = recipe.train.model_copy(update={"kernels": "liger" if chosen else "none"})
    return recipe.model_copy(update={"train": train})

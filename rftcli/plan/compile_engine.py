"""What an engine with a model of its own is started with: its lengths and numbers, and its part of a device. The same for every such engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from rftcli.plan import engine_memory, memory
from rftcli.plan.compile_models import trained_parameters, trains_in
from rftcli.plan.compile_ppo import all_parameters
from rftcli.plan.compile_precision import keeping
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import Facts, ModelFacts
from rftcli.plan.plan import BatchPlan, LearnerPlan, ModelPlan, WorldPlan
from rftcli.plan.plan_engine import EnginePlan
from rftcli.plan.plan_models import ReferencePlan

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

Found = TypeVar("Found", bound=EnginePlan)
MOST_SEQUENCES = 1024
"""Of one engine where the recipe leaves it to the plan: a decode step of more gains little, and their scores take memory."""
SEQUENCE_MULTIPLE = 8
"""Graphs are captured at multiples of it."""
UNKNOWN_SHARE = 0.4
"""Of a GPU for the engine where the model's size is not known before it is loaded."""
ALONE_ON_CPU = {
    "vllm": "vLLM's CPU build gives the memory that ranks share the same name in every job, and leaves it behind",
    "sglang": "one engine over several ranks is for GPUs that hold a part of the model each",
}
"""Why ranks do not share an engine there."""
CPU_CACHE_SHARE = 0.25
"""Of a rank's part of the machine's memory, at most, for the cache on a CPU."""
HOST_SHARE = 0.4
"""Of the machine's memory that the weights of sleeping engines may take; above it they are given up and pushed anew."""


def own_engine(
    record: type[Found], name: str, shown: str, graphs: bool, recipe: Recipe, facts: Facts, world: WorldPlan, policy: ModelPlan, learner: LearnerPlan,
    batch: BatchPlan, reference: ReferencePlan | None, critic: ModelFacts | None, problems: list[PlanProblem], notes: list[str],
) -> Found:  # fmt: skip
    """The engine `name` (a key of `rollout`; `shown` to people) as a `record` of it. `graphs`: where there is a GPU."""
    if recipe.rollout.hf != type(recipe.rollout.hf)():
        notes.append(f"rollout.hf has no effect: the engine is {name}")
    section = getattr(recipe.rollout, name)
    needs = engine_needs(recipe)
    _check(name, shown, section, facts, world, needs, problems)
    found = record(
        tensor_parallel=section.tensor_parallel,
        max_model_tokens=needs if section.max_model_tokens == "auto" else section.max_model_tokens,
        max_sequences=_sequences(section, recipe, world) if section.max_sequences == "auto" else section.max_sequences,
        memory_share=None,
        cache_bytes=None,
        sleep=0,
        graphs=world.device == "cuda" and graphs,
        seeds=section.seeds,
        check_weights=section.check_weights,
        options=dict(section.options),
    )
    return _with_memory(found, name, section, recipe, facts, world, policy, learner, batch, reference, critic, problems, notes)


def engine_needs(recipe: Recipe) -> int:
    """The longest prompt with the longest completion of rollout and evaluation."""
    new = [recipe.rollout.max_new_tokens]
    if recipe.data.eval:
        new.append(recipe.eval.max_new_tokens or 0)
        new += [source.sampling.max_new_tokens or 0 for source in recipe.data.eval.values()]
    return recipe.rollout.max_prompt_tokens + max(int(length) for length in new)


def _sequences(section: Any, recipe: Recipe, world: WorldPlan) -> int:
    """One engine's share of a rollout."""
    ranks = section.tensor_parallel
    prompts = recipe.batch.prompts_per_step * ranks / world.ranks / recipe.batch.rollouts_per_update
    rows = math.ceil(prompts) * recipe.rollout.samples_per_prompt
    return min(MOST_SEQUENCES, -(-rows // SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE)


def _check(name: str, shown: str, section: Any, facts: Facts, world: WorldPlan, needs: int, problems: list[PlanProblem]) -> None:
    if section.max_model_tokens != "auto" and section.max_model_tokens < needs:
        message = f"{section.max_model_tokens} tokens are fewer than the {needs} of the longest prompt and completion"
        hint = "`auto`, or lower `rollout.max_prompt_tokens` or the lengths of completions"
        problems.append(PlanProblem(path=f"rollout.{name}.max_model_tokens", message=message, hint=hint))
    limit = facts.model.max_positions
    if section.max_model_tokens != "auto" and limit is not None and section.max_model_tokens > limit:
        message = f"{section.max_model_tokens} tokens, the model has {limit} positions"
        problems.append(PlanProblem(path=f"rollout.{name}.max_model_tokens", message=message))
    ranks, together = world.ranks // world.nodes, section.tensor_parallel
    if together > 1 and world.device == "cpu":
        why = ALONE_ON_CPU[name]
        problems.append(PlanProblem(path=f"rollout.{name}.tensor_parallel", message="must be 1 on a CPU", reason=why, hint="an engine in every rank"))
    elif ranks % together:
        fitting = ", ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
        message = f"{together} consecutive ranks do not divide the {ranks} ranks of a machine"
        problems.append(PlanProblem(path=f"rollout.{name}.tensor_parallel", message=message, hint=f"one of {fitting}"))
    if section.sleep not in ("auto", 0) and world.device == "cpu":
        problems.append(PlanProblem(path=f"rollout.{name}.sleep", message=f"{shown} does not sleep on a CPU", hint="`auto` or 0"))


def _with_memory(
    found: Found, name: str, section: Any, recipe: Recipe, facts: Facts, world: WorldPlan, policy: ModelPlan, learner: LearnerPlan, batch: BatchPlan,
    reference: ReferencePlan | None, critic: ModelFacts | None, problems: list[PlanProblem], notes: list[str],
) -> Found:  # fmt: skip
    model, machine = facts.model, facts.machine
    share = None if section.memory_share == "auto" else float(section.memory_share)
    parameters, hidden, layers = policy.parameters, model.hidden, model.layers
    sleeps = None if section.sleep == "auto" else section.sleep > 0
    if parameters is None or hidden is None or layers is None:
        if world.device == "cpu":
            cache = CPU_CACHE_SHARE * machine.memory_gib * memory.GIB / world.ranks
            return replace(found, cache_bytes=int(cache), memory_share=share, memory="the model's size is not known before it is loaded")
        notes.append(f"rollout.{name}: the model's size is not known before it is loaded; the engine gets {share or UNKNOWN_SHARE:.0%} of each GPU")
        level = 1 if section.sleep == "auto" else section.sleep
        return replace(found, memory_share=share or UNKNOWN_SHARE, sleep=level, memory="the model's size is not known before it is loaded")
    number = memory.DTYPE_BYTES[policy.dtype]
    wanted = engine_memory.engine(
        parameters=parameters,
        number_bytes=number,
        layers=layers,
        key_width=model.key_width or hidden,
        vocabulary=model.vocabulary or 0,
        tensor_parallel=found.tensor_parallel,
        sequences=found.max_sequences,
        tokens=found.max_model_tokens,
    )
    found = replace(found, weight_bytes=int(wanted.weights))
    if world.device == "cpu":
        most = (CPU_CACHE_SHARE if share is None else share) * machine.memory_gib * memory.GIB / world.ranks
        cache = max(wanted.cache_least, min(wanted.cache_wanted, most) if share is None else most)
        text = f"{cache / memory.GIB:.2f} GiB of cache a rank ({wanted.cache_wanted / memory.GIB:.2f} GiB would hold all sequences)"
        return replace(found, cache_bytes=int(cache), cache_tokens=int(cache / wanted.cache_per_token), memory_share=share, memory=text)
    whole, trained = all_parameters(recipe, model, critic) or parameters, trained_parameters(policy, model)
    if trained is not None:
        trained += whole - parameters
    state = memory.training_bytes(whole, trains_in(policy), learner.zero_stage, world.ranks, keeping(recipe), trained=trained)
    if reference is not None and reference.kind == "model" and not reference.offload:
        state += number * parameters
    positions = batch.tokens_per_micro_batch or batch.micro_batch_size * found.max_model_tokens
    working = engine_memory.activations(
        positions=positions, hidden=hidden, layers=layers, number_bytes=number, checkpointing=policy.gradient_checkpointing
    )
    division = engine_memory.divide(machine.gpu_memory_gib * memory.GIB, state, working, wanted, share=share, sleeps=sleeps)
    if not division.fits:
        problems.append(
            PlanProblem(
                path=f"rollout.{name}.memory_share" if share is not None else "rollout.engine",
                message=f"the engine does not fit beside the training: {division.text}",
                hint=f"more ranks or a higher ZeRO stage, shorter completions, fewer `rollout.{name}.max_sequences`, `sleep: 1`, `tensor_parallel`",
            )
        )
    level = section.sleep if section.sleep != "auto" else _level(division.sleeps, wanted, world, facts)
    if section.sleep == "auto" and level:
        notes.append(f"rollout.{name}.sleep {level}: {division.text}")
    cache = max(1, int(division.cache))
    return replace(
        found, cache_bytes=cache, cache_tokens=int(cache / wanted.cache_per_token), memory_share=round(division.share, 3), sleep=level,
        memory=division.text,
    )  # fmt: skip


def _level(sleeps: bool, wanted: engine_memory.Engine, world: WorldPlan, facts: Facts) -> int:
    if not sleeps:
        return 0
    on_host = wanted.weights * world.ranks / world.nodes
    return 1 if on_host <= HOST_SHARE * facts.machine.memory_gib * memory.GIB else 2

"""Which engine samples, and what a vLLM engine is started with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rftcli.plan.compile_engine import own_engine
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.compile_sglang import sglang
from rftcli.plan.facts import Facts, ModelFacts
from rftcli.plan.plan import BatchPlan, LearnerPlan, ModelPlan, RolloutPlan, WorldPlan
from rftcli.plan.plan_engine import VllmPlan
from rftcli.plan.plan_models import ReferencePlan

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


def with_engine(
    plan: RolloutPlan | None, recipe: Recipe, facts: Facts, world: WorldPlan, policy: ModelPlan, learner: LearnerPlan | None,
    batch: BatchPlan | None, reference: ReferencePlan | None, critic: ModelFacts | None, problems: list[PlanProblem], notes: list[str],
) -> RolloutPlan | None:  # fmt: skip
    """The rollout with its engine chosen, and planned where it has a model of its own."""
    if plan is None or learner is None or batch is None:
        return plan
    engine, why = choice(recipe, facts, world)
    if engine in PLANNED:
        own, told = [], []
        found = PLANNED[engine](plan, recipe, facts, world, policy, learner, batch, reference, critic, own, told)
        unfit = next((problem.message for problem in own if problem.path == "rollout.engine"), None)
        if recipe.rollout.engine == "auto" and unfit is not None:
            engine, why = "hf", f"vllm is there, but {unfit}"
        else:
            problems += own
    if recipe.rollout.engine == "auto":
        notes.append(f"rollout.engine {engine}: {why}")
    for name in PLANNED:
        section = getattr(recipe.rollout, name)
        if name != engine and section != type(section)():
            notes.append(f"rollout.{name} has no effect: the engine is {engine}")
    if engine not in PLANNED:
        return replace(plan, engine=engine)
    notes += told
    return found


def _vllm(
    plan: RolloutPlan, recipe: Recipe, facts: Facts, world: WorldPlan, policy: ModelPlan, learner: LearnerPlan, batch: BatchPlan,
    reference: ReferencePlan | None, critic: ModelFacts | None, problems: list[PlanProblem], notes: list[str],
) -> RolloutPlan:  # fmt: skip
    section = recipe.rollout.vllm
    graphs = not section.options.get("enforce_eager", False)
    vllm = own_engine(
        VllmPlan, "vllm", "vLLM", graphs, recipe, facts, world, policy, learner, batch, reference, critic, problems, notes
    )
    vllm = replace(vllm, lora=section.lora)
    notes.append(_reproducible(vllm, world))
    return replace(plan, engine="vllm", shares_weights=False, options={}, vllm=vllm)


def choice(recipe: Recipe, facts: Facts, world: WorldPlan) -> tuple[str, str]:
    """(engine, why) of the recipe."""
    asked = recipe.rollout.engine
    if asked != "auto":
        return asked, "the recipe says so"
    if world.device != "cuda":
        return "hf", "no GPU is used"
    if not facts.machine.vllm:
        return "hf", "vllm is not installed (pip install 'rftcli[vllm]')"
    if recipe.rollout.first_token_temperature is not None:
        return "hf", "rollout.first_token_temperature is of that engine alone"
    if recipe.rollout.hf.options != type(recipe.rollout.hf.options)():
        return "hf", "rollout.hf.options are of that engine alone"
    return "vllm", "it is installed and there is a GPU"


def _reproducible(vllm: VllmPlan, world: WorldPlan) -> str:
    if vllm.seeds == "request" or (vllm.seeds == "auto" and world.device == "cpu"):
        seeds = "every completion has a seed of its own"
    elif vllm.seeds == "engine":
        seeds = "the engine's generator is seeded for each rollout"
    else:
        seeds = "every completion has a seed of its own where the engine takes one for free, else its generator is seeded for each rollout"
    return f"vllm: {seeds}; the same run again need not give the same samples, because the last bits of scores depend on what is decoded together"


PLANNED = {"vllm": _vllm, "sglang": sglang}
"""Engines with a model of their own -> what plans them."""

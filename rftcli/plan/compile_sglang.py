"""What an SGLang engine is started with, beyond what it shares with every engine of its own model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rftcli.plan.compile_engine import own_engine
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import Facts, ModelFacts
from rftcli.plan.plan import BatchPlan, LearnerPlan, ModelPlan, RolloutPlan, WorldPlan
from rftcli.plan.plan_engine import SglangPlan
from rftcli.plan.plan_models import ReferencePlan

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


def sglang(
    plan: RolloutPlan, recipe: Recipe, facts: Facts, world: WorldPlan, policy: ModelPlan, learner: LearnerPlan, batch: BatchPlan,
    reference: ReferencePlan | None, critic: ModelFacts | None, problems: list[PlanProblem], notes: list[str],
) -> RolloutPlan:  # fmt: skip
    section = recipe.rollout.sglang
    graphs = not section.options.get("disable_cuda_graph", False)
    found = own_engine(
        SglangPlan, "sglang", "SGLang", graphs, recipe, facts, world, policy, learner, batch, reference, critic, problems, notes
    )
    if section.seeds == "request" and world.device == "cpu":
        why = "SGLang's deterministic mode has no attention for a CPU"
        problems.append(PlanProblem(path="rollout.sglang.seeds", message="must be `engine` or `auto` on a CPU", reason=why))
    seeds = "every completion has a seed of its own" if section.seeds == "request" else "the engine's generator is seeded when it starts"
    notes.append(
        f"sglang: {seeds}; the same run again need not give the same samples, because the last bits of scores depend on what is decoded together"
    )
    return replace(plan, engine="sglang", shares_weights=False, options={}, sglang=found)

"""What a run remembers of its prompts from step to step: those that wait to come back or to be finished, and how hard the rows are. From the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rftcli.data.curriculum import OwnCurriculum, PassRates
from rftcli.data.source import PromptSource
from rftcli.plan.plan import Plan
from rftcli.protocols import Stateful, World
from rftcli.stages.drawing import Memory
from rftcli.stages.partial import Kept
from rftcli.stages.replay import Replay


def make_memory(plan: Plan, source: PromptSource, paths: list[Path], world: World, newest: Callable[[], int]) -> Memory:
    """`newest`: the version of the policy's weights."""
    replay, section = plan.rollout.replay, plan.data.curriculum
    curriculum: PassRates | OwnCurriculum | None = None
    if section is not None and section.target is not None:
        curriculum = OwnCurriculum(section.target, section.options or {}, paths)
    elif section is not None:
        curriculum = PassRates(
            low=section.low,
            high=section.high,
            share=section.share,
            metric=section.metric,
            pass_mark=section.pass_mark,
            memory=section.memory,
            seed=plan.data.seed,
            data=source.fingerprint,
        )
    partial = None
    if plan.rollout.partial is not None:
        updates = plan.batch.optimizer_updates_per_step
        partial = Kept(plan.rollout.partial, world, updates=updates, newest=newest, data=source.fingerprint)
    return Memory(replay=None if replay is None else Replay(replay, data=source.fingerprint), curriculum=curriculum, partial=partial)


def remembered(memory: Memory) -> dict[str, Stateful]:
    """What of it belongs into the registry."""
    kept = {"replay": memory.replay, "curriculum": memory.curriculum, "partial": memory.partial}
    return {name: item for name, item in kept.items() if item is not None}  # type: ignore[misc]

"""Dynamic sampling (DAPO, 2503.14476): a group that says nothing gives its place to a fresh prompt, for a bounded number of extra rollouts.

A step has `prompts_per_step` places, numbered; which rank trains on a place follows from (seed, step) alone. The first rollout fills all of them.
After each rollout the ranks tell each other which places have a group with signal. The places without one, in ascending order, ask for the next
draws of the source: the k-th of them for the k-th draw. So which prompt a place gets depends on draws and rewards, never on ranks, and the same
groups are trained on for any number of them. Groups do not move: a rank refills its own places, and waits for the one with most of them to refill.

After the last extra rollout a place keeps the last group it got, with signal or without: the number of trained groups never shrinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rftcli.plan.plan_sampling import DynamicPlan
from rftcli.protocols import World
from rftcli.stages.drawing import Drawing
from rftcli.stages.outcomes import REWARD, Ask, Outcome, known, metric_of
from rftcli.stages.records import SampleRecord, has_spread, records_of
from rftcli.types import Group


def accepts(group: Group, plan: DynamicPlan) -> bool:
    """Does the group say something: two samples with the metric, a spread among them, and a mean within the plan's range (bounds included)?"""
    values = known(metric_of(group, plan.metric))
    if not has_spread(values):
        return False
    mean = sum(values) / len(values)
    return (plan.low is None or mean >= plan.low) and (plan.high is None or mean <= plan.high)


class Refill:
    """The places of one step on this rank, and what all ranks know of every place. `plan` None: whatever came is kept.

    `metric`: what outcomes carry for the curriculum. `tells`: somebody wants the outcomes of all ranks, refill or not.
    """

    def __init__(self, plan: DynamicPlan | None, drawing: Drawing, world: World, *, metric: str = REWARD, tells: bool = False) -> None:
        self.groups: dict[int, Group] = {}
        """By place, this rank's."""
        self.replaced: list[SampleRecord] = []
        """Completions of this rank whose group lost its place."""
        self.outcomes: list[Outcome] = []
        """Every group of the step, all ranks, by draw; empty where nobody asks for them."""
        self._plan, self._drawing, self._world = plan, drawing, world
        self._metric, self._tells = metric, tells
        self._extra = 0
        self._rejected: list[Outcome] = []

    def after(self, asked: Mapping[int, Ask], groups: Mapping[int, Group]) -> dict[int, Ask]:
        """Take the groups (place -> group) that this rank got for what all ranks asked for; returns what is to be asked for next, {} at the end.
        Collective where ranks have to agree."""
        for slot, group in groups.items():
            if slot in self.groups:
                self.replaced += records_of([self.groups[slot]])
            self.groups[slot] = group
        if self._plan is None and not self._tells:
            return {}
        mine = [self._outcome(slot, asked[slot], group) for slot, group in groups.items()]
        everywhere = sorted((item for part in self._world.gather(mine) for item in part), key=lambda item: item.ask.draw)
        self.outcomes += everywhere
        refused = sorted((item for item in everywhere if not item.accepted), key=lambda item: item.slot)
        if self._plan is None or not refused or self._extra == self._plan.max_extra_rollouts:
            return {}
        self._extra += 1
        self._rejected += refused
        return dict(zip([item.slot for item in refused], self._drawing.fresh(len(refused)), strict=True))

    def metrics(self) -> Mapping[str, Any]:
        """`dynamic` of the step event, the same on every rank; {} without dynamic sampling."""
        if self._plan is None:
            return {}
        rewards = [reward for item in self.outcomes for reward in item.scored]
        unresolved = sum(not item.accepted for item in self.outcomes) - len(self._rejected)
        found: dict[str, Any] = {
            "extra_rollouts": self._extra,
            "groups_rejected": len(self._rejected),
            "groups_accepted": sum(item.accepted for item in self.outcomes),
            "groups_without_signal": unresolved,
            "groups_unscored": sum(len(item.scored) < 2 for item in self.outcomes),
            "tokens_rejected": sum(item.tokens for item in self._rejected),
        }
        if rewards:
            found["reward_mean_sampled"] = sum(rewards) / len(rewards)
        return {"dynamic": found}

    def _outcome(self, slot: int, ask: Ask, group: Group) -> Outcome:
        prompt = group.prompt
        return Outcome(
            ask=ask,
            slot=slot,
            source=prompt.source,
            row=prompt.row,
            row_id=prompt.row_id,
            label=prompt.label,
            rewards=metric_of(group, REWARD),
            values=metric_of(group, self._metric),
            tokens=sum(len(sample.completion.trace.ids) for sample in group.samples),
            accepted=self._plan is None or accepts(group, self._plan),
        )


def places(mini_batches: Sequence[Sequence[int]]) -> list[int]:
    """A rank's places, in the order in which they are asked for."""
    return [slot for mini_batch in mini_batches for slot in sorted(mini_batch)]

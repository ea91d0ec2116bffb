"""Which prompt the places of a step ask for: fresh ones in the order of the source, those that come back, those that are passed over.

Every rank computes the same, without asking the others: it depends on the source's position and on what is remembered, which is the same
everywhere. The source counts what was drawn, trained on or not, so a resumed run goes on exactly. Leaves out what is remembered and why (`replay`,
the curriculum of `data`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from rftcli.protocols import Source
from rftcli.stages.outcomes import REWARD, Ask, Outcome
from rftcli.stages.replay import Replay
from rftcli.types import Prompt

if TYPE_CHECKING:
    from rftcli.stages.partial import Kept


class Curriculum(Protocol):
    """Chooses rows by what was measured. Asked on every rank alike, and told the same."""

    metric: str
    """What `Outcome.values` are to hold for it."""

    def takes(self, row: Any, turn: int) -> bool:
        """Is this row drawn at its turn, or passed over?"""

    def after(self, step: int, outcomes: Sequence[Outcome]) -> None:
        """Everything that was sampled in a step."""

    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a collect remembers from step to step beside the source's position. The default is nothing."""

    replay: Replay | None = None
    curriculum: Curriculum | None = None
    partial: Kept | None = None
    """What earlier steps did not finish; only this rank's."""

    @property
    def metric(self) -> str:
        return REWARD if self.curriculum is None else self.curriculum.metric

    def __bool__(self) -> bool:
        return self.replay is not None or self.curriculum is not None

    def after(self, step: int, outcomes: Sequence[Outcome]) -> None:
        """Tell what the step's groups, of all ranks and in order of draws, came to."""
        for item in (self.replay, self.curriculum):
            if item is not None:
                item.after(step, outcomes)


NOTHING = Memory()


class Drawing:
    """The draws of one step."""

    def __init__(self, source: Source, memory: Memory, step: int) -> None:
        self.turn = source.next_draw
        """The source's next draw that nobody has asked for."""
        self._source, self._memory, self._step = source, memory, step
        self._came_back = self._passed_over = self._further = 0

    def keep_clear(self, newest: int) -> None:
        """Give no identity up to `newest`, the largest of the groups that wait. It does something only where a resume has changed what comes back."""
        self._further = max(0, newest + 1 - self._identity())

    def first(self, count: int) -> dict[int, Ask]:
        """What the places 0..count-1 ask for: prompts whose time has come back, then fresh ones."""
        replay = self._memory.replay
        waiting = [] if replay is None else replay.take(self._step, count)
        again = []
        for item in waiting:
            again.append(Ask(draw=self._identity(), turn=item.turn, returns=item.returns))
            replay.returned += 1
        self._came_back += len(again)
        return dict(enumerate([*again, *self.fresh(count - len(again))]))

    def fresh(self, count: int) -> list[Ask]:
        """The next draws of the source, but for rows that the curriculum passes over."""
        asks = []
        for _ in range(count):
            self._pass_over()
            asks.append(Ask(draw=self._identity(), turn=self.turn))
            self.turn += 1
        return asks

    def prompt(self, ask: Ask) -> Prompt:
        prompt = self._source.draw(ask.turn, 1)[0]
        return prompt if ask.draw == ask.turn else replace(prompt, draw=ask.draw)

    def metrics(self) -> dict[str, Any]:
        """`replay` and `curriculum` of the step event, the same on every rank."""
        found: dict[str, Any] = {}
        if self._memory.replay is not None:
            found["replay"] = {"came_back": self._came_back, **self._memory.replay.metrics()}
        if self._memory.curriculum is not None:
            found["curriculum"] = {"passed_over": self._passed_over, **self._memory.curriculum.metrics()}
        return found

    def _identity(self) -> int:
        """One more for every draw of the source and for every prompt that came back, so no group has another's."""
        return self.turn + self._further + (0 if self._memory.replay is None else self._memory.replay.returned)

    def _pass_over(self) -> None:
        """Go past rows that are not taken, but never past a whole pass of them."""
        curriculum = self._memory.curriculum
        if curriculum is None:
            return
        for _ in range(self._source.num_rows or 0):
            if curriculum.takes(self._source.row(self.turn), self.turn):
                return
            self.turn += 1
            self._passed_over += 1

"""Partial rollouts: answers that a step does not finish are kept, and go on first in the next step, under the weights of then.

A step ends as soon as enough groups are whole; what over-sampling or the budget has left unfinished is not dropped, and neither is a whole group that
found no place. Both stay with the log-probs that their tokens were sampled with and with the policy version of each segment. Each rank keeps its own
groups (`Kept`) and fills its own places from them and from fresh prompts (`Pool`), so what is trained depends on the number of ranks.

No group grows too old: `must_now` says how many of the oldest ones a step has to train so that all others can still be trained in time, and the step
waits for those. So the longest answers are trained late, and are not given up, which would teach the policy to be brief.

Leaves out sampling and scoring (`collect`), and what old tokens mean for the loss (`credit`, `correction`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftcli.codec import from_data, to_data
from rftcli.errors import ResumeError
from rftcli.plan.plan_sampling import PartialPlan
from rftcli.protocols import World
from rftcli.stages.drawing import Drawing
from rftcli.stages.outcomes import Ask
from rftcli.stages.over_sample import Candidate, Generate, grow
from rftcli.types import Completion, FinishReason, TokenTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """An answer that waits, finished or not; the source renders its prompt again."""

    sample: int
    text: str
    text_with_special: str
    trace: TokenTrace
    finish: FinishReason
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A group that waits, and what there is of its answers."""

    ask: Ask
    pieces: tuple[Piece, ...] = ()

    @property
    def oldest(self) -> int | None:
        """Version of the oldest weights that took part; None: nothing is sampled yet."""
        return oldest_version(piece.trace for piece in self.pieces)

    @property
    def tokens(self) -> int:
        return sum(len(piece.trace.ids) for piece in self.pieces)


def oldest_version(traces: Iterable[TokenTrace]) -> int | None:
    return min((version for trace in traces for _, version in trace.segments), default=None)


def must_now(steps_left: Sequence[int], places: int) -> dict[int, int]:
    """Steps left d -> how many of the groups with at most d steps left have to be trained now, where every later step trains `places`.

    Those with d steps left can be trained in d later steps, so at most d x `places` of them may wait (the test of schedules by deadlines).

    >>> must_now([0, 1, 1, 1], places=2)
    {0: 1, 1: 2}
    """
    return {d: max(0, sum(left <= d for left in steps_left) - d * places) for d in sorted(set(steps_left))}


class Kept:
    """`protocols.Stateful`: this rank's groups that wait. A group stays on its rank, but for a resume on another number of ranks."""

    def __init__(self, plan: PartialPlan, world: World, *, updates: int, newest: Callable[[], int], data: str = "") -> None:
        """`updates`: versions that a step adds, at most. `newest`: the version that samples now. `data`: fingerprint of the rows that turns are
        counted in."""
        self.held: list[Held] = []
        """Those with the oldest tokens first."""
        self.newest = newest
        self._plan, self._world, self._updates, self._data = plan, world, updates, data

    def steps_left(self, oldest: int | None) -> int:
        """In how many steps a group with tokens of this version may still be trained; 0: in this one only; below 0: it is too old."""
        lag = 0 if oldest is None else self.newest() - oldest
        return (self._plan.max_version_lag - lag) // self._updates

    def keep(self, held: Iterable[Held]) -> None:
        self.held = sorted(held, key=_age)

    def give_up(self, places: int) -> list[Held]:
        """Let go of what cannot be trained in time, the groups with the fewest tokens first, and return it. While the plan stays, it is nothing."""
        lost: set[int] = set()
        for left in sorted({self.steps_left(held.oldest) for held in self.held}):
            due = [held for held in self.held if held.ask.draw not in lost and self.steps_left(held.oldest) <= left]
            too_many = max(0, len(due) - max(0, left + 1) * places)
            lost |= {held.ask.draw for held in sorted(due, key=lambda held: (held.tokens, held.ask.draw))[:too_many]}
        gone = [held for held in self.held if held.ask.draw in lost]
        self.held = [held for held in self.held if held.ask.draw not in lost]
        return gone

    def state_dict(self) -> Mapping[str, Any]:
        """The groups of all ranks, a text for each rank: a checkpoint's lines are for people, and these are long. Collective."""
        return {"data": self._data, "ranks": [json.dumps(to_data(part), separators=(",", ":")) for part in self._world.gather(self.held)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """On another number of ranks groups are dealt anew, the oldest first, so that every rank gets equally many of an age. ResumeError if the
        turns were counted in other data."""
        if state["data"] != self._data:
            raise ResumeError("the answers that were kept belong to other rows", hint="let them go: `rft resume RUN_DIR --accept`")
        ranks = [[from_data(Held, item) for item in json.loads(part)] for part in state["ranks"]]
        if len(ranks) == self._world.size:
            self.keep(ranks[self._world.rank])
        else:
            everything = sorted((held for part in ranks for held in part), key=_age)
            self.keep(everything[self._world.rank :: self._world.size])


def _age(held: Held) -> tuple[float, int]:
    return float("inf") if held.oldest is None else held.oldest, held.ask.draw


class Pool:
    """The groups of one step on this rank: those that were kept, and fresh ones. Every method that says so is collective."""

    def __init__(
        self, kept: Kept, plan: PartialPlan, drawing: Drawing, world: World, *, places: int, slice_tokens: int | None, samples: Sequence[int],
        candidate: Callable[[Ask], Candidate], generate: Generate,
    ) -> None:  # fmt: skip
        """`places` of this rank in any step. `slice_tokens` of over-sampling; None: answers grow by the budget at once."""
        self.dropped = kept.give_up(places)
        self._kept, self._plan, self._drawing, self._world = kept, plan, drawing, world
        self._places, self._samples, self._candidate, self._generate = places, samples, candidate, generate
        self._slice = slice_tokens if slice_tokens is not None else plan.budget_tokens
        assert self._slice is not None, "something stops the answers of a step"
        self._asked_more = False
        self._pool = [self._restored(held) for held in kept.held]
        self._until = {one.ask.draw: one.stands_at(samples) + (plan.budget_tokens or 0) for one in self._pool}
        """Draw -> tokens that its answers may grow to in this step, where there is a budget."""
        self._continued = [one.ask.draw for one in self._pool]
        self._pieces_continued = sum(sample in one.answers for one in self._pool for sample in one.open(samples))
        self._trained: dict[int, Candidate] = {}
        """By place; a group that a refill replaces is not trained on."""

    def top_up(self, spares: int | None) -> None:
        """Fresh prompts, and those that come back: until there are as many groups as places and `spares`, or, where nobody has said how many are in
        work (None), for the places that no whole group waits for. So their number follows the length of answers over the budget. Collective."""
        if spares is None:
            most = self._places * (1 + self._kept.steps_left(None))
            wanted = min(self._places - len(self._whole()), most - len(self._pool))
        else:
            wanted = self._places + spares - len(self._pool)
        self._add_of(max(0, wanted), lambda count: list(self._drawing.first(count).values()))

    def add(self, asks: Iterable[Ask]) -> None:
        """Prompts that places of this rank ask for."""
        for ask in asks:
            self._pool.append(self._candidate(ask))
            self._until[ask.draw] = self._plan.budget_tokens or 0

    def fill(self, slots: Sequence[int]) -> dict[int, Candidate]:
        """A whole group for every place: those with the oldest tokens first, then the shortest. Answers grow until enough groups are whole; where the
        budget of all is used up before, fresh prompts are asked for once, and then as many groups as are missing get their budget again. The others
        had better grow under newer weights. Collective."""
        while True:
            while not self._enough(len(slots)) and (growing := [one for one in self._pool if self._grows(one)]):
                grow([(one, self._next_limit(one)) for one in growing], self._samples, self._generate)
            behind = not self._enough(len(slots))
            more = 0 if not behind or self._asked_more else self._room_for(len(slots))
            if not any(self._world.gather(behind)):
                break
            self._add_of(more, self._drawing.fresh)
            if behind and not more:
                self._grant(len(slots))
            self._asked_more |= more > 0
        best = sorted(self._whole(), key=lambda one: (self._left(one), one.tokens, one.ask.draw))[: len(slots)]
        taken = {one.ask.draw for one in best}
        self._pool = [one for one in self._pool if one.ask.draw not in taken]
        filled = dict(zip(sorted(slots), sorted(best, key=lambda one: one.ask.draw), strict=True))
        self._trained |= filled
        return filled

    def close(self) -> Mapping[str, Any]:
        """Keep what is left; `partial` and `version_lag` of the step event, over all ranks. Collective."""
        self._kept.keep(_held(one) for one in self._pool)
        unfinished = [one.answers[sample] for one in self._pool for sample in one.open(self._samples) if sample in one.answers]
        newest = self._kept.newest()
        traces = [answer.trace for one in self._trained.values() for sample, answer in one.answers.items() if sample >= 0]
        lags = [newest - version for trace in traces if (version := oldest_version([trace])) is not None]
        tokens = sum(len(trace.ids) for trace in traces)
        counts = {
            "groups_continued": len(self._continued),
            "answers_continued": self._pieces_continued,
            "groups_kept": len(self._pool),
            "answers_kept": len(unfinished),
            "tokens_kept": sum(len(answer.trace.ids) for one in self._pool for answer in one.answers.values()),
            "groups_dropped": len(self.dropped),
            "tokens_dropped": sum(held.tokens for held in self.dropped),
        }
        old = sum(sum(stale(trace, newest)) for trace in traces)
        totals = self._world.sum([*counts.values(), sum(lags), len(lags), old, tokens])
        (oldest,) = self._world.max([max(lags, default=0)])
        found: dict[str, Any] = {name: int(total) for name, total in zip(counts, totals[: len(counts)], strict=True)}
        lag, answers, stale_tokens, all_tokens = totals[len(counts) :]
        if all_tokens:
            found["stale_token_fraction"] = stale_tokens / all_tokens
        return {"partial": found, "version_lag": {"mean": lag / max(1.0, answers), "max": int(oldest)}}

    def _whole(self) -> list[Candidate]:
        return [one for one in self._pool if not one.open(self._samples)]

    def _enough(self, places: int) -> bool:
        """Are as many groups whole as there are places, and the ones among them that may not wait?"""
        return self._missing(places) <= 0

    def _missing(self, places: int) -> int:
        """Whole groups that are missing: for the places, or of those that may not wait."""
        ready = [self._left(one) for one in self._whole()]
        needed = must_now([self._left(one) for one in self._pool], self._places)
        return max(places - len(ready), *(count - sum(left <= d for left in ready) for d, count in needed.items()), 0)

    def _grant(self, places: int) -> None:
        """Another budget for as many open groups as are missing: those that may wait least, then the longest."""
        assert self._plan.budget_tokens is not None, "without a budget answers grow to their end"
        still = [one for one in self._pool if one.open(self._samples)]
        urgent = sorted(still, key=lambda one: (self._left(one), -one.stands_at(self._samples), one.ask.draw))
        for one in urgent[: self._missing(places)]:
            self._until[one.ask.draw] += self._plan.budget_tokens

    def _left(self, one: Candidate) -> int:
        """Steps left to it."""
        return self._kept.steps_left(oldest_version(answer.trace for answer in one.answers.values()))

    def _grows(self, one: Candidate) -> bool:
        limited = self._plan.budget_tokens is not None
        return bool(one.open(self._samples)) and not (limited and one.stands_at(self._samples) >= self._until[one.ask.draw])

    def _next_limit(self, one: Candidate) -> int:
        at = one.stands_at(self._samples)
        assert self._slice is not None
        return at + self._slice if self._plan.budget_tokens is None else min(at + self._slice, self._until[one.ask.draw])

    def _room_for(self, places: int) -> int:
        """Fresh prompts for the places that are short of a group, as far as all that wait can be trained in time."""
        most = places + self._places * self._kept.steps_left(None)
        return max(0, min(places - len(self._whole()), most - len(self._pool)))

    def _add_of(self, wanted: int, draw: Callable[[int], list[Ask]]) -> None:
        """So many prompts for this rank, of what all ranks want: dealt one each in turn, by rank. Collective."""
        counts = self._world.gather(wanted)
        order = sorted((turn, rank) for rank, count in enumerate(counts) for turn in range(count))
        asks = draw(len(order))
        self.add(ask for ask, (_, rank) in zip(asks, order, strict=True) if rank == self._world.rank)

    def _restored(self, held: Held) -> Candidate:
        one = self._candidate(held.ask)
        for piece in held.pieces:
            if piece.sample in self._samples:
                one.answers[piece.sample] = Completion(
                    prompt=one.prompt, sample=piece.sample, text=piece.text, text_with_special=piece.text_with_special, trace=piece.trace,
                    finish=piece.finish, policy_version=piece.policy_version,
                )  # fmt: skip
        return one


def _held(one: Candidate) -> Held:
    pieces = [
        Piece(
            sample=answer.sample,
            text=answer.text,
            text_with_special=answer.text_with_special,
            trace=answer.trace,
            finish=answer.finish,
            policy_version=answer.policy_version,
        )
        for _, answer in sorted(one.answers.items())
    ]
    return Held(ask=one.ask, pieces=tuple(pieces))


def stale(trace: TokenTrace, newest: int) -> list[bool]:
    """(T,) which tokens were sampled by older weights than `newest`.

    >>> stale(TokenTrace(ids=(5, 6, 7), segments=((0, 3), (2, 4))), 4)
    [True, True, False]
    """
    found = [False] * len(trace.ids)
    ends = [*(start for start, _ in trace.segments), len(trace.ids)][1:]
    for (start, version), end in zip(trace.segments, ends, strict=True):
        found[start:end] = [version < newest] * (end - start)
    return found

"""What `rft rewards try` found: completions with their rewards, and every part over all of them. Leaves out scoring (`try_rewards`) and printing."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rftcli.codec import to_data
from rftcli.stages.records import sample_line
from rftcli.types import PartScore, ScoredSample

SAME = 1e-9
"""A recorded reward that differs by less is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneTried:
    """A completion."""

    sample: ScoredSample
    """`reward` None with parts that are left out: what is combined would be another reward."""
    place: str
    """File and line that it comes from."""
    recorded: float | None
    """The combined reward that a run has recorded."""
    left_out: tuple[str, ...]
    """Parts whose model is not loaded."""
    asked: tuple[str, ...]
    """Parts that a scorer answers, all at once: nobody knows how long one completion takes."""

    @property
    def combined(self) -> float | None:
        """The reward of the parts, before shaping."""
        return self.sample.reward if self.sample.shaped is None else self.sample.shaped.combined

    @property
    def part_failed(self) -> bool:
        return any(part.error is not None for part in self.sample.parts) and self.sample.reward is None and self.sample.error is None

    @property
    def changed(self) -> bool | None:
        """Is the recorded reward another one? None where there is nothing to compare."""
        if self.recorded is None or self.left_out:
            return None
        return self.combined is None or abs(self.combined - self.recorded) > SAME * max(1.0, abs(self.recorded))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part over all tried completions of a label; `name` None: the reward itself, combined and shaped."""

    label: str
    name: str | None
    weight: float | None
    scored: int
    abstained: int
    """Of the reward: None without an error, or masked."""
    errors: Mapping[str, int]
    """Text of an error -> how often."""
    first: Mapping[str, str]
    """Text of an error -> where it was met first."""
    mean: float | None
    least: float | None
    greatest: float | None
    seconds: float | None
    """Of one completion on average; None where that is not known."""
    left_out: bool
    """Its model is not loaded; of the reward, that of one of its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    what: str
    completions: tuple[OneTried, ...]
    shaped: bool
    """Is a reward more than its parts combined?"""
    notes: tuple[str, ...]
    """What of the shaping is left out, and why."""

    @property
    def changed(self) -> int | None:
        """Completions whose recorded reward is another one; None: none was recorded."""
        found = [one.changed for one in self.completions if one.changed is not None]
        return sum(found) if found else None

    @property
    def left_out(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for one in self.completions for name in one.left_out))

    @property
    def logged(self) -> dict[str, float]:
        """Metric that reward functions logged -> its mean over all that logged it."""
        found: dict[str, list[float]] = defaultdict(list)
        for one in self.completions:
            for name, value in one.sample.metrics:
                found[name].append(value)
        return {name: statistics.fmean(values) for name, values in found.items()}

    @property
    def failed(self) -> bool:
        return any(one.sample.error or any(part.error for part in one.sample.parts) for one in self.completions)

    def parts(self) -> Iterator[Part]:
        """By label and name, in the order of the recipe; behind those of a label its reward."""
        for label in dict.fromkeys(one.sample.completion.prompt.label for one in self.completions):
            mine = [one for one in self.completions if one.sample.completion.prompt.label == label]
            found: dict[str, list[tuple[OneTried, PartScore]]] = defaultdict(list)
            for one in mine:
                for part in one.sample.parts:
                    found[part.name].append((one, part))
            for name, scores in found.items():
                told = [(score.value, score.error, one.place) for one, score in scores]
                seconds = None if name in mine[0].asked else statistics.fmean(score.seconds for _, score in scores)
                yield _part(label, name, told, weight=scores[0][1].weight, seconds=seconds, left_out=name in mine[0].left_out)
            told = [(one.sample.reward, one.sample.error, one.place) for one in mine if not one.part_failed]
            yield _part(label, None, told, weight=None, seconds=None, left_out=bool(mine[0].left_out))


def _part(
    label: str, name: str | None, told: Iterable[tuple[float | None, str | None, str]], *, weight: float | None, seconds: float | None, left_out: bool
) -> Part:
    """`told`: value, error and place of each completion."""
    values, errors, first, abstained = [], defaultdict[str, int](int), {}, 0
    for value, error, place in told:
        if error is not None:
            errors[error] += 1
            first.setdefault(error, place)
        elif value is not None:
            values.append(value)
        else:
            abstained += not left_out
    return Part(
        label=label,
        name=name,
        weight=weight,
        scored=len(values),
        abstained=abstained,
        errors=dict(errors),
        first=first,
        mean=statistics.fmean(values) if values else None,
        least=min(values, default=None),
        greatest=max(values, default=None),
        seconds=seconds,
        left_out=left_out,
    )


def as_data(tried: Tried) -> dict[str, Any]:
    """For `--json`; samples as in a run's files."""
    parts = list(tried.parts())
    return {
        "completions": tried.what,
        "changed": tried.changed,
        "left_out": list(tried.left_out),
        "notes": list(tried.notes),
        "logged": tried.logged,
        "parts": [to_data(part) for part in parts if part.name is not None],
        "rewards": [to_data(part) for part in parts if part.name is None],
        "samples": [{**sample_line(one.sample, step=0, advantage=None), "place": one.place} for one in tried.completions],
    }

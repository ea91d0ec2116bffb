"""Which settings are chosen by memory: the first rung of a ladder that fits. Pure, and in bytes of one rank.

From rung to rung each setting stays or saves more memory, and none goes back. So more memory never gives a higher ZeRO stage, fewer tokens, or
anything else that a smaller device does not need. What a recipe fixes is the same on all rungs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rftcli.plan.memory import GIB

MOST_TOKENS = {"cpu": 8192, "cuda": 32768}
"""Positions of one pass at most: enough to fill the device."""
BESIDE_LESS = 16384
"""Up to here a pass is worth more than an engine that is awake with all the cache that it wants; a larger one gains a tenth."""
FEW_TOKENS = 4096
"""From here down a pass fills a device badly: recomputing a layer costs less."""
FEWEST_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    zero_stage: int
    tokens: int
    """Positions of a pass: `batch.tokens_per_micro_batch`, or what rows of a fixed number come to."""
    checkpointing: bool
    waits: bool
    """Reference and teacher wait in CPU memory between uses."""

    def text(self) -> str:
        parts = [f"ZeRO {self.zero_stage}", f"{self.tokens} tokens a micro-batch"]
        parts += ["gradient checkpointing"] if self.checkpointing else []
        parts += ["the reference on the CPU"] if self.waits else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """What may be chosen."""

    stages: Sequence[int]
    """Ascending; one: it is fixed."""
    tokens: Sequence[int]
    """Descending."""
    checkpointing: Sequence[bool]
    waits: Sequence[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    choice: Choice
    fits: bool
    tried: tuple[tuple[Choice, float], ...]
    """Each rung up to the chosen one, with the bytes of its fullest stage."""


def ladder(free: Free) -> list[Choice]:
    """The rungs, the fastest first: what costs nothing goes before what costs time."""
    now = Choice(zero_stage=free.stages[0], tokens=free.tokens[0], checkpointing=free.checkpointing[0], waits=free.waits[0])
    rungs = [now]

    def step(**changes: object) -> None:
        nonlocal now
        fresh = replace(now, **changes)
        if fresh != now:
            now = fresh
            rungs.append(now)

    def tokens(least: int) -> None:
        for count in free.tokens:
            if least <= count < now.tokens:
                step(tokens=count)

    tokens(8192)  # a quarter of the most costs little
    for stage in free.stages:
        if now.zero_stage < stage <= 2:
            step(zero_stage=stage)
    step(waits=free.waits[-1])
    tokens(FEW_TOKENS)
    step(checkpointing=free.checkpointing[-1])
    tokens(0)
    step(zero_stage=free.stages[-1])
    return rungs


def choose(rungs: Sequence[Choice], need: Callable[[Choice], float], room: float) -> Chosen:
    """The first rung whose `need` (its fullest stage) is within `room`; where none is, the first of those that need least."""
    tried: list[tuple[Choice, float]] = []
    for rung in rungs:
        tried.append((rung, need(rung)))
        if tried[-1][1] <= room:
            return Chosen(choice=rung, fits=True, tried=tuple(tried))
    least = min(range(len(tried)), key=lambda index: tried[index][1])
    return Chosen(choice=tried[least][0], fits=False, tried=tuple(tried[: least + 1]))


def told(found: Chosen, room: float) -> str:
    """What was tried, in words."""
    *before, last = found.tried
    shown = [before[0], *([before[-1]] if len(before) > 1 else [])] if before else []
    text = "".join(f"{choice.text()}: {need / GIB:.2f} GiB, too much; " for choice, need in shown)
    verdict = "fits" if found.fits else "the least there is, and too much"
    least = "at least " if found.fits else ""  # an engine takes more where there is more
    return f"{text}{last[0].text()}: {least}{last[1] / GIB:.2f} GiB of {room / GIB:.2f} GiB, {verdict}"


def biggest(parts: Mapping[str, float], count: int = 3) -> list[str]:
    """Names and sizes of the largest parts."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])[:count]
    return [f"{name} {size / GIB:.2f} GiB" for name, size in ordered if size > 0]

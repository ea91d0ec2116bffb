"""What the samplers share whose engine is a model of its own: the rows of requests, versions, the ranks of one engine, the process's generators.

What it leaves out: sampling, and pushing weights (`vllm`, `sglang`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from rftcli.engines.finish import Decode, StopRule, completion
from rftcli.errors import RftError, UsageError
from rftcli.protocols import World
from rftcli.types import Completion, FinishReason, Request, SamplingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sample as the engine needs it. `request` None: it is another rank's of the same engine."""

    prefix: tuple[int, ...]
    """Prompt and what an earlier rollout has sampled."""
    draw: int
    sample: int
    done: int
    request: Request | None = None


def usable(version: int | None, newest: Callable[[], int] | None) -> int:
    """The version of the engine's weights. RftError where it has none, or older ones than the trainer (`newest`)."""
    wanted = None if newest is None else newest()
    if version is None:
        raise RftError("the engine has no weights yet: they are pushed before it samples")
    if wanted is not None and wanted != version:
        raise RftError(f"the engine has the weights of version {version}, the trainer is at {wanted}")
    return version


def split(requests: Sequence[Request], rule: StopRule) -> tuple[list[Row], list[tuple[Row, FinishReason]]]:
    """(rows to sample, rows that an earlier rollout has finished). UsageError for an empty prompt."""
    for request in requests:
        if not request.prompt.token_ids:
            raise UsageError(f"prompt {request.prompt.row_id} has no tokens", hint="every row needs a prompt of at least one token")
    waiting: list[Row] = []
    finished: list[tuple[Row, FinishReason]] = []
    for request in requests:
        for sample in request.samples:
            earlier = request.partial.get(sample)
            ids = () if earlier is None else tuple(earlier.ids)
            found = Row(prefix=(*request.prompt.token_ids, *ids), draw=request.prompt.draw, sample=sample, done=len(ids), request=request)
            finish = rule.finished(ids)
            if finish is None:
                waiting.append(found)
            else:
                finished.append((found, finish))
    return waiting, finished


def first_of(world: World, together: int) -> int:
    """The first of the consecutive ranks that share this rank's engine."""
    return world.rank // together * together


def united(mine: Sequence[Row], world: World, together: int) -> list[Row]:
    """The rows of all ranks of this engine, in rank order; the others' without their requests. Collective where engines are shared."""
    if together == 1:
        return list(mine)
    told = world.gather([(row.prefix, row.draw, row.sample, row.done) for row in mine])
    first = first_of(world, together)
    rows: list[Row] = []
    for rank in range(first, first + together):
        others = [Row(prefix=prefix, draw=draw, sample=sample, done=done) for prefix, draw, sample, done in told[rank]]
        rows += mine if rank == world.rank else others
    return rows


def completed(
    row: Row, new: Sequence[int], logprobs: Sequence[float] | None, finish: FinishReason, settings: SamplingSettings, version: int, decode: Decode
) -> Completion:
    """The record of a row of this rank. `new` and `logprobs`: what was sampled now."""
    request = row.request
    assert request is not None
    earlier = request.partial.get(row.sample)
    before = () if earlier is None else earlier.logprobs
    known = settings.logprobs and before is not None and (logprobs is not None or not new)
    return completion(
        request,
        row.sample,
        ids=(*row.prefix[len(request.prompt.token_ids) :], *new),
        logprobs=(*before, *(logprobs or ())) if known else None,
        finish=finish,
        version=version,
        decode=decode,
    )


@contextmanager
def own_randomness(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """An engine draws from, and seeds, the generators of the whole process: they are put back, so that the trainer's stay as they were."""
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device.index or 0]):
        if seed is not None:
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)

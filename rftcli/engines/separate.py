"""What the samplers share whose engine is a model of its own: the rows of requests, versions, the ranks of one engine, the process's generators.

What it leaves out: sampling, and pushing weights (`vllm`, `vllm_remote`, `sglang`).
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
    limit: int
    """Tokens at which the answer is cut, `done` ones included."""
    request: Request | None = None


def usable(version: int | None, newest: Callable[[], int] | None) -> int:
    """The version of the engine's weights. RftError where it has none, or older ones than the trainer (`newest`)."""
    wanted = None if newest is None else newest()
    if version is None:
        raise RftError("the engine has no weights yet: they are pushed before it samples")
    if wanted is not None and wanted != version:
        raise RftError(f"the engine has the weights of version {version}, the trainer is at {wanted}")
    return version


def row_of(request: Request, sample: int, settings: SamplingSettings) -> Row:
    earlier = request.partial.get(sample)
    ids = () if earlier is None else tuple(earlier.ids)
    limit = settings.max_new_tokens if request.limit is None else min(request.limit, settings.max_new_tokens)
    return Row(prefix=(*request.prompt.token_ids, *ids), draw=request.prompt.draw, sample=sample, done=len(ids), limit=limit, request=request)


def split(requests: Sequence[Request], settings: SamplingSettings, rule: StopRule) -> tuple[list[Row], list[tuple[Row, FinishReason]]]:
    """(rows to sample, rows that an earlier rollout has finished), both in the order of `requests`. UsageError for a prompt of no tokens: there is
    nothing to go on from."""
    for request in requests:
        if not request.prompt.token_ids:
            raise UsageError(f"prompt {request.prompt.row_id} has no tokens", hint="every row needs a prompt of at least one token")
    waiting: list[Row] = []
    finished: list[tuple[Row, FinishReason]] = []
    for request in requests:
        for sample in request.samples:
            row = row_of(request, sample, settings)
            finish = rule.finished(row.prefix[len(request.prompt.token_ids) :], request.limit)
            if finish is None:
                waiting.append(row)
            else:
                finished.append((row, finish))
    return waiting, finished


def cut_at_stop(
    rule: StopRule, row: Row, finish: FinishReason, new: tuple[int, ...], logprobs: tuple[float, ...] | None
) -> tuple[FinishReason, tuple[int, ...], tuple[float, ...] | None]:
    """The answer up to the end of a stop string that begins in what was sampled earlier: engines look for stop strings in new text alone."""
    earlier = row.prefix[len(row.prefix) - row.done :]
    if not earlier or not rule.strings:
        return finish, new, logprobs
    nearest = max(len(string.encode()) for string in rule.strings)  # a token holds at least one byte
    counts = range(1, min(len(new), nearest) + 1)
    torn = next((count for count in counts if rule.finished((*earlier, *new[:count])) is FinishReason.STOP), None)
    if torn is None:
        return finish, new, logprobs
    return FinishReason.STOP, new[:torn], None if logprobs is None else logprobs[:torn]


def first_of(world: World, together: int) -> int:
    """The first of the consecutive ranks that share this rank's engine."""
    return world.rank // together * together


def united(mine: Sequence[Row], world: World, together: int) -> list[Row]:
    """The rows of all ranks of this engine, in rank order; the others' without their requests. Collective where engines are shared."""
    if together == 1:
        return list(mine)
    told = world.gather([(row.prefix, row.draw, row.sample, row.done, row.limit) for row in mine])
    first = first_of(world, together)
    rows: list[Row] = []
    for rank in range(first, first + together):
        others = [Row(prefix=prefix, draw=draw, sample=sample, done=done, limit=limit) for prefix, draw, sample, done, limit in told[rank]]
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

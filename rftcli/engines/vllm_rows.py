"""One sample on its way through a vLLM engine, in this process or another: what it is given, and the record that its answer becomes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rftcli.engines.finish import Decode, StopRule, completion
from rftcli.errors import UsageError
from rftcli.types import Completion, FinishReason, Request, SamplingSettings

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


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


def row_of(request: Request, sample: int, settings: SamplingSettings) -> Row:
    earlier = request.partial.get(sample)
    ids = () if earlier is None else tuple(earlier.ids)
    limit = settings.max_new_tokens if request.limit is None else min(request.limit, settings.max_new_tokens)
    return Row(prefix=(*request.prompt.token_ids, *ids), draw=request.prompt.draw, sample=sample, done=len(ids), limit=limit, request=request)


def cut_at_stop(
    rule: StopRule, row: Row, finish: FinishReason, new: tuple[int, ...], logprobs: tuple[float, ...] | None
) -> tuple[FinishReason, tuple[int, ...], tuple[float, ...] | None]:
    """The answer up to the end of a stop string that begins in what was sampled earlier: vLLM looks for stop strings in new text alone."""
    earlier = row.prefix[len(row.prefix) - row.done :]
    if not earlier or not rule.strings:
        return finish, new, logprobs
    nearest = max(len(string.encode()) for string in rule.strings)  # a token holds at least one byte
    counts = range(1, min(len(new), nearest) + 1)
    torn = next((count for count in counts if rule.finished((*earlier, *new[:count])) is FinishReason.STOP), None)
    if torn is None:
        return finish, new, logprobs
    return FinishReason.STOP, new[:torn], None if logprobs is None else logprobs[:torn]


def refuse_empty(requests: Sequence[Request]) -> None:
    """UsageError for a prompt of no tokens: there is nothing to go on from."""
    for request in requests:
        if not request.prompt.token_ids:
            raise UsageError(f"prompt {request.prompt.row_id} has no tokens", hint="every row needs a prompt of at least one token")


def completed(
    row: Row, new: tuple[int, ...], logprobs: tuple[float, ...] | None, finish: FinishReason, settings: SamplingSettings, version: int, decode: Decode
) -> Completion:
    """The record of a finished row, of which `new` ids (T,) were sampled just now."""
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

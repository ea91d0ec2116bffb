"""When a completion is finished, and the record it then becomes. Shared by the engines of this package; no torch.

What it leaves out: sampling. End tokens that may not come yet (`min_new_tokens`) are banned where the token is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rftcli.types import Completion, FinishReason, Request, SamplingSettings, TokenTrace

Decode = Callable[..., str]
"""(ids, skip_special_tokens=...) -> text, as a tokenizer's `decode`."""

CONTEXT_TOKENS = 8
"""Tokens decoded in front of the longest stop string that could just have ended, so that the edge of the piece (a stripped space, a torn character)
lies outside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Ends a completion at a stop id, at a stop string, or at the length."""

    ids: frozenset[int]
    strings: tuple[str, ...]
    min_new_tokens: int
    max_new_tokens: int
    decode: Decode

    def finished(self, ids: Sequence[int], limit: int | None = None) -> FinishReason | None:
        """Why the completion ends with the last of `ids` (all tokens so far), or None if it goes on. Call it after every token. `limit`: of its
        request, where that has one."""
        if ids and (ids[-1] in self.ids or (self.strings and len(ids) >= self.min_new_tokens and self._ends_a_string(ids))):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= (self.max_new_tokens if limit is None else min(limit, self.max_new_tokens)) else None

    def _ends_a_string(self, ids: Sequence[int]) -> bool:
        """Whether the last token completed a stop string. A token holds at least one byte of text, so a string spans at most its bytes in tokens."""
        tail = list(ids[-(max(len(string.encode()) for string in self.strings) + CONTEXT_TOKENS) :])
        text = self.decode(tail, skip_special_tokens=False)
        found = [string for string in self.strings if string in text]
        if not found:
            return False
        before = self.decode(tail[:-1], skip_special_tokens=False)
        return any(text.rfind(string) > before.rfind(string) for string in found)


def stop_rule(settings: SamplingSettings, eos_ids: Sequence[int], decode: Decode) -> StopRule:
    """The rule of one call. `ignore_eos` lifts the model's own end tokens, not the stop ids that were asked for."""
    return StopRule(
        ids=frozenset(() if settings.ignore_eos else eos_ids) | frozenset(settings.stop_token_ids),
        strings=tuple(string for string in settings.stop if string),
        min_new_tokens=settings.min_new_tokens,
        max_new_tokens=settings.max_new_tokens,
        decode=decode,
    )


def is_greedy(sample: int, settings: SamplingSettings) -> bool:
    """Temperature 0, or the greedy twin of a group (sample -1)."""
    return settings.temperature == 0.0 or sample < 0


def completion(
    request: Request, sample: int, *, ids: Sequence[int], logprobs: Sequence[float] | None, finish: FinishReason, version: int, decode: Decode
) -> Completion:
    """The record of a finished row. `ids` and `logprobs` (T,) include what an earlier rollout sampled of it."""
    earlier = request.partial.get(sample)
    segments, mask = ((0, version),), None
    if earlier is not None:
        start = len(earlier.ids)
        segments = earlier.segments
        if len(ids) > start and not (segments and segments[-1][1] == version):
            segments = (*segments, (start, version))
        mask = None if earlier.mask is None else (*earlier.mask, *(True for _ in range(len(ids) - start)))
    return Completion(
        prompt=request.prompt,
        sample=sample,
        text=decode(list(ids), skip_special_tokens=True),
        text_with_special=decode(list(ids), skip_special_tokens=False),
        trace=TokenTrace(ids=tuple(ids), logprobs=None if logprobs is None else tuple(logprobs), mask=mask, segments=segments),
        finish=finish,
        policy_version=version if not segments else max(number for _, number in segments),
    )

"""An engine without a model: deterministic answers by key, for tests, scenarios and `rollout.engine: fake`. No torch.

Answers come from a function of yours, or from a stream of token ids keyed by (seed, draw, sample): uniform over the vocabulary, the same on any
rank and in any order. What it leaves out: temperature and filters; a greedy row (temperature 0, sample -1) is one fixed answer per draw.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence

from rftcli.algo.keyed import key64
from rftcli.engines.finish import Decode, StopRule, completion, is_greedy, stop_rule
from rftcli.errors import UsageError
from rftcli.protocols import Weights
from rftcli.types import Completion, FinishReason, Prompt, Request, SamplingSettings

Respond = Callable[[Prompt, int, SamplingSettings], Sequence[int]]
"""(prompt, sample, settings) -> the token ids of the whole answer, end token included. It ends there even without an end token."""


class FakeSampler:
    """`protocols.Sampler` without a model. `respond` is a function or its name `module:function`; None: ids of 0..vocab_size-1 by key."""

    def __init__(self, decode: Decode, respond: Respond | str | None = None, *, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        assert vocab_size >= 1, vocab_size
        self.version = 0
        self._decode = decode
        self._respond = _resolved(respond) if isinstance(respond, str) else respond
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
        """Completions in the order they were asked for."""
        rule = stop_rule(settings, self._eos_ids, self._decode)
        for request in requests:
            for sample in request.samples:
                yield self._one(request, sample, settings, rule)

    def load(self, weights: Weights, version: int) -> None:
        """There are no weights to take over; later completions carry the version."""
        self.version = version

    def sleep(self) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """Nothing to close."""

    def _one(self, request: Request, sample: int, settings: SamplingSettings, rule: StopRule) -> Completion:
        earlier = request.partial.get(sample)
        ids = [] if earlier is None else list(earlier.ids)
        logprobs = [] if earlier is None else earlier.logprobs
        answer = None if self._respond is None else tuple(self._respond(request.prompt, sample, settings))
        finish = rule.finished(ids, request.limit)
        while finish is None:
            if answer is not None and len(ids) >= len(answer):
                finish = FinishReason.STOP
                break
            ids.append(self._keyed_id(request.prompt.draw, sample, len(ids), settings, rule) if answer is None else answer[len(ids)])
            finish = rule.finished(ids, request.limit)
        new = len(ids) - (0 if earlier is None else len(earlier.ids))
        certain = answer is not None
        logprob = 0.0 if certain else -math.log(self._vocab_size)
        return completion(
            request,
            sample,
            ids=ids,
            logprobs=(*logprobs, *(logprob for _ in range(new))) if settings.logprobs and logprobs is not None else None,
            finish=finish,
            version=self.version,
            decode=self._decode,
        )

    def _keyed_id(self, draw: int, sample: int, token: int, settings: SamplingSettings, rule: StopRule) -> int:
        sample = -1 if is_greedy(sample, settings) else sample
        chosen = key64("fake", settings.seed, draw, sample, token) % self._vocab_size
        if token < settings.min_new_tokens and chosen in rule.ids:
            allowed = [candidate for candidate in range(self._vocab_size) if candidate not in rule.ids]
            chosen = allowed[chosen % len(allowed)] if allowed else chosen
        return chosen


def _resolved(name: str) -> Respond:
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"`{name}` cannot be imported: {error}", hint="write it as `package.module:function`") from error
    if not callable(function):
        raise UsageError(f"`{name}` is not a function", hint="it is called with (prompt, sample, settings) and returns token ids")
    return function

"""What is done to a model's scores before temperature and filters, row by row: bias, penalties, bans, the form of structured output.

Order, as in vLLM: logit bias; repetition, frequency, presence penalty; bans (suppressed tokens, end tokens before `min_new_tokens`, bad words,
repeated n-grams, the form). Definitions:

- repetition r (1909.05858): the score s of a token that prompt or completion already has becomes s / r if s > 0, else s x r;
- frequency f and presence p: s - f x (times the completion has it) - p if the completion has it at all;
- a ban is a score of -inf.

What it leaves out: temperature, top-k, top-p, min-p and the choice (`sampling`), and when a row ends (`finish`), but for a complete form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftcli.engines.grammar import Grammar, Matcher
from rftcli.engines.words import banned_sequences, bias_ids
from rftcli.errors import RftError, UsageError
from rftcli.types import SamplingSettings

Filter = Callable[[Tensor], Tensor]
"""Log-weights (R, V) -> log-weights with -inf for what is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What one call of an engine asks for, in token ids. `of` makes it."""

    settings: SamplingSettings
    end_ids: frozenset[int]
    bias: dict[int, float]
    banned: tuple[tuple[int, ...], ...]
    """Sequences whose last token is banned where the others stand before it."""
    suppressed: frozenset[int]
    ngram: int
    grammar: Grammar | None
    filters: tuple[Filter, ...]
    """After min-p."""

    @property
    def penalises(self) -> bool:
        settings = self.settings
        return (settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def shapes(self) -> bool:
        """Anything at all to do before the temperature."""
        some = self.bias or self.banned or self.suppressed or self.ngram or self.grammar or self.penalises
        return bool(some) or (self.settings.min_new_tokens > 0 and bool(self.end_ids))

    def check(self, vocabulary: int) -> None:
        """UsageError for ids that the model has no score for."""
        for name, ids in (("logit_bias", self.bias), ("hf.options.suppress_tokens", self.suppressed)):
            beyond = [token for token in ids if token >= vocabulary]
            if beyond:
                raise UsageError(f"rollout.{name}: there is no token {beyond[0]}", hint=f"the model has the ids 0 to {vocabulary - 1}")


def rules_of(settings: SamplingSettings, end_ids: frozenset[int], tokenizer: Any, device: torch.device) -> Rules:
    """Everything resolved with the tokenizer. UsageError for what it cannot spell, and for an option that is not known."""
    options = dict(settings.options)
    suppressed, ngram = frozenset(options.pop("suppress_tokens", ())), int(options.pop("no_repeat_ngram_size", 0))
    unknown = [name for name in options if name not in FILTERS]
    if unknown:
        known = ", ".join(("suppress_tokens", "no_repeat_ngram_size", *FILTERS))
        raise UsageError(f"the engine hf has no sampling option `{unknown[0]}`", hint=f"it has {known}")
    return Rules(
        settings=settings,
        end_ids=end_ids,
        bias=bias_ids(settings.logit_bias, tokenizer),
        banned=banned_sequences(settings.bad_words, tokenizer),
        suppressed=suppressed,
        ngram=ngram,
        grammar=None if settings.structured is None else Grammar(settings.structured, tokenizer, end_ids),
        filters=tuple(FILTERS[name](value, device) for name, value in options.items()),
    )


class Shaping:
    """The state of R rows under `rules`: which tokens each has, and where it stands in the form."""

    def __init__(self, rules: Rules, rows: int, vocabulary: int, device: torch.device) -> None:
        rules.check(vocabulary)
        self._rules, self._device, self._vocabulary = rules, device, vocabulary
        self._tokens: list[list[int] | None] = [None] * rows
        """Of each live row the completion so far; the caller's own list."""
        self._starts: list[dict[tuple[int, ...], set[int]]] = [{} for _ in range(rows)]
        """Of each row: the first n-1 tokens of an n-gram -> the tokens that ended it"""
        self._tails: list[tuple[int, ...]] = [()] * rows
        self._matchers: list[Matcher | None] = [None] * rows
        self._bias = _scattered(rules.bias, vocabulary, device) if rules.bias else None  # (V,)
        always = {*rules.suppressed, *(ids[0] for ids in rules.banned if len(ids) == 1)}
        self._always = _marked(always, vocabulary, device) if always else None  # (V,)
        self._ends = _marked(rules.end_ids, vocabulary, device)  # (V,)
        self._seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device) if rules.penalises else None  # (R, V) prompt and completion
        self._times = torch.zeros(rows, vocabulary, device=device) if rules.penalises else None  # (R, V) in the completion

    def place(self, row: int, prompt: Sequence[int], tokens: list[int]) -> None:
        """A completion begins or goes on in this row; `tokens` is its own list of what it has so far, which grows."""
        self._tokens[row] = tokens
        if self._seen is not None and self._times is not None:
            self._seen[row] = _marked({*prompt, *tokens}, self._vocabulary, self._device)
            self._times[row] = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=self._vocabulary).to(self._times)
        if self._rules.ngram:
            self._starts[row], self._tails[row] = {}, ()
            for token in (*prompt, *tokens):
                self._count_ngram(row, token)
        if self._rules.grammar is not None:
            self._matchers[row] = self._rules.grammar.matcher(tokens)

    def push(self, row: int, token: int) -> None:
        """The row took a token."""
        if self._seen is not None and self._times is not None:
            self._seen[row, token] = True
            self._times[row, token] += 1
        if self._rules.ngram:
            self._count_ngram(row, token)
        matcher = self._matchers[row]
        if matcher is not None and token not in self._rules.end_ids:
            matcher.push(token)

    def complete(self, row: int) -> bool:
        """Whether the row's form is complete."""
        matcher = self._matchers[row]
        return matcher is not None and matcher.complete

    def release(self, row: int) -> None:
        """The row goes on as a dummy."""
        self._tokens[row], self._matchers[row] = None, None

    def keep(self, places: Sequence[int]) -> None:
        """Only these rows from now on, in their order."""
        self._tokens, self._matchers = [self._tokens[place] for place in places], [self._matchers[place] for place in places]
        self._starts, self._tails = [self._starts[place] for place in places], [self._tails[place] for place in places]
        if self._seen is not None and self._times is not None:
            self._seen, self._times = self._seen[list(places)], self._times[list(places)]

    def apply(self, scores: Tensor) -> Tensor:
        """Shaped scores (R, V) float32; RftError where the model's own are not numbers."""
        if not bool(scores.isfinite().all()):
            raise RftError("the model's scores are not numbers", hint="look at grad_norm and loss of the last steps")
        scores = scores.clone() if self._bias is None else scores + self._bias
        if self._seen is not None and self._times is not None:
            settings = self._rules.settings
            factor = settings.repetition_penalty
            if factor != 1.0:
                scores = torch.where(self._seen, torch.where(scores > 0, scores / factor, scores * factor), scores)
            scores = scores - settings.frequency_penalty * self._times - settings.presence_penalty * (self._times > 0)
        if self._always is not None:
            scores.masked_fill_(self._always, -torch.inf)
        self._ban_rows(scores)
        return scores

    def _ban_rows(self, scores: Tensor) -> None:
        live = [(row, tokens) for row, tokens in enumerate(self._tokens) if tokens is not None]
        early = [row for row, tokens in live if len(tokens) < self._rules.settings.min_new_tokens]
        if early:
            places = torch.tensor(early, device=self._device)
            scores[places] = scores[places].masked_fill(self._ends, -torch.inf)
        pairs = [(row, ids[-1]) for row, tokens in live for ids in self._rules.banned if len(ids) > 1 and tuple(tokens[1 - len(ids) :]) == ids[:-1]]
        if self._rules.ngram:
            pairs += [(row, token) for row, _ in live for token in self._starts[row].get(self._tails[row], ())]
        if pairs:
            places, ids = torch.tensor(pairs, device=self._device).unbind(-1)
            scores[places, ids] = -torch.inf
        formed = [(row, matcher) for row, matcher in enumerate(self._matchers) if matcher is not None]
        if formed:
            allowed = torch.from_numpy(np.stack([matcher.allowed(self._vocabulary) for _, matcher in formed])).to(self._device)
            places = torch.tensor([row for row, _ in formed], device=self._device)
            scores[places] = scores[places].masked_fill(~allowed, -torch.inf)

    def _count_ngram(self, row: int, token: int) -> None:
        size = self._rules.ngram
        tail = self._tails[row]
        if len(tail) == size - 1:
            self._starts[row].setdefault(tail, set()).add(token)
        self._tails[row] = (*tail, token)[1 - size :] if size > 1 else ()


def _marked(ids: Any, vocabulary: int, device: torch.device) -> Tensor:
    marks = torch.zeros(vocabulary, dtype=torch.bool)
    marks[[token for token in ids if token < vocabulary]] = True
    return marks.to(device)


def _scattered(values: dict[int, float], vocabulary: int, device: torch.device) -> Tensor:
    row = torch.zeros(vocabulary)
    row[list(values)] = torch.tensor(list(values.values()))
    return row.to(device)


def _typical(mass: float, device: torch.device) -> Filter:
    from transformers import TypicalLogitsWarper

    warper = TypicalLogitsWarper(mass=mass)
    return lambda weights: warper(None, weights)


def _epsilon(cutoff: float, device: torch.device) -> Filter:
    from transformers import EpsilonLogitsWarper

    warper = EpsilonLogitsWarper(epsilon=cutoff)
    return lambda weights: warper(None, weights)


def _eta(cutoff: float, device: torch.device) -> Filter:
    from transformers import EtaLogitsWarper

    warper = EtaLogitsWarper(epsilon=cutoff, device=str(device))
    return lambda weights: warper(None, weights)


# How to add one: a function (value, device) -> Filter, a line here in the order of application, and a key of the same name in the recipe's
# `rollout.hf.options`, whose default is off.
FILTERS: dict[str, Callable[[float, torch.device], Filter]] = {"typical_p": _typical, "epsilon_cutoff": _epsilon, "eta_cutoff": _eta}

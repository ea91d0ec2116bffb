"""Generation with a transformers model: an own decode loop over its key-value cache. The engine that runs everywhere, and the exact one.

Promise: the same weights and the same key (seed, draw, sample) give the same tokens and log-probs, bit for bit, in any order, company or split
over ranks (float32 on a CPU, dense models, equal `batch_rows` and thread count). Two things keep it:

- On a CPU in float32 the linear layers compute in a way that gives a row the same bits whatever the number of rows is (`linears`). Where a model
  has no other matrices, and a trial shows the same bits in passes of few and of many rows, a pass has as many rows as are there, in eights, and
  prompts are prefilled together; finished rows leave it as it goes on.
- Elsewhere a matrix product gives a row other last bits when the matrix has another number of rows. Every decode pass then has a number of rows that
  follows from the settings and the prompt's width; places left over, and rows that are finished, go on as dummies. Prompts are prefilled in passes of
  a fixed number of rows.

Tokens go through an own decode step (`decoder`) where the model is covered and a trial before the first rollout shows the scores of transformers'
forward, else through that forward; prompts always go through it.

And in all of them:

- a prompt's width is that of its own bucket, `width_bucket` x 1, 2, 4, ..., never that of its batch; only rows of one width share a batch;
- prompts are prefilled once each, and their cache is copied to their rows;
- a bucket is wider than its prompts, so every row has a masked position and attention takes the masked kernel in every batch;
- positions in front that are padding in all rows of a batch are left out where a trial shows that the own step's attention has the same bits without;
- with `continuous`, where a waiting row takes the place of a finished one, the cache has a fixed size and every row a part of its own in it, so that
  a row's arithmetic has the same shapes at any time.

With another thread count matrix products may differ in the last bit too, unless the process was started with MKL_CBWR=AUTO,STRICT.
Keep `batch_rows` a multiple of 8: elementwise kernels treat the last few numbers of an oddly sized tensor separately.

What it leaves out: speed on a GPU (that is what other engines are for), and models whose cache is not keys and values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rftcli.engines.decoder import Decoder, uncovered
from rftcli.engines.finish import StopRule, completion, stop_rule
from rftcli.engines.kvcache import expanded
from rftcli.engines.linears import WORTH_PACKING_PASSES, Linears, Products
from rftcli.engines.passes import Passes, prompts_of
from rftcli.engines.rows import Batch, Pool, Prefilled, Row
from rftcli.engines.sampling import choose_greedily, draw, log_weights, logprobs_of
from rftcli.engines.shaping import Rules, Shaping, rules_of
from rftcli.engines.trial import (
    DROPPED_TOKENS,
    LEAST_POSITIONS,
    MOST_POSITIONS,
    TRIAL_TOKENS,
    VECTOR_ROWS,
    Found,
    in_eights,
    padding_drops,
    rows_are_alike,
    same_scores,
)
from rftcli.engines.weights import copy_into
from rftcli.errors import RftError, UsageError
from rftcli.protocols import Weights
from rftcli.types import Completion, FinishReason, Request, SamplingSettings

PREFILL_ROWS_CPU = 1
"""On a CPU one prompt fills the machine, and a dummy would cost as much as a prompt."""
PREFILL_ROWS_ACCELERATOR = 4
"""Elsewhere a pass is bound by launches, and dummies are nearly free."""
WORTH_LEAVING_OUT = 0.75
"""Places that a batch may go on with, of those that it has, for its cache to be copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What one call of `generate` asks for."""

    settings: SamplingSettings
    rule: StopRule
    rules: Rules
    passes: Passes


class HFSampler:
    """`protocols.Sampler` over a transformers causal LM.

    `module` is either the trainer's own (its weights are always the newest; `load` only takes the version) or a replica that `load` copies into
    (`owns_weights`). `eos_ids` are all end tokens of the model. `pad_id` fills masked positions; any valid id will do. `batch_rows`: the most rows
    of a pass; `fixed_rows` (None: as many): rows of every pass where their number changes bits. `batch_tokens` lowers the rows of a pass so that
    rows x (padded prompt + new tokens) stay within it. `continuous`: a waiting row takes a finished one's place.
    `own_step`: tokens go through `decoder` where that is covered and gives the model's scores. `found`: what an earlier engine over the same weights
    has found out; None: trials do, before the first rollout or in `prove`.
    """

    def __init__(
        self,
        module: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int],
        *,
        pad_id: int,
        batch_rows: int,
        fixed_rows: int | None = None,
        batch_tokens: int | None = None,
        continuous: bool = False,
        device: torch.device | str,
        width_bucket: int = 16,
        owns_weights: bool,
        own_step: bool = True,
        found: Found | None = None,
    ) -> None:
        assert batch_rows >= 1 and width_bucket >= 1, (batch_rows, width_bucket)
        self.version = 0
        self._module = module
        self._tokenizer = tokenizer
        self._decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._eos_ids = tuple(eos_ids)
        self._pad_id = pad_id
        self._batch_rows = batch_rows
        self._fixed_rows = batch_rows if fixed_rows is None else fixed_rows
        self._batch_tokens = batch_tokens
        self._continuous = continuous
        self._device = torch.device(device)
        self._width_bucket = width_bucket
        self._owns_weights = owns_weights
        self._linears = Linears(module, self._device)
        self._own_step = own_step
        self.found = found

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
        """Completions as they finish. Raises UsageError for an empty prompt, RftError when the model's scores are not numbers."""
        for request in requests:
            if not request.prompt.token_ids:
                raise UsageError(f"prompt {request.prompt.row_id} has no tokens", hint="every row needs a prompt of at least one token")
        rule = stop_rule(settings, self._eos_ids, self._decode)
        rows = [Row(request, sample, settings) for request in requests for sample in request.samples]
        if self._owns_weights:
            self._module.to(self._device)  # back from `sleep`
        with self._evaluating():
            products = self._linears.taken(passes=settings.max_new_tokens)
            found = self.prove(products)
            positions = max((self.width(len(row.prefix)) for row in rows), default=0) + settings.max_new_tokens
            call = _Call(
                settings=settings,
                rule=rule,
                rules=rules_of(settings, rule.ids, self._tokenizer, self._device),
                passes=self._passes(products, positions if found.plain is None else None, together=found.rows_alike),
            )
            waiting: dict[int, list[Row]] = {}
            for row in rows:
                finish = rule.finished(row.ids, row.request.limit)
                if finish is None and row.ids and call.rules.grammar is not None and call.rules.grammar.matcher(row.ids).complete:
                    finish = FinishReason.STOP
                if finish is not None:
                    yield self._completed(row, finish)
                else:
                    waiting.setdefault(self.width(len(row.prefix)), []).append(row)
            for width, alike in waiting.items():
                if self._continuous:
                    yield from self._refilling(alike, width, call)
                    continue
                size = self.pass_rows(width, settings)
                for first in range(0, len(alike), size):
                    yield from self._run(self._batch(alike[first : first + size], width, size, call), call)

    def prove(self, products: Products | None = None) -> Found:
        """Find out, once: does the own step give the model's scores, and do a row's bits depend on the number of rows?"""
        if self.found is not None:
            return self.found
        with self._evaluating():
            products = products or self._linears.taken(passes=WORTH_PACKING_PASSES)
            trial = {"width": self._width_bucket, "words": self._module.config.get_text_config().vocab_size, "device": self._device}
            positions = self._width_bucket + TRIAL_TOKENS
            plain = uncovered(self._module, self._device) if self._own_step else "the own decode step is switched off"
            library = self._passes(products, None, together=True)
            own = library if plain is not None else self._passes(products, positions, together=True)
            if plain is None:
                plain = same_scores(own, library, **trial)
            alike = self._linears.alike and rows_are_alike(own if plain is None else library, most=self._batch_rows, **trial)
        drops = plain is None and own.decoder is not None and padding_drops(own.decoder)
        self.found = Found(rows_alike=alike, plain=plain, padding_drops=drops)
        return self.found

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(part, part.training) for part in self._module.modules()]
        self._module.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training

    def _passes(self, products: Products, positions: int | None, *, together: bool) -> Passes:
        """By the own step where `positions` are known, the most that a row gets. `together`: prompts, as many as fit."""
        decoder = None if positions is None else Decoder(self._module, products, positions)
        fixed = PREFILL_ROWS_CPU if self._device.type == "cpu" else PREFILL_ROWS_ACCELERATOR
        return Passes(self._module, products, decoder, prompts_at_once=None if together else fixed, pad_id=self._pad_id, device=self._device)

    def load(self, weights: Weights, version: int) -> None:
        """Take over weights. A replica copies them, and every parameter has to arrive (once is enough for tied ones); RftError otherwise."""
        if self._owns_weights:
            copy_into(self._module, weights)
        self.version = version

    def sleep(self) -> None:
        """A replica leaves the accelerator until the next `generate`; shared weights are the trainer's to move."""
        if self._owns_weights and self._device.type != "cpu":
            self._module.to("cpu")
            torch.accelerator.empty_cache()

    def close(self) -> None:
        """Let go of the module."""
        self._module = nn.Module()

    def width(self, tokens: int) -> int:
        """Positions that a prefix of this many tokens is padded to: the bucket of its own, and at least one more than its tokens."""
        width = self._width_bucket
        while width <= tokens:
            width *= 2
        return width

    def pass_rows(self, width: int, settings: SamplingSettings) -> int:
        """The most rows of a decode pass over prompts of this width: a function of the settings and the width alone, never less than eight."""
        most = self._batch_rows if self._alike else self._fixed_rows
        if self._batch_tokens is None:
            return most
        fitting = self._batch_tokens // (width + settings.max_new_tokens) // VECTOR_ROWS * VECTOR_ROWS
        return min(most, max(VECTOR_ROWS, fitting))

    def _places(self, rows: int, most: int) -> int:
        """Rows of a pass for so many: in eights, or always the most."""
        return min(most, in_eights(rows)) if self._alike else most

    @property
    def _alike(self) -> bool:
        return self.found is not None and self.found.rows_alike

    def _refilling(self, rows: Sequence[Row], width: int, call: _Call) -> Iterator[Completion]:
        """All rows of one width through one pool. Prompts are prefilled when their first row gets a place, and let go with the last."""
        waiting = deque(rows)
        ready: dict[tuple[int, ...], tuple[Prefilled, int]] = {}

        def refill(pool: Pool) -> bool:
            for index in [index for index, row in enumerate(pool.rows) if row is None]:
                if not waiting:
                    break
                row = waiting.popleft()
                if row.prefix not in ready:
                    ready.clear()  # rows of one prompt stand together, so the others are done
                    ready.update(self._ahead(row, waiting, width, call))
                pool.fill(index, row, *ready[row.prefix])
            return bool(waiting)

        ready.update(self._ahead(waiting[0], waiting, width, call))
        first = ready[waiting[0].prefix][0]
        size = self._places(len(rows), self.pass_rows(width, call.settings))
        shaping = Shaping(call.rules, size, first.scores.shape[-1], self._device) if call.rules.shapes else None
        pool = Pool(size, width, width + call.settings.max_new_tokens, self._device, first, shaping)
        pool.greedy = [all(row.greedy for row in rows)] * size
        more = refill(pool)
        yield from self._run(pool, call, partial(refill, pool) if more else None)

    def _ahead(self, row: Row, waiting: Sequence[Row], width: int, call: _Call) -> dict[tuple[int, ...], tuple[Prefilled, int]]:
        """The row's prompt and the next ones, as many as one pass holds."""
        prefixes = list(dict.fromkeys((row.prefix, *(other.prefix for other in waiting))))[: call.passes.prompts_at_once or prompts_of(width)]
        prompts = call.passes.prefill(prefixes, width)
        return {prefix: (prompts, number) for number, prefix in enumerate(prefixes)}

    def _run(self, batch: Batch, call: _Call, refill: Callable[[], bool] | None = None) -> Iterator[Completion]:
        """One batch to its last row. `refill` says whether rows still wait for a place; None: none does. Gradients are off inside the passes only: a
        consumer runs between two yields."""
        while True:
            ids, logprobs = self._choose(batch, call)
            for index, (row, token) in enumerate(zip(batch.rows, ids.tolist(), strict=True)):
                if row is None:
                    continue
                if token < 0:
                    raise _no_token(batch.shaping)
                row.ids.append(token)
                if row.logprobs is not None:
                    row.logprobs.append(logprobs[index])
                finish = call.rule.finished(row.ids, row.request.limit)
                if batch.shaping is not None:
                    batch.shaping.push(index, token)
                    if batch.shaping.complete(index):
                        finish = FinishReason.STOP
                if finish is not None:
                    batch.release(index)
                    yield self._completed(row, finish)
            if any(row is not None for row in batch.rows):
                call.passes.step(batch, ids if refill is not None else self._without_finished(batch, ids))
            if refill is not None and not refill():
                refill = None
            if all(row is None for row in batch.rows):
                return

    def _without_finished(self, batch: Batch, ids: Tensor) -> Tensor:
        """Where rows are alike, a batch of which enough is finished goes on with fewer places; the chosen ids (R,) of those that stay."""
        live = [index for index, row in enumerate(batch.rows) if row is not None]
        size = self._places(len(live), len(batch.rows))
        if size > WORTH_LEAVING_OUT * len(batch.rows):
            return ids
        finished = [index for index, row in enumerate(batch.rows) if row is None]
        return ids[batch.keep(sorted(live + finished[: size - len(live)]))]

    def _batch(self, rows: Sequence[Row], width: int, size: int, call: _Call) -> Batch:
        """Each different prompt once; then its cache, scores and mask for every row of it. Dummies copy the first."""
        prefixes = list(dict.fromkeys(row.prefix for row in rows))
        prompts = call.passes.prefill(prefixes, width)
        size = self._places(len(rows), size)
        places = {prefix: index for index, prefix in enumerate(prefixes)}
        owner = torch.zeros(size, dtype=torch.int64)
        owner[: len(rows)] = torch.tensor([places[row.prefix] for row in rows])
        owner = owner.to(self._device)  # (R,)
        shaping = Shaping(call.rules, size, prompts.scores.shape[-1], self._device) if call.rules.shapes else None
        start = self._shared_padding(width, max(map(len, prefixes)), call.settings)
        batch = Batch(size, self._device, expanded(prompts.caches, owner, start), prompts.scores[owner], prompts.mask[owner, start:], shaping)
        batch.greedy = [all(row.greedy for row in rows)] * size
        for index, row in enumerate(rows):
            batch.place(index, row)
        return batch

    def _shared_padding(self, width: int, longest: int, settings: SamplingSettings) -> int:
        """Positions in front that no prompt of a batch has a token at, and that rows can do without; `longest`: tokens of its longest prompt."""
        if self.found is None or not self.found.padding_drops or width + settings.max_new_tokens > MOST_POSITIONS:
            return 0
        return max(0, width - max(longest, LEAST_POSITIONS)) // DROPPED_TOKENS * DROPPED_TOKENS

    @torch.no_grad()
    def _choose(self, batch: Batch, call: _Call) -> tuple[Tensor, list[float]]:
        """(ids (R,), log-probs (R,) or empty): the next token of every row, dummies too."""
        settings = call.settings
        scores = batch.scores.float()
        if batch.shaping is not None:
            scores = batch.shaping.apply(scores)
        if all(batch.greedy):
            return choose_greedily(scores), [0.0] * len(batch.greedy)  # a greedy choice is certain
        weights = log_weights(
            scores,
            temperature=self._temperature(batch, settings),
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            filters=call.rules.filters,
        )
        ids, mass = draw(weights, torch.from_numpy(batch.noise()).to(self._device))
        logprobs = logprobs_of(weights, ids, mass) if settings.logprobs else None
        if any(batch.greedy):
            greedy = torch.tensor(batch.greedy, device=self._device)
            ids = torch.where(greedy, choose_greedily(scores), ids)
            logprobs = None if logprobs is None else torch.where(greedy, 0.0, logprobs)
        return ids, [] if logprobs is None else logprobs.tolist()

    def _temperature(self, batch: Batch, settings: SamplingSettings) -> float | Tensor:
        """One for all rows, or (R,) where some of them take their first token at another one."""
        if settings.first_token_temperature is None:
            return settings.temperature
        found = torch.full((len(batch.rows),), settings.temperature, dtype=torch.float64)
        found[torch.from_numpy(batch.token_counts() == 0)] = settings.first_token_temperature
        return found.to(self._device)

    def _completed(self, row: Row, finish: FinishReason) -> Completion:
        return completion(row.request, row.sample, ids=row.ids, logprobs=row.logprobs, finish=finish, version=self.version, decode=self._decode)


def _no_token(shaping: Shaping | None) -> RftError:
    """Why a row has no token to take. Scores that are shaped have been looked at before."""
    if shaping is None:
        return RftError("the model's scores are not numbers", hint="look at grad_norm and loss of the last steps")
    return RftError(
        "no token is left to sample: bans, the form of rollout.structured and the tokenizer exclude all of them",
        hint="does the tokenizer have tokens for everything the form needs? Are rollout.bad_words or suppress_tokens too many?",
    )

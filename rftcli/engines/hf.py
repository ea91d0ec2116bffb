"""Generation with a transformers model: an own decode loop over its key-value cache. The engine that runs everywhere, and the exact one.

Promise: the same weights and the same key (seed, draw, sample) give the same tokens and log-probs, bit for bit, in any order, company or split
over ranks (float32 on a CPU, dense models, equal `batch_rows` and thread count). A matrix product gives a row other last bits when the matrix has
another number of rows, so no shape here depends on which requests happen to be present:

- every decode pass has exactly `batch_rows` rows; places left over, and rows that are finished, go on as dummies;
- a prompt's width is that of its own bucket, `width_bucket` x 1, 2, 4, ..., never that of its batch; only rows of one width share a batch;
- prompts are prefilled in passes of a fixed number of rows, once each, and their cache is copied to their rows;
- a bucket is wider than its prompts, so every row has a masked position and attention takes the masked kernel in every batch.

With another thread count matrix products may differ in the last bit too, unless the process was started with MKL_CBWR=AUTO,STRICT.
Keep `batch_rows` a multiple of 8: elementwise kernels treat the last few numbers of an oddly sized tensor separately.

What it leaves out: speed on a GPU (that is what other engines are for), and models whose cache is not keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from inspect import signature

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from rftcli.engines.finish import StopRule, completion, is_greedy, stop_rule
from rftcli.engines.kvcache import expanded
from rftcli.engines.noise import RowNoise, uniforms
from rftcli.engines.sampling import choose_greedily, draw, log_weights
from rftcli.errors import RftError, UsageError
from rftcli.protocols import Weights
from rftcli.types import Completion, FinishReason, Request, SamplingSettings

PREFILL_ROWS_CPU = 1
"""On a CPU one prompt fills the machine, and a dummy would cost as much as a prompt."""
PREFILL_ROWS_ACCELERATOR = 4
"""Elsewhere a pass is bound by launches, and dummies are nearly free."""


class _Row:
    """One sample in the making."""

    __slots__ = ("greedy", "ids", "key", "logprobs", "prefix", "request", "sample")

    def __init__(self, request: Request, sample: int, settings: SamplingSettings) -> None:
        earlier = request.partial.get(sample)
        self.request, self.sample = request, sample
        self.ids: list[int] = [] if earlier is None else list(earlier.ids)
        self.logprobs: list[float] | None = None
        if settings.logprobs and (earlier is None or earlier.logprobs is not None):
            self.logprobs = [] if earlier is None else list(earlier.logprobs)
        self.prefix = (*request.prompt.token_ids, *self.ids)
        self.greedy = is_greedy(sample, settings)
        self.key = RowNoise(settings.seed, request.prompt.draw, sample).key


class _Batch:
    """The rows of one batch and where they stand: R = `batch_rows` rows, the first `len(rows)` of them real."""

    __slots__ = ("cache", "greedy", "keys", "live", "mask", "positions", "rows", "scores")

    def __init__(self, rows: Sequence[_Row], size: int, device: torch.device, cache: DynamicCache, scores: Tensor, mask: Tensor) -> None:
        self.rows: list[_Row | None] = [*rows, *(None for _ in range(size - len(rows)))]
        """(R,) None once finished, and for dummies."""
        self.cache = cache
        self.scores = scores
        """(R, V) for the next token"""
        self.mask = mask
        """(R, width + new tokens so far) int64"""
        self.positions = mask.sum(-1, keepdim=True) - 1
        """(R, 1) of the newest token; stands still for finished rows, so that it stays inside learned position tables"""
        self.live = torch.tensor([[row is not None] for row in self.rows], device=device).long()
        """(R, 1) 1 for rows that go on"""
        self.greedy = [row.greedy for row in rows] + [all(row.greedy for row in rows)] * (size - len(rows))
        """(R,) a dummy is greedy where all rows are"""
        self.keys = np.array([0 if row is None else row.key for row in self.rows], dtype=np.uint64)

    def token_counts(self) -> np.ndarray:
        """(R,) tokens sampled so far."""
        return np.array([0 if row is None else len(row.ids) for row in self.rows], dtype=np.int64)


class HFSampler:
    """`protocols.Sampler` over a transformers causal LM.

    `module` is either the trainer's own (its weights are always the newest; `load` only takes the version) or a replica that `load` copies into
    (`owns_weights`). `eos_ids` are all end tokens of the model. `pad_id` fills masked positions; any valid id will do.
    """

    def __init__(
        self,
        module: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int],
        *,
        pad_id: int,
        batch_rows: int,
        device: torch.device | str,
        width_bucket: int = 16,
        owns_weights: bool,
    ) -> None:
        assert batch_rows >= 1 and width_bucket >= 1, (batch_rows, width_bucket)
        self.version = 0
        self._module = module
        self._decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._eos_ids = tuple(eos_ids)
        self._pad_id = pad_id
        self._batch_rows = batch_rows
        self._device = torch.device(device)
        self._width_bucket = width_bucket
        self._owns_weights = owns_weights
        self._prefill_rows = PREFILL_ROWS_CPU if self._device.type == "cpu" else PREFILL_ROWS_ACCELERATOR
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in signature(module.forward).parameters else {}

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
        """Completions as they finish. Raises UsageError for an empty prompt, RftError when the model's scores are not numbers."""
        for request in requests:
            if not request.prompt.token_ids:
                raise UsageError(f"prompt {request.prompt.row_id} has no tokens", hint="every row needs a prompt of at least one token")
        rule = stop_rule(settings, self._eos_ids, self._decode)
        rows = [_Row(request, sample, settings) for request in requests for sample in request.samples]
        modes = [(part, part.training) for part in self._module.modules()]
        if self._owns_weights:
            self._module.to(self._device)  # back from `sleep`
        self._module.eval()
        try:
            waiting: dict[int, list[_Row]] = {}
            for row in rows:
                finish = rule.finished(row.ids)
                if finish is not None:
                    yield self._completed(row, finish)
                else:
                    waiting.setdefault(self.width(len(row.prefix)), []).append(row)
            for width, alike in waiting.items():
                for first in range(0, len(alike), self._batch_rows):
                    yield from self._run(alike[first : first + self._batch_rows], width, settings, rule)
        finally:
            for part, training in modes:
                part.training = training

    def load(self, weights: Weights, version: int) -> None:
        """Take over weights. A replica copies them, and every parameter has to arrive (once is enough for tied ones); RftError otherwise."""
        if self._owns_weights:
            _copy_into(self._module, weights)
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

    def _run(self, rows: Sequence[_Row], width: int, settings: SamplingSettings, rule: StopRule) -> Iterator[Completion]:
        """One batch from prompts to the last finished row. Gradients are off inside the passes only: a consumer runs between two yields."""
        batch = self._prefill(rows, width)
        while True:
            ids, logprobs = self._choose(batch, settings, rule)
            for index, (row, token) in enumerate(zip(batch.rows, ids.tolist(), strict=True)):
                if row is None:
                    continue
                if token < 0:
                    raise RftError("the model's scores are not numbers", hint="look at grad_norm and loss of the last steps")
                row.ids.append(token)
                if row.logprobs is not None:
                    row.logprobs.append(logprobs[index])
                finish = rule.finished(row.ids)
                if finish is not None:
                    batch.rows[index] = None
                    batch.live[index] = 0
                    yield self._completed(row, finish)
            if all(row is None for row in batch.rows):
                return
            self._step(batch, ids)

    @torch.no_grad()
    def _prefill(self, rows: Sequence[_Row], width: int) -> _Batch:
        """Each different prefix once, padded on the left to `width`; then its cache, scores and mask for every row of it. Dummies copy the first."""
        prefixes = list(dict.fromkeys(row.prefix for row in rows))
        missing = -len(prefixes) % self._prefill_rows
        padded = torch.full((len(prefixes) + missing, width), self._pad_id)
        mask = torch.zeros_like(padded)
        for index, prefix in enumerate([*prefixes, *(prefixes[0] for _ in range(missing))]):
            padded[index, width - len(prefix) :] = torch.tensor(prefix)
            mask[index, width - len(prefix) :] = 1
        padded, mask = padded.to(self._device), mask.to(self._device)
        caches, scores = [], []
        for ids, seen in zip(padded.split(self._prefill_rows), mask.split(self._prefill_rows), strict=True):
            output = self._module(
                input_ids=ids,
                attention_mask=seen,
                position_ids=(seen.cumsum(-1) - 1).clamp(min=0),
                past_key_values=DynamicCache(config=self._module.config),
                use_cache=True,
                **self._last_only,
            )
            caches.append(output.past_key_values)
            scores.append(output.logits[:, -1])
        places = {prefix: index for index, prefix in enumerate(prefixes)}
        owner = torch.zeros(self._batch_rows, dtype=torch.int64)
        owner[: len(rows)] = torch.tensor([places[row.prefix] for row in rows])
        owner = owner.to(self._device)  # (R,)
        return _Batch(rows, self._batch_rows, self._device, expanded(caches, owner), torch.cat(scores)[owner], mask[owner])

    @torch.no_grad()
    def _choose(self, batch: _Batch, settings: SamplingSettings, rule: StopRule) -> tuple[Tensor, list[float]]:
        """(ids (R,), log-probs (R,) or empty): the next token of every row, dummies too."""
        counts = batch.token_counts()
        scores = batch.scores.float()
        early = counts < settings.min_new_tokens
        if early.any() and rule.ids:
            banned = torch.zeros(scores.shape[-1], dtype=torch.bool)
            banned[[token for token in rule.ids if token < scores.shape[-1]]] = True
            scores = scores.masked_fill((torch.from_numpy(early)[:, None] & banned).to(self._device), -torch.inf)
        if all(batch.greedy):
            return choose_greedily(scores), [0.0] * len(batch.greedy)  # a greedy choice is certain
        weights = log_weights(scores, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p)
        ids, logprobs = draw(weights, torch.from_numpy(uniforms(batch.keys, counts)).to(self._device))
        if any(batch.greedy):
            greedy = torch.tensor(batch.greedy, device=self._device)
            ids, logprobs = torch.where(greedy, choose_greedily(scores), ids), torch.where(greedy, 0.0, logprobs)
        return ids, logprobs.tolist() if settings.logprobs else []

    @torch.no_grad()
    def _step(self, batch: _Batch, ids: Tensor) -> None:
        """Feed the chosen ids (R,) and take the scores that follow."""
        batch.mask = torch.cat([batch.mask, torch.ones_like(batch.positions)], dim=-1)
        batch.positions = batch.positions + batch.live
        output = self._module(
            input_ids=ids.clamp(min=0)[:, None],
            attention_mask=batch.mask,
            position_ids=batch.positions,
            past_key_values=batch.cache,
            use_cache=True,
            **self._last_only,
        )
        batch.scores = output.logits[:, -1]

    def _completed(self, row: _Row, finish: FinishReason) -> Completion:
        return completion(row.request, row.sample, ids=row.ids, logprobs=row.logprobs, finish=finish, version=self.version, decode=self._decode)


@torch.no_grad()
def _copy_into(module: nn.Module, weights: Weights) -> None:
    """Copy full tensors, by their state dict names, into the module in place."""
    targets = module.state_dict(keep_vars=True)
    arrived: set[int] = set()
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            raise RftError(f"weight `{name}` is unknown to the rollout model")
        if target.shape != tensor.shape:
            raise RftError(f"weight `{name}` has the shape {tuple(tensor.shape)}, the rollout model's is {tuple(target.shape)}")
        target.copy_(tensor)
        arrived.add(id(target))
    lacking = [name for name, parameter in module.named_parameters() if id(parameter) not in arrived]
    if lacking:
        raise RftError(f"{len(lacking)} weights did not arrive at the rollout model, the first is `{lacking[0]}`")

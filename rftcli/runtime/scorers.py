"""The scorers of a plan made real on one rank: services reached, checkpoints loaded once, judges given the hf engine.

A checkpoint is loaded by itself, before anything partitions it: whatever DeepSpeed does to the policy never reaches it. Leaves out what parts ask
(`rewards.scorers.desk`) and how single kinds read texts and replies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch

from rftcli.algo.batchmath import token_micro_batches
from rftcli.algo.keyed import key64
from rftcli.builtin import builtin_path
from rftcli.engines.hf import HFSampler
from rftcli.engines.trial import Found
from rftcli.errors import RftError, UsageError
from rftcli.models.classifier import Texts, heads, load_classifier, max_positions, next_token_logits
from rftcli.models.load import eos_ids, load_causal_lm, load_tokenizer, pad_id, quantisation
from rftcli.plan.compile_scorers import same_checkpoint
from rftcli.plan.plan import Plan
from rftcli.protocols import World
from rftcli.rewards.scorers.cache import Cache
from rftcli.rewards.scorers.desk import Desk, Local, Remote
from rftcli.rewards.scorers.head import Head
from rftcli.rewards.scorers.own import OwnScorer, scorer_class
from rftcli.rewards.scorers.reading import read_reply, share
from rftcli.rewards.scorers.remote import remote_scorer
from rftcli.rewards.scorers.spec import CLASSIFIER, PYTHON, ScorerSpec, WeightsSpec
from rftcli.rewards.scorers.template import asked, judge_template
from rftcli.rewards.scorers.view import View
from rftcli.types import Completion, FinishReason, Prompt, Request, SamplingSettings

if TYPE_CHECKING:
    from rftcli.runtime.judges import Judges

Warn = Callable[[str, str], None]
JUDGE_ROWS = 64
"""Most rows of a judge's decode pass; `batch_tokens` lowers them."""


def fill_desk(
    desk: Desk, plan: Plan, world: World, device: torch.device, folder: Path, search_path: Sequence[Path], policy_tokenizer: Any, warn: Warn,
    judges: Judges | None = None,
) -> None:  # fmt: skip
    """Load and reach everything that the plan's rewards ask. `folder`: where replies are kept; `judges`: those that the run has started, which end
    with the desk. UsageError for what is no such model. Collective where a scorer is partitioned."""
    if not plan.scorers:
        return
    scorers = made_scorers(plan.scorers, world, device, search_path, warn, judges)
    caches = {spec.name: Cache(folder, spec, world.rank, files_of(spec, search_path)) for spec in plan.scorers if spec.cache}
    world.barrier("scorers")  # nobody writes replies while another rank still reads what was kept
    desk.fill(scorers, caches, Texts(policy_tokenizer).front, **({} if judges is None else {"on_close": judges.stop}))


def made_scorers(
    specs: Sequence[ScorerSpec], world: World, device: torch.device, search_path: Sequence[Path], warn: Warn, judges: Judges | None = None
) -> dict[str, Remote | Local]:
    """Each by its name, ready to be asked; a checkpoint of several names is loaded once. UsageError for what is no such model."""
    held: dict[tuple[Any, ...], Held] = {}
    scorers: dict[str, Remote | Local] = {}
    for spec in specs:
        if spec.service is not None:
            scorers[spec.name] = remote_scorer(spec, world.size) if judges is None else judges.asked(spec, world.size)
        elif spec.kind == PYTHON:
            scorers[spec.name] = OwnScorer(str(spec.target), spec.options, device, search_path)
        else:
            key = same_checkpoint(spec)
            if key not in held:
                alike = [other.weights for other in specs if other.weights is not None and same_checkpoint(other) == key]
                held[key] = Held.load(spec, device, offload=all(weights.offload for weights in alike))
            scorers[spec.name] = (ClassifierScorer if spec.kind == CLASSIFIER else JudgeScorer)(spec, held[key], world, warn)
    return scorers


@dataclass(slots=True, kw_only=True)
class Held:
    """One checkpoint on this rank. `module` may be partitioned, `config` and `generation` are the model's own."""

    module: Any
    config: Any
    generation: Any
    device: torch.device
    offload: bool

    @classmethod
    def load(cls, spec: ScorerSpec, device: torch.device, *, offload: bool) -> Held:
        weights = spec.weights
        assert weights is not None
        bits = weights.quantise
        few = None if bits is None else quantisation(bits=bits["bits"], kind=bits["kind"], nested=bits["nested"], dtype=weights.dtype)
        first = torch.device("cpu") if offload or weights.sharded else device
        common: dict[str, Any] = {
            "dtype": weights.dtype, "options": weights.options, "trust_remote_code": weights.trust_remote_code, "device": first,
            "revision": weights.revision, "quantised": few,
        }  # fmt: skip
        if spec.kind == CLASSIFIER:
            model = load_classifier(weights.path, **common)
        else:
            model = load_causal_lm(weights.path, attention="sdpa", dropout=0.0, **common).eval().requires_grad_(False)
        module = _partitioned(model, weights.dtype, device) if weights.sharded else model
        generation = None if spec.kind == CLASSIFIER else model.generation_config
        return cls(module=module, config=model.config, generation=generation, device=device, offload=offload)

    @contextmanager
    def at_work(self) -> Iterator[Any]:
        """The module on the device; back in CPU memory afterwards where it waits there."""
        if self.offload:
            self.module.to(self.device)
        try:
            yield self.module
        finally:
            if self.offload:
                self.module.to("cpu")
                torch.accelerator.empty_cache() if self.device.type != "cpu" else None


def _partitioned(model: Any, dtype: str, device: torch.device) -> Any:
    from rftcli.runtime.sharding import partitioned  # DeepSpeed, which whole weights do without

    return partitioned(model, dtype, device)


def files_of(spec: ScorerSpec, search_path: Sequence[Path]) -> list[Path]:
    """What a scorer reads on this machine. A hub id has none: its commit says what it is."""
    if spec.target is not None:
        source = inspect.getsourcefile(scorer_class(spec.target, search_path))
        return [] if source is None else [Path(source)]
    weights = spec.weights or spec.start
    places = [] if weights is None else [weights.path, *([] if weights.tokenizer is None else [weights.tokenizer])]
    return [path for path in (Path(_place(text)).expanduser() for text in places) if path.exists()]


def _place(path: str) -> str:
    return str(builtin_path(path.removeprefix("builtin:"))) if path.startswith("builtin:") else path


def tokenizer_of(weights: WeightsSpec) -> Any:
    path = _place(weights.tokenizer or weights.path)
    revision = weights.revision if weights.tokenizer is None else None
    return load_tokenizer(path, trust_remote_code=weights.trust_remote_code, revision=revision)


class _ModelScorer:
    """What classifiers and judges share: texts of bounded length, in passes that every rank makes equally often where weights are partitioned."""

    remote: Literal[False] = False

    def __init__(self, spec: ScorerSpec, held: Held, world: World, warn: Warn) -> None:
        assert spec.weights is not None
        self._spec, self._weights, self._held, self._world, self._warn = spec, spec.weights, held, world, warn
        self._texts = Texts(tokenizer_of(spec.weights), spec.weights.template)
        positions = max_positions(held.config)
        self._most = spec.weights.max_tokens or (None if positions is None else max(1, positions - spec.max_new_tokens))
        self._cuts = self._cut_total = 0
        self._told_at = 1
        self.collective = self._weights.sharded or self._weights.overlong == "cut_left"

    def score(self, views: Sequence[View]) -> list[float | Exception]:
        outcomes: dict[int, float | Exception] = {}
        rows: list[tuple[int, list[int]]] = []
        for index, view in enumerate(views):
            try:
                rows.append((index, self._read(view)))
            except ValueError as error:
                outcomes[index] = error
        rows.sort(key=lambda row: -len(row[1]))
        if rows or self._weights.sharded:
            found = self._scored([ids for _, ids in rows])
            outcomes |= {index: value for (index, _), value in zip(rows, found, strict=True)}
        if self._weights.overlong == "cut_left":
            self._tell_cuts()
        return [outcomes[index] for index in range(len(views))]

    def close(self) -> None:
        """Let go of the weights."""
        self._held.module = None

    def _read(self, view: View) -> list[int]:
        ids, cut = self._texts.fitted(self._ids(view), self._most, cut=self._weights.overlong == "cut_left")
        if not ids:
            raise ValueError("the text has no tokens")
        self._cuts += cut
        return ids

    def _passes(self, rows: Sequence[list[int]], work: Callable[[Any, Sequence[list[int]]], torch.Tensor]) -> list[torch.Tensor]:
        """One result a row. `rows` are in order of length."""
        lengths, budget = [len(ids) for ids in rows], self._weights.batch_tokens
        parts, most = token_micro_batches(lengths, budget, padded=True), 0
        if self._weights.sharded:
            most = int(self._world.max([len(parts)])[0])
            parts = token_micro_batches(lengths, budget, padded=True, at_least=max(1, most))
        found: list[torch.Tensor] = []
        with self._held.at_work() as module:
            for part in parts:
                found += work(module, [rows[index] for index in part])
            for _ in range(most - len(parts)):  # the others gather weights that this rank has a part of
                work(module, [[0]])
        return found

    def _tell_cuts(self) -> None:
        self._cut_total += int(self._world.sum([self._cuts])[0])
        self._cuts = 0
        if self._cut_total >= self._told_at:
            self._told_at = 2 * self._cut_total
            self._warn("scorer_cut", f"scorer `{self._spec.name}`: {self._cut_total} texts so far lost their beginning beyond {self._most} tokens")

    def _ids(self, view: View) -> list[int]:
        raise NotImplementedError

    def _scored(self, rows: Sequence[list[int]]) -> list[float | Exception]:
        raise NotImplementedError


class ClassifierScorer(_ModelScorer):
    """A reward model: the conversation by its own chat template, or prompt and answer as plain text. UsageError for a head it does not have."""

    def __init__(self, spec: ScorerSpec, held: Held, world: World, warn: Warn) -> None:
        super().__init__(spec, held, world, warn)
        self._head = Head(spec.head)
        try:
            self._head.fits(held.config.num_labels)
        except UsageError as error:
            raise UsageError(f"scorer `{spec.name}`: {error.message}", hint=error.hint) from error

    def key(self, view: View) -> str:
        return self._texts.rendered(view.turns, view.prompt + view.completion)

    def _ids(self, view: View) -> list[int]:
        return self._texts.ids(self.key(view))

    def _scored(self, rows: Sequence[list[int]]) -> list[float | Exception]:
        return [self._arithmetic(one.tolist()) for one in self._passes(rows, self._heads)]

    def _heads(self, module: Any, rows: Sequence[list[int]]) -> torch.Tensor:
        return heads(module, self._held.config, rows, self._held.device)

    def _arithmetic(self, values: list[float]) -> float | Exception:
        try:
            return self._head(values)
        except ArithmeticError as error:
            return ValueError(f"head `{self._spec.head}` of {values}: {error}")


class JudgeScorer(_ModelScorer):
    """A judge on the rank: its replies come from the hf engine; a probability from one pass over the question."""

    def __init__(self, spec: ScorerSpec, held: Held, world: World, warn: Warn) -> None:
        super().__init__(spec, held, world, warn)
        assert spec.prompt is not None and spec.read is not None
        self._question, self._reading = judge_template(spec.prompt), spec.read
        self._found: Found | None = None  # its weights stand still: the engine's trials hold for all calls
        tokenizer = self._texts.tokenizer
        self._pad = pad_id(tokenizer)
        self._words = {} if spec.read.token is None else _token_ids(tokenizer, held.config, (spec.read.token, *spec.read.against), spec.name)

    def key(self, view: View) -> str:
        return asked(self._question, view)

    def _ids(self, view: View) -> list[int]:
        text = self.key(view)
        return self._texts.ids(self._texts.rendered([{"role": "user", "content": text}], text, opening=True), open_end=True)

    def _scored(self, rows: Sequence[list[int]]) -> list[float | Exception]:
        return self._replies(rows) if self._reading.token is None else [self._share(one) for one in self._passes(rows, self._logits)]

    def _logits(self, module: Any, rows: Sequence[list[int]]) -> torch.Tensor:
        return next_token_logits(module, rows, self._held.device, self._pad)

    def _share(self, logits: torch.Tensor) -> float | Exception:
        probabilities = logits.softmax(-1)  # (V,)
        try:
            return share(self._reading, {word: float(probabilities[ids].sum()) for word, ids in self._words.items()}, complete=True)
        except ValueError as error:
            return error

    def _replies(self, rows: Sequence[list[int]]) -> list[float | Exception]:
        """Means over the samples of each row; what one reply lacks is an error of its row."""
        requests = [_request(index, ids, self._spec.samples) for index, ids in enumerate(rows)]
        settings = SamplingSettings(max_new_tokens=self._spec.max_new_tokens, seed=self._spec.seed, temperature=self._spec.temperature)
        told: dict[int, dict[int, Completion]] = {index: {} for index in range(len(rows))}
        with self._held.at_work() as module:
            engine = HFSampler(
                module, self._texts.tokenizer, eos_ids(self._held.config, self._held.generation, self._texts.tokenizer), pad_id=self._pad,
                batch_rows=JUDGE_ROWS, batch_tokens=self._weights.batch_tokens, device=self._held.device, owns_weights=False,
                found=self._found,
            )  # fmt: skip
            try:
                for completion in engine.generate(requests, settings):
                    told[completion.prompt.row][completion.sample] = completion
                self._found = engine.found
            except RftError as error:
                failure: Exception = ValueError(f"the judge gives no reply: {error.message}")
                return [self._mean(replies) if len(replies) == self._spec.samples else failure for replies in told.values()]
        return [self._mean(replies) for replies in told.values()]

    def _mean(self, replies: dict[int, Completion]) -> float | Exception:
        try:
            ordered = [replies[sample] for sample in sorted(replies)]
            return fmean(read_reply(self._reading, reply.text, cut=reply.finish is FinishReason.LENGTH) for reply in ordered)
        except ValueError as error:
            return error


def _request(index: int, ids: list[int], samples: int) -> Request:
    """Its noise follows from the question's ids, so the same question has the same replies in any company."""
    prompt = Prompt(draw=key64("judge", *ids), row=index, row_id=str(index), source="judge", label="", text="", token_ids=tuple(ids))
    return Request(prompt=prompt, samples=tuple(range(samples)))


def _token_ids(tokenizer: Any, config: Any, words: tuple[str, ...], name: str) -> dict[str, list[int]]:
    """Word -> ids of all tokens that are it, spaces around it apart. UsageError for a word that is not one token."""
    size = min(len(tokenizer), config.get_text_config().vocab_size)
    found: dict[str, list[int]] = {word: [] for word in words}
    for token, text in enumerate(tokenizer.batch_decode([[token] for token in range(size)])):
        if text.strip() in found:
            found[text.strip()].append(token)
    for word, ids in found.items():
        if not ids:
            raise UsageError(f"scorer `{name}`: `{word}` is not one token of the judge's vocabulary", hint="give a shorter word: `yes`, `A`, `1`")
    return found

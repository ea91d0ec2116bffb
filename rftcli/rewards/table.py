"""The reward table: for each label a few weighted parts. Completions in, scored samples out; the Scorer of a run.

Parts are scored as soon as a completion is there, side by side. How their values become a reward is in `combine`; a label whose parts are combined
by a function of the user waits for the end of the stream, because that sees whole groups.

Leaves out what a run does about too many failures (`failures.ErrorWindow`), and shaping of the result (the training loop's).
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from rftcli.errors import RftError, UsageError
from rftcli.rewards.combine import GROUP_RECORD, bounded, combine_group, combined
from rftcli.rewards.event_loop import EventLoop
from rftcli.rewards.functions import Log, UserFunction, as_values, describe, load_function
from rftcli.rewards.grace import STOP_GRACE_SECONDS, Grace, nobody_asks, row_of
from rftcli.rewards.inputs import HeavyRule, RuleInput
from rftcli.rewards.limits import TimedCalls, end_a_child_of
from rftcli.rewards.rules import check_options, open_rule
from rftcli.rewards.scorers.desk import Desk, ScorerGoneError, after
from rftcli.rewards.scorers.verdict import Verdict, is_number
from rftcli.rewards.spec import DEFAULT_LABEL, PLAIN_SUM, CombineSpec, PartSpec
from rftcli.types import Completion, PartScore, ScoredSample

Part = Callable[[Completion, str, "int | None", Log], Any]
"""(completion, the text this part reads, step, where it may log) -> what the rule or function said, unchecked."""
NO_COMBINES: Mapping[str, CombineSpec] = MappingProxyType({})


class RewardTable:
    """Implements `protocols.Scorer`. `step` may be set by the loop; user functions that ask for it get it.

    Construction opens every part: UsageError for unknown rules, wrong options, functions that cannot be found, MachineError for missing packages.
    Helper processes start with the first completion that needs one.
    """

    def __init__(
        self,
        parts_by_label: Mapping[str, Sequence[PartSpec]],
        *,
        combine: Mapping[str, CombineSpec] = NO_COMBINES,
        score_prefill: bool = True,
        search_path: Iterable[Path | str] = (),
        threads: int = 8,
        total_steps: int | None = None,
        desk: Desk | None = None,
        stop_asked: Callable[[], bool] = nobody_asks,
        grace_seconds: float = STOP_GRACE_SECONDS,
    ) -> None:
        self.step: int | None = None
        self._pid = os.getpid()
        self._grace = Grace(stop_asked, grace_seconds)
        self._total_steps = total_steps
        self._score_prefill = score_prefill
        self._desk = Desk() if desk is None else desk
        self._rules: dict[str, Callable[..., Any]] = {}
        self._functions: list[UserFunction] = []
        self._loop = EventLoop()
        self._combine = dict(combine)
        search_path = tuple(search_path)
        try:
            self._parts = {label: self._open(label, parts, search_path) for label, parts in parts_by_label.items()}
            self._by_group = {label: self._load(spec, search_path, GROUP_RECORD) for label, spec in combine.items() if spec.how == "python"}
        except BaseException:
            self._close_rules()
            raise
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="rewards")

    def score(self, completions: Iterable[Completion]) -> Iterator[ScoredSample]:
        """Each completion once, in the order in which scoring ends. `completions` is iterated here, in the caller's thread, and each one is handed
        on at once, so slow rewards run while the engine still generates. RftError for a part that failed with `on_error: stop`; HeldUpError where a
        stop was asked for and a function does not return."""
        groups: dict[int, list[ScoredSample]] = defaultdict(list)
        for sample in self._scored(completions):
            if self._label_of(sample.completion) in self._by_group:
                groups[sample.completion.prompt.draw].append(sample)
            else:
                yield sample
        for group in groups.values():
            yield from self._grace.result(self._executor.submit(self._combine_group, group))

    def _scored(self, completions: Iterable[Completion]) -> Iterator[ScoredSample]:
        """The samples, combined as far as one completion alone allows."""
        pending: set[Future[ScoredSample]] = set()
        ended: SimpleQueue[Future[ScoredSample]] = SimpleQueue()  # asking all pending ones, time and again, takes longer than scoring
        try:
            for completion in completions:
                future = self._begin(completion)
                pending.add(future)
                future.add_done_callback(ended.put)
                while not ended.empty():
                    yield _taken(ended.get(), pending)
            self._desk.flush()
            while pending:
                yield _taken(self._grace.next(ended), pending)
        finally:
            for future in pending:
                future.cancel()
            self._desk.end_round()

    def close(self) -> None:
        """End helper processes and event loop, and do not wait for functions that are still running."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._close_rules()
        self._loop.close()
        self._desk.close()

    def _close_rules(self) -> None:
        for rule in self._rules.values():
            if isinstance(rule, HeavyRule):
                rule.close()
        for function in self._functions:
            function.close()

    def _open(self, label: str, parts: Sequence[PartSpec], search_path: tuple[Path | str, ...]) -> tuple[OpenPart, ...]:
        if not any(part.weight for part in parts):
            raise UsageError(f"rewards.{label} has no part with a weight other than 0, so nothing would have a reward")
        return tuple(OpenPart(part, self._open_part(label, part, search_path)) for part in parts)

    def _open_part(self, label: str, part: PartSpec, search_path: tuple[Path | str, ...]) -> Part | None:
        """None for a scorer's: its answer is there when the part is scored."""
        options = dict(part.options)
        if part.kind == "model":
            if not self._desk.knows(part.target):
                raise UsageError(f"rewards.{label}: part `{part.name}` names the scorer `{part.target}`, which is not there")
            return None
        if part.kind == "python":
            function = self._load(part, search_path)
            limit = part.timeout_seconds  # of an async one, which is cancelled before it is left behind
            return lambda completion, text, step, log: function(record(completion, text, step, self._total_steps, log), limit)
        if problems := check_options(part.target, options):
            raise UsageError(f"rewards.{label}: part `{part.name}`: " + "; ".join(problems))
        if part.target not in self._rules:
            self._rules[part.target] = open_rule(part.target)
        rule = self._rules[part.target]
        if isinstance(rule, HeavyRule):
            rule.warm()
        return lambda completion, text, step, log: rule(rule_input(completion, text), **options)

    def _load(self, spec: PartSpec | CombineSpec, search_path: tuple[Path | str, ...], *record: Mapping[str, str]) -> UserFunction:
        assert spec.target is not None
        function = load_function(spec.target, spec.options, search_path, self._loop, *record).open()
        self._functions.append(function)
        return function

    def _begin(self, completion: Completion) -> Future[ScoredSample]:
        """Ask the scorers, and start everything else; the sample is there when all of it is."""
        step, parts, log = self.step, self._parts[self._label_of(completion)], Log()
        models = [opened.spec for opened in parts if opened.spec.kind == "model"]
        asked = {spec.name: self._desk.ask(spec.target, completion, self._text(completion, spec.text)) for spec in models}
        if not asked:
            return self._executor.submit(self._score_one, completion, step, log, {}, asked)
        early = self._executor.submit(self._score_early, completion, step, log)
        return after([early, *asked.values()], lambda: self._score_one(completion, step, log, early.result(), asked))

    def _score_early(self, completion: Completion, step: int | None, log: Log) -> dict[str, list[PartScore]]:
        parts = self._parts[self._label_of(completion)]
        return {opened.spec.name: self._score_part(opened, completion, step, log, {}) for opened in parts if opened.spec.kind != "model"}

    def _label_of(self, completion: Completion) -> str:
        """The entry that scores it. RftError if there is none."""
        label = completion.prompt.label
        if label in self._parts:
            return label
        if DEFAULT_LABEL not in self._parts:
            own = "" if label == DEFAULT_LABEL else f"rewards.{label}, or "
            hint = f"add {own}rewards.{DEFAULT_LABEL} for all rows without an entry of their own; there are rewards for {', '.join(self._parts)}"
            raise RftError(f"row {completion.prompt.row_id} has the label `{label}`, for which there are no rewards", hint=hint)
        return DEFAULT_LABEL

    def _score_one(
        self, completion: Completion, step: int | None, log: Log, known: Mapping[str, list[PartScore]], asked: Mapping[str, Future[Verdict]]
    ) -> ScoredSample:
        """`known`: parts that have been scored already; `asked`: what scorers answered to the others, by part."""
        entry = self._label_of(completion)
        scores = [
            (opened.spec, score)
            for opened in self._parts[entry]
            for score in known.get(opened.spec.name) or self._score_part(opened, completion, step, log, asked)
        ]
        how = self._combine.get(entry, PLAIN_SUM)
        parts = tuple(score for _, score in scores)
        reward, error = bounded(None if how.how == "python" else combined(how, [spec for spec, _ in scores], parts))
        return ScoredSample(completion=completion, parts=parts, reward=reward, error=error, extra=dict(log.extra), metrics=tuple(log.metrics))

    def _combine_group(self, group: list[ScoredSample]) -> list[ScoredSample]:
        entry = self._label_of(group[0].completion)
        specs = [opened.spec for opened in self._parts[entry]]
        target = self._combine[entry].target
        assert target is not None
        texts = {sample.completion.sample: self._text(sample.completion, "clean") for sample in group}
        with self._grace.call(f"rewards.{entry}.combine ({target})", row_of(group[0].completion)):
            try:
                return combine_group(self._by_group[entry], target, specs, group, texts, step=self.step, total_steps=self._total_steps)
            finally:
                end_a_child_of(self._pid)

    def _text(self, completion: Completion, kind: str) -> str:
        text = completion.text if kind == "clean" else completion.text_with_special
        return completion.prompt.prefill + text if self._score_prefill else text

    def _score_part(
        self, opened: OpenPart, completion: Completion, step: int | None, log: Log, asked: Mapping[str, Future[Verdict]]
    ) -> list[PartScore]:
        """One score; several where a function returned named values."""
        spec = opened.spec
        text = self._text(completion, spec.text)
        start = time.perf_counter()
        values: dict[str | None, float | None] = {None: None}
        error = None
        try:
            with self._grace.call(f"reward part `{spec.name}` ({spec.target})", row_of(completion)) if opened.unlimited else nullcontext():
                try:
                    told = _score(spec, asked[spec.name].result(), log) if spec.name in asked else opened.call(completion, text, step, log)
                finally:
                    end_a_child_of(self._pid)
                values = as_values(spec.target, told)
        except ScorerGoneError:
            raise
        except BaseException as caught:  # anybody's code, in a thread that no signal reaches: what it raises is a value (or a stop), never a crash
            error = f"{spec.target}: {describe(caught)}" if spec.kind == "python" else describe(caught, place=False)
            if spec.on_error == "stop":
                message = f"reward part `{spec.name}` failed on {row_of(completion)}: {error}"
                raise RftError(message, hint=f"`on_error: stop` is set for `{spec.name}`; `fail_sample` would drop the sample") from caught
        seconds = time.perf_counter() - start
        return [
            PartScore(
                name=spec.name if name is None else f"{spec.name}.{name}",
                value=value if value is None or spec.clip is None else min(max(value, spec.clip[0]), spec.clip[1]),
                weight=spec.weight,
                seconds=seconds,
                error=error,
            )
            for name, value in values.items()
        ]


def _taken(future: Future[ScoredSample], pending: set[Future[ScoredSample]]) -> ScoredSample:
    pending.remove(future)
    return future.result()


def _score(part: PartSpec, verdict: Verdict, log: Log) -> float:
    """The score; what the scorer says beside it is logged as a function would log it, under the part's name."""
    for name, said in verdict.extra.items():
        (log.log_metric if is_number(said) else log.log_extra)(f"{part.name}/{name}", said)
    return verdict.value


class OpenPart:
    """A part ready to be called, within its limit of time if it has one."""

    def __init__(self, spec: PartSpec, part: Part | None) -> None:
        self.spec, self._part = spec, part
        self._timed = None if spec.timeout_seconds is None else TimedCalls()
        self.unlimited = spec.kind == "python" and spec.timeout_seconds is None

    def call(self, completion: Completion, text: str, step: int | None, log: Log) -> Any:
        assert self._part is not None, "what a scorer says is asked for beforehand"
        if self._timed is None or self.spec.timeout_seconds is None:
            return self._part(completion, text, step, log)
        return self._timed.call(lambda: self._part(completion, text, step, log), self.spec.timeout_seconds)


def rule_input(completion: Completion, text: str) -> RuleInput:
    prompt = completion.prompt
    return RuleInput(
        text=text,
        prompt_text=prompt.text,
        reference=prompt.reference,
        columns=prompt.columns,
        tokens=len(completion.trace.ids),
        finish=str(completion.finish),
        label=prompt.label,
        sample=completion.sample,
    )


def record(completion: Completion, text: str, step: int | None, total_steps: int | None, log: Log) -> Mapping[str, Any]:
    """The fields of `functions.RECORD`. Lists are new for every call: a function may change them."""
    prompt = completion.prompt
    return {
        "prompt": prompt.text,
        "completion": text,
        "completion_ids": list(completion.trace.ids),
        "reference": prompt.reference,
        "label": prompt.label,
        "columns": dict(prompt.columns),
        "messages": [dict(message) for message in prompt.messages],
        "finish": str(completion.finish),
        "tokens": len(completion.trace.ids),
        "sample": completion.sample,
        "draw": prompt.draw,
        "step": step,
        "total_steps": total_steps,
        "log_extra": log.log_extra,
        "log_metric": log.log_metric,
    }

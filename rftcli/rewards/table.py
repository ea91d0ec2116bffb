"""The reward table: for each label a few weighted parts. Completions in, scored samples out; the Scorer of a run.

r = sum of w_j s_j over the parts that gave a value; weights are used as they are. A part that abstains is left out. A part that errors leaves the
sample without a reward, unless its `on_error` says otherwise. Parts of weight 0 are logged only: they neither give a sample its reward nor, by an
error, take it away. A sample without a value from any weighted part has the reward None, which is not 0.

Leaves out what a run does about too many failures (`failures.ErrorWindow`), and shaping of the sum.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from rftcli.errors import RftError, UsageError
from rftcli.rewards.functions import EventLoop, as_number, describe, load_function
from rftcli.rewards.inputs import HeavyRule, RuleInput
from rftcli.rewards.rules import check_options, open_rule
from rftcli.rewards.scorers.desk import Desk, after
from rftcli.rewards.spec import DEFAULT_LABEL, PartSpec
from rftcli.types import Completion, PartScore, ScoredSample

Part = Callable[[Completion, str, "int | None"], Any]
"""(completion, the text this part reads, step) -> what the rule or function said, unchecked."""


class RewardTable:
    """Implements `protocols.Scorer`. `step` may be set by the loop; user functions that ask for it get it.

    Construction opens every part: UsageError for unknown rules, wrong options, functions that cannot be found, MachineError for missing packages.
    Helper processes start with the first completion that needs one.
    """

    def __init__(
        self,
        parts_by_label: Mapping[str, Sequence[PartSpec]],
        *,
        score_prefill: bool = True,
        search_path: Iterable[Path | str] = (),
        threads: int = 8,
        desk: Desk | None = None,
    ) -> None:
        self.step: int | None = None
        self._score_prefill = score_prefill
        self._desk = Desk() if desk is None else desk
        self._rules: dict[str, Callable[..., Any]] = {}
        self._loop = EventLoop()
        search_path = tuple(search_path)
        try:
            self._parts = {label: self._open(label, parts, search_path) for label, parts in parts_by_label.items()}
        except BaseException:
            self._close_rules()
            raise
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="rewards")

    def score(self, completions: Iterable[Completion]) -> Iterator[ScoredSample]:
        """Each completion once, in the order in which scoring ends. `completions` is iterated here, in the caller's thread, and each one is handed
        on at once, so slow rewards run while the engine still generates. RftError for a part that failed with `on_error: stop`."""
        pending: set[Future[ScoredSample]] = set()
        try:
            for completion in completions:
                pending.add(self._begin(completion))
                done = {future for future in pending if future.done()}
                pending -= done
                yield from (future.result() for future in done)
            self._desk.flush()
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
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

    def _open(self, label: str, parts: Sequence[PartSpec], search_path: tuple[Path | str, ...]) -> tuple[tuple[PartSpec, Part], ...]:
        if not any(part.weight for part in parts):
            raise UsageError(f"rewards.{label} has no part with a weight other than 0, so nothing would have a reward")
        return tuple((part, self._open_part(label, part, search_path)) for part in parts)

    def _open_part(self, label: str, part: PartSpec, search_path: tuple[Path | str, ...]) -> Part:
        options = dict(part.options)
        if part.kind == "model":
            if not self._desk.knows(part.target):
                raise UsageError(f"rewards.{label}: part `{part.name}` names the scorer `{part.target}`, which is not there")
            return lambda completion, text, step: self._desk.ask(part.target, completion, text).result()
        if part.kind == "python":
            function = load_function(part.target, options, search_path, self._loop)
            return lambda completion, text, step: function(record(completion, text, step))
        if problems := check_options(part.target, options):
            raise UsageError(f"rewards.{label}: part `{part.name}`: " + "; ".join(problems))
        if part.target not in self._rules:
            self._rules[part.target] = open_rule(part.target)
        rule = self._rules[part.target]
        return lambda completion, text, step: rule(rule_input(completion, text), **options)

    def _begin(self, completion: Completion) -> Future[ScoredSample]:
        """Ask the scorers, and start everything else; the sample is there when all of it is."""
        step, parts = self.step, self._parts_of(completion)
        asked = [self._desk.ask(spec.target, completion, self._text(spec, completion)) for spec, _ in parts if spec.kind == "model"]
        if not asked:
            return self._executor.submit(self._score_one, completion, step, {})
        early = self._executor.submit(self._score_early, completion, step)
        return after([early, *asked], lambda: self._score_one(completion, step, early.result()))

    def _score_early(self, completion: Completion, step: int | None) -> dict[str, PartScore]:
        return {spec.name: self._score_part(spec, part, completion, step) for spec, part in self._parts_of(completion) if spec.kind != "model"}

    def _parts_of(self, completion: Completion) -> tuple[tuple[PartSpec, Part], ...]:
        label = completion.prompt.label
        parts = self._parts.get(label, self._parts.get(DEFAULT_LABEL))
        if parts is None:
            raise RftError(
                f"row {completion.prompt.row_id} has the label `{label}`, for which there are no rewards",
                hint=f"add rewards.{label}, or rewards.{DEFAULT_LABEL} for all labels without an entry",
            )
        return parts

    def _score_one(self, completion: Completion, step: int | None, known: Mapping[str, PartScore]) -> ScoredSample:
        """`known`: parts that have been scored already."""
        parts = self._parts_of(completion)
        scores = tuple(known.get(spec.name) or self._score_part(spec, part, completion, step) for spec, part in parts)
        return ScoredSample(completion=completion, parts=scores, reward=weighted_sum([spec for spec, _ in parts], scores))

    def _text(self, spec: PartSpec, completion: Completion) -> str:
        text = completion.text if spec.text == "clean" else completion.text_with_special
        return completion.prompt.prefill + text if self._score_prefill else text

    def _score_part(self, spec: PartSpec, part: Part, completion: Completion, step: int | None) -> PartScore:
        text = self._text(spec, completion)
        start = time.perf_counter()
        value, error = None, None
        try:
            value = as_number(spec.target, part(completion, text, step))
        except (Exception, SystemExit, asyncio.CancelledError) as caught:  # anybody's code: whatever it raises is a value (or a stop), never a crash
            error = f"{spec.target}: {describe(caught)}" if spec.kind == "python" else describe(caught, place=False)
            if spec.on_error == "stop":
                where = f"row {completion.prompt.row_id} (draw {completion.prompt.draw}, sample {completion.sample})"
                message = f"reward part `{spec.name}` failed on {where}: {error}"
                raise RftError(message, hint=f"`on_error: stop` is set for `{spec.name}`; `fail_sample` would drop the sample") from caught
        return PartScore(name=spec.name, value=value, weight=spec.weight, seconds=time.perf_counter() - start, error=error)


def weighted_sum(specs: Sequence[PartSpec], scores: Sequence[PartScore]) -> float | None:
    """The reward of one completion from its parts, as the module says.

    >>> spec, score = PartSpec(name="a", kind="rule", target="exact", weight=0.5), PartScore(name="a", value=1.0, weight=0.5, seconds=0.0)
    >>> weighted_sum([spec], [score])
    0.5
    """
    counted = [(spec, score) for spec, score in zip(specs, scores, strict=True) if spec.weight]
    if any(score.error is not None and spec.on_error != "abstain" for spec, score in counted):
        return None
    given = [spec.weight * score.value for spec, score in counted if score.value is not None]
    return sum(given) if given else None


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


def record(completion: Completion, text: str, step: int | None) -> Mapping[str, Any]:
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
    }

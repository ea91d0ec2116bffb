"""The events of a run, folded into what a reader wants to know: curves, evaluations, warnings, counts, times.

A `History` is itself an observer. Of a step that was done more than once, the last attempt counts; the time it cost counts every time.
Leaves out drawing and printing, and everything that is not in the events (samples, checkpoints on disk).
"""

from __future__ import annotations

import math
import shlex
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftcli.events import CheckpointSaved, EvalDone, Event, Progress, RunEnded, RunStarted, StepDone, Warned
from rftcli.observe.numbers import flatten, flatten_evals, means_with_intervals, number
from rftcli.observe.series import Series
from rftcli.observe.text import clean, duration, first_line, interval, percent, several, short, wrapped

KEPT_WARNINGS = 50
MAX_CAUSE = 500
"""Characters of the reason why a run ended before its last step."""
PACE_STEPS = 20
"""How many of the newest steps the time per step is averaged over."""
SUMMARY_STEPS = 10
"""The summary compares the mean reward of this many first and last steps."""


class History:
    """What a run has done so far.

    series: metric by dotted name (`reward_mean`, `reward_parts.math.mean`, `seconds.rollout`, `eval.gsm8k.mean@1`) -> its curve
    evals: step -> the sets of that evaluation; checkpoints: step -> path
    metrics: the newest step's metrics, nested as in the event
    counts: events by kind; warning_counts: warnings by code; warnings: the newest ones
    stage_seconds: seconds by stage over all steps, those done twice included
    `limit` bounds every curve and the number of evaluations (see `Series`); None keeps all.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.info: Mapping[str, Any] = {}
        self.attempt = 0
        self.step = 0
        self.metrics: Mapping[str, Any] = {}
        self.series: dict[str, Series] = {}
        self.evals: dict[int, Mapping[str, Mapping[str, Any]]] = {}
        self.checkpoints: dict[int, str] = {}
        self.warnings: deque[Warned] = deque(maxlen=KEPT_WARNINGS)
        self.counts: Counter[str] = Counter()
        self.warning_counts: Counter[str] = Counter()
        self.stage_seconds: Counter[str] = Counter()
        self.stage: Progress | None = None
        self.ended: RunEnded | None = None
        self._pace: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS + 1)
        self._seconds_before = 0.0
        self._began: float | None = None
        self._newest_time = 0.0
        self._furthest_step = -1

    def see(self, event: Event) -> None:
        if event.attempt > self.attempt:
            self._next_attempt(event)
        self._began = event.time if self._began is None else self._began
        self._newest_time = max(self._newest_time, event.time)
        self.counts[event.kind] += 1
        match event:
            case RunStarted():
                self.info = event.info
                self.step = event.step
            case Progress():
                self.stage = event
            case StepDone():
                self._step_done(event)
            case EvalDone():
                self._eval_done(event)
            case CheckpointSaved():
                self.checkpoints[event.step] = event.path
                self.stage = None
                self._bound(self.checkpoints)
            case Warned():
                self.warnings.append(event)
                self.warning_counts[event.code] += 1
            case RunEnded():
                self.ended = event
                self.stage = None

    def close(self) -> None:
        """Nothing to give back."""

    @property
    def total_steps(self) -> int | None:
        return _whole(number(self.info.get("steps")))

    @property
    def seconds(self) -> float:
        """Time from start to the newest event, summed over attempts; the time between attempts is not in it."""
        return self._seconds_before + (0.0 if self._began is None else self._newest_time - self._began)

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the newest steps of this attempt, evaluations and checkpoints between them included."""
        if len(self._pace) > 1:
            (first, began), (last, ended) = self._pace[0], self._pace[-1]
            return (ended - began) / (last - first) if last > first else None
        return number(_nested(self.metrics, "seconds", "total"))

    @property
    def eta_seconds(self) -> float | None:
        """None where it is not known, and after the last step."""
        pace, total = self.seconds_per_step, self.total_steps
        return None if pace is None or total is None or self.step >= total else (total - self.step) * pace

    @property
    def tokens(self) -> int | None:
        """Tokens since the start of the run, by the run's own count."""
        return _whole(self.last("tokens_total"))

    @property
    def started(self) -> bool:
        """Has an attempt come as far as to say what it does?"""
        return self.counts["start"] + self.counts["step"] > 0

    @property
    def evaluates_only(self) -> bool:
        """A finished run that trained nothing: its evaluation is all there is to tell."""
        return bool(self.evals) and not self.counts["step"] and self.ended is not None and self.ended.status == "done"

    def last(self, name: str) -> float | None:
        series = self.series.get(name)
        return None if series is None else series.last

    def held_out(self) -> dict[str, str]:
        """Evaluation set -> the name of its leading metric: the first one with a value. Sets of the first and of the newest evaluation."""
        found: dict[str, str] = {}
        for step in sorted({min(self.evals), max(self.evals)}) if self.evals else ():
            for name, metrics in self.evals[step].items():
                for metric in means_with_intervals(metrics):
                    found.setdefault(name, metric)
        return found

    def held_out_curve(self, name: str, metric: str) -> list[tuple[int, float, float | None, float | None]]:
        """(step, value, low, high) of one metric of one set, in order of step."""
        found = []
        for step in sorted(self.evals):
            entry = means_with_intervals(self.evals[step].get(name, {})).get(metric)
            if entry is not None:
                found.append((step, *entry))
        return found

    def _next_attempt(self, event: Event) -> None:
        self._seconds_before = self.seconds
        self._began, self._newest_time = event.time, event.time
        self.attempt = event.attempt
        self.stage, self.ended = None, None
        self._pace.clear()

    def _step_done(self, event: StepDone) -> None:
        if event.step <= self._furthest_step:
            self._forget(event.step, evals=False)
        self._furthest_step = max(self._furthest_step, event.step)
        self.step, self.metrics, self.stage = event.step, event.metrics, None
        self._pace.append((event.step, event.time))
        flat = flatten(event.metrics, ".")
        self._put(event.step, flat)
        self.stage_seconds.update({n.removeprefix("seconds."): v for n, v in flat.items() if n.startswith("seconds.") and math.isfinite(v)})

    def _eval_done(self, event: EvalDone) -> None:
        if event.step in self.evals:
            self._forget(event.step, evals=True)
        self.evals[event.step] = event.sets
        self.stage = None
        self._bound(self.evals)
        self._put(event.step, {f"eval.{name}": value for name, value in flatten_evals(event.sets, ".").items()})

    def _bound(self, by_step: dict[int, Any]) -> None:
        if self.limit is not None and len(by_step) > self.limit:
            del by_step[sorted(by_step)[1]]  # the first one stays: it is the "before" of every comparison

    def _forget(self, step: int, *, evals: bool) -> None:
        for name, series in self.series.items():
            if name.startswith("eval.") is evals:
                series.drop(step)

    def _put(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name not in self.series:
                self.series[name] = Series(self.limit)
            self.series[name].put(step, value)


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else int(value)


def _nested(metrics: Mapping[str, Any], outer: str, inner: str) -> Any:
    section = metrics.get(outer)
    return section.get(inner) if isinstance(section, Mapping) else None


def summary(history: History, run_dir: Path, columns: int | None = None) -> str:
    """What a person reads at the end of a run: what came out, where it lies, what to type next. Several lines, no newline at the end.

    Only what exists is named. Values are means over the first and the last `SUMMARY_STEPS` steps (fewer in a short run), held-out ones carry
    their intervals. Why a run failed or was stopped, and how it goes on, is said by the command as its error, whole and once. `columns`: of the
    terminal that it is for; paths and commands stay whole.
    """
    told, places = [*_outcome(history), *_cost(history)], _places(history, run_dir)
    width = max((len(name) for name, _ in (*told, *places)), default=0)
    body = [wrapped(f"  {name.ljust(width)}  {text}", columns, width + 4) for name, text in told]
    body += [f"  {name.ljust(width)}  {text}" for name, text in places]
    return "\n".join([_headline(history), *body, *_next_commands(history, run_dir)])


def _headline(history: History) -> str:
    status = "unfinished" if history.ended is None else history.ended.status
    if history.evaluates_only:
        return f"evaluated step {history.step} in {duration(history.seconds)}"
    attempt = f", attempt {history.attempt}" if history.attempt > 1 else ""
    if not history.started:
        return f"{status} while it was starting{attempt}"
    if history.total_steps is None and not history.counts["step"]:
        return f"{status} after {duration(history.seconds)}{attempt}"  # an evaluation
    of = "" if history.total_steps is None else f"{history.step} of "
    steps = of + several(history.step if history.total_steps is None else history.total_steps, "step")
    early = f"\n  {first_line(history.ended.cause, MAX_CAUSE)}" if status == "done" and history.ended is not None and history.ended.cause else ""
    return f"{status}: {steps} in {duration(history.seconds)}{attempt}{early}"


def _outcome(history: History) -> list[tuple[str, str]]:
    rows = []
    reward = history.series.get("reward_mean")
    if reward is not None and len(reward) > 0:
        count = max(min(SUMMARY_STEPS, len(reward) // 2), 1)
        before, after = reward.mean_of_first(count), reward.mean_of_last(count)
        if before is not None and after is not None:
            which = f"mean of the first and the last {count}" if count > 1 else "the first and the last"
            means = f"{short(before)} -> {short(after)}  ({which} of {len(reward)} steps)"
            rows.append(("reward", means if len(reward) > 1 else f"{short(after)}  (one step)"))
    for name, metric in history.held_out().items():
        curve = history.held_out_curve(name, metric)
        text = interval(*curve[-1][1:])
        if len(curve) > 1:
            text = f"{interval(*curve[0][1:])} -> {text}"
        steps = "step " + " -> ".join(str(step) for step in dict.fromkeys((curve[0][0], curve[-1][0])))
        rows.append((f"eval {clean(name, 40)}", f"{metric} {text}  ({steps})"))
    if history.warning_counts:
        rows.append(("warnings", ", ".join(f"{clean(code, 40)} x{count}" for code, count in history.warning_counts.most_common(8))))
    return rows


def _cost(history: History) -> list[tuple[str, str]]:
    rows = []
    total = history.stage_seconds["total"]
    stages = [(name, seconds) for name, seconds in history.stage_seconds.most_common() if name != "total" and seconds > 0]
    if total > 0 and stages:
        rows.append(("time", ", ".join(f"{clean(name, 20)} {percent(seconds / total)}" for name, seconds in stages[:6])))
    if history.tokens is not None:
        rows.append(("tokens", f"{history.tokens:,}"))
    return rows


def _places(history: History, run_dir: Path) -> list[tuple[str, str]]:
    rows = []
    for name in ("samples", "evals", "checkpoints", "final", "tensorboard", "wandb"):
        if _holds_something(run_dir / name):
            rows.append((name, str(run_dir / name)))
    logs = run_dir / "attempts" / str(history.attempt) / "logs"
    if _holds_something(logs):
        rows.append(("logs", str(logs)))
    return rows


def _holds_something(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _next_commands(history: History, run_dir: Path) -> list[str]:
    if history.evaluates_only:
        return []
    where = shlex.quote(str(run_dir))
    weights = (run_dir / "final").is_dir() or bool(history.checkpoints)
    commands = [f"rft eval {where}"] if weights and history.evals else [f"rft samples {where}"] if weights else []
    return ["next:", *(f"  {command}" for command in commands)] if commands else []

"""One line a step, for logs and for a standard output that is no terminal.

    step  12/200  reward  0.531 eval 0.512  kl 0.0012 loss -0.0031 grad 0.840 lr   1e-6  len  182 cut  2% nosig 25%   12.3s roll 66% learn 26%  eta 9m

Fields stand in this order; one whose metric the event lacks is left out. `eval` is the newest held-out value, `beta` the coefficient of the KL
term, `value` and `vloss` the critic's mean value and its loss, `len` the mean sampled tokens of a completion, `cut` the share of completions that
hit the token limit, `nosig` the share of groups without a learning signal; behind the seconds stand the slowest stages. Of a resumed run only the
newest attempt is printed, behind one line that says where it goes on. On a terminal, which gets these lines under NO_COLOR, they fit its width.
Leaves out colour, curves and samples: those are the console's; and how the run ended: the command says that, once.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rftcli.events import CheckpointSaved, EvalDone, Event, Logged, Progress, RunStarted, StepDone, Warned
from rftcli.observe.follow import newest_attempt
from rftcli.observe.history import History
from rftcli.observe.numbers import flatten, means_with_intervals, number
from rftcli.observe.series import KEPT_ENDS
from rftcli.observe.text import clean, columns_of, duration, interval, path_end, percent, several, short

WIDTH = 150
QUIET_SECONDS = 30.0
"""A stage says nothing before this time has passed, and then once in each such time."""
MAX_TEXT = 2000
NARROWEST = 40
_DROPPED_FIRST = ("second stage", "beta", "first stage", "lr", "vloss", "grad", "loss", "value", "nosig", "cut", "kl", "eta", "len", "eval")
"""Fields a line gives up, in this order, when it would be too wide."""


class Plain:
    """Writes lines of at most WIDTH columns, or those that a terminal has, to `stream` (standard output by default) and flushes each."""

    def __init__(self, run_dir: Path, options: Any = None, *, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._run_dir = run_dir
        self._newest: int | None = None
        self._passed_over = False
        self._history = History(limit=4 * KEPT_ENDS)
        self._spoke: tuple[int, str] | None = None
        self._spoke_at = 0.0
        self._began_at = 0.0

    def see(self, event: Event) -> None:
        self._history.see(event)
        if self._newest is None:
            self._newest = newest_attempt(self._run_dir)  # asked at the first event: an observer may be older than the attempt it is made for
        if event.attempt < self._newest:
            self._passed_over = True
            return
        if self._passed_over:
            self._passed_over = False
            self._print(f"attempt {event.attempt} goes on after step {event.step}")
        width = min(max(columns_of(self._stream) or WIDTH, NARROWEST), WIDTH)
        match event:
            case RunStarted():
                self._print(*_start_lines(event, width))
            case Progress():
                self._progress(event)
            case StepDone():
                self._print(step_line(self._history, width))
            case EvalDone():
                self._print(*eval_lines(event, width))
            case CheckpointSaved():
                self._print(f"checkpoint step {event.step} | {clean(event.path, 100)} | {duration(event.seconds)}")
            case Warned():
                self._print(*_wrapped(f"warning (step {event.step}) {clean(event.code, 40)}: ", event.text, width))
            case Logged():
                self._print(*_wrapped("log: ", event.text, width))

    def close(self) -> None:
        """The stream belongs to the caller and stays open."""

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._stream.write(_encodable(line, self._stream) + "\n")
        self._stream.flush()

    def _progress(self, event: Progress) -> None:
        if self._spoke != (event.step, event.stage):
            self._spoke, self._spoke_at, self._began_at = (event.step, event.stage), event.time, event.time
        elif event.time - self._spoke_at > QUIET_SECONDS:
            self._spoke_at = event.time
            running = duration(event.time - self._began_at)
            self._print(f"  {clean(event.stage, 30)} {event.done}/{event.of} after {running} (step {event.step})")


def step_line(history: History, width: int = WIDTH) -> str:
    """The line of the newest step in `history`."""
    total = history.total_steps
    of = "" if total is None else f"/{total}"
    fields = {"step": f"step {str(history.step).rjust(len(str(total or 0)))}{of}", **_fields(history)}
    for name in ("", *_DROPPED_FIRST):
        fields.pop(name, None)
        groups = (" ".join(fields[n] for n in group if n in fields) for group in LINE)
        line = "  ".join(group for group in groups if group)
        if len(line) <= width:
            break
    return line[:width]


def eval_lines(event: EvalDone, width: int = WIDTH) -> list[str]:
    """One line a set, more only where a set has more metrics than fit."""
    lines = []
    for name, metrics in event.sets.items():
        prompts = number(metrics.get("prompts"))
        head = f"eval step {event.step} | {clean(name, 40)}" + ("" if prompts is None else f" {several(prompts, 'prompt')}") + " |"
        fields = [f"{clean(metric, 24)} {interval(*entry)}" for metric, entry in means_with_intervals(metrics).items()]
        others = flatten({key: value for key, value in metrics.items() if not isinstance(value, Mapping)}, ".")
        fields += [f"{label} {shown(others[key])}" for key, label, shown in EVAL_FIELDS if key in others]
        lines += _packed(head, fields, width)
    if lines:
        lines[-1] += f" | {duration(event.seconds)}"
    return lines


def _fields(history: History) -> dict[str, str]:
    flat = flatten(history.metrics, ".")
    found = {}
    for label, name, width, shown in FIELDS:
        if name in flat:
            found[label] = f"{label} {shown(flat[name]).rjust(width)}"
    curve = next((history.held_out_curve(name, metric) for name, metric in history.held_out().items()), [])
    if curve:
        step, value = curve[-1][:2]
        found["eval"] = f"eval@{step} {short(value).rjust(5)}"  # of that step: it stays until the next evaluation
    if (total := flat.get("seconds.total")) is not None:
        found["seconds"] = duration(total).rjust(6)
        stages = {n.removeprefix("seconds."): v for n, v in flat.items() if n.startswith("seconds.") and n != "seconds.total" and 0 < v < total}
        slowest = sorted(stages.items(), key=lambda item: -item[1])
        for place, (name, seconds) in zip(("first stage", "second stage"), slowest, strict=False):
            found[place] = f"{SHORT_STAGES.get(name, clean(name, 12))} {percent(seconds / total).rjust(3)}"
    if (eta := history.eta_seconds) is not None:
        found["eta"] = f"eta {duration(eta, coarse=True)}"
    return found


def _start_lines(event: RunStarted, width: int) -> list[str]:
    info = {key: value for key, value in event.info.items() if isinstance(value, (str, int, float)) and not isinstance(value, bool)}
    own = [_wrapped("  ", text.format(_plainly(info.pop(key))), width) for key, text in OWN_LINES if key in info]
    name = clean(str(info.pop("name", "run")), 60)
    shown = [f"{clean(key, 30)} {path_end(str(value), 60) if key == 'model' else clean(_plainly(value), 60)}" for key, value in info.items()]
    return [*_packed(f"start {name} | attempt {event.attempt} |", shown, width), *(line for lines in own for line in lines)]


def _plainly(value: str | float) -> str:
    return short(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def _packed(head: str, fields: Iterable[str], width: int) -> list[str]:
    """The fields behind `head`, on as many lines as it takes; room is left for a duration at the end. A narrow line has the head once."""
    room = width - 12
    first = head if width == WIDTH else "   "
    lines, line, holds = [], head[:room], False
    for field in fields:
        if len(line) + 1 + len(field) > room and (holds or line != first):
            lines.append(line)
            line = first
        line, holds = f"{line} {field}"[:room], True
    return [*lines, line]


def _wrapped(head: str, text: str, width: int) -> list[str]:
    told = " ".join(clean(text, MAX_TEXT).split())
    return textwrap.wrap(head + told, width, subsequent_indent="    ", break_on_hyphens=False) or [head]


def _encodable(line: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a StringIO has none
    return line.encode(encoding, "replace").decode(encoding)


FIELDS = (
    ("reward", "reward_mean", 6, short),
    ("kl", "kl", 6, short),
    ("loss", "loss", 7, short),
    ("grad", "grad_norm", 5, short),
    ("lr", "lr", 6, short),
    ("beta", "kl_coefficient", 5, short),
    ("value", "value_mean", 6, short),
    ("vloss", "value_loss", 5, short),
    ("len", "response_tokens.mean", 4, short),
    ("cut", "truncated_fraction", 3, percent),
    ("nosig", "zero_signal_fraction", 3, percent),
)
"""Label, dotted metric, width, how it is shown. To add one: a row here, and its label in LINE where it should stand."""

LINE = (
    ("step",),
    ("reward", "eval"),
    ("kl", "beta", "loss", "grad", "lr"),
    ("value", "vloss"),
    ("len", "cut", "nosig"),
    ("seconds", "first stage", "second stage"),
    ("eta",),
)
"""The groups of a step line, in order."""

OWN_LINES = (("batch", "batch {}"), ("logprob_probe", "log-prob probe: at most {} nats from the model's plain forward"))
"""Facts of the start that get a line of their own, and its words."""

SHORT_STAGES = {"rollout": "roll", "checkpoint": "ckpt"}

EVAL_FIELDS = (("response_tokens", "len", short), ("truncated_fraction", "cut", percent))

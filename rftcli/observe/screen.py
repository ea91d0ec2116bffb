"""What one frame of the console shows: lines of styled text, cut to the terminal's width and height.

Every line is a `Text` built from parts, never markup, and foreign text passes through `clean`: a completion cannot colour or move anything. Sections
stand in the order of their worth, so a small terminal loses the sample first. Leaves out when to draw.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console, ConsoleOptions
from rich.text import Text

from rftcli.observe.history import History
from rftcli.observe.numbers import flatten, means_with_intervals, number
from rftcli.observe.text import clean, duration, interval, percent, several, short, sparkline

LABEL_COLUMNS = 10
VALUE_COLUMNS = 44
MIN_SPARK_COLUMNS, MAX_SPARK_COLUMNS = 8, 60
MIN_COLUMNS = 20
ROOMY_COLUMNS = 60
"""From this width on sections are set apart by empty lines."""
SILENT_SECONDS = 10.0
"""A stage that has not reported for this long is marked; a live one reports every two seconds."""
SHOWN_WARNINGS = 3
WARNING_LINES = 4
ONLY_LABEL = "default"
"""Of a run whose data has no labels: its mean is that of the run."""
SHOWN_ROWS = 8
"""Reward parts and labels that are listed, each."""
PROMPT_LINES = 2
COMPLETION_LINES = 6
SHOWN_EVALS = 3
_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_black")


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What a frame shows that is in no event. `name`: of the run directory; `stop_reason`: of a stop request (interrupt, terminate), else None."""

    name: str = "run"
    stop_reason: str | None = None


View = Callable[[Callable[[History, "Mapping[str, Any] | None", Around], Any]], Any]


class Frame:
    """Renders itself anew at every refresh, at the size the terminal has then. `final`: the last frame, without a current stage and of any height."""

    def __init__(self, view: View, clock: Callable[[], float]) -> None:
        self._view = view
        self._clock = clock
        self.final = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = max(options.max_width, MIN_COLUMNS)
        height = None if self.final or not console.is_terminal else max(console.size.height - 1, 1)
        now = None if self.final else self._clock()
        yield from self._view(lambda history, sample, around: frame_lines(history, sample, now, width, options.ascii_only, around)[:height])


def frame_lines(
    history: History, sample: Mapping[str, Any] | None, now: float | None, width: int, ascii_only: bool = False, around: Around = Around()
) -> list[Text]:
    """All lines of a frame, none wider than `width` columns. `now` in seconds since the epoch; None: nothing is going on any more."""
    sections = (
        _header(history, around),
        (*_progress(history, now, width, ascii_only), *_stage(history, now), *_stopping(history, now, around)),
        _curves(history, width, ascii_only),
        _seconds(history, width, ascii_only),
        _warnings(history, width),
        _rewards(history, width),
        _sample(history, sample, width),
    )
    lines: list[Text] = []
    for section in sections:
        part = list(section)
        if part and lines and width >= ROOMY_COLUMNS:
            lines.append(Text())
        lines += part
    return [_fitted(line, width, ascii_only) for line in lines]


def _header(history: History, around: Around) -> Iterator[Text]:
    info = history.info
    line = Text.assemble((clean(str(info.get("name", around.name)), 60), "bold"))
    for key in ("device", "engine"):
        if key in info:
            line.append(f"  {clean(str(info[key]), 40)}")
    if (ranks := number(info.get("ranks"))) is not None:
        line.append(f"  {several(ranks, 'rank')}")
    if (steps := history.total_steps) is not None:
        line.append(f"  {several(steps, 'step')}")
    if history.attempt > 1:
        line.append(f"  attempt {history.attempt}", style="dim")
    yield line
    if history.ended is not None:
        good = history.ended.status == "done"
        yield Text(f"{clean(history.ended.status, 20)} after {duration(history.seconds)}", style="bold green" if good else "bold red")


def _progress(history: History, now: float | None, width: int, ascii_only: bool) -> Iterator[Text]:
    total, step = history.total_steps, history.step
    pace, eta = history.seconds_per_step, history.eta_seconds
    tail = "" if pace is None or width < ROOMY_COLUMNS else f"  {duration(pace)}/step"
    if eta is not None and now is not None and history.ended is None:
        tail += f"  eta {duration(eta, coarse=True)}"
    if total:
        share = min(max(step / total, 0.0), 1.0)
        head = f"step {step}/{total} {percent(share)} "
        columns = max(min(width - len(head) - len(tail), MAX_SPARK_COLUMNS), MIN_SPARK_COLUMNS)
        full = round(share * columns)
        solid, empty = ("#", "-") if ascii_only else ("━", "─")
        yield Text.assemble(head, (solid * full, "green"), (empty * (columns - full), "dim"), tail)
    elif history.started:
        yield Text(f"step {step}{tail}")


def _stage(history: History, now: float | None) -> Iterator[Text]:
    stage = history.stage
    if stage is not None and now is not None:
        silent = now - stage.time
        late = f"  (last sign of life {duration(silent)} ago)" if silent > SILENT_SECONDS else ""
        yield Text(f"now: {clean(stage.stage, 40)} {stage.done}/{stage.of}{late}", style="dim")


def _stopping(history: History, now: float | None, around: Around) -> Iterator[Text]:
    if around.stop_reason is not None and now is not None and history.ended is None:
        again = "Ctrl-C again" if around.stop_reason == "interrupt" else "Ctrl-C"
        yield Text(f"stopping after this step ({again} ends it now)", style="bold yellow")


def _curves(history: History, width: int, ascii_only: bool) -> Iterator[Text]:
    first, *others = CURVES
    yield from _curve(history, *first, width, ascii_only)
    for name, metric in list(history.held_out().items())[:SHOWN_EVALS]:
        newest = means_with_intervals(history.evals[max(history.evals)].get(name, {})).get(metric)
        text = f"{clean(name, 24)} {clean(metric, 16)} {'' if newest is None else interval(*newest)}"
        yield from _curve(history, "held out", f"eval.{name}.{metric}", lambda _, text=text: text, width, ascii_only)
    for curve in others:
        yield from _curve(history, *curve, width, ascii_only)


def _curve(history: History, label: str, name: str, shown: Callable[[float], str], width: int, ascii_only: bool) -> Iterator[Text]:
    series = history.series.get(name)
    if series is None or series.last is None or (name in IF_IT_MOVES and min(series.values) == max(series.values)):
        return
    columns = _spark_columns(width)
    spark = sparkline(series.steps, series.values, columns, ascii_only=ascii_only)
    yield Text.assemble((label.ljust(LABEL_COLUMNS), "bold"), (spark.ljust(columns), "cyan"), "  ", shown(series.last))


def _spark_columns(width: int) -> int:
    return max(min(MAX_SPARK_COLUMNS, width - LABEL_COLUMNS - VALUE_COLUMNS), MIN_SPARK_COLUMNS)


def _seconds(history: History, width: int, ascii_only: bool) -> Iterator[Text]:
    flat = {n.removeprefix("seconds."): v for n, v in flatten(history.metrics, ".").items() if n.startswith("seconds.") and 0 < v < math.inf}
    total = flat.pop("total", 0.0)
    stages = sorted(flat.items(), key=lambda item: -item[1])[: len(_STYLES)]
    if not stages or total == 0.0:
        return
    columns = _spark_columns(width)
    bar, legend = Text(), Text(f"  {short(total)}s")
    full = False
    for place, ((name, seconds), style) in enumerate(zip(stages, _STYLES, strict=False)):
        room = columns - len(bar)
        bar.append(("=-~+:."[place] if ascii_only else "█") * min(round(seconds / total * columns), room), style=style)
        entry = f"  {clean(name, 16)} {percent(seconds / total)}"
        full = full or LABEL_COLUMNS + columns + cell_len(legend.plain + entry) > width
        if not full:
            legend.append(entry, style=style)
    bar.append(" " * (columns - len(bar)))
    yield Text.assemble(("seconds".ljust(LABEL_COLUMNS), "bold"), bar, legend)


def _warnings(history: History, width: int) -> Iterator[Text]:
    for warning in list(history.warnings)[-SHOWN_WARNINGS:]:
        head = f"! {clean(warning.code, 40)} (step {warning.step}): "
        lines = textwrap.wrap(head + clean(warning.text, 400), width, subsequent_indent="  ", max_lines=WARNING_LINES, placeholder=" ...") or [head]
        yield from (Text(line, style="yellow") for line in lines)


def _rewards(history: History, width: int) -> Iterator[Text]:
    parts = history.metrics.get("reward_parts")
    if isinstance(parts, Mapping) and parts:
        yield Text(f"{'reward part'.ljust(24)}{'mean'.rjust(9)}{'std'.rjust(9)}{'errors'.rjust(8)}", style="bold")
        for name, part in list(parts.items())[:SHOWN_ROWS]:
            entry = part if isinstance(part, Mapping) else {"mean": part}
            errors = number(entry.get("errors"))
            counted = "-" if errors is None else f"{errors:.0f}"
            yield Text(_cell(name, 24) + _number(entry.get("mean"), 9) + _number(entry.get("std"), 9) + counted.rjust(8))
    labels = history.metrics.get("labels")
    if isinstance(labels, Mapping) and [*labels] not in ([], [ONLY_LABEL]):
        yield Text(f"{'label'.ljust(24)}{'reward'.rjust(9)}", style="bold")
        for name, mean in list(labels.items())[:SHOWN_ROWS]:
            yield Text(_cell(name, 24) + _number(mean, 9))


def _sample(history: History, sample: Mapping[str, Any] | None, width: int) -> Iterator[Text]:
    if sample is None:
        return
    facts = [f"sample of step {history.step}"]
    if (reward := number(sample.get("reward"))) is not None:
        facts.append(f"reward {short(reward)}")
    if isinstance(sample.get("finish"), str):
        facts.append(clean(sample["finish"], 20))
    yield Text("  ".join(facts), style="bold")
    yield from (Text(line, style="dim") for line in _cut(sample.get("prompt"), width, PROMPT_LINES))
    yield from (Text(line) for line in _cut(sample.get("completion"), width, COMPLETION_LINES))


def _cut(text: Any, width: int, lines: int) -> Iterator[str]:
    """The first lines of a foreign text, wrapped; the last one says if there is more."""
    safe = clean(text if isinstance(text, str) else "" if text is None else str(text), width * (lines + 1), lines=True)
    pieces = [piece for line in safe.split("\n") for piece in (chop_cells(line, width - 2) or [""])]
    for place, piece in enumerate(pieces[:lines]):
        more = place == lines - 1 and len(pieces) > lines
        yield f"  {set_cell_size(piece, width - 5).rstrip()}..." if more else f"  {piece}"


def _cell(text: Any, columns: int) -> str:
    return set_cell_size(clean(str(text), columns * 2), columns - 1) + " "


def _number(value: Any, columns: int) -> str:
    plain = number(value)
    return ("-" if plain is None else short(plain)).rjust(columns)


def _fitted(line: Text, width: int, ascii_only: bool) -> Text:
    if ascii_only:
        line.plain = line.plain.encode("ascii", "replace").decode("ascii")
    line.no_wrap, line.end = True, "\n"
    if cell_len(line.plain) > width:
        line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return line


CURVES: Iterable[tuple[str, str, Callable[[float], str]]] = (
    ("reward", "reward_mean", short),
    ("length", "response_tokens.mean", lambda value: f"{short(value)} tokens"),
    ("kl", "kl", short),
    ("kl coef.", "kl_coefficient", short),
    ("value", "value_mean", short),
    ("v. loss", "value_loss", short),
)
"""Label, dotted metric, how its last value is shown. To add a curve: a row here. The held-out curves stand behind the first one."""

IF_IT_MOVES = ("kl_coefficient",)
"""Curves of settings, which are shown once they have changed."""

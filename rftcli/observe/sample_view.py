"""Completions of a run for a person to read: found on disk, chosen, sorted, shown. Reads `samples/` and `evals/`, whole or of a live run.

Leaves out writing them (`runtime.parts`) and pictures.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rftcli.errors import UsageError
from rftcli.observe.samples import MAX_LINE_BYTES
from rftcli.observe.text import clean, short

MAX_TEXT = 4000
"""Characters of a prompt or completion on the screen; the file has the whole text."""
_NAME = re.compile(r"step_(\d+)(?:\.samples)?\.jsonl")
Line = Mapping[str, Any]


def steps_on_disk(run_dir: Path, *, evals: bool) -> dict[int, Path]:
    """Step -> file, in order."""
    folder = run_dir / ("evals" if evals else "samples")
    found = {int(name[1]): path for path in folder.glob("step_*.jsonl") if (name := _NAME.fullmatch(path.name))} if folder.is_dir() else {}
    return dict(sorted(found.items()))


def samples_file(run_dir: Path, *, step: int | None, evals: bool) -> Path:
    """The file of `step`, or the newest. UsageError with the steps that are there."""
    there = steps_on_disk(run_dir, evals=evals)
    what = "evaluation samples" if evals else "samples"
    if not there:
        other = steps_on_disk(run_dir, evals=not evals)
        hint = f"`rft samples {shlex.quote(str(run_dir))}{'' if evals else ' --eval'}` shows the others" if other else "name a run directory"
        raise UsageError(f"{run_dir} has no {what}" if run_dir.is_dir() else f"there is no run directory {run_dir}", hint=hint)
    if step is None:
        return there[max(there)]
    if step not in there:
        near = sorted(there, key=lambda one: abs(one - step))[:8]
        raise UsageError(f"there are no {what} of step {step}", hint=f"steps with some: {', '.join(map(str, sorted(near)))}")
    return there[step]


def read_lines(path: Path, keep: Callable[[Line], bool]) -> Iterator[Line]:
    """Whole lines that `keep` wants. Torn ones and those that are too long for a screen are passed over."""
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            whole = line.endswith(b"\n")
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            try:
                record = json.loads(line) if whole else None
            except ValueError:
                continue
            if isinstance(record, dict) and keep(record):
                yield record


# How to add one: its name and what a line is sorted by, smallest first; `-name` is the other way round.
SORTS: dict[str, Callable[[Line], float]] = {
    "reward": lambda line: float(line["reward"]),
    "length": lambda line: float(line["tokens"]),
    "advantage": lambda line: float(line["advantage"]),
}


def chosen(lines: Sequence[Line], *, sort: str | None, count: int | None) -> list[Line]:
    """`lines` sorted and cut. Lines without the value come last either way. UsageError for an unknown order."""
    kept = list(lines)
    if sort is not None:
        name, down = sort.removeprefix("-"), sort.startswith("-")
        if name not in SORTS:
            raise UsageError(f"--sort {sort} is unknown", hint=f"one of {', '.join(SORTS)}, or with a minus for the largest first")
        field = "tokens" if name == "length" else name
        known = sorted((line for line in kept if line.get(field) is not None), key=SORTS[name], reverse=down)
        kept = known + [line for line in kept if line.get(field) is None]
    return kept if count is None else kept[:count]


def head(line: Line) -> str:
    """What is known of a completion, in one line."""
    reward = line.get("reward")
    pieces = [
        f"draw {line.get('draw')} sample {line.get('sample')}",
        f"set {line['set']}" if "set" in line else "",
        f"label {line['label']}" if line.get("label") not in (None, "default") else "",
        f"reward {short(float(reward))}" if reward is not None else "no reward",
        f"advantage {short(float(line['advantage']))}" if line.get("advantage") is not None else "",
        f"{line.get('tokens')} tokens, {line.get('finish')}",
        f"answer {clean(str(line['answer']), 40)}" if line.get("answer") is not None else "",
    ]
    return " | ".join(clean(piece, 200) for piece in pieces if piece)


def parts(line: Line) -> str:
    """Each part with what it said."""
    shown = []
    for name, part in (line.get("parts") or {}).items():
        value = part.get("value")
        said = f"error: {clean(str(part['error']), 120)}" if part.get("error") else "abstained" if value is None else short(float(value))
        shown.append(f"{clean(str(name), 40)} {said}")
    return ", ".join(shown)


def logged(line: Line) -> str:
    """What reward functions and services logged of this completion."""
    said = [(name, short(float(value))) for name, value in line.get("metrics") or ()]
    said += [(name, clean(str(value), 120)) for name, value in (line.get("extra") or {}).items()]
    return ", ".join(f"{clean(str(name), 60)} {value}" for name, value in said)


def fields(line: Line) -> list[tuple[str, str]]:
    """(name, text) of what follows the head, made safe for a terminal."""
    rows = [("parts", parts(line)), ("prompt", clean(str(line.get("prompt", "")), MAX_TEXT, lines=True))]
    rows.append(("completion", clean(str(line.get("completion", "")), MAX_TEXT, lines=True)))
    if line.get("reference") is not None:
        rows.append(("reference", clean(str(line["reference"]), 400, lines=True)))
    if line.get("extra") or line.get("metrics"):
        rows.append(("logged", logged(line)))
    if line.get("media"):
        rows.append(("media", clean(", ".join(map(str, line["media"])), 400)))
    return [(name, text) for name, text in rows if text]


def plain(line: Line) -> str:
    """A completion as text without colour."""
    width = 12
    body = [f"{name:<{width}}{text}".replace("\n", "\n" + " " * width) for name, text in fields(line)]
    return "\n".join([f"--- {head(line)}", *body])

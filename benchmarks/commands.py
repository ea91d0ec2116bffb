"""How long a person waits: for help, for a recipe to be checked and planned, for the first token, for a checkpoint, for a resumed run.

    python -m benchmarks.commands                 a table, and JSON under benchmarks/results/
    python -m benchmarks.commands --only help,validate

Told are the median and range of wall seconds over the repeats, and the processor seconds of the command and its children. Whole commands, as typed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.runs import RESULTS, machine

ROOT = Path(__file__).parents[1]
SMALL = [
    *("--set", "batch.prompts_per_step=8", "--set", "rollout.samples_per_prompt=4", "--set", "eval.before_training=false"),
    *("--set", "data.eval.held_out.limit=16"),
]


def recipe_text(lines: int, *, broken: bool = False) -> str:
    """A whole recipe of about so many lines: reward labels of three lines each fill it up. Broken: a key mistyped in every tenth label."""
    head = [
        *("models:", "  policy: {path: builtin:quickstart}", "data:", "  train: {path: builtin:quickstart/train.jsonl}"),
        *("rollout:", "  max_prompt_tokens: 24", "  max_new_tokens: 24", "batch: {prompts_per_step: 32}", "train: {steps: 30}"),
        *("rewards:", "  default: [{rule: exact, options: {after: '####'}}]"),
    ]
    labels = [
        line
        for number in range(max(0, (lines - len(head)) // 3))
        for key in ["wieght" if broken and number % 10 == 0 else "weight"]
        for line in (f"  label_{number}:", "    - rule: exact", f"      {key}: {1 + number}")
    ]
    return "\n".join([*head, *labels]) + "\n"


def timed(arguments: list[str], folder: Path, *, codes: tuple[int, ...] = (0,)) -> dict[str, float]:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "rftcli", *arguments], cwd=folder, env=_environment(), capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in codes:
        raise SystemExit(f"rft {' '.join(arguments)}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return {"wall": seconds, "processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def _environment() -> dict[str, str]:
    """With compiled modules kept, as in an installed package: the first turn, which is not counted, writes them."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "NO_COLOR": "1"}


def command(*arguments: str, codes: tuple[int, ...] = (0,)) -> Callable[[Path], dict[str, float]]:
    return lambda folder: timed(list(arguments), folder, codes=codes)


def on_recipe(verb: str, lines: int, *, broken: bool = False) -> Callable[[Path], dict[str, float]]:
    def once(folder: Path) -> dict[str, float]:
        (folder / "recipe.yaml").write_text(recipe_text(lines, broken=broken))
        return timed([verb, "recipe.yaml", *(["--ranks", "1"] if verb == "plan" else [])], folder, codes=(2,) if broken else (0,))

    return once


def run_parts(folder: Path) -> dict[str, float]:
    """One small run: to the first step's rollout, what its checkpoints hold up, and the whole."""
    started = time.time()
    sets = [*SMALL, "--set", "train.steps=6", "--set", "checkpoint.every=1"]
    whole = timed(["train", "quickstart", "--ranks", "1", "--run-dir", "run", *sets], folder)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    steps = [event["seconds"] for event in events if event["event"] == "step"]
    first = next(event["time"] for event in events if event["event"] == "progress")
    stalls = [event["seconds"] for event in events if event["event"] == "checkpoint"]
    return {
        "wall": whole["wall"],
        "processor": whole["processor"],
        "to_first_completion": first - started,
        "checkpoint": statistics.median(stalls),
        "step": statistics.median(step["total"] for step in steps),
    }


def resumed(folder: Path) -> dict[str, float]:
    """`rft resume` of a finished run for one more step, until that step is there."""
    timed(["train", "quickstart", "--ranks", "1", "--run-dir", "run", *SMALL, "--set", "train.steps=1", "--set", "checkpoint.every=1"], folder)
    started = time.time()
    whole = timed(["resume", "run", "--set", "train.steps=2"], folder)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return {**whole, "to_next_step": [event["time"] for event in events if event["event"] == "step"][-1] - started}


# name -> a function of an empty folder. To add one: a row.
CASES: dict[str, Callable[[Path], dict[str, float]]] = {
    "help": command("--help"),
    "version": command("--version"),
    **{f"validate-{lines}": on_recipe("validate-recipe", lines) for lines in (20, 130, 1000)},
    "validate-130-broken": on_recipe("validate-recipe", 130, broken=True),
    **{f"plan-{lines}": on_recipe("plan", lines) for lines in (20, 130)},
    "show-quickstart": command("show", "quickstart"),
    "explain": command("explain", "rollout.samples_per_prompt"),
    "train": run_parts,
    "resume": resumed,
}
SLOW = ("train", "resume")


def measure(name: str, repeats: int) -> dict[str, Any]:
    turns = []
    for turn in range(repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            found = CASES[name](Path(folder))
        if turn:  # the first reads the disk
            turns.append(found)
    columns = {key: [turn[key] for turn in turns] for key in turns[0]}
    return {key: {"median": statistics.median(values), "range": [min(values), max(values)]} for key, values in columns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, or beginnings of names, separated by commas")
    parser.add_argument("--repeats", type=int, default=7, help="of the quick ones; whole runs three times")
    parser.add_argument("--out", type=Path, default=RESULTS / "commands-cpu.json", help="results in it are kept; those measured anew are replaced")
    options = parser.parse_args()
    wanted = tuple(options.only.split(","))
    results: dict[str, Any] = json.loads(options.out.read_text())["results"] if options.out.is_file() else {}
    print(f"{'command':<22} {'what':<20} {'median s':>9}   range")
    for name in CASES:
        if name.startswith(wanted):
            results[name] = measure(name, min(3, options.repeats) if name in SLOW else options.repeats)
            for key, item in results[name].items():
                print(f"{name:<22} {key:<20} {item['median']:>9.3f}   {item['range'][0]:.3f} to {item['range'][1]:.3f}", flush=True)
    options.out.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

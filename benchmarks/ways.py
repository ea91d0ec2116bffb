"""Seconds of a recipe's steps with one setting and with another: runs of `rft train` in turns, read from their own events.

    python -m benchmarks.ways quickstart --way batch.skip_zero_advantage=auto --way batch.skip_zero_advantage=false --steps 12
    python -m benchmarks.ways recipe.yaml --ranks 2 --way batch.balance=auto --way batch.balance=false --set train.steps=8

The same seed on both sides, so the same prompts; answers may part after the first updates, whose last bits differ. Told are medians over all steps
but each run's first. Results: benchmarks/results/ways-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runs import RESULTS, machine

TOLD = (
    "seconds.total", "seconds.rollout", "seconds.credit", "seconds.learn", "idle_fraction", "rank_load.sampled", "rank_load.trained", "reward_mean",
)  # fmt: skip


def steps_of(recipe: str, way: str, arguments: list[str]) -> list[dict[str, Any]]:
    """The step events of one run, without the first."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "rftcli", "train", recipe, *arguments, "--set", way, "--run-dir", str(run), "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-3000:]}")
        events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event for event in events if event["event"] == "step"][1:]


def value(step: dict[str, Any], name: str) -> float | None:
    found: Any = step
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def summary(steps: list[dict[str, Any]]) -> dict[str, float]:
    columns = {name: [number for step in steps if (number := value(step, name)) is not None] for name in TOLD}
    return {name: statistics.median(numbers) for name, numbers in columns.items() if numbers}


def without_out(words: list[str]) -> list[str]:
    """What was typed, but for a folder of this machine."""
    place = words.index("--out") if "--out" in words else len(words)
    return words[:place] + words[place + 2 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a file, or the name of one that ships with the package")
    parser.add_argument("--way", action="append", required=True, metavar="KEY=VALUE", help="one side; twice and more")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, help="processes on a CPU")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all sides")
    parser.add_argument("--name", help="of the file of results; the recipe's otherwise")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    where = ["--ranks", str(options.ranks)] if options.ranks else ["--gpus", str(options.gpus)] if options.gpus else []
    quiet = ("eval.before_training=false", "eval.at_end=false", "eval.every=0", "checkpoint.every=0", f"train.steps={options.steps}")
    arguments = [*where, *(word for item in (*quiet, *options.set) for word in ("--set", item))]
    steps: dict[str, list[dict[str, Any]]] = {way: [] for way in options.way}
    for turn in range(options.repeats):
        for way in options.way if turn % 2 == 0 else reversed(options.way):
            steps[way] += steps_of(options.recipe, way, arguments)
    found = {way: summary(steps[way]) for way in options.way}
    names = [name for name in TOLD if any(name in numbers for numbers in found.values())]
    print("| way | " + " | ".join(names) + " |\n|" + "---|" * (1 + len(names)))
    for way, numbers in found.items():
        print(f"| {way} | " + " | ".join(f"{numbers[name]:.3g}" if name in numbers else "" for name in names) + " |")
    told = {"machine": machine(), "command": " ".join(["python -m benchmarks.ways", *without_out(sys.argv[1:])]), "ways": found}
    path = options.out / f"ways-{options.name or Path(options.recipe).stem}.json"
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Seconds a step of `rft`, of TRL's GRPO trainer and of a plain loop, on the same model, prompts, reward, lengths and settings.

    python -m benchmarks.against c1 c2 c3                 a CPU; TRL has to be installed for its sides: pip install trl
    python -m benchmarks.against cmp-0.5b --sides rft,trl-tuned --repeats 2
    python -m benchmarks.against real --model FOLDER          real weights, real ends

Sides run one after the other in turns, each a process of its own; told are the median and the range over all counted steps of all turns.
Results: benchmarks/results/against-WORKLOAD-CARD.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.runs import RESULTS, machine
from benchmarks.workloads import WORKLOADS, Workload, prepare

ROOT = Path(__file__).parents[1]


def recipe(workload: Workload, model: Path, prompts: Path) -> dict[str, Any]:
    cut = {} if workload.micro_batch >= workload.rows else {"micro_batch_size": workload.micro_batch}
    return {
        "models": {"policy": {"path": str(model), "dtype": workload.dtype}},
        "data": {"train": {"path": str(prompts), "as_chat": False}, "shuffle": False},
        "rollout": {
            "engine": workload.engine, "samples_per_prompt": workload.samples, "max_prompt_tokens": workload.prompt_tokens,
            "max_new_tokens": workload.new_tokens, "ignore_eos": not workload.ends_early,
        },
        "rewards": {"default": [{"python": "benchmarks.workloads:even_share", "name": "even"}]},
        "algorithm": {"advantage": {"kind": "grpo"}},
        "batch": {"prompts_per_step": workload.prompts, **cut},
        "train": {"steps": workload.warm_up + workload.steps, "optimizer": {"lr": workload.lr}},
        "eval": {"before_training": False, "at_end": False},
        "checkpoint": {"every": 0, "trainer_state": False},
        "track": {"tensorboard": False},
    }  # fmt: skip


def rft(name: str, shared: Path, folder: Path, sets: tuple[str, ...] = ()) -> dict[str, Any]:
    workload = WORKLOADS[name]
    model, prompts = prepare(workload, shared)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(workload, model, prompts)))
    options = [word for item in sets for word in ("--set", item)]
    _run([sys.executable, "-m", "rftcli", "train", str(folder / "recipe.yaml"), *_one_rank(), "--run-dir", str(folder / "run"), "--quiet", *options])
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    parts = {stage: [step["seconds"].get(stage, 0.0) for step in steps] for stage in steps[0]["seconds"]}
    peaks = [max(step["memory_gib"].values()) for step in steps if step.get("memory_gib")]
    lengths = [step["response_tokens"]["mean"] for step in steps]
    return {
        "seconds": parts.pop("total"), "stages": parts, "mean_length": lengths, "peak_gib": max(peaks, default=None), "mfu": steps[-1].get("mfu"),
    }  # fmt: skip


def _one_rank() -> tuple[str, str]:
    return ("--gpus", "1") if machine()["card"] else ("--ranks", "1")


def other(module: str, *options: str) -> Callable[[str, Path, Path], dict[str, Any]]:
    def side(name: str, shared: Path, folder: Path) -> dict[str, Any]:
        said = _run([sys.executable, "-m", module, name, str(shared), *options])
        return dict(json.loads(said.splitlines()[-1]))

    return side


# To add one: a function of (workload's name, folder of its materials, an empty folder) that gives the seconds of each step.
SIDES: dict[str, Callable[[str, Path, Path], dict[str, Any]]] = {
    "rft": rft,
    "rft-liger": partial(rft, sets=("train.kernels=liger",)),
    "trl-tuned": other("benchmarks.trl_side", "tuned"),
    "trl-liger": other("benchmarks.trl_side", "liger"),
    "trl-default": other("benchmarks.trl_side", "default"),
    "plain": other("benchmarks.plain_loop"),
}


def _run(command: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def measure(name: str, sides: list[str], repeats: int, model: Path | None) -> dict[str, Any]:
    workload = WORKLOADS[name]
    turns: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as shared:
        if workload.ends_early and model is not None:
            (Path(shared) / "model").symlink_to(model.resolve())
        prepare(workload, Path(shared))
        for turn in range(repeats):
            for side in sides if turn % 2 == 0 else reversed(sides):  # a machine that slows down is no side's loss
                try:
                    with tempfile.TemporaryDirectory() as folder:
                        turns[side].append(SIDES[side](name, Path(shared), Path(folder)))
                except RuntimeError as error:
                    print(f"{name} {side}: left out, {error}", flush=True)
                    continue
                print(f"{name} {side}: {[round(second, 3) for second in turns[side][-1]['seconds']]}", flush=True)
    found = {}
    for side, runs in turns.items():
        if not runs:
            continue
        counted = [second for run in runs for second in run["seconds"][workload.warm_up :]]
        found[side] = {"median": statistics.median(counted), "range": [min(counted), max(counted)], "turns": runs}
    return found


def table(name: str, found: dict[str, Any]) -> str:
    base = found.get("rft", {}).get("median")
    lines = [f"| {name}: {WORKLOADS[name].what} | s a step, median (range) | times rft's |", "|---|---|---|"]
    for side, item in found.items():
        low, high = item["range"]
        times = f"{item['median'] / base:.2f}" if base else ""
        lines.append(f"| {side} | {item['median']:.3f} ({low:.3f} to {high:.3f}) | {times} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=list(WORKLOADS), metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--sides", default="rft,trl-tuned,trl-default,plain", help=", ".join(SIDES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--model", type=Path, help="folder of the workload `real`")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    told = machine()
    card = re.sub(r"\W+", "-", told["card"] or "cpu").strip("-")
    for name in options.workloads:
        found = measure(name, options.sides.split(","), options.repeats, options.model)
        typed = f"python -m benchmarks.against {name} --sides {options.sides} --repeats {options.repeats}"
        typed += f" --model {options.model.name}" if options.model else ""
        result = {"command": typed, "machine": told, "sides": found}
        (options.out / f"against-{name}-{card}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"\n{table(name, found)}\n", flush=True)


if __name__ == "__main__":
    main()

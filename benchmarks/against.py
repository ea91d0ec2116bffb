"""Seconds a step of `rft`, of TRL's GRPO trainer and of a plain loop, on the same model, prompts, reward, lengths and settings.

    python -m benchmarks.against c1 c2 c3                 a CPU; TRL has to be installed for its sides: pip install trl
    python -m benchmarks.against cmp-0.5b --sides rft,trl-tuned --repeats 2
    python -m benchmarks.against real --model FOLDER          real weights, real ends

Sides run one after the other in turns, each a process of its own; told are the median and the range over all counted steps of all turns.
Results: benchmarks/results/against-WORKLOAD-CARD.json, and with --ranks N against-WORKLOAD-xN-CARD.json.
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
from benchmarks.workloads import SCORER, WORKLOADS, Workload, prepare

ROOT = Path(__file__).parents[1]


def recipe(workload: Workload, model: Path, prompts: Path) -> dict[str, Any]:
    cut = {"micro_batch_size": workload.micro_batch} if 0 < workload.micro_batch < workload.rows else {}
    scorers = {"judge": {"kind": "classifier", "path": str(model.parent / SCORER)}} if workload.scorer else {}
    return {
        "models": {"policy": {"path": str(model), "dtype": workload.dtype}, **({"scorers": scorers} if scorers else {})},
        "data": {"train": {"path": str(prompts), "as_chat": False}, "shuffle": False},
        "rollout": {
            "engine": workload.engine, "samples_per_prompt": workload.samples, "max_prompt_tokens": workload.prompt_tokens,
            "max_new_tokens": workload.new_tokens, "ignore_eos": not (workload.ends_early or workload.mean_tokens), "stop_token_ids": workload.ends,
        },
        "rewards": {"default": [{"python": "benchmarks.workloads:even_share", "name": "even"}, *({"model": name} for name in scorers)]},
        "algorithm": {"advantage": {"kind": "grpo"}},
        "batch": {"prompts_per_step": workload.prompts, **cut},
        "train": {"steps": workload.warm_up + workload.steps, "optimizer": {"lr": workload.lr}},
        "eval": {"before_training": False, "at_end": False},
        "checkpoint": {"every": 0, "trainer_state": False},
        "track": {"tensorboard": False},
    }  # fmt: skip


def rft(name: str, shared: Path, folder: Path, ranks: int, sets: tuple[str, ...] = ()) -> dict[str, Any]:
    workload = WORKLOADS[name]
    model, prompts = prepare(workload, shared)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(workload, model, prompts)))
    options = [word for item in (*workload.sets, *sets) for word in ("--set", item)]
    where = ("--gpus", str(ranks)) if machine()["card"] else ("--ranks", str(ranks))
    _run([sys.executable, "-m", "rftcli", "train", str(folder / "recipe.yaml"), *where, "--run-dir", str(folder / "run"), "--quiet", *options])
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    parts = {stage: [step["seconds"].get(stage, 0.0) for step in steps] for stage in steps[0]["seconds"]}
    peaks = [max(step["memory_gib"].values()) for step in steps if step.get("memory_gib")]
    lengths = [step["response_tokens"]["mean"] for step in steps]
    plan = json.loads((folder / "run" / "plan.json").read_text())
    last = steps[-1].get("memory_gib") or {}
    start = next(event for event in events if event["event"] == "start")
    return {
        "seconds": parts.pop("total"), "stages": parts, "mean_length": lengths, "peak_gib": max(peaks, default=None),
        "planned_gib": max(planned(plan).values(), default=0.0), "memory_gib": {"planned": planned(plan), "measured": last},
        "mfu": steps[-1].get("mfu"), "parameters": start["parameters"], "sampler_logprob_gap": steps[0].get("sampler_logprob_gap"), "ranks": ranks,
    }  # fmt: skip


def planned(plan: dict[str, Any]) -> dict[str, float]:
    """GiB of a device by stage."""
    rows = [row["gib"] for row in (plan.get("memory") or {}).get("rows", ())]
    return {stage: sum(row.get(stage, 0.0) for row in rows) for stage in dict.fromkeys(stage for row in rows for stage in row)}


def other(module: str, *options: str) -> Callable[[str, Path, Path, int], dict[str, Any]]:
    def side(name: str, shared: Path, folder: Path, ranks: int) -> dict[str, Any]:
        if not WORKLOADS[name].for_all or ranks > 1:
            raise RuntimeError("only rft has this workload, and more than one rank")
        said = _run([sys.executable, "-m", module, name, str(shared), *options])
        return dict(json.loads(said.splitlines()[-1]))

    return side


# To add one: a function of (workload's name, folder of its materials, an empty folder, ranks) that gives the seconds of each step.
SIDES: dict[str, Callable[[str, Path, Path, int], dict[str, Any]]] = {
    "rft": rft,
    "rft-liger": partial(rft, sets=("train.kernels=liger",)),
    "rft-beside": partial(rft, sets=("rollout.vllm.process=beside",)),
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


def measure(
    name: str, sides: list[str], repeats: int, shared: Path, model: Path | None, ranks: int, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """What each side took. `shared`: folder of the model and the prompts, made where they are not there. `keep` is given what there is so far after
    every run: a machine may be taken away."""
    workload = WORKLOADS[name]
    turns: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    if workload.ends_early and model is not None and not (shared / "model").exists():
        (shared / "model").symlink_to(model.resolve())
    prepare(workload, shared)
    for turn in range(repeats):
        for side in sides if turn % 2 == 0 else reversed(sides):  # a machine that slows down is no side's loss
            try:
                with tempfile.TemporaryDirectory() as folder:
                    turns[side].append(SIDES[side](name, shared, Path(folder), ranks))
            except RuntimeError as error:
                print(f"{name} {side}: left out, {error}", flush=True)
                continue
            print(f"{name} {side}: {[round(second, 3) for second in turns[side][-1]['seconds']]}", flush=True)
            keep(summary(workload, turns))
    return summary(workload, turns)


def measured_before(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Sides of an earlier call on a machine with the same card and versions: peers are measured once a card."""
    earlier = json.loads(path.read_text()) if path.is_file() else {}
    return dict(earlier["sides"]) if earlier.get("machine") == told else {}


def summary(workload: Workload, turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    found = {}
    for side, runs in turns.items():
        if runs:
            counted = [second for run in runs for second in run["seconds"][workload.warm_up :]]
            found[side] = {"median": statistics.median(counted), "range": [min(counted), max(counted)], "turns": runs}
    return found


def table(name: str, found: dict[str, Any]) -> str:
    base = found.get("rft", {}).get("median")
    title = f"{name}: {WORKLOADS[name].what}"
    lines = [f"| {title} | s a step, median (range) | times rft's | rollout, learn, sync s | MFU | peak GiB (planned) |", "|---|---|---|---|---|---|"]
    for side, item in found.items():
        low, high = item["range"]
        times = f"{item['median'] / base:.2f}" if base else ""
        last = item["turns"][-1]
        by_stage, first = last.get("stages", {}), WORKLOADS[name].warm_up
        stages = ", ".join(f"{statistics.median(by_stage[stage][first:]):.2f}" for stage in ("rollout", "learn", "sync") if stage in by_stage)
        share = f"{100 * last['mfu']:.1f}%" if last.get("mfu") else ""
        planned = f" ({last['planned_gib']:.1f})" if last.get("planned_gib") else ""
        peak = f"{last['peak_gib']:.1f}{planned}" if last.get("peak_gib") else ""
        lines.append(f"| {side} | {item['median']:.3f} ({low:.3f} to {high:.3f}) | {times} | {stages} | {share} | {peak} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=list(WORKLOADS), metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--sides", default="rft,trl-tuned,trl-default,plain", help=", ".join(SIDES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, or processes on a CPU; of rft alone")
    parser.add_argument("--model", type=Path, help="folder of the workload `real`")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results; sides measured there before on the same machine are kept")
    parser.add_argument("--materials", type=Path, help="folder that keeps model and prompts for the next call with a workload of the same shape")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    told = machine()
    card = re.sub(r"\W+", "-", told["card"] or "cpu").strip("-")
    for name in options.workloads:
        typed = f"python -m benchmarks.against {name} --sides {options.sides} --repeats {options.repeats}"
        typed += f" --ranks {options.ranks}" if options.ranks > 1 else ""
        typed += f" --model {options.model.name}" if options.model else ""
        several = f"x{options.ranks}-" if options.ranks > 1 else ""
        path = options.out / f"against-{name}-{several}{card}.json"

        def keep(found: dict[str, Any], path: Path = path, typed: str = typed) -> None:
            named = {side: {"command": typed, **item} for side, item in found.items()}
            path.write_text(json.dumps({"machine": told, "sides": {**measured_before(path, told), **named}}, indent=1) + "\n")

        with tempfile.TemporaryDirectory() as fresh:
            shared = options.materials or Path(fresh)
            shared.mkdir(parents=True, exist_ok=True)
            found = measure(name, options.sides.split(","), options.repeats, shared, options.model, options.ranks, keep)
        keep(found)
        print(f"\n{table(name, found)}\n", flush=True)


if __name__ == "__main__":
    main()

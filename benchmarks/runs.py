"""Runs whole `rft train` commands and tells what came out: reward, held-out accuracy, seconds a step and where they went.

    python -m benchmarks.runs cpu                         the cases of this machine, a table, and JSON under benchmarks/results/
    python -m benchmarks.runs gpu --only zero1,zero3 --set train.steps=10

Every number is read from the run's own events; nothing is timed here but the command as a whole.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SMOLLM2 = ["smollm2-chain-sum", "--set", "eval.every=0", "--set", "checkpoint.every=0"]

# name -> arguments of `rft train`
CASES: dict[str, dict[str, list[str]]] = {
    "cpu": {
        "quickstart-1": ["quickstart", "--ranks", "1"],
        "quickstart-2": ["quickstart", "--ranks", "2"],
        "quickstart-2-zero2": ["quickstart", "--ranks", "2", "--set", "train.deepspeed.zero_stage=2"],
        "smollm2-2": [*SMOLLM2, "--ranks", "2", "--set", "train.steps=3", "--set", "data.eval.held_out.limit=16"],
    },
    "gpu": {
        "quickstart-float32-zero0": ["quickstart", "--set", "models.policy.dtype=float32", "--set", "train.deepspeed.zero_stage=0"],
        "quickstart-float32-zero3": ["quickstart", "--set", "models.policy.dtype=float32", "--set", "train.deepspeed.zero_stage=3"],
        "quickstart-bfloat16-zero1": ["quickstart", "--set", "train.deepspeed.zero_stage=1"],
        "quickstart-bfloat16-zero2": ["quickstart", "--set", "train.deepspeed.zero_stage=2"],
        "quickstart-bfloat16-zero3": ["quickstart", "--set", "train.deepspeed.zero_stage=3"],
        "smollm2-zero1": [*SMOLLM2, "--set", "batch.prompts_per_step=32", "--set", "train.optimizer.lr=1e-5"],
    },
}


def run_case(name: str, arguments: list[str], folder: Path) -> dict[str, Any]:
    """One `rft train`; its events as numbers. A run that fails keeps its cause in the result."""
    run_dir = folder / name
    command = [sys.executable, "-m", "rftcli", "train", *arguments, "--run-dir", str(run_dir), "--quiet", "--json"]
    start = time.perf_counter()
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    result: dict[str, Any] = {"command": "rft train " + " ".join(arguments), "exit_code": finished.returncode, "seconds_whole": round(seconds, 1)}
    if finished.returncode != 0:
        return {**result, "error": finished.stderr[-2000:]}
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    held_out = [event["sets"]["held_out"]["mean@1"] for event in events if event["event"] == "eval"]
    few = max(1, min(5, len(steps) // 2))
    later = steps[1:] or steps  # the first step warms caches up
    return {
        **result,
        "steps": len(steps),
        "reward_first": statistics.fmean(step["reward_mean"] for step in steps[:few]),
        "reward_last": statistics.fmean(step["reward_mean"] for step in steps[-few:]),
        "rewards": [round(step["reward_mean"], 4) for step in steps],
        "held_out_before": held_out[0],
        "held_out_after": held_out[-1],
        "step_seconds_median": statistics.median(step["seconds"]["total"] for step in later),
        "step_seconds_range": [min(step["seconds"]["total"] for step in later), max(step["seconds"]["total"] for step in later)],
        "stage_seconds": {stage: round(statistics.median(step["seconds"][stage] for step in later), 4) for stage in later[0]["seconds"]},
        "start_up_seconds": round(seconds - (events[-1]["time"] - events[0]["time"]), 1),
        "first_grad_norm": steps[0].get("grad_norm"),
        "memory_gib": max((step.get("memory_gib", {}).get("step", 0.0) for step in steps), default=0.0) or None,
    }


def machine() -> dict[str, Any]:
    import torch

    packages = {name: metadata.version(name) for name in ("torch", "transformers", "deepspeed")}
    for name in ("vllm", "trl"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {"card": card, "cards": torch.cuda.device_count(), "processor": platform.machine(), "python": platform.python_version(), **packages}


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'case':<28} {'reward':>15} {'held out':>15} {'step s':>8} {'start s':>8} {'whole s':>8}"]
    for name, item in results.items():
        if item["exit_code"]:
            lines.append(f"{name:<28} exit {item['exit_code']}: {item['error'].strip().splitlines()[-1][:90]}")
            continue
        reward = f"{item['reward_first']:.3f} -> {item['reward_last']:.3f}"
        held_out = f"{item['held_out_before']['value']:.3f} -> {item['held_out_after']['value']:.3f}"
        numbers = f"{item['step_seconds_median']:>8.2f} {item['start_up_seconds']:>8.1f} {item['seconds_whole']:>8.1f}"
        lines.append(f"{name:<28} {reward:>15} {held_out:>15} {numbers}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", choices=sorted(CASES))
    parser.add_argument("--only", help="names, or parts of names, separated by commas")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="for every case: dotted.path=value")
    parser.add_argument("--out", type=Path, help="JSON; default benchmarks/results/runs-<machine>.json")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else [""]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in CASES[options.machine].items():
            if any(part in name for part in wanted):
                extra = [item for text in options.sets for item in ("--set", text)]
                results[name] = run_case(name, [*arguments, *extra], Path(folder))
                print(table({name: results[name]}).splitlines()[-1], flush=True)
    out = options.out or RESULTS / f"runs-{options.machine}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
    print(f"\n{table(results)}\n\nwritten to {out}")


if __name__ == "__main__":
    main()

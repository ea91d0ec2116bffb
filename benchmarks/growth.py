"""How a step grows with samples a prompt, new tokens and prompt tokens: whole `rft train` runs of a small random model, one setting at a time.

    python -m benchmarks.growth                          a CPU, some two minutes when nothing else runs; a table, and JSON under benchmarks/results/
    python -m benchmarks.growth --only samples

Told are the median seconds of a step and of its two large parts, and the times of the setting before. Lengths are fixed: no answer ends earlier.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.against import rft
from benchmarks.runs import RESULTS, machine
from benchmarks.workloads import WORKLOADS, Workload

BASE = replace(WORKLOADS["c2"], what="growth", prompts=4, samples=8, warm_up=1, steps=3, micro_batch=64)
# To add one: the field of `Workload` and its values, smallest first.
AXES: dict[str, tuple[int, ...]] = {"samples": (2, 4, 8, 16), "new_tokens": (32, 64, 128, 256), "prompt_tokens": (16, 256)}


def measure(workload: Workload) -> dict[str, Any]:
    name = f"growth-{workload.samples}-{workload.new_tokens}-{workload.prompt_tokens}"
    workloads.WORKLOADS[name] = workload
    with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as folder:
        found = rft(name, Path(shared), Path(folder), 1)
    counted = {"step": found["seconds"], **{stage: found["stages"][stage] for stage in ("rollout", "learn")}}
    medians = {stage: statistics.median(seconds[workload.warm_up :]) for stage, seconds in counted.items()}
    return {**medians, "range": [min(found["seconds"][workload.warm_up :]), max(found["seconds"][workload.warm_up :])]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(AXES))
    parser.add_argument("--out", type=Path, default=RESULTS / "growth-cpu.json")
    options = parser.parse_args()
    known: dict[Workload, dict[str, Any]] = {}
    axes: dict[str, list[dict[str, Any]]] = {}
    for axis, values in AXES.items():
        if options.only not in (None, axis):
            continue
        print(f"\n| {axis} | s a step | rollout | learn | times the one before |\n|---|---|---|---|---|", flush=True)
        for value in values:
            workload = replace(BASE, **{axis: value})
            found = known[workload] = known[workload] if workload in known else measure(workload)
            before = axes.get(axis, [])[-1:]
            times = f"{found['step'] / before[0]['step']:.2f}" if before else ""
            print(f"| {value} | {found['step']:.3f} | {found['rollout']:.3f} | {found['learn']:.3f} | {times} |", flush=True)
            axes.setdefault(axis, []).append({"value": value, **found})
    options.out.write_text(json.dumps({"machine": machine(), "axes": axes}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

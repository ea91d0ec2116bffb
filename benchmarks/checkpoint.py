"""How long a checkpoint holds a run up: written before the next step, and behind it. Inside `rft train`, with the engine without a model.

    python -m benchmarks.checkpoint --shape 0.5b --prompts 32 --response 256
    python -m benchmarks.checkpoint --shape tiny --prompts 4 --response 16 --steps 3        (a CPU, in seconds)

Both ways run in turn. `stall` is the step's own `checkpoint` seconds; `behind` is from the end of the step to the commit; `step` is the whole step,
which a thread that writes may slow.
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
from benchmarks.update import SHAPES, make_model

WAYS = {"never": ["checkpoint.every=0"], "before": ["checkpoint.every=1", "checkpoint.background=false"],
        "behind": ["checkpoint.every=1", "checkpoint.background=true"]}  # fmt: skip


def run_once(options: argparse.Namespace, way: str, model: Path, folder: Path, number: int) -> dict[str, list[float]]:
    """Seconds of every step but the first and the last."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "7" * options.prompt, "row": row}) + "\n" for row in range(options.prompts)))
    (folder / "by_key.py").write_text("def score(sample):\n    return float(sample % 2)\n")
    recipe = folder / "checkpoint.yaml"
    recipe.write_text(
        json.dumps({
            "models": {"policy": {"path": str(model)}},
            "data": {"train": {"path": str(prompts), "as_chat": False}},
            "rollout": {"engine": "fake", "max_prompt_tokens": options.prompt + 8, "max_new_tokens": options.response, "ignore_eos": True},
            "rewards": {"default": [{"python": "by_key:score", "name": "by_key"}]},
            "batch": {"prompts_per_step": options.prompts},
            "train": {"steps": options.steps + 2},
            "checkpoint": {"keep": 1},
            "samples": {"every": 1_000_000},
        })
    )  # fmt: skip
    run_dir = folder / f"{way}-{number}"
    ranks = [] if options.ranks is None else ["--ranks", str(options.ranks)]
    sets = [word for item in (*WAYS[way], *options.sets) for word in ("--set", item)]
    finished = subprocess.run(
        [sys.executable, "-m", "rftcli", "train", str(recipe), "--run-dir", str(run_dir), "--quiet", *ranks, *sets],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if finished.returncode:
        raise SystemExit(f"{way}: exit {finished.returncode}: {finished.stderr[-1500:]}")
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    # the first step warms caches up, and the second holds its checkpoint
    steps = [event["seconds"] for event in events if event["event"] == "step"][2:]
    written = [event["seconds"] for event in events if event["event"] == "checkpoint"][1:]
    return {"stall": [step["checkpoint"] for step in steps], "step": [step["total"] for step in steps], "written": written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    for name, default in (("prompts", 32), ("prompt", 64), ("response", 256), ("steps", 4), ("repeats", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, help="processes on a CPU; default: all GPUs")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {way: {"stall": [], "step": [], "written": []} for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(options.shape, model, options.prompt + options.response + 8)
        for number in range(options.repeats):
            for way in WAYS:
                for name, seconds in run_once(options, way, model, Path(folder), number).items():
                    found[way][name] += seconds
    results: dict[str, Any] = {}
    for way, kinds in found.items():
        results[way] = {name: {"median": round(statistics.median(all_of), 3), "range": [round(min(all_of), 3), round(max(all_of), 3)]}
                        for name, all_of in kinds.items() if all_of}  # fmt: skip
        print(way, results[way], flush=True)
    out = options.out or RESULTS / f"checkpoint-{options.shape}.json"
    shown = {key: value for key, value in vars(options).items() if key != "out"}
    out.write_text(json.dumps({"machine": machine(), "options": shown, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()

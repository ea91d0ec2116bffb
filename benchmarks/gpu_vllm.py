"""A real model learns with vLLM in the training ranks: SmolLM2-135M-Instruct on chain_sum, its curve, where the time goes.

    python -m benchmarks.gpu_vllm --gpus 1 --steps 60                     # or --gpus 2; --ranks 2 on a CPU
    python -m benchmarks.gpu_vllm --gpus 1 --steps 20 --engine hf         # the same with the other engine

Prints one line a step and writes JSON: rewards, the gap of log-probs, seconds by stage, evaluations. What `--set` gives goes to `rft train`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-chain-sum")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpus", type=int)
    where.add_argument("--ranks", type=int)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--run-dir", type=Path, default=Path("gpu_vllm_run"))
    parser.add_argument("--out", type=Path, default=Path("gpu_vllm.json"))
    arguments = parser.parse_args()
    sets = [
        f"rollout.engine={arguments.engine}", f"train.steps={arguments.steps}", "batch.prompts_per_step=32", "train.optimizer.lr=1.0e-5",
        f"eval.every={max(1, arguments.steps // 3)}", "checkpoint.every=0", *arguments.sets,
    ]  # fmt: skip
    count = ["--gpus", str(arguments.gpus)] if arguments.gpus else ["--ranks", str(arguments.ranks)]
    command = [sys.executable, "-m", "rftcli", "train", arguments.recipe, *count, "--run-dir", str(arguments.run_dir)]
    done = subprocess.run([*command, *(item for text in sets for item in ("--set", text))], check=False)
    events = [json.loads(line) for line in (arguments.run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    found: dict[str, Any] = {"exit": done.returncode, "sets": sets, "steps": [], "evals": []}
    for event in events:
        if event["event"] == "step":
            kept = ("step", "reward_mean", "grad_norm", "kl_update", "tokens", "sampler_logprob_gap", "policy_version", "memory_gib")
            seconds = {name: round(value, 3) for name, value in event["seconds"].items()}
            line = {name: event[name] for name in kept if name in event} | {"seconds": seconds}
            found["steps"].append(line)
            gap = event.get("sampler_logprob_gap", {}).get("mean")
            shown = "" if gap is None else f"  gap {gap:.2g}"
            times = " ".join(f"{name} {seconds[name]:.2f}" for name in ("rollout", "learn", "sync", "other", "total"))
            print(f"step {event['step']:>3}  reward {event['reward_mean']:.3f}  {times}{shown}")
        elif event["event"] == "eval":
            scores = {name: values["mean@1"]["value"] for name, values in event["sets"].items()}
            found["evals"].append({"step": event["step"], "scores": scores})
            print(f"eval {event['step']:>3}  {scores}")
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()

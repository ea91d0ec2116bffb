"""Trains the quickstart's model with every preset, and with the estimators that have none: does the reward rise?

    python -m benchmarks.learning                       all cases, seed 0; a table, and JSON under benchmarks/results/ that grows case by case
    python -m benchmarks.learning --only gspo,opo --seeds 0,1,2

As they are shipped, on top of the quickstart, with what a preset leaves to the user. Every number is read from the runs' own events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.runs import RESULTS, machine
from rftcli.recipe.layers import preset_names, shipped_recipes

FEW = 5
"""Steps at either end whose mean is told."""
COMMON = {
    **{"batch.prompts_per_step": "16", "train.steps": "24", "checkpoint.every": "0"},
    **{"eval.before_training": "true", "data.eval.held_out.limit": "128"},
}
ALONE = {"batch.prompts_per_step": "128"}
"""With one answer a prompt, as many answers a step as the others have."""
TEACHER = "teacher/checkpoints/step_000024/policy"
"""What distill learns from: a run of grpo, beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`extends` stands behind the quickstart; `settings` are `--set` keys."""

    extends: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    teacher: bool = False


# What a preset leaves to the user. One that leaves nothing needs no row.
NEEDS = {
    "ppo": Case(settings={**ALONE, "models.critic": "{optimizer: {lr: 1e-3}}"}),
    "reinforce_pp": Case(settings=ALONE),
    "remax": Case(settings=ALONE),
    "distill": Case(settings={"models.teacher.path": TEACHER}, teacher=True),
}
PRESETS = {name: Case(extends=(f"presets/{name}",), settings=case.settings, teacher=case.teacher)
           for name in preset_names(shipped_recipes()) for case in [NEEDS.get(name, Case())]}  # fmt: skip
PARTS = "[{rule: exact, name: answer, options: {after: '####'}}, {rule: regex, name: form, weight: 0.2, options: {pattern: '####'}}]"
# Estimators and losses that are no paper's whole recipe: name -> what is set on top of the quickstart's grpo. To add one: a row.
OTHERS = {
    "reinforce": {"algorithm.advantage": "{kind: reinforce, whiten: all}"},
    "gae": {"algorithm.advantage.kind": "gae", "models.critic": "{optimizer: {lr: 1e-3}}"},
    "opo": {"algorithm.advantage.kind": "opo"},
    "gdpo": {"algorithm.advantage.kind": "gdpo", "rewards": f"{{default: {PARTS}}}"},
    "grpo_passk": {"algorithm.advantage.kind": "grpo_passk"},
    "gmpo": {"algorithm.loss.kind": "gmpo", "batch.updates_per_step": "4"},
    "sapo": {"algorithm.loss.kind": "sapo", "batch.updates_per_step": "4"},
    "clip_cov": {"algorithm.loss.kind": "clip_cov", "batch.updates_per_step": "4"},
    "kl_cov": {"algorithm.loss.kind": "kl_cov", "batch.updates_per_step": "4"},
    "rloo_sequence": {"algorithm.advantage.kind": "rloo", "algorithm.loss.kind": "rloo_sequence"},
    "dro": {"algorithm.loss.kind": "dro", "batch.updates_per_step": "4"},
}
CASES = {**PRESETS, **{name: Case(settings=settings) for name, settings in OTHERS.items()}}


def train(folder: Path, name: str, case: Case, seed: int) -> dict[str, Any]:
    """One `rft train`: its rewards, held-out accuracy and seconds. RuntimeError where it fails."""
    (folder / f"{name}.yaml").write_text(f"extends: [{', '.join(('quickstart', *case.extends))}]\n", encoding="utf-8")
    settings = [item for key, value in {**COMMON, **case.settings, "seed": str(seed)}.items() for item in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "rftcli", "train", f"{name}.yaml", "--ranks", "1", "--run-dir", name, "--quiet", *settings]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name}: exit {done.returncode}\n{done.stderr[-3000:]}")
    events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    rewards = [event["reward_mean"] for event in events if event["event"] == "step"]
    held_out = [event["sets"]["held_out"]["mean@1"] for event in events if event["event"] == "eval"]
    return {
        "seed": seed,
        "rewards": [round(reward, 4) for reward in rewards],
        "reward_first": round(statistics.fmean(rewards[:FEW]), 4),
        "reward_last": round(statistics.fmean(rewards[-FEW:]), 4),
        "held_out_before": held_out[0],
        "held_out_after": held_out[-1],
        "seconds": round(time.perf_counter() - started, 1),
    }


def run(name: str, seed: int) -> dict[str, Any]:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if case.teacher:
            train(folder, "teacher", PRESETS["grpo"], seed)
        return train(folder, name, case, seed)


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: a row a case and seed."""
    lines = ["| case | seed | mean reward, first and last five steps | held-out accuracy before and after [95%] |", "|---|---|---|---|"]
    for name, runs in results.items():
        for one in runs:
            before, after = one["held_out_before"], one["held_out_after"]
            held_out = f"{before['value']:.3f} -> {after['value']:.3f} [{after['low']:.3f}, {after['high']:.3f}]"
            lines.append(f"| `{name}` | {one['seed']} | {one['reward_first']:.3f} -> {one['reward_last']:.3f} | {held_out} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--out", type=Path, default=RESULTS / "learning-cpu.json", help="results in it are kept; those measured anew are replaced")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(CASES)
    results: dict[str, list[dict[str, Any]]] = json.loads(options.out.read_text())["results"] if options.out.is_file() else {}
    for name in names:
        for seed in (int(word) for word in options.seeds.split(",")):
            one = run(name, seed)
            results[name] = sorted([*(old for old in results.get(name, []) if old["seed"] != seed), one], key=lambda item: item["seed"])
            print(table({name: [one]}).splitlines()[-1], flush=True)
            ordered = {key: results[key] for key in CASES if key in results}
            told = {"machine": machine(), "common": COMMON, "settings": {key: CASES[key].settings for key in ordered}, "results": ordered}
            options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"\n{table(results)}\n\nwritten to {options.out}")


if __name__ == "__main__":
    main()

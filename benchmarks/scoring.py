"""How long rewards take for completions that are there all at once, as an engine hands them over that ends many in one go: seconds of a whole round.

    python -m benchmarks.scoring                        rules of every kind, 512 and 4096 completions
    python -m benchmarks.scoring --completions 8192 --only exact

`exact` is a comparison of two texts: what is left is the table's own work. `reasoning_gym` (pip install reasoning-gym) checks in a helper process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.runs import machine
from rftcli.data.gym import rows
from rftcli.rewards.spec import PartSpec
from rftcli.rewards.table import RewardTable
from rftcli.types import Completion, FinishReason, Prompt, TokenTrace

OPTIONS: dict[str, dict[str, Any]] = {"exact": {}, "math_answer": {}, "reasoning_gym": {"extract": "last_number"}}
SAMPLES = 8


def completions(count: int) -> list[Completion]:
    """Sums with a right answer in every group."""
    found = []
    for draw, row in enumerate(rows("chain_sum", -(-count // SAMPLES), 1, min_terms=2, max_terms=3, min_digits=1, max_digits=2)):
        entry = {"columns": {"entry": row["entry"]}, "reference": row["answer"], "text": row["prompt"]}
        prompt = Prompt(
            draw=draw, row=draw, row_id=f"train:{draw}", source="train", label="default", token_ids=(1,), messages=(), prefill="", **entry
        )
        for sample in range(SAMPLES):
            text = f"The answer is {int(row['answer']) + sample}"
            found.append(
                Completion(
                    prompt=prompt, sample=sample, text=text, text_with_special=text, trace=TokenTrace(ids=(1, 2, 3)), finish=FinishReason.STOP,
                    policy_version=0,
                )
            )  # fmt: skip
    return found[:count]


def measure(rule: str, count: int, repeats: int) -> dict[str, Any]:
    part = PartSpec(name=rule, kind="rule", target=rule, options=OPTIONS[rule])
    batch, seconds = completions(count), []
    with closing(RewardTable({"default": [part]})) as table:
        list(table.score(batch[:SAMPLES]))  # helpers start with the first one
        for _ in range(repeats):
            start = time.perf_counter()
            scored = list(table.score(batch))
            seconds.append(time.perf_counter() - start)
    assert len(scored) == count and not any(sample.error for sample in scored)
    median = statistics.median(seconds)
    return {"seconds": median, "range": [min(seconds), max(seconds)], "microseconds_each": 1e6 * median / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", default="512,4096", help="numbers, separated by commas")
    parser.add_argument("--only", choices=OPTIONS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {
        f"{rule}-{count}": measure(rule, int(count), options.repeats)
        for rule in ([options.only] if options.only else OPTIONS)
        for count in options.completions.split(",")
    }
    print("| rule, completions | s | microseconds each |\n|---|---|---|")
    for name, numbers in found.items():
        print(f"| {name} | {numbers['seconds']:.4f} | {numbers['microseconds_each']:.1f} |")
    if options.out is not None:
        told = {"machine": machine(), "command": "python -m benchmarks.scoring", "rounds": found}
        options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

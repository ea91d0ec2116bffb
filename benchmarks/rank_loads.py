"""How uneven the work of ranks would be, from the lengths of a run's answers: as sampled, and shared out anew (`batch.balance`). Arithmetic alone.

    python -m benchmarks.rank_loads RUN_DIR                          steps whose samples were written, on 2 to as many ranks as divide the prompts
    python -m benchmarks.rank_loads --spread 0.6 --groups 0.4        drawn lengths: log-normal, so much between answers, so much between prompts

Told is the work of the fullest rank by the mean, the mean over all steps: how much longer an update takes than with even ranks.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

from rftcli.algo.balance import fair_shares, fullest
from rftcli.algo.batchmath import groups_of_rank

Step = list[list[int]]
"""Lengths of each group's answers."""


def written(run: Path) -> Iterator[Step]:
    for path in sorted((run / "samples").glob("step_*.jsonl")):
        groups: dict[int, list[int]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            groups.setdefault(sample["draw"], []).append(max(1, sample["tokens"]))
        yield [groups[draw] for draw in sorted(groups)]


def drawn(prompts: int, samples: int, within: float, between: float, steps: int = 20) -> Iterator[Step]:
    draws = random.Random(0)
    for _ in range(steps):
        centres = [draws.gauss(6.0, between) for _ in range(prompts)]
        yield [[100 + round(min(8192.0, draws.lognormvariate(centre, within))) for _ in range(samples)] for centre in centres]


def loads(step: Step, ranks: int, number: int, whole_groups: bool) -> tuple[float, float]:
    """(as sampled, shared out) of one step."""
    homes, costs = [], []
    for rank in range(ranks):
        (mine,) = groups_of_rank(0, number, len(step), 1, ranks, rank)
        for group in mine:
            parts = [sum(step[group])] if whole_groups else step[group]
            costs += [float(part) for part in parts]
            homes += [rank] * len(parts)
    even = sum(costs) / ranks
    return fullest(costs, homes, ranks) / even, fullest(costs, fair_shares(costs, homes, ranks), ranks) / even


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--spread", type=float, default=0.6, help="deviation of the logarithm of lengths within a group")
    parser.add_argument("--groups", type=float, default=0.4, help="the same of the groups' centres")
    options = parser.parse_args()
    steps = list(written(options.run)) if options.run else list(drawn(options.prompts, options.samples, options.spread, options.groups))
    prompts = len(steps[0])
    length = statistics.fmean(tokens for step in steps for group in step for tokens in group)
    print(f"{len(steps)} steps of {prompts} prompts x {len(steps[0][0])} answers of {length:.0f} tokens on average")
    print("| ranks | as sampled | shared out | whole groups shared out |\n|---|---|---|---|")
    for ranks in (2, 4, 8, 16, 32, 64, 128):
        if prompts % ranks == 0:
            single = [loads(step, ranks, number, False) for number, step in enumerate(steps)]
            whole = [loads(step, ranks, number, True) for number, step in enumerate(steps)]
            columns = ([before for before, _ in single], [after for _, after in single], [after for _, after in whole])
            print(f"| {ranks} | " + " | ".join(f"{statistics.fmean(column):.2f}" for column in columns) + " |")


if __name__ == "__main__":
    main()

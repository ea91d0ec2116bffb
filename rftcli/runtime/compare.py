"""Two policies on the same prompts: what to evaluate beside an evaluation, and what the two sample files say, prompt by prompt. No torch.

The second is evaluated by the first one's plan, so data, sampling, rewards and the key of every sample are the same. Differences are first - second.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rftcli.algo.paired import DRAWN, paired
from rftcli.codec import to_data
from rftcli.errors import UsageError
from rftcli.plan.plan import plan_to_json
from rftcli.runtime import prepare
from rftcli.runtime.checkpoint import read_progress
from rftcli.runtime.rundir import RunDir, step_name, write_json, write_text
from rftcli.runtime.start import EvalJob, checkpoint_of

BASE = "base"
"""Word for the model that the first one's recipe starts from."""
FOLDER = "compared"
"""Where the second evaluation goes, inside the first one's directory."""
FILE = "compare.json"


@dataclass(slots=True, kw_only=True)
class _Row:
    """One prompt of a sample file."""

    identity: str
    """Its id and a fingerprint of its text and reference."""
    rewards: list[float] = field(default_factory=list)

    @property
    def score(self) -> float | None:
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """What a policy is compared with. `samples`: of an evaluation that was made before; else `checkpoint`, or the untrained model `given` (None: the
    one that the first one's plan starts from)."""

    what: str
    samples: Path | None = None
    checkpoint: Path | None = None
    step: int = 0
    given: str | None = None


def other_of(word: str) -> Other:
    """What `--compare` means: `base`, a checkpoint, a run directory, an evaluation's directory, or a recipe. UsageError for anything else."""
    path, run = Path(word), RunDir(word)
    if word == BASE:
        return Other(what="the untrained model")
    if not path.is_dir():
        given = prepare.load(path, ()).recipe.models.policy.path
        return Other(what=f"the untrained model of {word}", given=given)
    files = sorted(run.evals.glob("step_*.samples.jsonl")) if run.evals.is_dir() else []
    if files and not run.committed_checkpoints():
        return Other(what=word, samples=files[-1])
    checkpoint = checkpoint_of(path)
    if not (checkpoint / "policy").is_dir():
        raise UsageError(f"{checkpoint} holds no policy/ (checkpoint.save_hf was false)")
    return Other(what=str(checkpoint), checkpoint=checkpoint, step=int(read_progress(checkpoint)["step"]))


def second(first: EvalJob, other: Other) -> EvalJob:
    """The evaluation of `other` by the first one's plan, in a directory inside the first one's."""
    plan = first.plan
    if other.given is not None:
        plan = replace(plan, policy=replace(plan.policy, path=prepare.resolved_model(other.given), given=other.given))
    run = RunDir(first.run.path / FOLDER)
    run.create()
    write_text(run.plan, plan_to_json(plan))
    return EvalJob(run=run, plan=plan, checkpoint=other.checkpoint, step=other.step, what=other.what)


def samples_of(job: EvalJob) -> Path:
    return job.run.evals / f"{step_name(job.step)}.samples.jsonl"


def compare(first: Path, other: Path, *, names: tuple[str, str], seed: int) -> dict[str, Any]:
    """Every set of two sample files against each other. UsageError when they do not hold the same prompts."""
    one, two = _read(first), _read(other)
    if one.keys() != two.keys():
        raise UsageError(f"the two were evaluated on other sets: {', '.join(sorted(one))} and {', '.join(sorted(two))}")
    return {"first": names[0], "second": names[1], "sets": {name: _compare_set(name, one[name], two[name], seed) for name in one}}


def write(run: RunDir, result: Mapping[str, Any]) -> Path:
    path = run.path / FILE
    write_json(path, result)
    return path


def _compare_set(name: str, one: Mapping[int, _Row], two: Mapping[int, _Row], seed: int) -> dict[str, Any]:
    rows = sorted(one.keys() | two.keys())
    different = [row for row in rows if row not in one or row not in two or one[row].identity != two[row].identity]
    if different:
        raise UsageError(
            f"set `{name}`: the prompts are not the same ({len(different)} of {len(rows)} differ, the first in row {different[0]})",
            hint="other data, another chat template or another system turn: evaluate both by one recipe",
        )
    pairs = [(a.score, b.score) for draw, a in one.items() for b in (two[draw],)]
    scored = [(a, b) for a, b in pairs if a is not None and b is not None]
    found: dict[str, Any] = {"prompts": len(pairs), "left_out": len(pairs) - len(scored)}
    if not scored:
        return found
    values = [value for pair in scored for value in pair]
    result = to_data(paired([a for a, _ in scored], [b for _, b in scored], seed=seed))
    return found | {key: value for key, value in result.items() if value is not None} | {"zero_one": all(value in (0.0, 1.0) for value in values)}


def _read(path: Path) -> dict[str, dict[int, _Row]]:
    """Set -> row -> what was scored there."""
    found: dict[str, dict[int, _Row]] = {}
    with path.open(encoding="utf-8") as file:
        for text in file:
            line = json.loads(text)
            key = json.dumps([line["prompt"], line["reference"]], default=str)
            identity = f"{line['prompt_id']} {hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}"
            row = found.setdefault(str(line["set"]), {}).setdefault(int(line["draw"]), _Row(identity=identity))
            if line["reward"] is not None:
                row.rewards.append(float(line["reward"]))
    return found


def text(result: Mapping[str, Any]) -> str:
    """For a person; several lines."""
    lines = [f"first:  {result['first']}", f"second: {result['second']}"]
    for name, found in result["sets"].items():
        if "difference" not in found:
            lines.append(f"{name}: no prompt was scored by both")
            continue
        between = f" [{found['low']:+.4f}, {found['high']:+.4f}]" if "low" in found else ""
        test = "McNemar, exact" if found["zero_one"] else "sign test, exact"
        flips = "exact" if found["permutation_exact"] else f"{DRAWN} of them drawn"
        means = f"mean reward {found['first']:.4f} against {found['second']:.4f}, difference {found['difference']:+.4f}{between}"
        left_out = f", left out {found['left_out']}" if found["left_out"] else ""
        lines += [
            f"{name}: {means} over {found['pairs']} prompts",
            f"  better {found['better']}, worse {found['worse']}, same {found['same']}{left_out}",
            f"  p {found['sign_p']:.3g} ({test}), p {found['permutation_p']:.3g} (sign flips of the difference, {flips})",
        ]
    return "\n".join(lines)

"""`rft rewards try`: the recipe's rewards on completions that are given, recorded by a run, or the data's own references. No model is loaded
here; judges that a run would start on GPUs of their own are started, and ended behind the last score.

Rewards are those of the parts, combined as the recipe says; shaping is left out, because it depends on a step. Leaves out printing.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rftcli.codec import to_data
from rftcli.data.rows import Row, read_table
from rftcli.errors import UsageError
from rftcli.plan.compile_data import data_specs, reward_plan
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.compile_scorers import scorer_plans, used_scorers
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import WorldPlan
from rftcli.probe.machine import machine_facts
from rftcli.recipe.load import LoadedRecipe
from rftcli.recipe.problems import Problem
from rftcli.recipe.scorer_rules import variant
from rftcli.rewards.scorers.desk import Desk
from rftcli.rewards.scorers.remote import without_models
from rftcli.rewards.scorers.spec import ScorerSpec
from rftcli.rewards.table import RewardTable
from rftcli.rewards.words import words
from rftcli.runtime.averaged import BOTH
from rftcli.runtime.judge_servers import Starter, started, told_of
from rftcli.runtime.judges import Judges
from rftcli.runtime.recipe_checks import recipe_file
from rftcli.runtime.scorer_checks import scorer_facts
from rftcli.stages.records import sample_line
from rftcli.types import Completion, FinishReason, Prompt, ScoredSample, TokenTrace

ROWS = 8
"""Rows that are tried unless a number is asked for."""
SAME = 1e-9
"""A recorded reward that differs by less is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part over all tried completions."""

    label: str
    name: str
    weight: float
    scored: int
    abstained: int
    errors: Mapping[str, int]
    """Text of an error -> how often."""
    mean: float | None
    least: float | None
    greatest: float | None
    seconds: float
    """Of one completion on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    what: str
    samples: tuple[ScoredSample, ...]
    parts: tuple[Part, ...]
    changed: int | None
    """Completions whose recorded reward is another one; None: none was recorded."""


def try_rewards(loaded: LoadedRecipe, *, count: int | None, completions: Path | None) -> Tried:
    """`count` rows or completions; None: a few rows, every completion. UsageError for a file without completions."""
    recipe, folder = loaded.recipe, recipe_file(loaded).resolve().parent
    plan, prefill = reward_plan(recipe, str(folder)), recipe.models.policy.chat.prefill or ""
    if completions is None:
        found = [_of_reference(row, index) for index, row in enumerate(islice(_rows(loaded, folder, count or ROWS), count or ROWS))]
        what, recorded = "the rows' own references as answers", [None] * len(found)
    else:
        lines = list(islice(read_lines(completions), count))
        if not lines:
            raise UsageError(f"{completions} holds no completion")
        known = _known(loaded, folder) if any("prompt_id" in line for line in lines) else {}
        found = [_of_line(line, index, known, prefill) for index, line in enumerate(lines)]
        what, recorded = str(completions), [line.get("combined", line.get("reward")) for line in lines]
    specs = _scorers(loaded)
    desk = Desk(spec.name for spec in specs)
    own = {"combine": plan.combine, "score_prefill": plan.score_prefill, "search_path": [folder], "desk": desk}
    with closing(RewardTable(plan.labels, **own)) as table, _judges(specs) as judges:
        desk.fill(without_models([judges.placed(spec) for spec in specs], judges.gone))
        samples = sorted(table.score(iter(found)), key=_order(found))
    return Tried(what=what, samples=tuple(samples), parts=tuple(_parts(samples)), changed=_changed(samples, recorded))


def _scorers(loaded: LoadedRecipe) -> tuple[ScorerSpec, ...]:
    """As on one rank of a CPU: only services are reached. Where judges are to be started, on the GPUs of this machine, none of which trains."""
    machine, device, ranks = MachineFacts(cores=1, memory_gib=1.0), "cpu", 1
    recipe = loaded.recipe
    if any(variant(recipe.models.scorers[name]) in ("started", "beside") for name in used_scorers(recipe)):
        machine = machine_facts()
        device, ranks = ("cuda", 0) if machine.gpus else ("cpu", 1)
    world = WorldPlan(ranks=ranks, device=device, backend="gloo", threads_per_rank=1)
    facts = Facts(machine=machine, model=ModelFacts(path=""), ranks=ranks)
    problems: list[Problem] = []
    unfit: list[PlanProblem] = []
    known = scorer_facts(loaded, problems, os.environ, hub=False)
    loaded.raise_problems(problems)
    specs = scorer_plans(recipe, facts, world, known, unfit, [])
    loaded.raise_problems([loaded.problem(one.path, one.message, reason=one.reason, hint=one.hint) for one in unfit])
    return specs


@contextmanager
def _judges(specs: Sequence[ScorerSpec]) -> Iterator[Judges]:
    """Ready, and gone afterwards. Their logs are kept where something went wrong."""
    folder = Path(tempfile.mkdtemp(prefix="rft-judges-"))
    own = started(specs, folder, Starter())
    judges = Judges(specs, own, told_of(own), None)
    try:
        judges.wait()
        yield judges
    finally:
        judges.stop()
    shutil.rmtree(folder, ignore_errors=True)


def _order(completions: Sequence[Completion]) -> Any:
    place = {id(completion): index for index, completion in enumerate(completions)}
    return lambda sample: place[id(sample.completion)]


def _rows(loaded: LoadedRecipe, folder: Path, first: int | None) -> Iterator[Row]:
    train, _ = data_specs(loaded.recipe)
    for spec in train:
        yield from read_table(spec, [folder], first).rows


def _known(loaded: LoadedRecipe, folder: Path) -> dict[tuple[str | None, str], Row]:
    """(held-out set, None: training; id) -> row. The two may have sets of one name."""
    _, held_out = data_specs(loaded.recipe)
    found: dict[tuple[str | None, str], Row] = {(None, row.id): row for row in _rows(loaded, folder, None)}
    for spec in held_out:
        for row in read_table(spec, [folder], None).rows:
            found[spec.name, row.id] = row
            found.setdefault((None, row.id), row)
    return found


def _of_reference(row: Row, index: int) -> Completion:
    reference = row.reference[0] if isinstance(row.reference, (list, tuple)) and row.reference else row.reference
    text = "" if reference is None else reference if isinstance(reference, str) else json.dumps(reference)
    return _completion({"completion": text}, index, row, "")


def _of_line(line: Mapping[str, Any], index: int, known: Mapping[tuple[str | None, str], Row], prefill: str) -> Completion:
    held_out, own = line.get("set"), str(line.get("prompt_id"))
    name = None if held_out is None else str(held_out).removesuffix(BOTH)
    return _completion(line, index, known.get((name, own)), prefill)


def _completion(line: Mapping[str, Any], index: int, row: Row | None, prefill: str) -> Completion:
    """What is missing in a line is taken from its row: reference, label, columns. Without a recorded number of tokens, words are counted. `prefill`
    is the recipe's: recorded completions begin behind it."""
    whole = line["completion"]
    end = line.get("special_end", "")
    text = line["text"] if "text" in line else whole.removesuffix(end)
    own = None if row is None else row.prompt if isinstance(row.prompt, str) else "\n".join(str(turn.get("content", "")) for turn in row.prompt)
    tokens = line.get("tokens")
    prompt = Prompt(
        draw=int(line.get("draw", index)),
        row=0 if row is None else row.index,
        row_id=str(line.get("prompt_id", index if row is None else row.id)),
        source="" if row is None else row.source,
        label=str(line.get("label", "default" if row is None else row.label)),
        text=str(line.get("prompt", own or "")),
        token_ids=(),
        reference=line.get("reference", None if row is None else row.reference),
        columns=line.get("columns", {} if row is None else row.columns),
        prefill=prefill,
    )
    return Completion(
        prompt=prompt,
        sample=int(line.get("sample", 0)),
        text=text,
        text_with_special=whole,
        trace=TokenTrace(ids=(0,) * (len(words(text)) if tokens is None else int(tokens))),
        finish=FinishReason(line.get("finish", "stop")),
        policy_version=0,
    )


def read_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """The completions of a file: JSON objects with `completion` (a run's samples have more), one a line. UsageError with the line that is none."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise UsageError(f"{path}:{number}: not JSON: {error}") from None
                if not isinstance(record, dict) or not isinstance(record.get("completion"), str):
                    raise UsageError(f"{path}:{number}: no text `completion`", hint='one object a line: {"completion": "..", "reference": ..}')
                yield record
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}") from error


def _parts(samples: Iterable[ScoredSample]) -> Iterator[Part]:
    """By label and name, in the order of the recipe."""
    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for sample in samples:
        for part in sample.parts:
            found[sample.completion.prompt.label, part.name].append(part)
    for (label, name), scores in found.items():
        values = [score.value for score in scores if score.value is not None]
        errors: dict[str, int] = defaultdict(int)
        for score in scores:
            if score.error is not None:
                errors[score.error] += 1
        yield Part(
            label=label,
            name=name,
            weight=scores[0].weight,
            scored=len(values),
            abstained=sum(score.value is None and score.error is None for score in scores),
            errors=dict(errors),
            mean=statistics.fmean(values) if values else None,
            least=min(values, default=None),
            greatest=max(values, default=None),
            seconds=statistics.fmean(score.seconds for score in scores),
        )


def _changed(samples: Sequence[ScoredSample], recorded: Sequence[Any]) -> int | None:
    pairs = [(sample.reward, before) for sample, before in zip(samples, recorded, strict=True) if isinstance(before, (int, float))]
    return sum(now is None or abs(now - before) > SAME * max(1.0, abs(before)) for now, before in pairs) if pairs else None


def as_data(tried: Tried) -> dict[str, Any]:
    """For `--json`; samples as in a run's files."""
    return {
        "completions": tried.what,
        "changed": tried.changed,
        "parts": [to_data(part) for part in tried.parts],
        "samples": [sample_line(sample, step=0, advantage=None) for sample in tried.samples],
    }

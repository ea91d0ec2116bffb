"""`rft rewards try`: the recipe's rewards on completions that are given, recorded by a run, or the data's own references. Judges that a run would
start are started, and ended behind the last score.

Rewards are those of the parts, combined and shaped as the recipe says, but for the running normalisation, which depends on the rewards before. The
models of scorers are loaded (`try_models`), or left out where that is asked for. Leaves out reading files (`completion_lines`) and printing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from rftcli.algo.stats import Moments
from rftcli.data.messages import with_system
from rftcli.data.rows import Row, read_table
from rftcli.errors import UsageError
from rftcli.plan.compile_data import reward_plan
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.compile_rewards import shaping_plan
from rftcli.plan.compile_scorers import scorer_plans
from rftcli.plan.facts import Facts, ModelFacts
from rftcli.plan.plan import ShapingPlan, WorldPlan
from rftcli.plan.specs import data_specs
from rftcli.probe.machine import machine_facts
from rftcli.recipe.load import LoadedRecipe
from rftcli.recipe.problems import Problem
from rftcli.recipe.scorer_rules import variant
from rftcli.rewards.scorers.desk import Desk
from rftcli.rewards.scorers.remote import NotLoaded
from rftcli.rewards.scorers.spec import ScorerSpec
from rftcli.rewards.spec import DEFAULT_LABEL, PartSpec
from rftcli.rewards.table import RewardTable
from rftcli.rewards.words import words
from rftcli.runtime.averaged import BOTH
from rftcli.runtime.completion_lines import Line, check_label, read_lines
from rftcli.runtime.judge_servers import Starter, started, told_of
from rftcli.runtime.judges import Judges
from rftcli.runtime.recipe_checks import recipe_file
from rftcli.runtime.references import FULL_MARKS, written_form
from rftcli.runtime.scorer_checks import scorer_facts
from rftcli.runtime.try_report import OneTried, Tried
from rftcli.stages.shape import penalised, scaled
from rftcli.types import Completion, FinishReason, Prompt, ScoredSample, TokenTrace

ROWS = 8
"""Rows that are tried unless a number is asked for."""
Say = Callable[[str], None]


def try_rewards(
    loaded: LoadedRecipe, *, count: int | None, completions: Path | None, models: bool = True, say: Say = lambda text: None
) -> Tried:
    """`count` rows or completions; None: a few rows, every completion. `models`: those of scorers are loaded. `say` is told what takes time.
    UsageError for a file without completions, with the line of what is wrong in it."""
    recipe, folder = loaded.recipe, recipe_file(loaded).resolve().parent
    plan = reward_plan(recipe, str(folder))
    if completions is None:
        rows = list(islice(_rows(loaded, folder, count or ROWS), count or ROWS))
        system = recipe.models.policy.chat.system
        what, found = "the rows' own references as answers", [_of_reference(row, index, system) for index, row in enumerate(rows)]
        places, recorded, shown = [row.place for row in rows], [None] * len(rows), False
    else:
        lines = list(islice(read_lines(completions), count))
        if not lines:
            raise UsageError(f"{completions} holds no completion")
        known = _known(loaded, folder) if any("prompt_id" in line.record for line in lines) else {}
        what, found = str(completions), [_of_line(line, index, known, loaded) for index, line in enumerate(lines)]
        places, recorded = [line.place for line in lines], [line.record.get("combined", line.record.get("reward")) for line in lines]
        for line, completion in zip(lines, found, strict=True):
            check_label(line, completion.prompt.label, plan.labels)
        shown = any("prompt" in line.record and not completion.prompt.messages for line, completion in zip(lines, found, strict=True))
    specs, device = _scorers(loaded, plan.labels, models=models)
    left_out = {} if models else _left_out(plan.labels, specs)
    labels = {label: _never_stopping(parts, left_out.get(label, ())) for label, parts in plan.labels.items()}
    desk = Desk(spec.name for spec in specs)
    own = {"combine": plan.combine, "score_prefill": plan.score_prefill, "search_path": [folder], "desk": desk}
    asked = [spec for spec in specs if models or not _is_model(spec)]
    with closing(RewardTable(labels, **own)) as table, _judges(asked) as judges:
        if models and any(spec.service is None for spec in specs):
            _load_models(desk, specs, loaded, folder, device, say, judges, with_front=shown)
        else:
            desk.fill({spec.name: judges.asked(spec, 1) if spec in asked else NotLoaded(spec.name) for spec in specs})
        samples = sorted(table.score(iter(found)), key=_order(found))
    shaping, notes = _shaping(loaded)
    notes += [] if completions is not None else _forms(rows, samples, plan.labels)
    tried = []
    for sample, place, before in zip(samples, places, recorded, strict=True):
        entry = _entry(sample, plan.labels)
        absent, asked = left_out.get(entry, ()), tuple(part.name for part in plan.labels[entry] if part.kind == "model")
        sample = _without(sample, absent)
        sample = scaled(penalised(sample, shaping), shaping, Moments()) if shaping.active else sample
        before = float(before) if isinstance(before, (int, float)) else None
        tried.append(OneTried(sample=sample, place=place, recorded=before, left_out=absent, asked=asked))
    return Tried(what=what, completions=tuple(tried), shaped=shaping.active, notes=tuple(notes))


def _forms(rows: Sequence[Row], samples: Sequence[ScoredSample], labels: Mapping[str, Sequence[PartSpec]]) -> list[str]:
    """Where a rule gives a reference full marks only in a form that a model has to learn: the form. By the first row of each part that lacks it."""
    notes: list[str] = []
    looked: set[tuple[str, str]] = set()
    several = len({_entry(sample, labels) for sample in samples}) > 1
    for row, sample in zip(rows, samples, strict=True):
        entry = _entry(sample, labels)
        for part, scored in zip(labels[entry], sample.parts, strict=True):
            if (entry, part.name) in looked or scored.error or scored.value is None or scored.value >= FULL_MARKS:
                continue
            looked.add((entry, part.name))
            form = written_form(row, part)
            if form is not None and form.strip() != sample.completion.text.strip():
                name = f"{entry}.{part.name}" if several else part.name
                scores = f"a reference as it stands scores {scored.value:g}, and written as {form!r} it has full marks"
                line = '{"completion": .., "prompt_id": ..}'
                notes.append(f"{name}: {scores} ({row.place}); try answers with --completions FILE, a line each: {line}")
    return notes


def _is_model(spec: ScorerSpec) -> bool:
    """Whether it is loaded, or its server started, for the trial; else it is a service that runs already."""
    return spec.service is None or spec.start is not None


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


def _load_models(
    desk: Desk, specs: Sequence[ScorerSpec], loaded: LoadedRecipe, folder: Path, device: str, say: Say, judges: Judges, *, with_front: bool
) -> None:
    """`with_front`: recorded prompts begin with what the policy's tokenizer puts in front."""
    from rftcli.runtime.try_models import load_scorers, text_in_front

    front = text_in_front(loaded.recipe) if with_front else ""
    desk.fill(load_scorers(specs, device, folder, say, judges), front=front)


def _scorers(loaded: LoadedRecipe, labels: Mapping[str, Sequence[PartSpec]], *, models: bool) -> tuple[tuple[ScorerSpec, ...], str]:
    """(what the parts ask, device): as on one rank, of the GPU that is there or of the CPU; judges to be started have all GPUs where no model is
    loaded on one. Nothing is looked up on the hub where nothing is loaded here."""
    recipe = loaded.recipe
    asked = {part.target for parts in labels.values() for part in parts if part.kind == "model"}
    if not asked:
        return (), "cpu"
    machine = machine_facts()
    device, backend = ("cuda", "nccl") if machine.gpus else ("cpu", "gloo")
    loads = any(variant(recipe.models.scorers[str(name)]) not in ("http", "server", "started") for name in asked)
    ranks = 0 if machine.gpus and not loads else 1
    world = WorldPlan(ranks=ranks, device=device, backend=backend, threads_per_rank=1)
    problems: list[Problem] = []
    known = scorer_facts(loaded, problems, os.environ, hub=models and loads)
    wrong: list[PlanProblem] = []
    specs = scorer_plans(recipe, Facts(machine=machine, model=ModelFacts(path=""), ranks=ranks), world, known, wrong, [])
    problems += [loaded.problem(one.path, one.message, reason=one.reason, hint=one.hint) for one in wrong]
    loaded.raise_problems(problems)
    return tuple(spec for spec in specs if spec.name in asked), device


def _left_out(labels: Mapping[str, Sequence[PartSpec]], specs: Sequence[ScorerSpec]) -> dict[str, tuple[str, ...]]:
    names = {spec.name for spec in specs if _is_model(spec)}
    found = {label: tuple(part.name for part in parts if part.kind == "model" and part.target in names) for label, parts in labels.items()}
    return {label: parts for label, parts in found.items() if parts}


def _never_stopping(parts: Sequence[PartSpec], names: Sequence[str]) -> tuple[PartSpec, ...]:
    """What is left out ends nothing."""
    return tuple(replace(part, on_error="fail_sample") if part.name in names else part for part in parts)


def _without(sample: ScoredSample, names: Sequence[str]) -> ScoredSample:
    """The sample without the errors of parts that are left out, and without a reward that would be another one."""
    if not names:
        return sample
    parts = tuple(replace(part, error=None) if part.name in names else part for part in sample.parts)
    return replace(sample, parts=parts, reward=None, error=None)


def _entry(sample: ScoredSample, labels: Mapping[str, Any]) -> str:
    label = sample.completion.prompt.label
    return label if label in labels else DEFAULT_LABEL


def _shaping(loaded: LoadedRecipe) -> tuple[ShapingPlan, list[str]]:
    """The recipe's shaping as far as one completion alone has it, and what is left out."""
    recipe, notes = loaded.recipe, []
    section, rollout = recipe.reward_shaping, recipe.rollout
    if section.running_norm != "off":
        notes.append("reward_shaping.running_norm is left out: it depends on all rewards before")
        section = section.model_copy(update={"running_norm": "off"})
    if rollout.max_new_tokens == "auto":
        if section.overlong is not None:
            notes.append("reward_shaping.overlong is left out: `rollout.max_new_tokens: auto` has no number before a plan")
            section = section.model_copy(update={"overlong": None})
        rollout = rollout.model_copy(update={"max_new_tokens": 1})
    return shaping_plan(recipe.model_copy(update={"reward_shaping": section, "rollout": rollout})), notes


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


def _of_reference(row: Row, index: int, system: str | None) -> Completion:
    reference = row.reference[0] if isinstance(row.reference, (list, tuple)) and row.reference else row.reference
    text = "" if reference is None else reference if isinstance(reference, str) else json.dumps(reference)
    return _completion({"completion": text}, index, row, "", system)


def _of_line(line: Line, index: int, known: Mapping[tuple[str | None, str], Row], loaded: LoadedRecipe) -> Completion:
    held_out, own = line.record.get("set"), str(line.record.get("prompt_id"))
    name = None if held_out is None else str(held_out).removesuffix(BOTH)
    chat = loaded.recipe.models.policy.chat
    if "prompt_id" in line.record and (name, own) not in known and not {"prompt", "reference"} & set(line.record):
        hint = "ids are a set and a row's number, such as `train:0`, or what `data.*.columns.id` names"
        raise UsageError(f"{line.place}: no row has the prompt_id `{own}`", hint=hint)
    return _completion(line.record, index, known.get((name, own)), chat.prefill or "", chat.system)


def _completion(line: Mapping[str, Any], index: int, row: Row | None, prefill: str, system: str | None) -> Completion:
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
        messages=() if row is None or isinstance(row.prompt, str) else with_system(row.prompt, system),
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

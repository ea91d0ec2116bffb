"""Checks of rows before a run: lengths in tokens, the data's own reference answers, training rows that are evaluation rows. Called by `prepare`.

What was found out about unchanged files, and about the same rows of a function, comes from the cache of `probe.cache`. It leaves out labels and
missing columns, which are `probe.data`'s. Whatever looks at rows or tokens is imported where it is called: often the cache knows all there is to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rftcli.data.once import Tables
from rftcli.data.origin import origin_of
from rftcli.data.rows import Row
from rftcli.data.spec import DataSpec
from rftcli.plan.specs import data_specs, reward_parts
from rftcli.probe import cache
from rftcli.probe.overlap import Overlap, overlaps
from rftcli.recipe.load import LoadedRecipe
from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.problems import Problem
from rftcli.recipe.sections import PolicyModel
from rftcli.rewards.spec import PartSpec
from rftcli.runtime.environment import resolved_model
from rftcli.runtime.reference_finding import ReferenceFinding

if TYPE_CHECKING:
    from rftcli.plan.facts import ModelFacts
    from rftcli.runtime.measure import Measured, MeasureJob

T = TypeVar("T")
CACHE_FORMAT = 3
"""To be raised when a check changes its meaning."""
READERS = ("transformers", "tokenizers", "math-verify", "sympy", "reasoning-gym")
"""Packages whose versions what is found may depend on."""
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.gguf")
REFERENCE_HINT = "correct those rows, or leave them out with `where`; `data.check_reference: off` does without this check"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFindings:
    overlaps: tuple[Overlap, ...]
    references: tuple[ReferenceFinding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetKey:
    """A set of a recipe and where it stands there."""

    spec: DataSpec
    key: KeyPath

    @property
    def place(self) -> str:
        """The key whose value says where the rows come from."""
        return format_path((*self.key, "python" if self.spec.path is None else "path"))


def sets_of(loaded: LoadedRecipe) -> tuple[list[SetKey], list[SetKey]]:
    """(training sets, evaluation sets) with the environment's values."""
    train, held_out = data_specs(loaded.recipe)
    return (
        [SetKey(spec=spec, key=("data", "train", index)) for index, spec in enumerate(train)],
        [SetKey(spec=spec, key=("data", "eval", spec.name)) for spec in held_out],
    )


def check_lengths(
    loaded: LoadedRecipe, model: ModelFacts, tokenizer_revision: str | None, folder: Path, problems: list[Problem], tables: Tables, *,
    first_streamed: int, teacher: ModelFacts | None = None,
) -> tuple[Measured, list[str]]:  # fmt: skip
    """Lengths of all prompts, and warnings about drops and cuts. Prompts that are refused, sets with nothing left and chat settings that do not
    work are problems at their place, and so is a `teacher` with other tokens. `tokenizer_revision`: of a tokenizer of its own."""
    from rftcli.plan.compile_data import data_plan
    from rftcli.probe.lengths import overlong_text
    from rftcli.runtime.measure import Measured, MeasureJob, measure, raise_machine

    train, held_out = sets_of(loaded)
    policy = loaded.recipe.models.policy
    job = MeasureJob(
        data=data_plan(loaded.recipe),
        tokenizer=model.path if policy.tokenizer is None else resolved_model(policy.tokenizer),
        revision=(model.revision or policy.revision) if policy.tokenizer is None else tokenizer_revision,
        tokenizer_options=dict(policy.tokenizer_options),
        add_tokens=tuple(policy.add_tokens),
        trust_remote_code=policy.trust_remote_code,
        search_path=(str(folder),),
        first_streamed=first_streamed,
        teacher=None if teacher is None else teacher.path,
        teacher_revision=None if teacher is None else teacher.revision,
    )
    key = _key_of_lengths(job, folder, tables)
    known = _cached(key, Measured, lambda: measure(job, tables), keep=lambda measured: not measured.troubles)
    raise_machine(known)
    places = {item.spec.name: item.place for item in (*held_out, *train)}
    for trouble in known.troubles:
        where = places[trouble.name] if trouble.name is not None else _place_of(trouble.message, policy)
        problems.append(loaded.problem(where, trouble.message, hint=trouble.hint))
    return known, [text for facts in (*known.train, *known.eval) if (text := overlong_text(facts)) is not None]


def _place_of(message: str, policy: PolicyModel) -> str:
    """The key that a trouble of no data set is about."""
    if "models.teacher" in message:
        return "models.teacher.path"
    if "add_tokens" in message:
        return "models.policy.add_tokens"
    if "chat" in message:
        return "models.policy.chat"
    return "models.policy.path" if policy.tokenizer is None else "models.policy.tokenizer"


def check_rows(
    loaded: LoadedRecipe, folder: Path, problems: list[Problem], tables: Tables, *, first: int | None, first_streamed: int
) -> list[str]:
    """Warnings about shared prompts and, as `data.check_reference` says, warnings or problems about reference answers."""
    train, held_out = sets_of(loaded)
    how = loaded.recipe.data.check_reference
    rewards = reward_parts(loaded.recipe)
    if how == "off" and not held_out:
        return []

    def find() -> RowFindings:
        return _findings(train, held_out, rewards if how != "off" else {}, folder, tables, first, first_streamed)

    states = _states([item.spec for item in (*train, *held_out)], folder, tables, first, first_streamed)
    key = (
        None
        if states is None
        else ("rows", states, [item.spec for item in (*train, *held_out)], len(train), rewards if how != "off" else None, first)
    )
    found = _cached(key, RowFindings, find)
    warnings = [one.text for one in found.overlaps]
    places = {item.spec.name: item.place for item in (*held_out, *train)}
    for one in found.references:
        if how == "refuse" or one.unreadable:
            problems.append(loaded.problem(places[one.source], one.text, hint=REFERENCE_HINT))
        else:
            warnings.append(f"{one.text}; {REFERENCE_HINT}")
    return warnings


def _findings(
    train: Sequence[SetKey],
    held_out: Sequence[SetKey],
    rewards: Mapping[str, Sequence[PartSpec]],
    folder: Path,
    tables: Tables,
    first: int | None,
    first_streamed: int,
) -> RowFindings:
    from rftcli.runtime.references import check_references

    def rows(items: Sequence[SetKey]) -> dict[str, list[Row]]:
        return {item.spec.name: tables.read(item.spec, [folder], _read_of(item.spec, first, first_streamed)).rows for item in items}

    trained, evaluated = rows(train), rows(held_out)
    references = [*check_references(trained, rewards), *check_references(evaluated, rewards)]
    return RowFindings(overlaps=tuple(overlaps(trained, evaluated)), references=tuple(references))


def _key_of_lengths(job: MeasureJob, folder: Path, tables: Tables) -> tuple[Any, ...] | None:
    """None where it cannot be known whether something has changed: a tokenizer of the hub, a template in a file of its own."""
    files = _tokenizer_files(job.tokenizer)
    others = [] if job.teacher is None else _tokenizer_files(job.teacher)
    template = job.data.chat.template
    if not files or (job.teacher is not None and not others) or (template is not None and "{" not in template):  # a template in a file of its own
        return None
    states = _states((*job.data.train, *job.data.eval), folder, tables, None, job.first_streamed)
    return None if states is None else ("lengths", states, cache.file_states([*files, *others]), *_tokenizing(job), job.data, job.first_streamed)


def _tokenizer_files(path: str) -> list[Path]:
    """Empty for a model of the hub."""
    model = Path(path)
    return [model] if model.is_file() else [file for pattern in TOKENIZER_FILES for file in sorted(model.glob(pattern))] if model.is_dir() else []


def _tokenizing(job: MeasureJob) -> tuple[Any, ...]:
    """What makes another tokenizer of the same files."""
    return dict(job.tokenizer_options), job.add_tokens, job.trust_remote_code


def _states(specs: Iterable[DataSpec], folder: Path, tables: Tables, first: int | None, first_streamed: int) -> list[Any] | None:
    """What tells that the sets are the same: states of their files; of a function or a set of the hub, which are read anyway, the rows themselves.
    None where a file may still be written to."""
    files: list[cache.FileState] = []
    rows: list[tuple[str, int, bool]] = []
    for spec in specs:
        found = cache.file_states(origin_of(spec, [folder]).files)
        if not found:
            table = tables.read(spec, [folder], _read_of(spec, first, first_streamed))
            rows.append((table.fingerprint, table.filtered, table.complete))
        files += found
    return [files, rows] if cache.settled(files) else None


def _read_of(spec: DataSpec, first: int | None, first_streamed: int) -> int | None:
    """How many rows of a set are looked at; None: all."""
    return first_streamed if spec.streaming and first is None else first


def _cached(key: tuple[Any, ...] | None, cls: type[T], find: Callable[[], T], keep: Callable[[T], bool] = lambda _: True) -> T:
    """What was found under that key before, by the same versions of packages, else what is found now."""
    if key is None:
        return find()
    return cache.kept(cache.entry(cache.user_cache_dir(), CACHE_FORMAT, cache.versions(READERS), *key), cls, find, keep)

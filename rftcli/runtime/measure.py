"""Prompt lengths of a recipe's sets, before any rank starts: `python -m rftcli.runtime.measure`, a pickled job on stdin, facts on stdout.

A process of its own, because a tokenizer brings torch along and the commands stay light. A process that has torch already measures itself.
"""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcli.codec import from_data, to_data
from rftcli.data.once import Tables
from rftcli.data.spec import DataSpec
from rftcli.errors import EXIT_MACHINE, MachineError, RftError
from rftcli.probe.lengths import LengthFacts

if TYPE_CHECKING:
    from rftcli.plan.plan import DataPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureJob:
    """Whose prompts, and for which tokenizer. Never written to disk: it holds what the environment says."""

    data: DataPlan
    tokenizer: str
    """Where its files lie."""
    revision: str | None
    tokenizer_options: Mapping[str, Any]
    add_tokens: tuple[str, ...]
    trust_remote_code: bool
    search_path: tuple[str, ...]
    first_streamed: int
    """Rows of a streamed set that are measured."""
    teacher: str | None = None
    """Where the files of a teacher lie, whose tokens have to be the policy's."""
    teacher_revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something that a person has to change. `name`: of the set; None: the chat settings or the model."""

    name: str | None
    message: str
    hint: str | None
    machine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    train: tuple[LengthFacts, ...]
    eval: tuple[LengthFacts, ...]
    troubles: tuple[Trouble, ...]


def measure(job: MeasureJob, tables: Tables) -> Measured:
    """Here if torch is loaded already, else in a process of its own. RftError if that process ends without an answer.
    `tables`: what has been read."""
    if "torch" in sys.modules:
        return measure_here(job, tables)
    command = [sys.executable, "-m", "rftcli.runtime.measure"]
    done = subprocess.run(command, input=pickle.dumps((job, tables)), capture_output=True, check=False)
    try:
        return from_data(Measured, json.loads(done.stdout))
    except ValueError as error:
        said = done.stderr.decode(errors="replace")
        last = next((line for line in reversed(said.splitlines()) if line.strip()), f"exit code {done.returncode}")
        raise RftError(f"the prompts could not be measured: {last}") from error


def measure_here(job: MeasureJob, tables: Tables) -> Measured:
    """Imports torch."""
    from rftcli.data.prompts import PromptBuilder
    from rftcli.models.load import load_tokenizer
    from rftcli.models.vocabularies import check_same_ids
    from rftcli.models.vocabulary import add_tokens

    paths = [Path(path) for path in job.search_path]
    try:
        tokenizer = load_tokenizer(
            job.tokenizer, trust_remote_code=job.trust_remote_code, revision=job.revision, options=job.tokenizer_options
        )
        add_tokens(tokenizer, job.add_tokens)
        if job.teacher is not None:
            other = load_tokenizer(job.teacher, trust_remote_code=job.trust_remote_code, revision=job.teacher_revision, options={})
            check_same_ids(tokenizer.get_vocab(), other.get_vocab())
        builder = PromptBuilder(tokenizer, job.data.chat, job.data.max_prompt_tokens, job.data.overlong_prompt, paths)
    except RftError as error:
        return Measured(train=(), eval=(), troubles=(_trouble(None, error),))
    troubles: list[Trouble] = []
    train = _sets(job.data.train, builder, paths, job, tables, troubles)
    held_out = _sets(job.data.eval, builder, paths, job, tables, troubles)
    return Measured(train=train, eval=held_out, troubles=tuple(troubles))


def _sets(
    specs: Sequence[DataSpec], builder: object, paths: Sequence[Path], job: MeasureJob, tables: Tables, troubles: list[Trouble]
) -> tuple[LengthFacts, ...]:
    from rftcli.data.prompts import PromptBuilder
    from rftcli.data.source import fit

    assert isinstance(builder, PromptBuilder)
    found = []
    for spec in specs:
        try:
            table = tables.read(spec, paths, job.first_streamed if spec.streaming else None)
            lengths = builder.lengths(table.rows)
            _, counts = fit(spec.name, table.rows, lengths, builder)
        except RftError as error:
            troubles.append(_trouble(spec.name, error))
            continue
        policy, allowed = job.data.overlong_prompt, job.data.max_prompt_tokens
        found.append(LengthFacts.of(spec.name, lengths, allowed=allowed, counts=counts, policy=policy, complete=table.complete))
    return tuple(found)


def _trouble(name: str | None, error: RftError) -> Trouble:
    return Trouble(name=name, message=error.message, hint=error.hint, machine=error.exit_code == EXIT_MACHINE)


def raise_machine(measured: Measured) -> None:
    """MachineError for what is no fault of the recipe."""
    for trouble in measured.troubles:
        if trouble.machine:
            raise MachineError(trouble.message, hint=trouble.hint)


if __name__ == "__main__":
    gc.set_threshold(100_000, 50, 50)  # most of this process is imports, which leave no rubbish
    # Libraries may print: the answer is the last line that goes to the real stdout.
    out, sys.stdout = sys.stdout, sys.stderr
    # a pickle names its classes by their module, which is not `__main__`
    out.write(json.dumps(to_data(measure_here(*pickle.load(sys.stdin.buffer)))))
    out.flush()

"""A full disk, at each writer: told in words with a way out, never as a traceback; half a file takes no room."""

from __future__ import annotations

import doctest
import errno
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rftcli.errors import MachineError, RftError
from rftcli.events import Logged
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import Plan
from rftcli.recipe.load import load_text
from rftcli.runtime import disk
from rftcli.runtime.emit import Emitter
from rftcli.runtime.rundir import RunDir, State, write_json
from rftcli.runtime.tell import merge_parts
from rftcli.runtime.verdict import first_cause, record_failure
from rftcli.runtime.world import SoloWorld

LINES = [{"draw": 0, "sample": 0, "text": "x" * 1000}]


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `size_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    made.attempt(1).create()
    return made


def plan_of(*sets: str, parameters: int | None = 1024**3) -> Plan:
    text = "models: {policy: {path: org/m}}\ndata: {train: {path: t}}\nrewards: {default: [{rule: exact}]}\ntrain: {steps: 1}\n"
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=64.0), model=ModelFacts(path="/m", parameters=parameters), ranks=1)
    return compile_plan(load_text(text, sets=list(sets), env={}).recipe, facts, name="n", search_path="/", policy_path="/m")


def events_to_a_full_device(run: RunDir) -> None:
    run.events.symlink_to("/dev/full")
    emit = Emitter(run, 1, writes=True)
    try:
        emit.emit(Logged(time=0.0, attempt=1, step=0, text="words"))
    finally:
        emit.close()


def state_that_does_not_fit(run: RunDir) -> None:
    with largest_file(20):
        run.write_state(State(status="running", step=1, attempt=1))


def samples_that_do_not_fit(run: RunDir) -> None:
    with largest_file(100):
        merge_parts(SoloWorld(), run.samples / "step_000001.jsonl", LINES)


def evaluation_that_does_not_fit(run: RunDir) -> None:
    with largest_file(100):
        write_json(run.evals / "step_000001.json", {"sets": LINES})


@pytest.mark.parametrize("writer", [events_to_a_full_device, state_that_does_not_fit, samples_that_do_not_fit, evaluation_that_does_not_fit])
def test_each_writer_says_what_is_wrong_and_what_helps(run: RunDir, writer: Callable[[RunDir], None]) -> None:
    with pytest.raises(OSError) as caught:
        writer(run)
    told = disk.told(caught.value, run.path)
    assert isinstance(told, RftError) and "no space left on the disk" in told.message and "iB are free" in told.message
    assert "rft resume" in str(told.hint)
    record_failure(run.attempt(1), 0, told, "")
    assert "Traceback" not in first_cause(run.attempt(1), None) and "traceback" not in first_cause(run.attempt(1), None)  # type: ignore[arg-type]


def test_half_a_file_leaves_nothing(run: RunDir) -> None:
    run.write_state(State(status="running", step=1, attempt=1))
    before = run.state_file.read_text()
    with pytest.raises(OSError):
        state_that_does_not_fit(run)
    assert run.state_file.read_text() == before
    assert not [path for path in run.path.iterdir() if path.name.startswith(".state")]


def test_other_errors_stay_as_they_are(run: RunDir) -> None:
    for error in (FileNotFoundError(errno.ENOENT, "no"), ValueError("x"), RftError("mine")):
        assert disk.told(error, run.path) is error
    assert disk.is_full(RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"))  # torch.save
    assert not disk.is_full(RuntimeError("shape mismatch"))


def test_a_reserve_leaves_room_for_the_last_words(tmp_path: Path) -> None:
    reserve = disk.Reserve(tmp_path / "reserve")
    assert (tmp_path / "reserve").stat().st_size == disk.RESERVE_BYTES
    reserve.release()
    reserve.release()
    assert list(tmp_path.iterdir()) == []


def test_what_a_checkpoint_needs() -> None:
    # 1 Gi parameters in float32: policy 4, trainer's weights 4, moments 8 (ZeRO 0: no master weights apart)
    assert disk.checkpoint_bytes(plan_of("train.deepspeed.zero_stage=0")) == 16 * 1024**3
    assert disk.checkpoint_bytes(plan_of("train.deepspeed.zero_stage=1")) == 20 * 1024**3
    assert disk.checkpoint_bytes(plan_of("models.policy.dtype=bfloat16", "train.deepspeed.zero_stage=1")) == (2 + 2 + 4 + 8) * 1024**3
    assert disk.checkpoint_bytes(plan_of("checkpoint.trainer_state=false")) == 4 * 1024**3
    assert disk.checkpoint_bytes(plan_of(parameters=None)) is None


def test_a_disk_without_room_for_one_checkpoint_is_refused(tmp_path: Path) -> None:
    free = disk.free_bytes(tmp_path / "not" / "there" / "yet")
    assert free is not None
    with pytest.raises(MachineError, match="a checkpoint needs about"):
        disk.check(plan_of(parameters=free), tmp_path)
    assert disk.check(plan_of("checkpoint.every=1", parameters=1000), tmp_path) == []
    (warning,) = disk.check(plan_of("checkpoint.every=1", "train.deepspeed.zero_stage=0", parameters=free // 30), tmp_path)
    assert "lower checkpoint.keep" in warning
    assert disk.check(plan_of("checkpoint.every=0", "train.deepspeed.zero_stage=0", parameters=free // 30), tmp_path) == []  # one at the end


def test_the_next_checkpoint_is_as_large_as_the_last(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))
    assert disk.next_checkpoint_bytes(plan_of(), [tmp_path]) == 1000
    assert disk.next_checkpoint_bytes(replace(plan_of(parameters=None)), []) is None


def test_the_records_are_json(run: RunDir) -> None:
    record_failure(run.attempt(1), 0, disk.told(OSError(errno.ENOSPC, "No space left on device", "/x"), run.path), "")
    assert "/x" in json.loads((run.attempt(1).failures / "rank_0.json").read_text())["message"]


def test_examples() -> None:
    assert doctest.testmod(disk).failed == 0

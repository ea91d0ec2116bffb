"""Processes of one job find each other in a folder; nothing of an earlier job is taken for this one."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from rftcli.errors import EXIT_USAGE, MachineError, UsageError
from rftcli.runtime.joined import Crew, check_options, crew_of, leading
from rftcli.runtime.rundir import AttemptDir, RunDir
from rftcli.runtime.travel import place_of


def crew(rank: int, base: Path, size: int = 2, meet_seconds: float = 30.0, see_seconds: float = 30.0, **environment: str) -> Crew:
    told = {"RANK": str(rank), "WORLD_SIZE": str(size), **environment}
    place = place_of(told)
    assert place is not None
    return Crew(place, base, told, meet_seconds=meet_seconds, see_seconds=see_seconds)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    run = RunDir(tmp_path / "run")
    run.create()
    run.attempt(1).create()
    return run.attempt(1)


def in_thread(action):  # type: ignore[no-untyped-def]
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    return lambda: (thread.join(20), found[0])[1]


def test_the_others_get_the_attempt(tmp_path: Path, attempt: AttemptDir) -> None:
    attempt.launch.write_text("{}")
    first, second = crew(0, tmp_path), crew(1, tmp_path)
    asked = in_thread(second.ask)
    with leading(first):
        first.announce(attempt)
    assert asked().path == attempt.path
    assert not list(tmp_path.glob(".rft-meeting-*"))


def test_an_answer_to_an_earlier_job_is_not_taken(tmp_path: Path, attempt: AttemptDir) -> None:
    attempt.launch.write_text("{}")
    first, second = crew(0, tmp_path), crew(1, tmp_path)
    folder = first._folder
    folder.mkdir()
    (folder / "answer.json").write_text(json.dumps({"run_dir": "/old", "attempt": 9, "tokens": {"1": "of another process"}}))
    (folder / "hello_1.json").write_text(json.dumps({"token": "of another process", "host": "h"}))
    assert second._answer() is None
    first.gather()  # takes the old hello for the new one
    asked = in_thread(second.ask)
    first.announce(attempt)
    assert asked().path == attempt.path


def test_a_refusal_is_everybodys(tmp_path: Path) -> None:
    first, second = crew(0, tmp_path), crew(1, tmp_path)
    asked = in_thread(second.ask)
    with pytest.raises(UsageError), leading(first):
        raise UsageError("no")
    assert asked() == EXIT_USAGE


def test_a_machine_that_does_not_see_the_directory(tmp_path: Path, attempt: AttemptDir) -> None:
    first, second = crew(0, tmp_path), crew(1, tmp_path, see_seconds=0.5)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            second.ask()
        except MachineError as error:
            errors.append(error)

    asked = in_thread(ask)
    first.gather()
    with pytest.raises(MachineError, match="is not seen from"):  # launch.json never shows
        first.announce(attempt)
    asked()
    assert "is not seen from" in str(errors[0])
    assert json.loads((attempt.path / "over.json").read_text()) == {"exit_code": 3}


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="rank 1, 2 of 3 did not come"):
        crew(0, tmp_path, size=3, meet_seconds=0.2).gather()


def test_jobs_meet_in_places_of_their_own(tmp_path: Path) -> None:
    def folder(rank: int, **more: str) -> Path:
        return crew(rank, tmp_path, LOCAL_WORLD_SIZE="1", MASTER_ADDR="a", **more)._folder

    assert folder(0, MASTER_PORT="1") == folder(1, MASTER_PORT="1") != folder(0, MASTER_PORT="2")


def test_who_is_in_a_job() -> None:
    assert crew_of(None, {}) is None
    assert crew_of(None, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None  # an interactive shell
    alone = crew_of(None, {"RANK": "0", "WORLD_SIZE": "1"})
    assert alone is not None and alone.leads


@pytest.mark.parametrize(("options", "says"), [
    ({"ranks": 4}, "has started 2"), ({"gpus": 4}, "has started 2 on this machine"), ({"several": True}, "already one of a launcher's"),
])  # fmt: skip
def test_options_that_contradict_the_launcher(tmp_path: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_options(crew(0, tmp_path), **{"ranks": None, "gpus": None, "several": False, **options})  # type: ignore[arg-type]
    check_options(crew(0, tmp_path), ranks=2, gpus=None, several=False)

"""The run directory: never overwritten, written whole, and readable by anybody who comes later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rftcli.errors import ResumeError, UsageError
from rftcli.events import Logged, StepDone, read_events
from rftcli.observe.files import read_json
from rftcli.observe.files import write_json as observers_json
from rftcli.runtime.disk import way_out
from rftcli.runtime.emit import Emitter
from rftcli.runtime.launch import close_book
from rftcli.runtime.rundir import RunDir, State, write_text


def test_a_used_directory_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    (run.path / "note.txt").write_text("mine")
    with pytest.raises(UsageError) as caught:
        RunDir(tmp_path / "run").create()
    assert "rft resume" not in str(caught.value) and "--run-dir" in str(caught.value)
    run.write_state(State(status="done", step=1, attempt=1))
    with pytest.raises(UsageError, match=f"`rft resume {run.path}` goes on with it"):
        RunDir(tmp_path / "run").create()
    assert (run.path / "note.txt").read_text() == "mine"


def test_half_a_surrogate_pair_in_a_cause_is_written_and_read(tmp_path: Path) -> None:
    """Replies of services and errors of anybody's code may hold one. Whatever else is written beside it must not be lost."""
    run = RunDir(tmp_path)
    state = State(status="failed", step=1, attempt=1, cause="bad \ud800 reply, \N{SNOWMAN}")
    run.write_state(state)
    assert run.read_state() == state
    close_book(run, state)
    (ended,) = read_events(run.events)
    assert ended.kind == "end" and ended.cause == state.cause
    observers_json(tmp_path / "small.json", {"cause": state.cause})
    assert read_json(tmp_path / "small.json") == {"cause": state.cause}


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    RunDir(tmp_path / "run").create()
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_state_round_trip_and_garbage(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.read_state() is None
    state = State(status="stopped", step=7, attempt=2, cause="asked to", heartbeat=12.5)
    run.write_state(state)
    assert run.read_state() == state
    run.state_file.write_text("{")
    with pytest.raises(UsageError, match=r"state\.json"):
        run.read_state()


def test_what_is_no_directory_holds_no_state(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert RunDir(tmp_path / "file").read_state() is None


def test_a_damaged_state_names_the_way_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.state_file.write_text("")
    with pytest.raises(UsageError) as caught:
        run.read_state()
    assert caught.value.hint is None
    folder = run.checkpoints / "step_000004"
    folder.mkdir(parents=True)
    (folder / "COMMITTED").write_text("step 4 attempt 1\n")
    with pytest.raises(UsageError) as caught:
        run.read_state()
    assert caught.value.hint == f"its checkpoints are whole up to step_000004: delete state.json, and `rft resume {run.path}` goes on from there"


def test_commands_that_are_named_can_be_copied(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "my run")
    run.create()
    run.write_state(State(status="done", step=1, attempt=1))
    with pytest.raises(UsageError, match=f"`rft resume '{run.path}'` goes on with it"):
        RunDir(run.path).create()
    assert f"`rft resume '{run.path}'`" in way_out(run.path)


def test_a_checkpoint_without_committed_does_not_exist(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    for step, whole in ((5, True), (10, False), (15, True)):
        folder = run.checkpoints / f"step_{step:06d}"
        folder.mkdir()
        if whole:
            (folder / "COMMITTED").write_text("")
    assert [path.name for path in run.committed_checkpoints()] == ["step_000005", "step_000015"]


def test_latest_log_follows_the_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    for number in (1, 2):
        run.attempt(number).create()
        assert (run.path / "logs" / "latest").resolve() == run.attempt(number).logs
    assert run.last_attempt() == 2


def test_write_text_leaves_the_old_file_when_the_new_one_fails(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_text(target, "old")
    with pytest.raises(TypeError):
        write_text(target, 3)  # type: ignore[arg-type]
    assert target.read_text() == "old"


def test_emitter_writes_and_beats_only_on_rank_zero(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    silent = Emitter(run, 1, writes=False)
    silent.log("nothing")
    silent.state("running", step=1)
    silent.close()
    assert not run.events.exists() and run.read_state() is None
    emit = Emitter(run, 1, writes=True)
    emit.state("running", step=3)
    emit.at(3)
    emit.emit(StepDone(time=1.0, attempt=1, step=3, metrics={"loss": float("nan"), "seconds": {"total": 1.0}}))
    emit.log("hello")
    emit.close()
    events = list(read_events(run.events))
    assert [event.kind for event in events] == ["step", "log"]
    assert isinstance(events[0], StepDone) and events[0].metrics == {"loss": "nan", "seconds": {"total": 1.0}}
    state = run.read_state()
    assert state is not None and state.step == 3 and state.status == "running"


def test_progress_is_thinned(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    emit = Emitter(run, 1, writes=True)
    for done in range(1000):
        emit.progress("rollout", done, 1000)
    emit.close()
    assert len(list(read_events(run.events))) == 1


def test_a_torn_line_does_not_swallow_the_next_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.events.write_text('{"event": "log", "time": 1.0, "attempt": 1, "step": 0, "text": "whole"}\n{"event": "log", "ti')
    emit = Emitter(run, 2, writes=True)
    emit.log("after")
    emit.close()
    texts = [event.text for event in read_events(run.events) if isinstance(event, Logged)]
    assert texts == ["whole", "after"]


@pytest.mark.parametrize("left", ["", '{"event": "log", "ti'])
def test_every_line_after_a_killed_writer_is_an_event_or_what_it_left(tmp_path: Path, left: str) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    whole = '{"event": "log", "time": 1.0, "attempt": 1, "step": 0, "text": "whole"}'
    run.events.write_text(f"{whole}\n{left}")
    close_book(run, State(status="failed", step=1, attempt=1, cause="killed"))
    emit = Emitter(run, 2, writes=True)
    emit.log("after")
    emit.close()
    lines = run.events.read_text().split("\n")
    assert lines[:-3] == [whole, *([left] if left else [])] and lines[-1] == ""
    assert [json.loads(line)["event"] for line in lines[-3:-1]] == ["end", "log"]


def test_stop_request_is_read_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    attempt = run.attempt(1)
    attempt.create()
    assert attempt.stop_reason() is None
    attempt.request_stop("interrupt")
    assert attempt.stop_reason() == "interrupt"
    assert not [path for path in attempt.path.iterdir() if path.name.startswith(".stop")]


def test_a_run_is_written_by_one_command_at_a_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    with run.locked(), pytest.raises(ResumeError, match="another command"), RunDir(run.path).locked():
        raise AssertionError("two writers")
    with RunDir(run.path).locked():
        pass


def test_a_line_torn_inside_a_character_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    begins = b'{"event": "log", "time": 1.0, "attempt": 1, "step": 0, "text": '
    path.write_bytes(begins + b'"caf\xc3\n' + begins + b'"ok"}\n')
    assert [event.text for event in read_events(path) if isinstance(event, Logged)] == ["ok"]

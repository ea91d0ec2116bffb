"""The side process, for real: its own process, TensorBoard and an offline wandb run, ends of all kinds."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time

import psutil
import pytest

from rftcli.events import EvalDone, RunEnded, RunStarted, Warned
from rftcli.observe.follow import Audience
from rftcli.observe.samples import first_samples
from rftcli.observe.tracker import close_within
from rftcli.observe.wandb import COLUMNS, TABLE_CHARACTERS, TABLE_ROWS, TABLES
from rftcli.redact import redacted

LIMIT_SECONDS = 60


def _environment(tmp_path):
    quiet = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    return {**quiet, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": "offline", "http_proxy": "http://127.0.0.1:9"}


@pytest.fixture
def start(tmp_path):
    """Start the side process of an attempt; whatever is left of it ends with the test."""
    started = []

    def run(run_dir, attempt, spec, **environment):
        command = [sys.executable, "-m", "rftcli.observe.tracker", str(run_dir), "--attempt", str(attempt), "--spec", json.dumps(spec)]
        process = subprocess.Popen(command, env={**_environment(tmp_path), **environment})
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "my-run"
    path.mkdir()
    return path


def _status(run_dir, attempt):
    return json.loads((run_dir / "attempts" / str(attempt) / "trackers_status.json").read_text(encoding="utf-8"))


def _wait_for(condition):
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def wandb_rows(run_dir):
    """The history rows of every offline run of a run directory in the order they were made: name -> value, with the run's id and directory."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        run_id = None
        for data in _log_records(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                run_id = record.run.run_id
            elif record.WhichOneof("record_type") == "history":
                row = {}
                for item in record.history.item:
                    names = list(item.nested_key) or [item.key]
                    row["/".join(names)] = json.loads(item.value_json)
                found.append((run_id, path.parent, row))
    return found


def _log_records(data):
    """The records of a wandb transaction log: LevelDB's log format behind a header of seven bytes."""
    block, place, whole = 32768, 7, b""
    while place < len(data):
        left = block - place % block
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full record, or the last piece of one
            yield whole
            whole = b""


def _eval(step, attempt):
    sets = {"test": {"mean@1": {"value": step / 100 + attempt, "low": 0.0, "high": 1.0}}}
    return EvalDone(time=0.0, attempt=attempt, step=step, seconds=1.0, sets=sets)


def _attempt(step_done, attempt, first, last, status):
    yield RunStarted(time=0.0, attempt=attempt, step=first - 1, info={"name": "my-run", "steps": 14, "api_key": "sk-hidden"})
    for step in range(first, last + 1):
        yield step_done(step, attempt, reward_mean=step / 10 + attempt, seconds={"rollout": 3.0})
        if step % 2 == 0:
            yield _eval(step, attempt)
    yield RunEnded(time=0.0, attempt=attempt, step=last, status=status)


def _sample(step, draw, text):
    return {
        "draw": draw, "sample": 0, "label": "math", "prompt": "2+2?", "completion": text, "reference": 4 if draw else {"answer": 4},
        "reward": None if draw == 3 else 1, "advantage": 0.5, "tokens": 5, "finish": "stop", "step": step,
    }  # fmt: skip


def test_crash_and_resume_offline_keeps_every_metric_and_every_step(run_dir, step_done, append_events, write_samples, start):
    """Evaluated every 2 steps, samples every step, one of 200,000 characters; attempt 1 ends at step 12, attempt 2 goes on from step 8."""
    for step in range(1, 15):
        write_samples(run_dir, step, [_sample(step, draw, "日\x1b[31m" * 66_667 if draw == 0 else "4") for draw in range(40)])
    (run_dir / "recipe.resolved.yaml").write_text(
        "models: {policy: {path: org/model}}\nservice: {token: sk-hidden, url: 'http://me:sk-hidden@host/x'}\n"
    )
    spec = {"tensorboard": True, "wandb": {"project": "p", "entity": None, "group": "g", "name": None, "tags": ["a", "b"], "mode": "online"}}
    for attempt, first, last, status in [(1, 1, 12, "failed"), (2, 9, 14, "done")]:
        append_events(run_dir, _attempt(step_done, attempt, first, last, status))
        assert start(run_dir, attempt, spec).wait(LIMIT_SECONDS) == 0
        assert _status(run_dir, attempt) == {"tensorboard": "ok", "wandb": "ok"}
    rows = wandb_rows(run_dir)
    assert {run_id for run_id, _, _ in rows} == {json.loads((run_dir / "trackers.json").read_text())["wandb"]["id"]}
    for attempt, first, last in [(1, 1, 12), (2, 9, 14)]:
        mine = [row for _, _, row in rows if row["attempt"] == attempt]
        rewards = {row["step"]: row["reward/reward_mean"] for row in mine if "reward/reward_mean" in row}
        evals = {row["step"]: row["eval/test/mean@1"] for row in mine if "eval/test/mean@1" in row}
        assert rewards == pytest.approx({s: s / 10 + attempt for s in range(first, last + 1)})
        assert evals == pytest.approx({s: s / 100 + attempt for s in range(first, last + 1) if s % 2 == 0})
        assert [row["time/rollout"] for row in mine if "reward/reward_mean" in row] == [3.0] * (last - first + 1)
    tables = [directory / "files" / row["samples/path"] for _, directory, row in rows if "samples/path" in row]
    assert len(tables) == 12 + 6
    for path in tables:
        assert path.stat().st_size < TABLE_ROWS * 3 * TABLE_CHARACTERS * 3
        table = json.loads(path.read_text(encoding="utf-8"))
        assert table["columns"] == list(COLUMNS)
        assert len(table["data"]) == TABLE_ROWS
        first_row = dict(zip(COLUMNS, table["data"][0], strict=True))
        assert len(first_row["completion"]) == TABLE_CHARACTERS
        assert first_row["completion"].startswith("日日")
        assert (first_row["reward"], first_row["reference"]) == (1, '{"answer": 4}')
        assert table["data"][3][COLUMNS.index("reward")] is None
    assert len(first_samples(run_dir, 1, 1)[0]["completion"]) == 6 * 66_667  # the whole text stays local
    written = b"".join(path.read_bytes() for path in (run_dir / "wandb").rglob("*") if path.is_file() and not path.is_symlink())
    assert b"sk-hidden" not in written
    assert b"org/model" in written
    assert not (run_dir / "attempts" / "3").exists()


def test_steps_that_go_back_are_kept(run_dir, step_done, append_events, start):
    """Within one wandb session: what a resumed online run looks like to wandb, whose own counter never goes back."""
    order = [1, 2, 3, 4, 2, 3, 1, 5]
    events = [step_done(step, kl=float(place)) for place, step in enumerate(order)]
    append_events(run_dir, [*events, RunEnded(time=0.0, attempt=1, step=5, status="done")])
    assert start(run_dir, 1, {"wandb": {}}).wait(LIMIT_SECONDS) == 0
    assert [(row["step"], row["policy/kl"]) for _, _, row in wandb_rows(run_dir)] == [(step, float(place)) for place, step in enumerate(order)]


def test_tables_are_few_in_a_long_run(run_dir, step_done, append_events, write_samples, start):
    steps = TABLES * 20
    events = [RunStarted(time=0.0, attempt=1, step=0, info={"steps": steps})]
    for step in range(1, 61):
        write_samples(run_dir, step, [_sample(step, 0, "x")])
        events.append(step_done(step, kl=0.0))
    append_events(run_dir, [*events, RunEnded(time=0.0, attempt=1, step=60, status="done")])
    assert start(run_dir, 1, {"wandb": {}}).wait(LIMIT_SECONDS) == 0
    assert [row["step"] for _, _, row in wandb_rows(run_dir) if "samples/path" in row] == [1, 20, 40, 60]


def test_a_tracker_that_cannot_start_is_reported_and_the_others_go_on(run_dir, step_done, append_events, start):
    append_events(run_dir, _attempt(step_done, 1, 1, 2, "done"))
    spec = {"wandb": {"mode": "online"}, "tensorboard": True, "mlflow": {}, "console": None}
    process = start(run_dir, 1, spec, WANDB_MODE="online")  # no key is configured
    assert process.wait(LIMIT_SECONDS) == 0
    status = _status(run_dir, 1)
    assert status["tensorboard"] == "ok"
    assert re.fullmatch(r"failed: UsageError: .*log ?in.*", status["wandb"])
    assert status["mlflow"].startswith("failed: UsageError: there is no observer named `mlflow`")
    assert set(status) == {"wandb", "tensorboard", "mlflow"}
    assert "Traceback" in (run_dir / "attempts" / "1" / "logs" / "trackers.log").read_text()
    assert list((run_dir / "tensorboard").iterdir())


def test_stop_signals_are_left_to_the_ranks(run_dir, step_done, append_events, start):
    process = start(run_dir, 1, {"tensorboard": True})
    append_events(run_dir, [step_done(1, kl=1.0)])
    _wait_for((run_dir / "tensorboard").is_dir)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    append_events(run_dir, [step_done(2, kl=1.0), RunEnded(time=0.0, attempt=1, step=2, status="stopped")])
    assert process.wait(LIMIT_SECONDS) == 0


def test_ends_when_its_parent_is_gone_after_reading_everything(tmp_path, run_dir, step_done, append_events):
    """A parent starts the tracker, and dies without an end event; the tracker is then nobody's child and has to notice."""
    append_events(run_dir, [step_done(step, kl=float(step)) for step in range(1, 4)])
    code = f"""
import pathlib, subprocess, sys, time
process = subprocess.Popen([sys.executable, "-m", "rftcli.observe.tracker", {str(run_dir)!r}, "--attempt", "1", "--spec", '{{"tensorboard": true}}'])
while not pathlib.Path({str(run_dir / "attempts/1/trackers_status.json")!r}).exists():
    time.sleep(0.02)
print(process.pid, flush=True)
"""
    parent = subprocess.run(
        [sys.executable, "-c", code], env=_environment(tmp_path), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True
    )
    pid = int(parent.stdout)

    def ended():
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # where nobody waits for orphans
        except psutil.NoSuchProcess:
            return True

    _wait_for(ended)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    assert [e.value for e in accumulator.Scalars("policy/kl")] == [1.0, 2.0, 3.0]


class Closing:
    """An observer that closes when it is let."""

    def __init__(self):
        self.let = threading.Event()

    def see(self, event):
        pass

    def close(self):
        self.let.wait(LIMIT_SECONDS)


def test_a_tracker_that_does_not_finish_is_named_and_not_waited_for():
    quick, slow = Closing(), Closing()
    quick.let.set()
    assert close_within(Audience([quick, slow]), 0.1) == (slow,)
    slow.let.set()
    assert close_within(Audience([quick, slow]), LIMIT_SECONDS) == ()


def test_redacted_blanks_what_looks_like_a_secret_and_nothing_else():
    given = {
        "api_key": "a", "HF-TOKEN": "b", "token": "c", "headers": {"Authorization": "Bearer d"}, "urls": ["https://user:pw@host/x", "http://host/x"],
        "max_new_tokens": 16, "stop_token_ids": [1], "key": 3, "path": "org/token", "tokenizer": None,
    }  # fmt: skip
    assert redacted(given) == {
        "api_key": "***", "HF-TOKEN": "***", "token": "***", "headers": {"Authorization": "***"}, "urls": ["https://***@host/x", "http://host/x"],
        "max_new_tokens": 16, "stop_token_ids": [1], "key": 3, "path": "org/token", "tokenizer": None,
    }  # fmt: skip


OWN = """
import json
class Mine:
    def __init__(self, run_dir):
        self.path = run_dir / "own.jsonl"
    def see(self, event):
        with self.path.open("a") as file:
            file.write(json.dumps([event.kind, event.step]) + "\\n")
        if event.step == STOP_AT:
            raise ValueError("mine is broken")
    def close(self):
        with self.path.open("a") as file:
            file.write('"closed"\\n')
"""


@pytest.mark.parametrize("stop_at", [None, 2])
def test_an_observer_of_the_users_own(tmp_path, run_dir, step_done, append_events, start, stop_at):
    """It sees every event; what it raises switches it off, is told once, and nothing else stops."""
    (tmp_path / "my_observer.py").write_text(OWN.replace("STOP_AT", repr(stop_at)))
    append_events(run_dir, _attempt(step_done, 1, 1, 4, "done"))
    spec = {"python": {"target": "my_observer:Mine", "folder": str(tmp_path)}, "tensorboard": True}
    assert start(run_dir, 1, spec).wait(LIMIT_SECONDS) == 0
    seen = [json.loads(line) for line in (run_dir / "own.jsonl").read_text().splitlines()]
    assert seen[:3] == [["start", 0], ["step", 1], ["step", 2]] and seen[-1] == "closed"
    assert len(seen) == (1 + 4 + 2 + 1 + 1 if stop_at is None else 4)
    assert _status(run_dir, 1) == {"tensorboard": "ok", "python": "ok" if stop_at is None else "failed: ValueError: mine is broken"}


def test_online_without_a_network_goes_on_offline(run_dir, step_done, append_events, start):
    """A key is there and no server answers: nothing waits, the data is kept, and a person is told how to send it."""
    append_events(run_dir, _attempt(step_done, 1, 1, 2, "done"))
    began = time.monotonic()
    process = start(run_dir, 1, {"wandb": {}}, WANDB_MODE="online", WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="f" * 40)
    assert process.wait(LIMIT_SECONDS) == 0
    assert time.monotonic() - began < 45  # most of it imports, on a busy machine
    status = _status(run_dir, 1)["wandb"]
    assert status.startswith("offline: http://127.0.0.1:9 does not answer") and "`wandb sync" in status
    assert [row["policy/kl"] if "policy/kl" in row else row["step"] for _, _, row in wandb_rows(run_dir)]
    assert not any(b"f" * 40 in path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and not path.is_symlink())


def test_steps_that_are_done_again_alike_are_not_sent_twice(run_dir, step_done, append_events, write_samples, start):
    """Attempt 2 repeats step 3 to the last bit but for its clock, does step 4 otherwise, and goes on."""
    for step in range(1, 6):
        write_samples(run_dir, step, [_sample(step, draw, "x") for draw in range(4)])
    spec = {"wandb": {"upload_samples": 2}}
    first = [RunStarted(time=0.0, attempt=1, step=0, info={"steps": 5}), *(step_done(step, 1, kl=float(step)) for step in range(1, 5))]
    append_events(run_dir, [*first, RunEnded(time=0.0, attempt=1, step=4, status="failed")])
    assert start(run_dir, 1, spec).wait(LIMIT_SECONDS) == 0
    second = [step_done(3, 2, kl=3.0, seconds={"rollout": 9.0}), step_done(4, 2, kl=4.5), step_done(5, 2, kl=5.0)]
    append_events(run_dir, [*second, RunEnded(time=0.0, attempt=2, step=5, status="done")])
    (run_dir / "attempts" / "2").mkdir()
    assert start(run_dir, 2, spec).wait(LIMIT_SECONDS) == 0
    rows = wandb_rows(run_dir)
    assert [(row["step"], row["attempt"], row["policy/kl"]) for _, _, row in rows] == [
        (1, 1, 1.0), (2, 1, 2.0), (3, 1, 3.0), (4, 1, 4.0), (4, 2, 4.5), (5, 2, 5.0),
    ]  # fmt: skip
    tables = [directory / "files" / row["samples/path"] for _, directory, row in rows if "samples/path" in row]
    assert tables and all(len(json.loads(path.read_text())["data"]) == 2 for path in tables)


def test_a_warning_is_in_every_tracker(run_dir, step_done, append_events, start):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warned = Warned(time=1.0, attempt=1, step=2, code="low_entropy", text="the policy repeats itself")
    append_events(run_dir, [step_done(1, kl=0.5), warned, RunEnded(time=0.0, attempt=1, step=2, status="done")])
    assert start(run_dir, 1, {"wandb": {}, "tensorboard": True}).wait(LIMIT_SECONDS) == 0
    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    (found,) = accumulator.Tensors("warning/low_entropy")
    assert found.step == 2 and found.tensor_proto.string_val == [b"the policy repeats itself"]
    assert accumulator.SummaryMetadata("warning/low_entropy").plugin_data.plugin_name == "text"
    assert [row["warning/low_entropy"] for _, _, row in wandb_rows(run_dir) if "warning/low_entropy" in row] == ["the policy repeats itself"]


def test_a_directory_that_cannot_be_written(run_dir, step_done, append_events, start):
    (run_dir / "taken").write_text("a file, no directory")
    append_events(run_dir, _attempt(step_done, 1, 1, 2, "done"))
    assert start(run_dir, 1, {"tensorboard": "taken/below"}).wait(LIMIT_SECONDS) == 0
    assert _status(run_dir, 1)["tensorboard"].startswith("failed: ")

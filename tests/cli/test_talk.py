"""What commands say cannot steer a terminal, wherever its words come from."""

from __future__ import annotations

import errno
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rftcli.cli import talk
from rftcli.cli.main import run
from rftcli.cli.talk import show_unusable
from rftcli.errors import RftError

STEERS = "\x1b]0;title\x07\x1b[2J\x9b31m\x07"


def test_errors_are_said_without_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    talk.show_error(RftError(f"reward {STEERS} failed\nsecond line", hint=f"look at {STEERS}"))
    said = capsys.readouterr().err
    assert not set("\x1b\x9b\x07") & set(said) and "failed\nsecond line" in said and said.count("\n") == 3


def test_a_name_in_a_plan_is_only_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("plan", ["quickstart", "--ranks", "1", "--set", 'name="my\\u202ename"']) == 0
    out = capsys.readouterr().out
    assert "name" in out and "\u202e" not in out


def test_long_talk_is_whole() -> None:
    text = "word " * 5000 + "\nend"
    assert talk.plain(text) == text


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EROFS])
def test_a_path_that_cannot_be_used_is_said(capsys: pytest.CaptureFixture[str], number: int) -> None:
    assert show_unusable(OSError(number, os.strerror(number), "some/where"))
    assert capsys.readouterr().err == f"error: some/where: {os.strerror(number)}\n"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken", "x"), OSError(errno.EACCES, "denied"), OSError("no number")])
def test_other_errors_keep_their_traceback(capsys: pytest.CaptureFixture[str], error: OSError) -> None:
    assert not show_unusable(error) and capsys.readouterr().err == ""


FINISH = """
import sys, time
from rftcli.cli.watch import finish
from rftcli.runtime.launch import Outcome
from rftcli.runtime.rundir import RunDir, State
sys.stdin.readline()  # until the terminal is closed
state = State(status="stopped", step=1, attempt=1, cause="asked to stop")
sys.exit(finish(RunDir(sys.argv[1]), Outcome(state=state, exit_code=75), as_json=True))
"""


def test_a_closed_terminal_does_not_change_how_a_run_ended(tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(talk.__file__).parents[2])}
    command = subprocess.Popen([sys.executable, "-c", FINISH, str(tmp_path)], env=env, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(terminal)
    command.communicate(b"go\n", timeout=60)
    assert command.returncode == 75

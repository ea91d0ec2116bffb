"""Which rank failed first, and why. Ranks write down their end; one that is killed cannot, so its process is watched.

An error that only says "a peer is gone" is secondary: it names the rank that noticed, not the one that failed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rftcli.errors import HeldUpError
from rftcli.redact import known_values, redacted_text
from rftcli.runtime.hang import TIMED_OUT, waited_in_vain
from rftcli.runtime.rundir import DEAD_AFTER_SECONDS, AttemptDir, RunDir, State

SECONDARY = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "ProcessGroup",
    "Socket Timeout",
    "unhandled system error",
)
"""Texts of collective errors that another rank's end brings about."""
LAST_LOG_LINES = 15


class Watch(Protocol):
    """The command's eyes on its ranks: `RankWatch` on this machine, `warden.FarWatch` on several."""

    vanished: list[int]
    statuses: dict[int, int]
    lost: dict[int, str]

    def look(self) -> None: ...

    @property
    def broken(self) -> bool: ...

    @property
    def started(self) -> bool: ...

    @property
    def finished(self) -> bool: ...

    @property
    def note(self) -> str | None: ...

    def living(self) -> list[int]: ...

    def who(self, rank: int) -> str: ...

    def end(self) -> None: ...

    def settle(self) -> None: ...

    def tell(self, exit_code: int) -> None: ...


@dataclass(slots=True)
class RankWatch:
    """Notices rank processes that vanish without having said that they are done. Called often; reads one small file a rank once."""

    attempt: AttemptDir
    ranks: int
    vanished: list[int] = field(default_factory=list)
    """In the order in which they were found to be gone."""
    statuses: dict[int, int] = field(default_factory=dict)
    """Wait status of a vanished rank, if it was seen before its parent took it away: the signal in the low bits, else the exit code above them."""
    lost: dict[int, str] = field(default_factory=dict)
    """Of a rank that nothing is heard of: what is known instead of a wait status."""
    only: list[int] = field(default_factory=list)
    """The ranks that are watched, where it is not all of them."""
    _pids: dict[int, tuple[int, str]] = field(default_factory=dict)
    broken: bool = False
    """Must the command end the attempt? Here the launcher does it."""
    note: str | None = None

    def look(self) -> None:
        for rank in self.only or range(self.ranks):
            if rank in self.vanished:
                continue
            if rank not in self._pids:
                record = _read(self.attempt.ranks / f"rank_{rank}.json")
                if record is None:
                    continue
                self._pids[rank] = (int(record["pid"]), str(record["started"]))
            if not _lives(*self._pids[rank]) and not (self.attempt.ranks / f"rank_{rank}.done").exists():
                self.vanished.append(rank)
                status = wait_status(self._pids[rank][0])
                if status is not None:
                    self.statuses[rank] = status

    @property
    def started(self) -> bool:
        """Has any rank said that it is there?"""
        return bool(self._pids)

    @property
    def finished(self) -> bool:
        """Have all ranks said that they are done, and gone? Their launcher, which looks once a second, need not be waited for then."""
        done = (self.attempt.ranks / f"rank_{rank}.done" for rank in range(self.ranks))
        return self.ranks > 0 and len(self._pids) == self.ranks and all(path.exists() for path in done) and not self.living()

    def living(self) -> list[int]:
        """Pids of ranks that are still there."""
        return [pid for pid, started in self._pids.values() if _lives(pid, started)]

    def pid(self, rank: int) -> int:
        return self._pids[rank][0]

    def who(self, rank: int) -> str:
        return f"pid {self.pid(rank)}"

    def end(self) -> None:
        """The launcher ends the ranks."""

    def settle(self) -> None:
        """What is seen here is seen at once."""

    def tell(self, exit_code: int) -> None:
        """Nobody else waits for it."""


def process_start(pid: int) -> str:
    """The kernel's start time of a process: with the pid, the identity of the process. Empty when it is gone or only waits to be reaped."""
    fields = _stat(pid)
    return "" if not fields or fields[0] in "ZX" else fields[19]


def wait_status(pid: int) -> int | None:
    """How a process that waits to be reaped ended (proc(5), field exit_code); None when it is gone already."""
    fields = _stat(pid)
    return int(fields[49]) if len(fields) > 49 and fields[0] == "Z" else None


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def attempt_lives(attempt: AttemptDir) -> bool:
    """Is any rank of the attempt still a process on this machine, or one on another whose run has said something lately?"""
    records = [record for path in attempt.ranks.glob("rank_*.json") if (record := _read(path)) is not None]
    here = [record for record in records if record.get("host", this_host()) == this_host()]
    if any(_lives(int(record["pid"]), str(record["started"])) for record in here):
        return True
    state = attempt.run.read_state()
    if len(here) == len(records) or state is None or state.attempt != attempt.number:
        return False
    return state.status == "running" and why_dead(attempt.run, state) is None


def why_dead(run: RunDir, state: State) -> str | None:
    """Why a run that says `running` is not; None: it runs, or says something else.

    Where rank 0 is a process of this machine, its process decides, at once. Elsewhere the heartbeat does, by the clock of the file system that both
    machines write to, not by theirs.
    """
    if state.status != "running":
        return None
    record = _read(run.attempt(state.attempt).ranks / "rank_0.json")
    if record is not None and record.get("host", this_host()) == this_host():
        return None if _lives(int(record["pid"]), str(record["started"])) else f"its process {record['pid']} is gone"
    age = _file_age_seconds(run.state_file)
    if age <= DEAD_AFTER_SECONDS:
        return None
    return f"no heartbeat for {age:.0f} s"


def _file_age_seconds(path: Path) -> float:
    """How long ago a file was written, both times taken from its file system where that can be written to."""
    written = path.stat().st_mtime
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".now_") as probe:
            return Path(probe.name).stat().st_mtime - written
    except OSError:  # a full disk, or somebody else's run
        return time.time() - written


def this_host() -> str:
    """The name that tells the machines of a run apart."""
    return platform.node()


def _lives(pid: int, started: str) -> bool:
    return process_start(pid) == started


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None


def is_secondary(kind: str, text: str) -> bool:
    return kind in ("DistBackendError", "DistNetworkError", "RuntimeError") and any(mark in text for mark in SECONDARY)


def record_failure(attempt: AttemptDir, rank: int, error: BaseException, traceback: str) -> None:
    """A rank's last words. Written whole: the launcher may kill the rank at any moment."""
    kind = type(error).__name__
    text = redacted_text(str(error), known_values(os.environ))
    data = {
        "rank": rank,
        "time": time.time(),
        "type": kind,
        "message": text,
        "hint": getattr(error, "hint", None),
        "expected": getattr(error, "exit_code", None) is not None,
        "exit_code": getattr(error, "exit_code", None),
        "traceback": redacted_text(traceback, known_values(os.environ)),
        "secondary": is_secondary(kind, text),
    }
    fresh = attempt.failures / f".rank_{rank}"
    fresh.write_text(json.dumps(data, indent=2), encoding="utf-8")
    fresh.replace(attempt.failures / f"rank_{rank}.json")


def first_exit_code(attempt: AttemptDir) -> int | None:
    """The exit code that the first error of a rank's own asks for; None where there is none."""
    primary = _primary(_records(attempt))
    return primary[0]["exit_code"] if primary else None


def held_up(attempt: AttemptDir) -> bool:
    """Did a rank leave what it did because it was asked to stop, and a reward function or a server held it up?"""
    primary = _primary(_records(attempt))
    return bool(primary) and primary[0]["type"] == HeldUpError.__name__


def _records(attempt: AttemptDir) -> list[dict[str, Any]]:
    return [record for path in attempt.failures.glob("rank_*.json") if (record := _read(path)) is not None]


def _primary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted((record for record in records if not record["secondary"]), key=lambda record: record["time"])


def first_cause(attempt: AttemptDir, watch: Watch) -> str:
    """The first failing rank and its cause, for a person."""
    records = _records(attempt)
    primary = _primary(records)
    if primary:
        first = primary[0]
        hang = waited_in_vain(attempt, primary) if any(text in first["message"] for text in TIMED_OUT) else None
        if hang is not None:
            return hang
        hint = f"\nhint: {first['hint']}" if first["hint"] else ""
        message = first["message"].split("\nhint: ")[0]
        kind = "" if first["expected"] else f"{first['type']}: "
        return f"rank {first['rank']}: {kind}{message}{hint}\nlog: {attempt.log(first['rank'])}{'' if first['expected'] else ' has the traceback'}"
    spoken = {record["rank"] for record in records}
    silent = [rank for rank in watch.vanished if rank not in spoken]
    if silent:
        rank, told = silent[0], _log_text(attempt.logs / "launcher.log")
        asked = _ASKED.search(told)
        if asked and not _RETURN_CODE.search(told):
            log = attempt.log(rank)
            return f"the launcher was asked to end by {asked[1]}, and the ranks with it; last lines of {log}:\n{_tail(log)}"
        status = watch.statuses.get(rank, _told_by_launcher(told, watch.who(rank)))
        how = watch.lost.get(rank) or _how(status)
        return f"rank {rank} ({watch.who(rank)}) died without a word{how}; last lines of {attempt.log(rank)}:\n{_tail(attempt.log(rank))}"
    if records:
        first = min(records, key=lambda r: r["time"])
        return f"rank {first['rank']}: {first['type']}: {first['message']} (log in {attempt.log(first['rank'])})"
    log = attempt.logs / "launcher.log"
    if watch.note is not None:
        return f"{watch.note}; last lines of {log}:\n{_tail(log)}"
    if watch.started:
        return f"the launcher was ended from outside, and the ranks with it; last lines of {log}:\n{_tail(log)}"
    return f"the launcher ended before the ranks had started; last lines of {log}:\n{_tail(log)}"


def _how(status: int | None) -> str:
    if status is None:
        return ""
    number = status & 0x7F
    if number == 0:
        return f", exit code {status >> 8}"
    why = " (the kernel does that when memory runs out: see `dmesg`)" if number == signal.SIGKILL else ""
    return f", killed by {signal.Signals(number).name}{why}"


_RETURN_CODE = re.compile(r"exits with return code = (-?\d+)")
_OF_RANK = re.compile(r"rank \d+ \((pid \d+)\) exits with return code = (-?\d+)")
_ASKED = re.compile(r"asked to end by (SIG\w+)\b.*: ending the ranks$", re.MULTILINE)
"""The starter's words (`starter`); other launchers name no rank."""


def _log_text(log: Path) -> str:
    return log.read_text(errors="replace") if log.is_file() else ""


def _told_by_launcher(told: str, who: str) -> int | None:
    """Wait status of the rank `who` that a launcher found dead, for one that its parent took away before anybody had looked. None: not told, or
    several ends are, and nobody can say whose they are. A rank that dies without a word was killed by a signal if any rank was."""
    named = _OF_RANK.findall(told)
    codes = {int(code) for one, code in named if one == who} if named else {int(code) for code in _RETURN_CODE.findall(told)}
    likely = {code for code in codes if code < 0} or codes
    if len(likely) != 1:
        return None
    code = likely.pop()
    return -code if code < 0 else code << 8


def _tail(path: Path) -> str:
    if not path.is_file():
        return "  (no log)"
    lines = path.read_text(errors="replace").splitlines()[-LAST_LOG_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  (empty)"

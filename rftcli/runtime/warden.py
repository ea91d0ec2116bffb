"""Ranks on other machines: who watches them there, and how the command hears of it. Files in the attempt's folder, which every machine sees.

    python -m rftcli.runtime.warden RUN_DIR ATTEMPT NODE EXPECTED LAUNCHER_PID      one a node, started by the first rank there

A warden looks at the processes of its ranks, which nobody can do from afar, and writes `ranks/warden_NODE.json` every second: a beat, and which
ranks are gone. It ends its ranks when the command says that the attempt is over (`over.json`), or when the command itself has been silent for
SILENT_SECONDS. The command's side, `FarWatch`, reads the wardens' files and takes one that is silent for that long for a lost machine.
Beats are counted, and their age is measured by whoever reads them, so clocks of machines need not agree. No torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rftcli.runtime.rundir import AttemptDir, RunDir
from rftcli.runtime.verdict import RankWatch, process_start

BEAT_SECONDS = 1.0
SILENT_SECONDS = 60.0
"""A machine or command that has not beaten for this long is lost. Shared file systems show a change late: well above their caches' half minute."""
START_SECONDS = 300.0
"""After the first node has started, the others have this long."""
LET_SPEAK_SECONDS = 3.0
"""Between the first rank that is gone and the end of all: the others write down what they noticed."""
LEAVE_SECONDS = 10.0
"""Ranks that are told that the attempt is over leave by themselves; after this time they are killed."""
SETTLE_SECONDS = 12.0


def write_small(path: Path, data: Any) -> None:
    """A file that another machine may read at any moment; not worth a flush to disk, it is written again in a second."""
    fresh = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    fresh.write_text(json.dumps(data), encoding="utf-8")
    fresh.replace(path)


def read_small(path: Path) -> dict[str, Any] | None:
    """None where there is no whole file (yet)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(slots=True)
class Pulse:
    """The age of something that beats, by the reader's own clock."""

    beat: Any = None
    since: float = field(default_factory=time.monotonic)

    def seen(self, beat: Any) -> float:
        """Seconds since the beat last changed."""
        if beat != self.beat:
            self.beat, self.since = beat, time.monotonic()
        return time.monotonic() - self.since


def over_file(attempt: AttemptDir) -> Path:
    return attempt.path / "over.json"


def command_file(attempt: AttemptDir) -> Path:
    return attempt.path / "command.json"


class Warden:
    """Of the ranks of one node."""

    def __init__(
        self,
        attempt: AttemptDir,
        node: str,
        ranks: Sequence[int] = (),
        *,
        leave_seconds: float = LEAVE_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._leave_seconds, self._silent_seconds = leave_seconds, silent_seconds
        self._attempt = attempt
        self._file = attempt.ranks / f"warden_{node}.json"
        self._node = node
        self._beats = 0
        self._written = 0.0
        self._command = Pulse()
        self._over_since: float | None = None
        self.watch = RankWatch(attempt, 0, only=list(ranks))

    def look(self) -> None:
        """Tell how the ranks are, and end them when it is over. Called often."""
        for path in self._attempt.ranks.glob("rank_*.json"):
            record = read_small(path)
            rank = int(path.stem.removeprefix("rank_"))
            if record is not None and record.get("node") == self._node and rank not in self.watch.only:
                self.watch.only.append(rank)
        self.watch.look()
        now = time.monotonic()
        if now - self._written >= BEAT_SECONDS:
            self._written = now
            self._beats += 1
            self.write()
        command = read_small(command_file(self._attempt))
        silent = self._command.seen(None if command is None else command.get("beat"))
        if self._over_since is None and (over_file(self._attempt).exists() or silent > self._silent_seconds):
            self._over_since = now
        if self._over_since is not None and now - self._over_since > self._leave_seconds:
            self.kill()

    @property
    def over(self) -> bool:
        return self._over_since is not None

    def write(self) -> None:
        gone = {str(rank): {"pid": self.watch.pid(rank), "status": self.watch.statuses.get(rank)} for rank in self.watch.vanished}
        write_small(self._file, {"host": socket.gethostname(), "beat": self._beats, "ranks": sorted(self.watch.only), "gone": gone})

    def kill(self) -> None:
        for pid in self.watch.living():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


class FarWatch:
    """The command's eyes on ranks of other machines; stands where `RankWatch` stands on one machine. It also tells the wardens that it is there."""

    def __init__(
        self, attempt: AttemptDir, ranks: int, wardens: int, *, start_seconds: float = START_SECONDS, let_speak_seconds: float = LET_SPEAK_SECONDS
    ) -> None:
        self._start_seconds, self._let_speak_seconds = start_seconds, let_speak_seconds
        self.vanished: list[int] = []
        self.statuses: dict[int, int] = {}
        self.lost: dict[int, str] = {}
        self._attempt, self._ranks, self._wardens = attempt, ranks, wardens
        self._pulses: dict[str, Pulse] = {}
        self._hosts: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        self._beats = 0
        self._looked = 0.0
        self._first: float | None = None
        self._trouble: float | None = None
        self._missing: str | None = None

    def look(self, silent_seconds: float = SILENT_SECONDS) -> None:
        now = time.monotonic()
        if now - self._looked < BEAT_SECONDS / 2:
            return
        self._looked = now
        self._beats += 1
        write_small(command_file(self._attempt), {"host": socket.gethostname(), "beat": self._beats})
        for path in sorted(self._attempt.ranks.glob("warden_*.json")):
            told = read_small(path)
            if told is not None:
                self._hear(path.name, told, silent_seconds)
        if self._pulses and self._first is None:
            self._first = now
        if self._first is not None and len(self._pulses) < self._wardens and now - self._first > self._start_seconds:
            self._missing = f"only {len(self._pulses)} of {self._wardens} nodes started within {self._start_seconds:.0f} s"
        if (self.vanished or self._missing) and self._trouble is None:
            self._trouble = now

    def _hear(self, name: str, told: dict[str, Any], silent_seconds: float) -> None:
        age = self._pulses.setdefault(name, Pulse()).seen(told["beat"])
        for rank in told["ranks"]:
            self._hosts[rank] = told["host"]
            if rank in self.vanished or (self._attempt.ranks / f"rank_{rank}.done").exists():
                continue
            gone = told["gone"].get(str(rank))
            if gone is not None:
                self.vanished.append(rank)
                self._pids[rank] = gone["pid"]
                if gone["status"] is not None:
                    self.statuses[rank] = gone["status"]
            elif age > silent_seconds:
                self.vanished.append(rank)
                self.lost[rank] = f": nothing was heard of {told['host']} for {age:.0f} s"

    @property
    def broken(self) -> bool:
        """Must the attempt be ended? Some rank is gone, and the others have had time to write down what they noticed."""
        return self._trouble is not None and time.monotonic() - self._trouble > self._let_speak_seconds

    @property
    def started(self) -> bool:
        return bool(self._pulses)

    @property
    def finished(self) -> bool:
        """The wardens and launchers of the nodes end by themselves, and are waited for."""
        return False

    @property
    def note(self) -> str | None:
        return self._missing

    def living(self) -> list[int]:
        """None: their pids mean nothing here. Wardens end their ranks."""
        return []

    def who(self, rank: int) -> str:
        record = read_small(self._attempt.ranks / f"rank_{rank}.json") or {}
        return f"pid {self._pids.get(rank, record.get('pid'))} on {self._hosts.get(rank, record.get('host'))}"

    def end(self) -> None:
        """Tell every warden that it is over."""
        if not over_file(self._attempt).exists():
            write_small(over_file(self._attempt), {})

    def settle(self) -> None:
        """Before a verdict: a machine that is gone has not been silent for long yet, and what ranks of others wrote may show late."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and not self.vanished:
            self.look(silent_seconds=SETTLE_SECONDS * 0.6)
            time.sleep(0.2)

    def tell(self, exit_code: int) -> None:
        """The last word: the exit code that every process of the job leaves with."""
        write_small(over_file(self._attempt), {"exit_code": exit_code})


def main() -> int:
    run_dir, number, node, expected, launcher = sys.argv[1:6]
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the node's launcher ends all that its ranks started; this one has to tell of it first
    warden = Warden(RunDir(run_dir).attempt(int(number)), node)
    born = process_start(int(launcher))
    while True:
        warden.look()
        watch = warden.watch
        if not watch.living() and (len(watch.only) >= int(expected) or process_start(int(launcher)) != born or warden.over):
            warden.look()
            warden.write()
            return 0
        time.sleep(0.25)


if __name__ == "__main__":
    sys.exit(main())

"""A job that somebody else has started: torchrun, srun, mpirun or a Kubernetes operator runs the same `rft` command once for each rank.

    torchrun --nproc-per-node 2 -m rftcli train recipe.yaml

Every process becomes one rank, in a child process of its own, so that a stop request, a failure and the outcome are handled as everywhere. Rank 0
prepares the run, creates its directory, shows its progress and settles its state; the others meet it in a folder on the shared file system:

    <base>/.rft-meeting-<job>/hello_<rank>.json     "I am rank 3 on host b; my token is ..."
    <base>/.rft-meeting-<job>/answer.json           the run directory, and every token that rank 0 has heard
    <base>/.rft-meeting-<job>/here_<rank>.json      "I see that directory" (or not)

An answer without the own token is of an earlier job and is not taken. All processes leave with the same exit code. No torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rftcli.errors import EXIT_FAILED, EXIT_MACHINE, MachineError, RftError, UsageError
from rftcli.runtime.rundir import AttemptDir, RunDir
from rftcli.runtime.travel import Place, place_of
from rftcli.runtime.warden import over_file, read_small, write_small

MEET_SECONDS = 300.0
"""From the first process of a job to the last."""
SEE_SECONDS = 60.0
"""A shared file system may show a new directory this late."""
PREPARE_SECONDS = 3600.0
"""Rank 0 may look at a large data set before it answers."""
POLL_SECONDS = 0.1
JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")
"""What tells jobs apart that meet in the same folder."""


class Crew:
    """This process's place among those of its job, and how they speak to each other before the run."""

    def __init__(
        self, place: Place, base: Path, environ: Mapping[str, str], *, meet_seconds: float = MEET_SECONDS, see_seconds: float = SEE_SECONDS
    ) -> None:
        self.place = place
        self._meet_seconds, self._see_seconds = meet_seconds, see_seconds
        self.token = secrets.token_hex(8)
        told = [environ.get(name, "") for name in JOB]
        if place.local_size == place.size:  # one machine: all have one parent, which two jobs never share
            told += [socket.gethostname(), str(os.getppid())]
        job = hashlib.sha256("\0".join([*told, str(place.size)]).encode()).hexdigest()[:16]
        self._folder = base / f".rft-meeting-{job}"
        self._tokens: dict[int, str] = {}
        self._announced = False

    @property
    def leads(self) -> bool:
        return self.place.rank == 0

    # The others

    def ask(self) -> AttemptDir | int:
        """Tell rank 0 of this process, and wait for the attempt to join; or for the exit code to leave with, where rank 0 refuses to start."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_small(self._folder / f"hello_{self.place.rank}.json", {"token": self.token, "host": socket.gethostname()})
        except OSError as error:
            raise MachineError(f"{self._folder} cannot be written from {socket.gethostname()}: {error}", hint=_SHARED) from error
        answer = _wait_for(lambda: self._answer(), PREPARE_SECONDS)
        if answer is None:
            who = f"rank {self.place.rank} on {socket.gethostname()}"
            raise MachineError(f"{who} heard nothing of rank 0 in {self._folder.parent} for {PREPARE_SECONDS:.0f} s", hint=_SHARED)
        if "refused" in answer:
            return int(answer["refused"])
        attempt = RunDir(answer["run_dir"]).attempt(int(answer["attempt"]))
        seen = _wait_for(lambda: attempt.launch.is_file() or None, self._see_seconds) is not None
        write_small(self._folder / f"here_{self.place.rank}.json", {"token": self.token, "host": socket.gethostname(), "sees": seen})
        if not seen:
            raise MachineError(f"the run directory {attempt.run.path} is not seen from {socket.gethostname()}", hint=_SHARED)
        return attempt

    def _answer(self) -> dict[str, Any] | None:
        found = read_small(self._folder / "answer.json")
        return found if found is not None and found["tokens"].get(str(self.place.rank)) == self.token else None

    # Rank 0

    def gather(self) -> None:
        """Wait until every other process has said that it is there. MachineError naming those that have not."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "answer.json").unlink(missing_ok=True)

        def all_there() -> bool | None:
            for rank in range(1, self.place.size):
                hello = read_small(self._folder / f"hello_{rank}.json")
                if hello is not None:
                    self._tokens[rank] = hello["token"]
            return len(self._tokens) == self.place.size - 1 or None

        if _wait_for(all_there, self._meet_seconds) is None:
            missing = [str(rank) for rank in range(1, self.place.size) if rank not in self._tokens]
            who = f"rank {', '.join(missing)} of {self.place.size}"
            raise MachineError(f"{who} did not come to {self._folder} within {self._meet_seconds:.0f} s", hint=_SHARED)

    def announce(self, attempt: AttemptDir) -> None:
        """Give out the attempt, and wait until everybody sees its directory."""
        self._tell({"run_dir": str(attempt.run.path), "attempt": attempt.number})

        def all_here() -> list[dict[str, Any]] | None:
            self._hear_again({"run_dir": str(attempt.run.path), "attempt": attempt.number})
            told = [read_small(self._folder / f"here_{rank}.json") for rank in range(1, self.place.size)]
            mine = [one for rank, one in enumerate(told, start=1) if one is not None and one["token"] == self._tokens.get(rank)]
            return mine if len(mine) == self.place.size - 1 else None

        here = _wait_for(all_here, self._meet_seconds)
        blind = sorted({one["host"] for one in here or () if not one["sees"]})
        if here is None or blind:
            where = ", ".join(blind) or "some machine"
            write_small(over_file(attempt), {"exit_code": EXIT_MACHINE})
            raise MachineError(f"the run directory {attempt.run.path} is not seen from {where}", hint=_SHARED)
        self._announced = True
        shutil.rmtree(self._folder, ignore_errors=True)

    def refuse(self, exit_code: int) -> None:
        """Let the others leave with this code. Nothing where they have a run already: its end tells them."""
        if self._announced:
            return
        self._tell({"refused": exit_code})

    def _tell(self, answer: dict[str, Any]) -> None:
        write_small(self._folder / "answer.json", {**answer, "tokens": {str(rank): token for rank, token in self._tokens.items()}})

    def _hear_again(self, answer: dict[str, Any]) -> None:
        """A hello that was left by an earlier job of this name is replaced by the real one later: answer that too."""
        fresh = {rank: hello["token"] for rank in range(1, self.place.size) if (hello := read_small(self._folder / f"hello_{rank}.json")) is not None}
        if fresh != self._tokens:
            self._tokens = fresh
            self._tell(answer)


_SHARED = "all processes of a job need one working directory (or --run-dir) on a file system that every node shares"


def crew_of(run_dir: Path | None, environ: Mapping[str, str] | None = None) -> Crew | None:
    """The job that this process belongs to; None outside of any launcher. `run_dir`: as given on the command line, alike for all."""
    told = os.environ if environ is None else environ
    place = place_of(told)
    if place is None or (place.size == 1 and "RANK" not in told):  # an interactive shell under srun is no job of ranks
        return None
    return Crew(place, Path("runs").absolute() if run_dir is None else run_dir.absolute().parent, told)


def check_options(crew: Crew, *, ranks: int | None, gpus: int | None, several: bool) -> None:
    """UsageError where the options contradict the launcher that has started this job."""
    if several:
        raise UsageError(
            "--hostfile, --nodes and --launcher start ranks, and this process is already one of a launcher's", hint="leave them out inside a launcher"
        )
    if ranks is not None and ranks != crew.place.size:
        raise UsageError(f"--ranks {ranks}, but the launcher has started {crew.place.size}", hint="leave --ranks out inside a launcher")
    if gpus is not None and gpus != crew.place.local_size:
        here = f"the launcher has started {crew.place.local_size} on this machine"
        raise UsageError(f"--gpus {gpus}, but {here}", hint="leave --gpus out inside a launcher")


@contextlib.contextmanager
def leading(crew: Crew) -> Iterator[None]:
    """Around everything that rank 0 does before it announces the attempt: whatever ends it lets the others leave with the same exit code."""
    crew.gather()
    try:
        yield
    except RftError as error:
        crew.refuse(error.exit_code)
        raise
    except BaseException:
        crew.refuse(EXIT_FAILED)
        raise


def _wait_for(look: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found is not None:
            return found
        time.sleep(POLL_SECONDS)
    return None

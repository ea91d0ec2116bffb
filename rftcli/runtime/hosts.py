"""Which machines a run uses, and the words that start its ranks there. No torch; nothing is started here but the look at the machines.

    hostA slots=8        one machine a line, as DeepSpeed and Open MPI write it; `#` begins a comment

Several machines run DeepSpeed's launcher for many nodes. The directory of the run, the code and the Python environment lie at the same paths on
all of them, which `check` finds out before anything heavy starts. Leaves out watching the ranks (`warden`) and joining a job that somebody
else has started (`joined`).
"""

from __future__ import annotations

import base64
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rftcli.errors import MachineError, UsageError
from rftcli.redact import is_secret_name
from rftcli.runtime.rundir import AttemptDir

RANK_MODULE = "rftcli.runtime.rank"
CHECK_SECONDS = 120
"""How long the machines may take to say that they are there; importing Python over a slow file system takes a while."""
UNUSED_PORT = 29500
"""DeepSpeed asks for one. Nobody listens there: rank 0 takes a port that is free and writes it down for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Several machines, alike, in the order of their ranks. The first one is where the others meet."""

    names: tuple[str, ...]
    per_host: int
    launcher: str

    @property
    def ranks(self) -> int:
        return len(self.names) * self.per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of the command line, as given."""

    hostfile: Path | None = None
    nodes: int | None = None
    launcher: str | None = None

    @property
    def several(self) -> bool:
        return self.hostfile is not None or (self.nodes or 1) > 1


def hosts_of(asked: Asked, *, ranks: int | None, gpus: int | None, gpus_here: int) -> Hosts | None:
    """The machines that were asked for; None for this one alone. `ranks`: of all nodes together, on CPUs; `gpus`: a node.

    UsageError where the options do not fit together or the hostfile has faults, each with its line; MachineError where the launcher is missing.
    """
    if asked.launcher is not None and asked.launcher not in LAUNCHERS:
        raise UsageError(f"there is no launcher `{asked.launcher}`", hint=f"known launchers: {', '.join(LAUNCHERS)}")
    if not asked.several:
        if asked.launcher is not None:
            raise UsageError("--launcher starts ranks on several machines, and only this one was asked for", hint="add --hostfile FILE or --nodes N")
        return None
    launcher = asked.launcher or "pdsh"
    listed = _listed(asked, launcher)
    if asked.nodes is not None:
        if asked.nodes > len(listed):
            raise UsageError(f"--nodes {asked.nodes}, but only {len(listed)} hosts are listed", hint="add hosts, or ask for fewer nodes")
        listed = listed[: asked.nodes]
    per_host = _per_host(listed, asked, ranks, gpus, gpus_here)
    hosts = Hosts(names=tuple(name for name, _ in listed), per_host=per_host, launcher=launcher)
    program = LAUNCHERS[launcher].program
    if program is not None and shutil.which(program) is None:
        raise MachineError(f"the launcher `{launcher}` needs the program `{program}`, which is not here", hint=LAUNCHERS[launcher].install)
    return hosts


def _listed(asked: Asked, launcher: str) -> list[tuple[str, int | None]]:
    """(name, slots) of every host there is to choose from."""
    if asked.hostfile is not None:
        return [(name, slots) for name, slots in read_hostfile(asked.hostfile)]
    assert asked.nodes is not None
    if launcher == "slurm":
        return [(name, None) for name in _slurm_hosts()]
    if launcher == "none":  # whoever starts the others knows their names
        return [(platform.node(), None), *((f"node-{index}", None) for index in range(1, asked.nodes))]
    raise UsageError(f"--nodes {asked.nodes} does not say which machines", hint="--hostfile FILE with lines such as `worker-1 slots=8` does")


def _slurm_hosts() -> list[str]:
    names, scontrol = os.environ.get("SLURM_JOB_NODELIST"), shutil.which("scontrol")
    if names is None or scontrol is None:
        raise UsageError(
            "this is no Slurm allocation, so --launcher slurm needs a hostfile", hint="`salloc --nodes N ...` or sbatch first; or --hostfile FILE"
        )
    told = subprocess.run([scontrol, "show", "hostnames", names], capture_output=True, text=True, check=False)
    if told.returncode != 0:
        raise MachineError(f"`scontrol show hostnames {names}` failed: {told.stderr.strip()}", hint="give --hostfile FILE")
    return told.stdout.split()


def _per_host(listed: Sequence[tuple[str, int | None]], asked: Asked, ranks: int | None, gpus: int | None, gpus_here: int) -> int:
    """Ranks of each machine, the same on all."""
    nodes = len(listed)
    if ranks is not None and ranks % nodes:
        even = f"{max(1, ranks // nodes) * nodes} or {(ranks // nodes + 1) * nodes}"
        raise UsageError(f"{ranks} ranks do not divide evenly over {nodes} nodes", hint=f"--ranks {even}: every node runs as many")
    slots = {count for _, count in listed if count is not None}
    wanted = ranks // nodes if ranks is not None else gpus
    if wanted is not None:
        few = [f"{name} has {count}" for name, count in listed if count is not None and count < wanted]
        if few:
            raise UsageError(f"{wanted} ranks a node were asked for, and {few[0]} slots", hint="fewer ranks, or another hostfile")
        return wanted
    if len(slots) > 1:
        told = ", ".join(f"{name} slots={count}" for name, count in listed)
        raise UsageError(f"ranks per host are uneven: {told}", hint=f"--gpus {min(slots)} uses as many of each")
    return slots.pop() if slots else max(1, gpus_here)


def read_hostfile(path: Path) -> list[tuple[str, int]]:
    """(name, slots) of every host, in order. UsageError naming file and line of every fault."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the hostfile {path} cannot be read: {error}") from error
    found: dict[str, int] = {}
    faults = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = [_SLOTS.fullmatch(word) for word in words[1:]]
        if not _HOST.fullmatch(words[0]):
            faults.append(f"{path}:{number}  `{words[0]}` is no host name")
        elif words[0] in found:
            faults.append(f"{path}:{number}  `{words[0]}` is listed twice")
        elif len(slots) != 1 or slots[0] is None or int(slots[0][1]) < 1:
            faults.append(f"{path}:{number}  `{line.strip()}` does not say how many ranks: `{words[0]} slots=8`")
        else:
            found[words[0]] = int(slots[0][1])
    if faults:
        raise UsageError("the hostfile has faults\n" + "\n".join(faults), hint="one machine a line: `NAME slots=N`")
    if not found:
        raise UsageError(f"the hostfile {path} lists no host", hint="one machine a line: `NAME slots=N`")
    return list(found.items())


_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_SLOTS = re.compile(r"slots=(\d{1,6})")


def world_info(names: Sequence[str], per_host: int) -> str:
    """DeepSpeed's description of a job: host -> devices, as URL-safe base64 of JSON."""
    return base64.urlsafe_b64encode(json.dumps({name: list(range(per_host)) for name in names}).encode()).decode()


def node_command(hosts: Hosts, attempt: AttemptDir, node: int) -> list[str]:
    """DeepSpeed's launcher of one node: starts the ranks there and ends them when one fails."""
    return [
        *(sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world_info(hosts.names, hosts.per_host)}"),
        *(f"--node_rank={node}", f"--master_addr={hosts.names[0]}", f"--master_port={UNUSED_PORT}", "--no_local_rank", "--log_level=error"),
        *("--module", RANK_MODULE, str(attempt.run.path), str(attempt.number)),
    ]


def start_command(hosts: Hosts, attempt: AttemptDir) -> list[str]:
    """What is started here: DeepSpeed's launcher for many nodes; for `none` the part of this machine, the first."""
    if hosts.launcher == "none":
        return node_command(hosts, attempt, 0)
    hostfile = attempt.path / "hostfile"
    hostfile.write_text("".join(f"{name} slots={hosts.per_host}\n" for name in hosts.names), encoding="utf-8")
    program = ["--module", RANK_MODULE]
    if hosts.launcher == "slurm":  # DeepSpeed's srun line leaves `-m` out: a file it is
        script = attempt.path / "rank.py"
        script.write_text(f"from {RANK_MODULE} import start\n\nstart()\n", encoding="utf-8")
        program = ["--num_nodes", str(len(hosts.names)), str(script)]
    return [
        *(sys.executable, "-u", "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--launcher", hosts.launcher, "--force_multi"),
        *("--master_addr", hosts.names[0], "--master_port", str(UNUSED_PORT), "--no_ssh_check", "--no_local_rank"),
        *("--log_level", "error"),  # it would write all that it exports into its log
        *program,
        *(str(attempt.run.path), str(attempt.number)),
    ]


def start_environment(environment: dict[str, str]) -> dict[str, str]:
    """For DeepSpeed's launcher, which puts what it exports on a command line: no secrets, and no file of its own that adds some."""
    exported = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
    kept = {name: value for name, value in environment.items() if not (name.startswith(exported) and is_secret_name(name))}
    return {**kept, "DS_ENV_FILE": os.devnull}


def by_hand(hosts: Hosts, attempt: AttemptDir) -> str:
    """For `none`: what to run on the other machines."""
    lines = [
        f"  {name}: cd {shlex.quote(str(Path.cwd()))} && PYTHONPATH={shlex.quote(os.environ.get('PYTHONPATH', ''))} "
        f"{shlex.join(node_command(hosts, attempt, node))}"
        for node, name in enumerate(hosts.names)
        if node > 0
    ]
    return "\n".join(["the ranks of this machine are started; start the others:", *lines])


def check(hosts: Hosts, folder: Path) -> None:
    """Every machine answers, has this Python with DeepSpeed, and sees the folder of the run. MachineError naming those that do not."""
    remote = LAUNCHERS[hosts.launcher].remote
    if remote is None:
        return
    token = folder / f".rft-token-{socket.gethostname()}-{os.getpid()}"
    token.write_text(socket.gethostname(), encoding="utf-8")
    seen = [sys.executable, "-c", _LOOK, str(token)]
    environment = {**os.environ, "PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-oBatchMode=yes -oConnectTimeout=20"}
    try:
        told = subprocess.run(
            remote(hosts, seen), env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise MachineError(f"the machines did not answer within {CHECK_SECONDS} s: {', '.join(hosts.names)}", hint=_try(hosts)) from error
    finally:
        token.unlink(missing_ok=True)
    _judge(hosts, folder, told.stdout, told.stderr)


_LOOK = (
    "import importlib.util as u,os,socket,sys;"
    "print('rft-host',os.environ.get('RFT_HOST') or socket.gethostname(),'sees' if os.path.exists(sys.argv[1]) else 'blind',"
    "'whole' if u.find_spec('deepspeed') else 'bare')"
)
"""Standard library only: it has to speak where the package is missing too."""


def _judge(hosts: Hosts, folder: Path, out: str, err: str) -> None:
    answers = [line.split("rft-host ")[1].split() for line in out.splitlines() if "rft-host " in line]
    blind = [name for name, sight, _ in answers if sight == "blind"]
    bare = [name for name, _, python in answers if python == "bare"]
    if blind:
        raise MachineError(
            f"{folder}, where the run lies, is not seen from {', '.join(blind)}", hint="give a --run-dir on a file system that all nodes share"
        )
    if bare:
        hint = "the same environment must lie at the same path on all nodes"
        raise MachineError(f"{sys.executable} has no deepspeed on {', '.join(bare)}", hint=hint)
    if len(answers) < len(hosts.names):
        said = [line.strip() for line in err.splitlines() if line.strip()]
        silent = [name for name in hosts.names if any(name in line for line in said)] or list(hosts.names)
        why = "; ".join(said[:6]) or "no message"
        raise MachineError(f"{len(answers)} of {len(hosts.names)} machines answered; look at {', '.join(silent)}: {why}", hint=_try(hosts))


def _try(hosts: Hosts) -> str:
    return f"`{shlex.join(LAUNCHERS[hosts.launcher].attempt(hosts))}` must work without a password"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """`program`: what has to be installed; `remote`: the command that runs another one once on every host; None where nobody can."""

    program: str | None
    install: str
    remote: Callable[[Hosts, Sequence[str]], list[str]] | None

    def attempt(self, hosts: Hosts) -> list[str]:
        assert self.remote is not None
        return self.remote(hosts, ["hostname"])


def _pdsh(hosts: Hosts, command: Sequence[str]) -> list[str]:
    return ["pdsh", "-S", "-w", ",".join(hosts.names), f"cd {shlex.quote(str(Path.cwd()))}; RFT_HOST=%h {shlex.join(command)}"]


def _srun(hosts: Hosts, command: Sequence[str]) -> list[str]:
    nodes = str(len(hosts.names))
    return ["srun", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1", *command]


def _mpirun(hosts: Hosts, command: Sequence[str]) -> list[str]:
    return ["mpirun", "-n", str(len(hosts.names)), "--host", ",".join(hosts.names), *command]


# How to add one: DeepSpeed's runner has to know it; how it tells a process its rank goes into `travel.PLACES`.
LAUNCHERS: dict[str, Launcher] = {
    "pdsh": Launcher(program="pdsh", install="`apt install pdsh` or your system's package of it; or --launcher slurm, openmpi, none", remote=_pdsh),
    "slurm": Launcher(program="srun", install="run it where Slurm's commands are: on a login node or inside an allocation", remote=_srun),
    "openmpi": Launcher(program="mpirun", install="`apt install openmpi-bin`, or load your cluster's module of it", remote=_mpirun),
    "none": Launcher(program=None, install="", remote=None),
}

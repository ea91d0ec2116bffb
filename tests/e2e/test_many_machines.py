"""Runs on several machines, with two names for this one: a `pdsh` that runs the commands of its hosts here, DeepSpeed's own launchers, real ranks.

And jobs that another launcher has started: torchrun, and what srun tells its processes.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import LIMIT_SECONDS, ROOT, SMALL, Command, all_gone, events, processes_of, rank_pids, state, steps, weights_equal

PDSH = """\
#!{python}
# What pdsh does, on this machine: the command of every host at once, %n its number and %h its name, each line of output behind the host's name.
import os, subprocess, sys
arguments = sys.argv[1:]
hosts, command = None, []
while arguments:
    word = arguments.pop(0)
    if word == "-S":
        continue
    if word in ("-f", "-w"):
        value = arguments.pop(0)
        hosts = value.split(",") if word == "-w" else hosts
        continue
    command = [word, *arguments]
    break
assert not any("pkill" in word for word in command), "it would end every job of this user"
kept = {{name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "NO_COLOR", "XDG_CACHE_HOME")}}  # a login starts with little
children = []
for number, host in enumerate(hosts):
    if host in os.environ.get("UNREACHABLE", "").split(","):
        children.append(subprocess.Popen(["sh", "-c", f"echo 'pdsh@here: {{host}}: ssh exited with exit code 255' >&2; exit 255"]))
        continue
    line = " ".join(command).replace("%n", str(number)).replace("%h", host)
    if host in os.environ.get("BLIND", "").split(","):
        line = line.replace("/.rft-token", "/nowhere/.rft-token")
    line = f"({{line}}) 2>&1 | sed 's/^/{{host}}: /'"
    children.append(subprocess.Popen(["bash", "-o", "pipefail", "-c", line], env=kept, start_new_session=True))
sys.exit(max(child.wait() for child in children))
"""
TWO_HOSTS = "127.0.0.1 slots=1\nlocalhost slots=1  # the same machine by another name\n"


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs in front of all others, with `pdsh` in it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "pdsh"
    program.write_text(PDSH.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "hosts").write_text(TWO_HOSTS)
    return folder


def test_two_hosts(rft: Callable[..., Command], tmp_path: Path, on_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through DeepSpeed's runner: the run of one machine bit for bit; a rank of the second host killed, the first one ends; gone on with on both."""
    monkeypatch.setenv("WANDB_API_KEY", "f00dfeedf00dfeed")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    run = tmp_path / "run"
    arguments = ["train", "quickstart", "--ranks", "2", "--hostfile", "hosts", "--run-dir", "run", *SMALL]
    command = rft(*arguments, "--set", "launch={env: {MINE: here}, timeout_minutes: 2}")
    command.wait_for(lambda: events(run, "checkpoint"))
    assert json.loads((run / "plan.json").read_text())["world"]["nodes"] == 2
    killed = rank_pids(run)[1]
    environment = psutil.Process(killed).environ()
    os.kill(killed, signal.SIGKILL)
    result = command.wait()
    assert result.code == 1, result
    assert f"rank 1 (pid {killed} on" in result.err and "SIGKILL" in result.err, result
    assert state(run)["status"] == "failed" and processes_of(run) == []
    told = json.loads((run / "attempts" / "1" / "launch.json").read_text())
    assert told["env"]["NCCL_DEBUG"] == "WARN" and told["launch_env"]["MINE"] == "here" and told["hosts"]["names"] == ["127.0.0.1", "localhost"]
    assert "WANDB_API_KEY stays on this machine" in result.err and "WANDB_API_KEY" not in environment
    for path in run.rglob("*"):
        assert path.is_symlink() or not path.is_file() or b"f00dfeed" not in path.read_bytes(), path

    assert rft("resume", "run").wait().code == 0  # on the same hosts
    assert steps(run) == steps(straight) and weights_equal(run / "final", straight / "final")
    assert (run / "attempts" / "2" / "hostfile").is_file() and all_gone(run)


def test_without_a_remote_shell(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    """`--launcher none` starts the first host's part and prints the others'."""
    run = tmp_path / "run"
    few = [*SMALL, "--set", "train.steps=1", "--set", "eval.before_training=false"]
    command = rft("train", "quickstart", "--ranks", "2", "--nodes", "2", "--launcher", "none", "--run-dir", "run", *few)
    assert command.process.stderr is not None
    line = ""
    while "node-1:" not in line:
        line = command.process.stderr.readline()
        assert line, command.wait()
    other = subprocess.Popen(["bash", "-c", line.partition("node-1:")[2]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    result = command.wait()
    assert result.code == 0, result
    assert other.wait(LIMIT_SECONDS) == 0
    assert steps(run)[1] == steps(straight)[1] and all_gone(run)


def test_refused_before_anything_starts(rft: Callable[..., Command], tmp_path: Path, on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["train", "quickstart", "--ranks", "2", "--hostfile", "hosts", "--run-dir", "run"]
    monkeypatch.setenv("UNREACHABLE", "localhost")
    result = rft(*arguments).wait()
    assert result.code == 3 and "look at localhost: pdsh@here: localhost: ssh exited" in result.err and "`pdsh -S -w" in result.err, result
    monkeypatch.delenv("UNREACHABLE")
    monkeypatch.setenv("BLIND", "localhost")
    result = rft(*arguments).wait()
    assert result.code == 3 and "where the run lies, is not seen from localhost" in result.err and "--run-dir" in result.err, result
    monkeypatch.delenv("BLIND")
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slot=1\n127.0.0.1 slots=2\n")
    result = rft(*arguments).wait()
    assert result.code == 2 and "hosts:2  `localhost slot=1`" in result.err and "hosts:3  `127.0.0.1` is listed twice" in result.err, result
    assert not (tmp_path / "run").exists()
    (tmp_path / "hosts").write_text(TWO_HOSTS)
    result = rft(*arguments, "--launcher", "slurm").wait()
    assert result.code == 3 and "needs the program `srun`" in result.err and "hint:" in result.err, result


class Job:
    """A command that starts `rft` once for each rank."""

    def __init__(self, folder: Path, *command: str, **environment: str) -> None:
        inherited = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "NO_COLOR": "1", "RFT_CACHE_DIR": str(folder / "cache")}
        self.process = subprocess.Popen(
            command, cwd=folder, env={**inherited, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode, out


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def start(*command: str, **environment: str) -> Job:
        started.append(Job(tmp_path, *command, **environment))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        assert one.process.stdout is not None
        one.process.stdout.close()
        one.process.wait()


TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", "-m", "rftcli")


def test_torchrun(job: Callable[..., Job], tmp_path: Path, straight: Path) -> None:
    """No option beside the recipe: both processes are ranks of one run, whose directory only rank 0 has made; then an evaluation of it."""
    code, out = job(*TORCHRUN, "train", "quickstart", *SMALL).wait()
    assert code == 0, out
    (run,) = (tmp_path / "runs").glob("quickstart-*")
    assert steps(run) == steps(straight) and weights_equal(run / "final", straight / "final")
    assert out.count("step 4/4") == 1 and not list((tmp_path / "runs").glob(".rft-meeting-*")) and all_gone(run)
    code, out = job(*TORCHRUN, "eval", str(run), "--run-dir", "eval").wait()
    assert code == 0, out
    assert events(tmp_path / "eval", "eval")[0]["sets"] == events(straight, "eval")[-1]["sets"]


def test_a_joined_rank_that_dies(job: Callable[..., Job], tmp_path: Path, straight: Path) -> None:
    """Started as srun starts them, without a port to meet at: the killed rank is named, both leave with 1, resumed by torchrun."""
    ranks = [
        job(sys.executable, "-m", "rftcli", "train", "quickstart", "--run-dir", "run", *SMALL,
            SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS="2", SLURM_LOCALID=str(rank), SLURM_STEP_TASKS_PER_NODE="2", SLURM_JOB_ID="7")
        for rank in range(2)
    ]  # fmt: skip
    run = tmp_path / "run"
    while not events(run, "checkpoint"):
        time.sleep(0.02)
        assert all(one.process.poll() is None for one in ranks), [one.wait() for one in ranks]
    os.kill(rank_pids(run)[1], signal.SIGKILL)
    (first, told), (second, _) = (one.wait() for one in ranks)
    assert (first, second) == (1, 1) and "rank 1 (pid" in told and "SIGKILL" in told, told
    assert state(run)["status"] == "failed" and processes_of(run) == []
    code, out = job(*TORCHRUN, "resume", "run").wait()
    assert code == 0, out
    assert steps(run) == steps(straight) and weights_equal(run / "final", straight / "final")


def test_a_joined_job_is_refused_by_all(job: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("seed: one\n")
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [job(sys.executable, "-m", "rftcli", "train", "wrong.yaml", RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(2)]
    (first, told), (second, silent) = (one.wait() for one in ranks)
    assert (first, second) == (2, 2) and "seed" in told and silent == ""
    code, out = job(sys.executable, "-m", "rftcli", "train", "--ranks", "4", RANK="1", **place).wait()
    assert code == 2 and "the launcher has started 2" in out


def test_stopped_by_the_launcher(job: Callable[..., Job], tmp_path: Path) -> None:
    """SIGTERM to any process of a joined job: a checkpoint, and 75 from all of them."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    arguments = ("train", "quickstart", "--run-dir", "run", *SMALL, "--set", "train.steps=500", "--set", "checkpoint.every=0")
    ranks = [job(sys.executable, "-m", "rftcli", *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(2)]
    run = tmp_path / "run"
    while not events(run, "start"):
        time.sleep(0.02)
        assert all(one.process.poll() is None for one in ranks), [one.wait() for one in ranks]
    ranks[1].process.send_signal(signal.SIGTERM)
    assert [one.wait()[0] for one in ranks] == [75, 75]
    assert state(run)["status"] == "stopped" and all_gone(run)


def test_the_launcher_of_a_job_is_killed(job: Callable[..., Job], tmp_path: Path) -> None:
    """torchrun handed a port of 0 on, and is killed: its processes and their ranks end by themselves."""
    arguments = ("train", "quickstart", "--run-dir", "run", *SMALL, "--set", "train.steps=500", "--set", "checkpoint.every=0")
    launcher = job(*TORCHRUN[:1], "--nproc-per-node", "2", "--master-port", "0", "-m", "rftcli", *arguments)
    run = tmp_path / "run"
    while not events(run, "step"):
        time.sleep(0.02)
        assert launcher.process.poll() is None, launcher.wait()
    launcher.process.kill()
    assert all_gone(run)
    deadline = time.monotonic() + 60
    while state(run)["status"] == "running" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert state(run)["status"] == "failed" and "the launcher that had started this job" in state(run)["cause"]


def test_the_printed_command_is_one_command(tmp_path: Path) -> None:
    from rftcli.runtime.hosts import Hosts, by_hand
    from rftcli.runtime.rundir import RunDir

    text = by_hand(Hosts(names=("a", "b"), per_host=2, launcher="none"), RunDir(tmp_path / "my run").attempt(3))
    words = shlex.split(text.splitlines()[1].partition("b: ")[2])
    assert words[0] == "cd" and "--node_rank=1" in words and words[-2:] == [str(tmp_path / "my run"), "3"]

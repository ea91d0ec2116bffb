"""Hostfiles, options, and the words that start ranks on other machines; nothing is started."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from rftcli.errors import EXIT_MACHINE, EXIT_USAGE, MachineError, RftError, UsageError
from rftcli.runtime.hosts import LAUNCHERS, Asked, Hosts, hosts_of, read_hostfile, start_command, start_environment
from rftcli.runtime.rundir import RunDir


@pytest.fixture
def hostfile(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str) -> Path:
        (tmp_path / "hosts").write_text(text)
        return tmp_path / "hosts"

    return write


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every launcher's program is there, and does nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("pdsh", "srun", "mpirun"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    return folder


def test_a_hostfile(hostfile) -> None:  # type: ignore[no-untyped-def]
    assert read_hostfile(hostfile("# ours\n\nworker-1 slots=8\n10.0.0.2   slots=4 # smaller\n")) == [("worker-1", 8), ("10.0.0.2", 4)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a slots=8\na slots=8\n", ":2  `a` is listed twice"),
        ("a\n", ":1  `a` does not say how many ranks"),
        ("a slots=0\n", ":1  "),
        ("a slots=x\n", ":1  "),
        ("a slots=2 max=3\n", ":1  "),
        ("-w slots=2\n", ":1  `-w` is no host name"),
        ("a;reboot slots=2\n", ":1  `a;reboot` is no host name"),
        ("# nothing\n", "lists no host"),
    ],
)
def test_faults_of_a_hostfile(hostfile, text: str, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as caught:
        read_hostfile(hostfile(text))
    assert says in caught.value.message and "hosts" in caught.value.message and caught.value.hint


def test_all_faults_at_once(hostfile) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as caught:
        read_hostfile(hostfile("a\nb slots=2\nb slots=2\n"))
    assert ":1  " in caught.value.message and ":3  " in caught.value.message and ":2  " not in caught.value.message


@pytest.mark.parametrize(
    ("text", "asked", "expected"),
    [
        ("a slots=8\nb slots=8\n", {}, (("a", "b"), 8)),
        ("a slots=8\nb slots=8\nc slots=8\n", {"nodes": 2}, (("a", "b"), 8)),
        ("a slots=8\nb slots=4\n", {"gpus": 4}, (("a", "b"), 4)),
        ("a slots=8\nb slots=8\n", {"ranks": 4}, (("a", "b"), 2)),
        ("a slots=2\n", {}, (("a",), 2)),
    ],
)
def test_machines_and_ranks(hostfile, programs: Path, text: str, asked: dict[str, int], expected: object) -> None:  # type: ignore[no-untyped-def]
    found = hosts_of(Asked(hostfile=hostfile(text), nodes=asked.get("nodes")), ranks=asked.get("ranks"), gpus=asked.get("gpus"), gpus_here=0)
    assert found is not None and (found.names, found.per_host) == expected and found.ranks == len(found.names) * found.per_host


@pytest.mark.parametrize(
    ("asked", "ranks", "gpus", "says", "code"),
    [
        ({"nodes": 3}, None, None, "only 2 hosts are listed", EXIT_USAGE),
        ({}, None, None, "uneven: a slots=8, b slots=4", EXIT_USAGE),
        ({}, 3, None, "3 ranks do not divide evenly over 2 nodes", EXIT_USAGE),
        ({}, None, 5, "b has 4 slots", EXIT_USAGE),
        ({"launcher": "ray"}, None, 4, "there is no launcher `ray`", EXIT_USAGE),
        ({"hostfile": None, "launcher": "pdsh"}, None, None, "only this one was asked for", EXIT_USAGE),
        ({"hostfile": None, "nodes": 2}, None, None, "does not say which machines", EXIT_USAGE),
        ({"hostfile": None, "nodes": 2, "launcher": "slurm"}, None, None, "no Slurm allocation", EXIT_USAGE),
    ],
)
def test_refused(hostfile, programs: Path, asked: dict[str, object], ranks: int | None, gpus: int | None, says: str, code: int) -> None:  # type: ignore[no-untyped-def]
    given = {"hostfile": hostfile("a slots=8\nb slots=4\n"), **asked}
    with pytest.raises(RftError, match=says.replace("(", "\\(")) as caught:
        hosts_of(Asked(**given), ranks=ranks, gpus=gpus, gpus_here=0)  # type: ignore[arg-type]
    assert caught.value.exit_code == code and caught.value.hint


@pytest.mark.parametrize("launcher", [name for name, row in LAUNCHERS.items() if row.program])
def test_a_launcher_that_is_not_installed(hostfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="is not here") as caught:
        hosts_of(Asked(hostfile=hostfile("a slots=1\nb slots=1\n"), launcher=launcher), ranks=None, gpus=None, gpus_here=0)
    assert caught.value.exit_code == EXIT_MACHINE and caught.value.hint


def test_this_machine_alone() -> None:
    assert hosts_of(Asked(), ranks=2, gpus=None, gpus_here=0) is None


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "slurm"])
def test_deepspeed_takes_the_command(tmp_path: Path, launcher: str) -> None:
    """Its own parser and its own runner make of it what was meant: our module on every host, the attempt as its arguments."""
    from deepspeed.launcher import multinode_runner, runner

    run = RunDir(tmp_path / "run")
    run.create()
    run.attempt(1).create()
    hosts = Hosts(names=("a", "b"), per_host=2, launcher=launcher)
    words = start_command(hosts, run.attempt(1))
    arguments = runner.parse_args(words[words.index("deepspeed.launcher.runner") + 1 :])
    pool = runner.fetch_hostfile(arguments.hostfile)
    assert pool == {"a": 2, "b": 2} and arguments.no_ssh_check and arguments.master_addr == "a" and arguments.log_level == "error"
    info = base64.urlsafe_b64encode(json.dumps({"a": [0, 1], "b": [0, 1]}).encode()).decode()
    made = {
        "pdsh": lambda: multinode_runner.PDSHRunner(arguments, info).get_cmd({}, {"a": [0, 1], "b": [0, 1]})[0],
        "openmpi": lambda: multinode_runner.OpenMPIRunner(arguments, info, pool).get_cmd({}, pool),
        "slurm": lambda: multinode_runner.SlurmRunner(arguments, info, pool).get_cmd({}, {"a": [0, 1], "b": [0, 1]}),
    }[launcher]()
    assert made[-2:] == [str(run.path), "1"]
    if launcher == "slurm":
        assert made[:3] == ["srun", "-n", "4"] and "start()" in Path(made[-3]).read_text()
    else:
        assert made[-3] == "rftcli.runtime.rank" and ("a,b" in made if launcher == "pdsh" else "4" in made)


def test_no_secrets_on_deepspeeds_command_line() -> None:
    kept = start_environment({"MLFLOW_TRACKING_PASSWORD": "x", "NCCL_DEBUG": "INFO", "PATH": "/bin", "HF_TOKEN": "y"})
    assert kept == {"NCCL_DEBUG": "INFO", "PATH": "/bin", "HF_TOKEN": "y", "DS_ENV_FILE": "/dev/null"}  # the last is in the environment only

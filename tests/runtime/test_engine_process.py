"""A process that a rank starts: it ends with it however that ends, says why it ended, and has a port that nobody else takes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rftcli.engines.vllm_serve import arguments
from rftcli.runtime.engine_process import EngineProcess, HeldPort, environment, flags, own_devices, telling_line

FAMILY = "import os, pathlib, subprocess, sys, time; c = subprocess.Popen(['sleep', '300']); f = pathlib.Path(sys.argv[1]); "
FAMILY += "f.with_suffix('.new').write_text(f'{os.getpid()} {c.pid}'); f.with_suffix('.new').replace(f); time.sleep(300)"
RANK = """
import os, pathlib, sys, time
from rftcli.runtime.engine_process import EngineProcess, HeldPort
process = EngineProcess([sys.executable, "-c", sys.argv[1], sys.argv[2]], os.environ, pathlib.Path(sys.argv[2] + ".log"), HeldPort("127.0.0.1"))
time.sleep(300)
"""


def until(found: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_ends_in_any_way_leaves_no_engine(tmp_path: Path, number: int) -> None:
    told = tmp_path / "pids"
    rank = subprocess.Popen([sys.executable, "-c", RANK, FAMILY, str(told)], env=os.environ)
    until(told.exists)
    pids = [int(word) for word in told.read_text().split()]
    assert all(alive(pid) for pid in pids)
    rank.send_signal(number)
    rank.wait()
    until(lambda: not any(alive(pid) for pid in pids))


def test_stopping_ends_what_the_engine_has_started(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    port = HeldPort("127.0.0.1")
    process = EngineProcess([sys.executable, "-c", FAMILY, str(told)], os.environ, tmp_path / "log", port)
    until(told.exists)
    assert process.last_words() is None
    process.stop()
    assert not any(alive(int(word)) for word in told.read_text().split())
    assert (process.last_words() or "").startswith("it ended with signal SIGTERM")


@pytest.mark.parametrize(("code", "words"), [
    ("print('loading'); raise ValueError('no such model')", "it ended with code 1; {log} says: ValueError: no such model"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "it ended with signal SIGKILL; {log} says: nothing"),
    (
        "print('OSError: disk'); print('WARNING 1 Found ulimit of 2, which may cause OSError: [Errno 24]'); raise SystemExit(3)",
        "it ended with code 3; {log} says: OSError: disk",
    ),
    ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "it ended with signal SIGKILL; {log} says: nothing"),
])
def test_an_engine_that_ended_says_why(tmp_path: Path, code: str, words: str) -> None:
    log = tmp_path / "log"
    process = EngineProcess([sys.executable, "-c", code], {**os.environ, "TMPDIR": str(tmp_path)}, log, HeldPort("127.0.0.1"))
    until(lambda: process.last_words() is not None)
    assert process.last_words() == words.format(log=log)
    process.stop()
    assert telling_line(tmp_path / "none").startswith("nothing (")


HOLDER = '''
import os, pathlib, signal, subprocess, sys, time
held = pathlib.Path(sys.argv[1])
child = """import pathlib, signal, sys, time
held = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (held.unlink(), sys.exit()))
held.touch()
time.sleep(300)"""
subprocess.Popen([sys.executable, "-c", child, sys.argv[1]])
while not held.exists():
    time.sleep(0.02)
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGKILL)
'''


def test_what_an_engine_has_started_gives_back_what_it_holds(tmp_path: Path) -> None:
    """Also where the engine itself was killed: shared memory stays on the machine otherwise."""
    held = tmp_path / "held"
    process = EngineProcess([sys.executable, "-c", HOLDER, str(held)], os.environ, tmp_path / "log", HeldPort("127.0.0.1"))
    until(held.exists)
    until(lambda: process.last_words() is not None)
    assert (process.last_words() or "").startswith("it ended with signal SIGKILL")
    until(lambda: not held.exists(), 3.0)
    process.stop()


@pytest.mark.parametrize("killed", [False, True], ids=["asked", "by-itself"])
def test_the_folder_of_an_engine_s_sockets_ends_with_it(tmp_path: Path, killed: bool) -> None:
    code = "import os, pathlib, time; folder = os.environ['VLLM_RPC_BASE_PATH']; pathlib.Path(folder, 'one').touch(); print(folder, flush=True)"
    log = tmp_path / "log"
    process = EngineProcess([sys.executable, "-c", code + ("" if killed else "; time.sleep(300)")], os.environ, log, HeldPort("127.0.0.1"))
    until(lambda: log.read_text().endswith("\n"))
    folder = Path(log.read_text().strip())
    if killed:
        until(lambda: process.last_words() is not None)
    else:
        assert (folder / "one").exists()
    process.stop()
    assert not folder.exists()


def test_a_command_that_is_not_there_leaves_no_folder(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    process = EngineProcess(["/nowhere/vllm", "serve"], environ, tmp_path / "log", HeldPort("127.0.0.1"))
    until(lambda: process.last_words() is not None)
    process.stop()
    assert process.no_program and not list(tmp_path.glob("rft-engine-*"))


def test_a_port_is_kept_for_the_server_alone() -> None:
    ports = [HeldPort("127.0.0.1") for _ in range(20)]
    assert len({port.number for port in ports}) == 20
    with socket.create_server(("127.0.0.1", ports[0].number)) as server, socket.create_connection(("127.0.0.1", ports[0].number)):
        peer, _ = server.accept()
        peer.close()
    with socket.socket() as rude, pytest.raises(OSError, match="in use"):
        rude.bind(("127.0.0.1", ports[1].number))
    for port in ports:
        port.close()


def test_an_engine_is_not_told_the_ranks_place() -> None:
    base = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "0,1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "A": "1"}
    found = environment(base, {"A": "2", "B": "3"}, ["4", "5"])
    assert found == {"CUDA_VISIBLE_DEVICES": "4,5", "A": "1", "B": "3", "VLLM_SERVER_DEV_MODE": "1"}
    assert environment(base, {}, None)["CUDA_VISIBLE_DEVICES"] == "0,1"
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(torch.__file__).parents[1]), "/src"])}
    assert environment(paths, {}, None, own=False)["PYTHONPATH"] == "/src" and environment(paths, {}, None)["PYTHONPATH"] == paths["PYTHONPATH"]
    assert own_devices({"CUDA_VISIBLE_DEVICES": "6, GPU-ab,2"}, 1, 2) == ["GPU-ab", "2"] and own_devices({}, 1, 2) == ["1", "2"]


def test_arguments_become_words() -> None:
    assert flags({"a_b": [1, 2], "c": {"d": 1}, "e": None, "f": True, "g": False, "h": 0.5}) == [
        "--a-b", "1", "2", "--c", '{"d": 1}', "--f", "--no-g", "--h", "0.5",
    ]  # fmt: skip
    given = ["m", "--graphs-up-to", "600", "--x"]
    assert arguments(given, scale_out=False, graph_size=True) == ["m", "--compilation-config", '{"max_cudagraph_capture_size": 608}', "--x"]
    older = arguments(given, scale_out=True, graph_size=False)
    assert older[-1] == "--enable-scale-out" and '"cudagraph_capture_sizes": [1, 2, 4, 8,' in older[2] and "608]" in older[2]
    own = ["m", "--compilation-config", '{"mode": 2}', "--graphs-up-to", "24", "--x"]
    assert arguments(own, scale_out=False, graph_size=True) == ["m", "--compilation-config", '{"max_cudagraph_capture_size": 24, "mode": 2}', "--x"]
    own[2] = '{"max_cudagraph_capture_size": 8}'
    assert arguments(own, scale_out=False, graph_size=True) == ["m", "--compilation-config", '{"max_cudagraph_capture_size": 8}', "--x"]
    assert arguments(own[:3], scale_out=False, graph_size=True) == own[:3]

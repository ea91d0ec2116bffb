"""vLLM servers that a rank starts: their command line, their environment, a port that nobody else takes, their log, their end.

Leaves out what is said to them (`engines`), and which rank starts which (`vllm_apart`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rftcli.ports import HeldPort
from rftcli.redact import redacted_text

STOP_SECONDS = 15.0
SHOWN = 300
NO_ERROR = ("error_response", "WARNING", "Warning", " INFO ")
"""Words of lines of a log that end nothing."""
ELSEWHERE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a rank is told of its place: an engine that read it would join the ranks."""
ALWAYS = {"VLLM_SERVER_DEV_MODE": "1"}
"""The endpoints that take weights and empty caches."""
ON_A_CPU = {"enable_chunked_prefill": False}
"""Arguments of vLLM's CPU build, unless a recipe has others: a prompt that is cut between two passes ends the engine where its request has a seed.
vLLM then sets the generator back, and torch's for a CPU cannot be."""
UNLESS_SET = {
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent anywhere
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are the same ones
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles at the first start, and takes no seeds of rows
}
"""Environment of vLLM, inside a rank and in a process of its own."""
OWN_COMMAND = (sys.executable, "-m", "rftcli.engines.vllm_serve")
"""Starts a server where the recipe names no command."""
LAST_LINES = 8
"""Of a log, shown when its server is gone."""


class EngineProcess:
    """One server under its guard. It ends with `stop`, or with this process, however that ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, port: HeldPort) -> None:
        self.log, self._port = log, port
        self.no_program = shutil.which(command[0], path=environment.get("PATH")) is None
        """Is there none of the command's first word?"""
        self._code: int | None = None
        self._ended, tells = os.pipe()
        os.set_blocking(self._ended, False)
        with log.open("ab") as file:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "rftcli.runtime.engine_guard", str(tells), *command],
                env=dict(environment), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, pass_fds=(tells,),
            )  # fmt: skip
        os.close(tells)

    def last_words(self) -> str | None:
        """How it ended and the line of its log that says most; None while it lives."""
        code = self._how_it_ended()
        if code is None:
            return None
        number = -code if code < 0 else code - 128  # of a guard that was killed itself
        how = f"signal {signal.Signals(number).name}" if 0 < number < signal.NSIG else f"code {code}"
        return f"it ended with {how}; {self.log} says: {telling_line(self.log)}"

    def _how_it_ended(self) -> int | None:
        """The command's exit code, as soon as it has ended; its guard's, where that was killed."""
        if self._code is None:
            with contextlib.suppress(OSError, ValueError):  # nothing was written; the pipe is closed
                self._code = int(os.read(self._ended, 16))
        return self._guard.poll() if self._code is None else self._code

    def end_of_log(self) -> str:
        """Its last lines, one under the other, with an indent."""
        return "".join(f"\n  {line}" for line in last_lines(self.log, LAST_LINES))

    def ask_to_end(self) -> None:
        self._guard.terminate()

    def stop(self) -> None:
        """Its end, awaited."""
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(STOP_SECONDS)
        if self._guard.poll() is None:
            self._guard.kill()
            self._guard.wait()
        self._how_it_ended()
        if self._ended >= 0:
            os.close(self._ended)
            self._ended = -1
        self._port.close()


def serve(
    command: Sequence[str], arguments: Sequence[str], env: Mapping[str, str], log: Path, host: str, bind: str
) -> tuple[str, EngineProcess]:
    """A server on its way, and its address as others see it (`host`); it listens at `bind`, on a port that it alone has."""
    port = HeldPort(bind)
    process = EngineProcess([*command, *arguments, "--host", bind, "--port", str(port.number)], env, log, port)
    return f"http://{host}:{port.number}", process


def stop_all(processes: Sequence[EngineProcess]) -> None:
    for process in processes:
        process.ask_to_end()  # all at once: each takes its time
    for process in processes:
        process.stop()


def host_and_bind(*, several: bool) -> tuple[str, str]:
    """Of a server on this machine: its name for those that ask, and where it listens. `several`: ranks on other machines ask too."""
    return (socket.gethostname(), "0.0.0.0") if several else ("127.0.0.1", "127.0.0.1")


def telling_line(log: Path) -> str:
    """The last line with an error, or the last one at all. Warnings name errors that might come."""
    try:
        lines = _lines(log)
    except OSError as error:
        return f"nothing ({error.strerror})"
    errors = [line for line in lines if "Error" in line and not any(word in line for word in NO_ERROR)]
    found = (errors or lines or ["nothing"])[-1]
    return redacted_text(found[-SHOWN:])


def last_lines(log: Path, count: int) -> list[str]:
    """Each cut to a length that a terminal shows."""
    try:
        return [redacted_text(line[:SHOWN]) for line in _lines(log)[-count:]]
    except OSError:
        return []


def _lines(log: Path) -> list[str]:
    return [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


def environment(base: Mapping[str, str], more: Mapping[str, str], devices: Sequence[str] | None, *, own: bool = True) -> dict[str, str]:
    """Of a server: a rank's own, without its place among the ranks. `devices`: the GPUs that it sees; None: as the rank. Not `own`: it may be another
    Python's, which has to find its own packages."""
    found = {name: value for name, value in base.items() if name not in ELSEWHERE}
    found |= {name: value for name, value in more.items() if name not in base} | ALWAYS
    found.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # of engines inside a rank
    if not own:
        paths = [path for path in found.get("PYTHONPATH", "").split(os.pathsep) if path and not (Path(path) / "torch").is_dir()]
        found["PYTHONPATH"] = os.pathsep.join(paths)
    if devices is not None:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return found


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of `vllm.LLM` as words of a command line; None is left out.

    >>> flags({"max_num_seqs": 8, "enforce_eager": True, "enable_x": False, "compilation_config": {"mode": 3}, "seed": None})
    ['--max-num-seqs', '8', '--enforce-eager', '--no-enable-x', '--compilation-config', '{"mode": 3}']
    """
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            words += [f"--{flag}", json.dumps(dict(value))]
        elif isinstance(value, (list, tuple)):
            words += [f"--{flag}", *(json.dumps(one) if isinstance(one, Mapping) else str(one) for one in value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def devices_of_machine(environ: Mapping[str, str], gpus: Sequence[int]) -> list[str]:
    """Names of a machine's GPUs, counted as the plan counts them. A rank may see fewer than there are: those beyond them go by their numbers."""
    listed = _listed(environ)
    return [listed[gpu] if gpu < len(listed) else str(gpu) for gpu in gpus]


def _listed(environ: Mapping[str, str]) -> list[str]:
    return [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def own_devices(environ: Mapping[str, str], first: int, count: int) -> list[str]:
    """Names of the `count` GPUs from the `first` that this process sees, as a process that sees others has to be told."""
    listed = _listed(environ)
    return listed[first : first + count] if listed else [str(number) for number in range(first, first + count)]

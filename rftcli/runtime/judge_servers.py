"""vLLM servers of judges: their arguments, that they are ready, asleep or gone, their end. Whoever starts them is their parent.

Each is under its guard (`engine_guard`), so that none outlives that parent. Leaves out which rank starts which (`judges`). No torch.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftcli.builtin import builtin_path
from rftcli.engines.vllm_http import Server, Wire, plain
from rftcli.engines.vllm_offer import names_of, wait_for
from rftcli.errors import RftError, UsageError
from rftcli.rewards.scorers.desk import ScorerGoneError
from rftcli.rewards.scorers.spec import ScorerSpec, StartSpec
from rftcli.runtime.engine_process import (
    ON_A_CPU,
    OWN_COMMAND,
    UNLESS_SET,
    EngineProcess,
    devices_of_machine,
    environment,
    flags,
    host_and_bind,
    own_devices,
    serve,
    stop_all,
)
from rftcli.runtime.rundir import write_text

CONTROL_SECONDS = 30.0
SLEEP_SECONDS = 300.0
"""For weights on their way to CPU memory and back."""
HINT = "memory and arguments are `placement.memory_share` and `placement.options`, a judge's longest question is `max_tokens`; then `rft resume`"
NO_PROGRAM = "`placement.command` starts with a program that is there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """The process that starts servers."""

    rank: int | None = None
    """None: no rank, of no job."""
    gpu: int | None = None
    """Number of its own device among those that it sees; None: it has none."""
    several: bool = False
    """Ranks on other machines ask its servers too."""
    own_command: tuple[str, ...] = OWN_COMMAND
    """Starts a server where the recipe names no command."""


class JudgeServers:
    """The servers of one `StartSpec`, started by this process."""

    def __init__(self, name: str, start: StartSpec, folder: Path, by: Starter, *, teacher: bool = False) -> None:
        """`name`: of the first scorer that asks them; `teacher`: they are no judge's. `folder`: for logs."""
        self._start = start
        self._what, self._section = ("the teacher", "models.teacher") if teacher else (f"judge `{name}`", f"models.scorers.{name}")
        self.model = f"rft-judge-{uuid.uuid4().hex[:12]}"
        self._processes: list[EngineProcess] = []
        self._servers: list[Server] = []
        stem = "teacher" if teacher else f"judge_{name}" if not start.beside or by.rank is None else f"judge_{name}_rank_{by.rank}"
        template = None if start.template is None else folder / f"{stem}.jinja"
        if template is not None:
            write_text(template, str(start.template))
        words = [_place(start.path), *flags(arguments(start, self.model, template))]
        host, bind = host_and_bind(several=by.several and not start.beside)
        for number in range(start.servers):
            own = start.gpus[number * start.tensor_parallel : (number + 1) * start.tensor_parallel]
            devices = devices_of_machine(os.environ, own) if own else own_devices(os.environ, by.gpu, 1) if by.gpu is not None else None
            env = environment(os.environ, UNLESS_SET, devices, own=not start.command)
            log = folder / (f"{stem}_{number}.log" if start.servers > 1 else f"{stem}.log")
            url, process = serve(start.command or by.own_command, words, env, log, host, bind)
            self._processes.append(process)
            self._servers.append(Server(url=url, last_words=process.last_words, gpus=tuple(devices or ())))

    @property
    def beside(self) -> bool:
        return self._start.beside

    @property
    def urls(self) -> tuple[str, ...]:
        """As OpenAI's clients want them."""
        return tuple(f"{server.url}/v1" for server in self._servers)

    def wait(self) -> None:
        """Until all are healthy and serve this run's judge. RftError with the end of the log of one that is not."""
        wire = Wire(timeout_seconds=CONTROL_SECONDS)
        try:
            for server, process in zip(self._servers, self._processes, strict=True):
                try:
                    wait_for(wire, server, self._start.ready_seconds, key=f"{self._section}.placement.ready_seconds")
                    self._check_model(wire, server)
                    self._rest(wire, server)
                except RftError as error:
                    message = f"{self._what} ({self._start.given}): {error.message}{process.end_of_log()}"
                    raise type(error)(message, hint=error.hint or (NO_PROGRAM if process.no_program else HINT)) from error
        finally:
            wire.close()

    def _check_model(self, wire: Wire, server: Server) -> None:
        reply = wire.call(server, "GET", "/v1/models")
        listed = names_of(plain(server, "/v1/models", reply)) if reply.status_code == 200 else []
        if self.model not in listed:
            raise UsageError(f"{server.shown} serves {', '.join(listed) or 'no model'}, not {self.model}", hint="another server has taken its port")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Awake; asleep again afterwards, where the plan says so."""
        wire = Wire(timeout_seconds=CONTROL_SECONDS)
        try:
            for server in self._servers if self._start.sleeps else ():
                self._control(wire, server, "/wake_up")
            yield
            for server in self._servers:
                self._rest(wire, server)
        finally:
            wire.close()

    def _rest(self, wire: Wire, server: Server) -> None:
        if self._start.sleeps:
            self._control(wire, server, "/sleep?level=1")  # weights wait in CPU memory, the cache is given up

    def _control(self, wire: Wire, server: Server, path: str) -> None:
        try:
            reply = wire.call(server, "POST", path, seconds=SLEEP_SECONDS)
        except RftError as error:
            raise ScorerGoneError(self.last_words() or f"{self._what}: {error.message}", hint=error.hint) from error
        if reply.status_code != 200:
            message = f"{self._what} does not take {path}: status {reply.status_code}"
            raise RftError(message, hint=f"{self._section}.offload: false")

    def last_words(self) -> str | None:
        """Of the first that has ended, with the end of its log; None while all live."""
        for process in self._processes:
            words = process.last_words()
            if words is not None:
                return f"the server of {self._what} ({self._start.given}) is gone: {words}{process.end_of_log()}"
        return None

    @property
    def processes(self) -> tuple[EngineProcess, ...]:
        return tuple(self._processes)


def owner(specs: Sequence[ScorerSpec], spec: ScorerSpec) -> str:
    """The first scorer that has the same servers."""
    return next(other.name for other in specs if other.start == spec.start)


def started(specs: Sequence[ScorerSpec], folder: Path, by: Starter, *, apart: bool = True, beside: bool = True) -> dict[str, JudgeServers]:
    """Servers on their way, of judges apart from the ranks and beside them; RftError where a process cannot be started."""
    found: dict[str, JudgeServers] = {}
    try:
        for spec in specs:
            if spec.start is not None and owner(specs, spec) == spec.name and (beside if spec.start.beside else apart):
                found[spec.name] = JudgeServers(spec.name, spec.start, folder, by)
    except OSError as error:
        end_all(found)
        raise RftError(f"a judge's server cannot be started: {error}", hint=NO_PROGRAM) from error
    return found


def told_of(own: Mapping[str, JudgeServers]) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {name: (servers.model, servers.urls) for name, servers in own.items()}


def end_all(own: Mapping[str, JudgeServers]) -> None:
    stop_all([process for servers in own.values() for process in servers.processes])


def arguments(start: StartSpec, model: str, template: Path | None) -> dict[str, Any]:
    """Of `vllm serve`, but for the model and where it listens. Temperature and length come with each request."""
    on_gpus = bool(start.gpus) or (start.beside and start.memory_share is not None)
    found: dict[str, Any] = {
        "served_model_name": model,
        "revision": start.revision,
        "tokenizer": None if start.tokenizer is None else _place(start.tokenizer),
        "tokenizer_revision": None if start.tokenizer is None or start.revision is None else "main",  # vLLM would take the checkpoint's
        "chat_template": None if template is None else str(template.absolute()),
        "dtype": start.dtype,
        "trust_remote_code": start.trust_remote_code or None,
        "tensor_parallel_size": start.tensor_parallel,
        "max_model_len": start.max_model_tokens,
        "gpu_memory_utilization": start.memory_share if on_gpus else None,
        "kv_cache_memory_bytes": start.cache_bytes,
        "enforce_eager": None if on_gpus else True,
        "enable_sleep_mode": True if start.sleeps else None,
        "enable_prefix_caching": True,  # questions begin alike
        "generation_config": "vllm",
        "disable_log_stats": True,
        "uvicorn_log_level": "warning",
    }
    return found | ({} if on_gpus else ON_A_CPU) | dict(start.options)


def _place(path: str) -> str:
    return str(builtin_path(path.removeprefix("builtin:"))) if path.startswith("builtin:") else path

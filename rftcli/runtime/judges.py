"""Judges that the run starts: servers on their way before models are loaded, waited for before the first rollout, watched, and ended with the run.

They are children of the first rank, which every rank asks. Each is under its guard (`engine_guard`), so that none outlives whoever started it. One
that ends while it is needed ends the run, with the last lines of its log. Leaves out what a judge is asked (`rewards.scorers.judge`). No torch.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rftcli.builtin import builtin_path
from rftcli.engines.vllm_http import Server, Wire
from rftcli.engines.vllm_offer import wait_for
from rftcli.errors import RftError, UsageError
from rftcli.protocols import World
from rftcli.rewards.scorers.spec import ScorerSpec, StartSpec
from rftcli.runtime.agreed import agreed
from rftcli.runtime.engine_process import (
    OWN_COMMAND,
    UNLESS_SET,
    EngineProcess,
    devices_of_machine,
    environment,
    flags,
    host_and_bind,
    serve,
    stop_all,
)
from rftcli.runtime.rundir import AttemptDir, write_text

CONTROL_SECONDS = 30.0
GONE_SECONDS = 3.0
"""How long a broken connection waits for word that the server has ended: the guard sees it within a third of a second, other ranks by a file."""
LOOK_SECONDS = 0.2
HINT = "memory and arguments are `placement.memory_share`, `placement.options` and `max_tokens` of the scorer; then `rft resume`"


class JudgeServers:
    """The servers of one `StartSpec`, started by this process."""

    def __init__(self, name: str, start: StartSpec, folder: Path, *, several: bool) -> None:
        """`name`: of the first scorer that asks them. `folder`: for logs. `several`: ranks on other machines ask too."""
        self._name, self._start = name, start
        self.model = f"rft-judge-{uuid.uuid4().hex[:12]}"
        self._processes: list[EngineProcess] = []
        self._servers: list[Server] = []
        template = None if start.template is None else folder / f"judge_{name}.jinja"
        if template is not None:
            write_text(template, str(start.template))
        words = [_place(start.path), *flags(arguments(start, self.model, template))]
        host, bind = host_and_bind(several=several)
        for number in range(start.servers):
            own = start.gpus[number * start.tensor_parallel : (number + 1) * start.tensor_parallel]
            devices = devices_of_machine(os.environ, own) if own else None
            env = environment(os.environ, UNLESS_SET, devices, own=not start.command)
            log = folder / (f"judge_{name}_{number}.log" if start.servers > 1 else f"judge_{name}.log")
            url, process = serve(start.command or OWN_COMMAND, words, env, log, host, bind)
            self._processes.append(process)
            self._servers.append(Server(url=url, last_words=process.last_words))

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
                    wait_for(wire, server, self._start.ready_seconds, key=f"models.scorers.{self._name}.placement.ready_seconds")
                    self._check_model(wire, server)
                except RftError as error:
                    message = f"judge `{self._name}` ({self._start.given}): {error.message}{process.end_of_log()}"
                    raise type(error)(message, hint=error.hint or HINT) from error
        finally:
            wire.close()

    def _check_model(self, wire: Wire, server: Server) -> None:
        reply = wire.call(server, "GET", "/v1/models")
        listed = [str(model["id"]) for model in reply.json().get("data", [])] if reply.status_code == 200 else []
        if self.model not in listed:
            raise UsageError(f"{server.shown} serves {', '.join(listed) or 'no model'}, not {self.model}", hint="another server has taken its port")

    def last_words(self) -> str | None:
        """Of the first that has ended, with the end of its log; None while all live."""
        for process in self._processes:
            words = process.last_words()
            if words is not None:
                return f"the server of judge `{self._name}` ({self._start.given}) is gone: {words}{process.end_of_log()}"
        return None

    @property
    def processes(self) -> tuple[EngineProcess, ...]:
        return tuple(self._processes)


class Judges:
    """All judges of the run as one rank sees them."""

    def __init__(
        self, specs: Sequence[ScorerSpec], own: Mapping[str, JudgeServers], told: Mapping[str, tuple[str, tuple[str, ...]]], notes: Path | None
    ) -> None:
        """`own`: started by this process, by the name of their first scorer. `told`: model and addresses of all. `notes`: where the process that has
        started them tells others that one is gone; None: nobody else asks."""
        self._owners = {spec.name: owner(specs, spec) for spec in specs if spec.start is not None}
        self._own, self._told, self._notes, self._over = dict(own), dict(told), notes, threading.Event()
        if own and notes is not None:
            notes.mkdir(parents=True, exist_ok=True)
            threading.Thread(target=self._watch, name="judge-watch", daemon=True).start()

    def placed(self, spec: ScorerSpec) -> ScorerSpec:
        """The scorer with the addresses of its servers, where the run has started some."""
        if spec.start is None:
            return spec
        assert spec.service is not None
        model, urls = self._told[self._owners[spec.name]]
        return replace(spec, model=model, service=replace(spec.service, urls=urls))

    def gone(self, spec: ScorerSpec) -> Callable[[], str | None] | None:
        """Asked after a broken connection: why the scorer's server has ended, None where it has not."""
        if spec.start is None:
            return None
        name = self._owners[spec.name]

        def look() -> str | None:
            end = time.monotonic() + GONE_SECONDS
            while True:
                words = self._last_words(name)
                if words is not None or time.monotonic() > end or self._over.is_set():
                    return words
                time.sleep(LOOK_SECONDS)

        return look

    def wait(self) -> None:
        """For those that this process has started. RftError for one that does not get ready; all are ended then."""
        try:
            for servers in self._own.values():
                servers.wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._over.set()
        stop_all([process for servers in self._own.values() for process in servers.processes])

    def _last_words(self, name: str) -> str | None:
        if name in self._own:
            return self._own[name].last_words()
        note = None if self._notes is None else self._notes / f"{name}.gone"
        return note.read_text(encoding="utf-8") if note is not None and note.is_file() else None

    def _watch(self) -> None:
        """Writes down which have ended, for other ranks."""
        assert self._notes is not None
        left = set(self._own)
        while left and not self._over.wait(LOOK_SECONDS):
            for name in tuple(left):
                words = self._own[name].last_words()
                if words is not None and not self._over.is_set():
                    write_text(self._notes / f"{name}.gone", words)
                    left.discard(name)


NO_JUDGES = Judges((), {}, {}, None)


def owner(specs: Sequence[ScorerSpec], spec: ScorerSpec) -> str:
    """The first scorer that has the same servers."""
    return next(other.name for other in specs if other.start == spec.start)


def started(specs: Sequence[ScorerSpec], folder: Path, *, several: bool = False) -> dict[str, JudgeServers]:
    """The servers of all judges that need some, on their way; RftError where a process cannot be started."""
    found: dict[str, JudgeServers] = {}
    try:
        for spec in specs:
            if spec.start is not None and owner(specs, spec) == spec.name:
                found[spec.name] = JudgeServers(spec.name, spec.start, folder, several=several)
    except OSError as error:
        stop_all([process for servers in found.values() for process in servers.processes])
        raise RftError(f"a judge's server cannot be started: {error}", hint="`placement.command` starts with a program that is there") from error
    return found


def told_of(own: Mapping[str, JudgeServers]) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {name: (servers.model, servers.urls) for name, servers in own.items()}


def begin_judges(specs: Sequence[ScorerSpec], world: World, attempt: AttemptDir, *, several: bool) -> Judges:
    """On their way; `ready` waits for them. Collective where there are any."""
    if all(spec.start is None for spec in specs):
        return NO_JUDGES
    own = agreed(world, lambda: started(specs, attempt.logs, several=several) if world.rank == 0 else {})
    told = world.gather(told_of(own))[0]
    return Judges(specs, own, told, attempt.path / "judges" if world.size > 1 else None)


def await_judges(judges: Judges, specs: Sequence[ScorerSpec], world: World) -> None:
    """Until every judge is ready; RftError on every rank alike. Collective where there are any."""
    if any(spec.start is not None for spec in specs):
        agreed(world, judges.wait)


def arguments(start: StartSpec, model: str, template: Path | None) -> dict[str, Any]:
    """Of `vllm serve`, but for the model and where it listens. Temperature and length come with each request."""
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
        "gpu_memory_utilization": start.memory_share if start.gpus else None,
        "kv_cache_memory_bytes": start.cache_bytes,
        "enforce_eager": None if start.gpus else True,
        "enable_prefix_caching": True,  # questions begin alike
        "generation_config": "vllm",
        "disable_log_stats": True,
        "uvicorn_log_level": "warning",
    }
    return found | dict(start.options)


def _place(path: str) -> str:
    return str(builtin_path(path.removeprefix("builtin:"))) if path.startswith("builtin:") else path

"""vLLM engines in other processes than the ranks, from the plan: started or found, looked at, given a way for weights, joined to a sampler.

A server named in the recipe is every rank's; rank 0 sends its weights. One that the run starts is rank 0's child. An engine beside its ranks is the
child of the first of them, sees their devices, and takes weights from each. Leaves out how engines are spoken to (`engines`).
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rftcli.algo.keyed import key64
from rftcli.engines.vllm_http import Server, Wire, host_of, is_local
from rftcli.engines.vllm_offer import EXTENSION, check, look, wait_for
from rftcli.engines.vllm_remote import RemoteVLLMSampler
from rftcli.engines.vllm_send import ROOM, FilesPush, GroupPush, Push, SocketPush
from rftcli.engines.vllm_stream import SocketWay
from rftcli.errors import MachineError, RftError, UsageError
from rftcli.models.load import DTYPES
from rftcli.plan.memory import DTYPE_BYTES
from rftcli.plan.plan import ModelPlan, Plan
from rftcli.plan.plan_engine import ServerPlan, VllmPlan
from rftcli.probe.model import model_facts
from rftcli.protocols import World
from rftcli.runtime.agreed import agreed
from rftcli.runtime.emit import Emitter
from rftcli.runtime.engine_process import (
    ON_A_CPU,
    OWN_COMMAND,
    EngineProcess,
    devices_of_machine,
    environment,
    flags,
    host_and_bind,
    own_devices,
    serve,
    stop_all,
)
from rftcli.runtime.rundir import AttemptDir

BESIDE_SECONDS = 600.0
"""Time limit of an engine beside its rank, which the recipe does not name: to be ready, to take weights, to finish anything at all."""
TOKEN_SECONDS = 0.1
"""Added to it for every token of the longest sequence: a busy engine takes longer than most for one, and nothing may finish before."""
LEAST_FREE_SHARE = 0.01
NO_PROGRAM = "the words that start `vllm serve`, such as `[/other/venv/bin/vllm, serve]`; leave it out for vLLM of this Python"
STARTED = "its arguments are `rollout.vllm.options`, its memory is `rollout.vllm.memory_share`; its log says more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of a rank among the engines."""

    plan: Plan
    world: World
    device: torch.device
    attempt: AttemptDir
    emit: Emitter
    folder: str
    """What an engine reads its configuration from."""
    own_command: tuple[str, ...] = OWN_COMMAND
    """Starts an engine where the recipe names no command."""

    @property
    def vllm(self) -> VllmPlan:
        assert self.plan.rollout.vllm is not None
        return self.plan.rollout.vllm


@dataclass(slots=True)
class Engines:
    """What a rank has found or started."""

    wire: Wire
    servers: list[Server]
    leads: bool
    """This rank speaks to them about weights."""
    processes: list[EngineProcess] = field(default_factory=list)

    def give_up(self) -> None:
        self.wire.close()
        self.stop()

    def stop(self) -> None:
        stop_all(self.processes)


def check_servers(
    plan: Plan, world: World, told: Callable[[str], None] = lambda text: None, stop_asked: Callable[[], bool] = lambda: False
) -> None:
    """Servers that run already, and the folder for weights, are looked at before any model is loaded. Collective; the errors are those of
    `make_apart`."""
    vllm = plan.rollout.vllm
    if vllm is None or vllm.server is None:
        return
    server = vllm.server

    def work() -> None:
        if world.rank == 0 and server.folder is not None:
            _check_folder(Path(server.folder), plan.policy)
        command = () if server.start is None else server.start.command
        if world.rank == 0 and command and shutil.which(command[0]) is None:
            raise MachineError(f"rollout.vllm.server.start.command: there is no program `{command[0]}` on the first rank's machine", hint=NO_PROGRAM)
        if world.rank == 0 and server.start is None:
            wire = Wire(timeout_seconds=server.timeout_seconds, headers=_headers(server), stop_asked=stop_asked)
            try:
                for url in server.urls:
                    one = Server(url=url)
                    wait_for(wire, one, server.ready_seconds, told=told, stop_asked=stop_asked)
                    look(wire, one)
                    check(one, tokens=vllm.max_model_tokens, dtype=plan.policy.dtype, checked=vllm.check_weights, shape=_shape(plan.policy))
            finally:
                wire.close()

    agreed(world, work)


def _check_folder(folder: Path, policy: ModelPlan) -> None:
    """UsageError where no weights can be written there, MachineError where there is too little room for them."""
    key = "rollout.vllm.server.folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="rft-"):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        hint = "a folder that this machine and the servers see"
        raise UsageError(f"{key}: nothing can be written to {folder}: {error.strerror}", hint=hint) from error
    needed = (policy.parameters or 0) * DTYPE_BYTES[policy.dtype]
    if needed > free:
        message = f"{key}: {folder} has {free / 2**20:,.0f} MiB left, the weights on their way to the servers take {needed / 2**20:,.0f} MiB"
        raise MachineError(message, hint=ROOM)


def _shape(policy: ModelPlan) -> dict[str, int | None]:
    """What the files of the policy say of its widths; nothing where they cannot be read, which loading them will tell. Tokens that are added widen
    the vocabulary later."""
    try:
        facts = model_facts(policy.path, policy.revision)
    except RftError:
        return {}
    return {"layers": facts.layers, "hidden": facts.hidden, "vocabulary": None if policy.add_tokens else facts.vocabulary}


def make_apart(
    place: Place, model: Any, tokenizer: Any, ends: Sequence[int], defaults: dict[str, str], newest: Callable[[], int] | None
) -> RemoteVLLMSampler:
    """The sampler of this rank, its engines ready and without weights yet. Collective. `defaults`: environment of a server unless it is set."""
    vllm, plan, world = place.vllm, place.plan, place.world
    run = world.gather(uuid.uuid4().hex)[0]
    engines = agreed(world, lambda: _begun(place, run, defaults), undo=Engines.give_up)
    try:
        _told_where(place, engines)
        told = agreed(world, lambda: _looked_at(place, engines, run) if engines.leads else [])
        told = agreed(world, lambda: told or _looked_at(place, engines, run))  # who started a server knows first that it has ended
        way = agreed(world, lambda: _way(place, engines))
    except BaseException:
        engines.give_up()
        raise
    push = _joined(place, engines, way) if isinstance(way, SocketWay) else way
    free = all(server.facts["free_seeds"] for server in engines.servers)
    seeded = free if vllm.seeds == "auto" else vllm.seeds == "request"
    for line in told:
        place.emit.log(line)
    memory = "" if vllm.server is not None and vllm.server.start is None else f"; {vllm.memory}"
    place.emit.log(f"vllm: {_seeds(seeded, {str(server.facts['device']) for server in engines.servers})}{memory}")
    return RemoteVLLMSampler(
        engines.wire, engines.servers, model, tokenizer, ends,
        push=push, leads=engines.leads, run=run, world=place.world, seeded=seeded, at_once=vllm.max_sequences,
        together=vllm.tensor_parallel if vllm.server is None else 1, sleep=vllm.sleep, check=vllm.check_weights, checkable=_checkable(engines),
        dtype=DTYPES[plan.policy.dtype], newest=newest, on_close=engines.stop,
    )  # fmt: skip


def _seeds(seeded: bool, devices: Set[str]) -> str:
    """Who draws how, in words."""
    if seeded:
        return "a seed for every completion"
    if "cpu" in devices:
        return "no seeds of completions: vLLM's CPU build ends at them while it cuts prompts (`--no-enable-chunked-prefill` at its start lets it)"
    return "no seeds of completions: this engine would draw row by row with them"


def _begun(place: Place, run: str, defaults: dict[str, str]) -> Engines:
    """Connections, and the engines that fall to this rank, on their way."""
    vllm, rank, stop_asked = place.vllm, place.world.rank, place.attempt.stop_asked
    server = vllm.server
    if server is None:
        leads = rank % vllm.tensor_parallel == 0
        own = [_start_beside(place, run, defaults)] if leads else []
        wire = Wire(timeout_seconds=beside_seconds(vllm), stop_asked=stop_asked)
        return Engines(wire, [one for one, _ in own], leads, [process for _, process in own])
    wire = Wire(timeout_seconds=server.timeout_seconds, retries=server.retries, headers=_headers(server), stop_asked=stop_asked)
    if server.start is None:
        return Engines(wire, [Server(url=url) for url in server.urls], rank == 0)
    own = [_start_apart(place, server, number, run, defaults) for number in range(server.start.servers)] if rank == 0 else []
    return Engines(wire, [one for one, _ in own], rank == 0, [process for _, process in own])


def beside_seconds(vllm: VllmPlan) -> float:
    return BESIDE_SECONDS + TOKEN_SECONDS * vllm.max_model_tokens


def _told_where(place: Place, engines: Engines) -> None:
    """Ranks that have started nothing learn where their engines are. Collective."""
    told = place.world.gather([(server.url, server.gpus) for server in engines.servers])
    first = 0 if place.vllm.server is not None else place.world.rank // place.vllm.tensor_parallel * place.vllm.tensor_parallel
    if not engines.servers:
        engines.servers += [Server(url=url, gpus=gpus) for url, gpus in told[first]]


def _looked_at(place: Place, engines: Engines, run: str) -> list[str]:
    """Waits for this rank's servers and looks at them."""
    vllm, told = place.vllm, []
    seconds = beside_seconds(vllm) if vllm.server is None else vllm.server.ready_seconds
    started = vllm.server is None or vllm.server.start is not None
    for server in engines.servers:
        try:
            wait_for(engines.wire, server, seconds, stop_asked=place.attempt.stop_asked)
        except RftError as error:
            raise type(error)(error.message, hint=error.hint or (STARTED if started else None)) from error
        told.append(look(engines.wire, server, wanted_name=served_name(run) if started else None))
        check(server, tokens=vllm.max_model_tokens, dtype=place.plan.policy.dtype, checked=vllm.check_weights)
    return told


def _checkable(engines: Engines) -> bool:
    return all(server.workers == 1 and server.facts["quantization"] is None for server in engines.servers)


def _joined(place: Place, engines: Engines, way: SocketWay) -> SocketPush:
    """With the sockets of all ranks of the engine. Collective."""
    first = place.world.rank // place.vllm.tensor_parallel * place.vllm.tensor_parallel
    sockets = place.world.gather(way.path)[first : first + place.vllm.tensor_parallel]
    return SocketPush(engines.wire, engines.servers[0], way, sockets, leads=engines.leads)


def _way(place: Place, engines: Engines) -> Push | SocketWay | None:
    """How this rank hands weights over; None: it does not."""
    server, device = place.vllm.server, place.device
    if server is None:
        return SocketWay(device, beside_seconds(place.vllm), lambda text: place.emit.warn("weights_through_memory", text))
    if place.world.rank != 0:
        return None
    on_gpus = device.type == "cuda" and all(one.facts["device"] == "cuda" for one in engines.servers)
    if server.weights == "nccl" and not on_gpus and (device.type == "cuda" or any(one.facts["device"] == "cuda" for one in engines.servers)):
        raise UsageError("rollout.vllm.server.weights nccl needs GPUs on both sides, or on neither", hint="`files`, or `auto`")
    if server.weights == "nccl" or (server.weights == "auto" and on_gpus):
        try:
            push = GroupPush(engines.wire, engines.servers, _this_host(engines.servers), device)
        except RftError as error:
            if server.weights == "nccl":
                raise
            place.emit.warn("weights_by_files", f"weights cannot be broadcast to the servers, they go by files: {error.message}")
        else:
            place.emit.log("vllm: weights are broadcast")
            return push
    folder = place.attempt.path / "weights" if server.folder is None else shared_folder(Path(server.folder), place.attempt.run.path)
    for left in (folder, *place.attempt.path.parent.glob("*/weights")):
        shutil.rmtree(left, ignore_errors=True)  # of an attempt that was killed in a push
    place.emit.log(f"vllm: weights go through {folder}")
    return FilesPush(engines.wire, engines.servers, folder.absolute())


def _this_host(servers: Sequence[Server]) -> str:
    """The address by which the servers reach this machine."""
    far = next((server for server in servers if not is_local(server.url)), None)
    if far is None:
        return "127.0.0.1"
    try:
        return _address_towards(host_of(far.url))
    except OSError as error:
        message = f"{far.shown}: no way of this machine leads to its host: {error.strerror or error}"
        raise RftError(message, hint="`rollout.vllm.server.weights: files`") from error


def _address_towards(host: str) -> str:
    kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a datagram socket sends nothing here; it only picks the way
        return str(probe.getsockname()[0])


def _headers(server: ServerPlan) -> dict[str, str]:
    missing = [name for name in server.headers_env.values() if not os.environ.get(name)]
    if missing:
        message = f"rollout.vllm.server.headers_env: the environment variable `{missing[0]}` is not set on the ranks"
        raise MachineError(message, hint=f"export {missing[0]}=... before the run")
    return {header: os.environ[name] for header, name in server.headers_env.items()}


def shared_folder(folder: Path, run: Path) -> Path:
    """A run's own place in a folder that several may have: the same for its attempts, another for a run of the same name elsewhere."""
    return folder / f"{run.name}-{key64('weights folder', str(run.absolute())):016x}"


def served_name(run: str) -> str:
    """The model's name at a server of this run: by it the run knows its own."""
    return f"rft-{run[:12]}"


# Starting


def _start_apart(place: Place, server: ServerPlan, number: int, run: str, defaults: dict[str, str]) -> tuple[Server, EngineProcess]:
    start, each = server.start, place.vllm.tensor_parallel
    assert start is not None
    devices = devices_of_machine(os.environ, start.gpus[number * each : (number + 1) * each]) if start.gpus else None
    host, bind = host_and_bind(several=place.plan.world.nodes > 1)
    more = {} if place.vllm.memory_share is None else {"gpu_memory_utilization": place.vllm.memory_share}
    log = place.attempt.logs / f"vllm_{number}.log"
    command = start.command or place.own_command
    env = environment(os.environ, defaults, devices, own=not start.command)
    return _start(place, command, log, host, bind, number, run, env, more, devices)


def _start_beside(place: Place, run: str, defaults: dict[str, str]) -> tuple[Server, EngineProcess]:
    devices, more = None, {}
    if place.device.type == "cuda":
        devices = own_devices(os.environ, place.device.index or 0, place.vllm.tensor_parallel)
        torch.cuda.empty_cache()  # vLLM looks at what is free
        free, total = torch.cuda.mem_get_info(place.device)
        share = min(place.vllm.memory_share or 1.0, int(free / total * 100) / 100 - LEAST_FREE_SHARE)
        more["gpu_memory_utilization"] = max(LEAST_FREE_SHARE, share)
    log = place.attempt.logs / f"vllm_rank_{place.world.rank}.log"
    env = environment(os.environ, defaults, devices)
    return _start(place, place.own_command, log, "127.0.0.1", "127.0.0.1", place.world.rank, run, env, more, devices)


def _start(
    place: Place, command: Sequence[str], log: Path, host: str, bind: str, number: int, run: str, env: dict[str, str], more: dict[str, Any],
    devices: Sequence[str] | None,
) -> tuple[Server, EngineProcess]:  # fmt: skip
    url, process = serve(command, serve_words(place, command == place.own_command, run, number, more), env, log, host, bind)
    return Server(url=url, last_words=process.last_words, gpus=tuple(devices or ())), process


def serve_words(place: Place, own: bool, run: str, number: int, more: dict[str, Any]) -> list[str]:
    """Arguments of `vllm serve`, but for where it listens. `own`: by `engines.vllm_serve`, which knows what this vLLM takes."""
    plan, vllm = place.plan, place.vllm
    arguments: dict[str, Any] = {
        "served_model_name": served_name(run),
        "worker_extension_cls": EXTENSION,
        "load_format": "dummy",
        "dtype": plan.policy.dtype,
        "trust_remote_code": plan.policy.trust_remote_code or None,
        "tensor_parallel_size": vllm.tensor_parallel,
        "max_model_len": vllm.max_model_tokens,
        "max_num_seqs": vllm.max_sequences,
        "enable_prefix_caching": True,
        "enforce_eager": None if vllm.graphs else True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "uvicorn_log_level": "warning",
        "kv_cache_memory_bytes": vllm.cache_bytes,
        "enable_sleep_mode": True if vllm.sleep else None,
        "seed": key64("vllm server", plan.seed, place.attempt.number, number) % 2**31,
        **(ON_A_CPU if place.device.type == "cpu" else {}),
        **more,
        **vllm.options,
    }
    graphs = ["--graphs-up-to", str(vllm.max_sequences)] if own and vllm.graphs else []
    return [place.folder, *flags(arguments), *graphs]


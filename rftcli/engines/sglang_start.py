"""Starting SGLang's offline engine beside a trainer, and ending it, so that the trainer's process stays its own.

SGLang is made to own its process: it sets environment variables, signal handlers, the root logger, the event loops' policy and the way processes are
started, and it ends by killing every child of its parent. All of that is put back here, and only its own processes are ended.

What a release can do is looked up by the names of its arguments and methods, never by its version. What it leaves out: the plan's arguments
(`runtime.sglang_engine`), sampling (`sglang`).
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rftcli.engines import sglang_worker
from rftcli.engines.separate import own_randomness
from rftcli.engines.sglang_weights import Pack
from rftcli.errors import MachineError, RftError, UsageError
from rftcli.ports import HeldPort

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
"""A trainer's place in its job: the engine's processes are a job of their own."""
ENVIRONMENT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
"""The room that SGLang wants behind the longest sequence may lie behind the model's last position, where nothing is ever computed."""
OTHER_NAMES = {"cuda_graph_max_bs": "cuda_graph_max_bs_decode"}
"""Argument -> its name in later releases."""
ASKED = {
    "async_generate": ("input_ids", "sampling_params", "return_logprob", "rid"),
    "update_weights_from_tensor": ("named_tensors", "load_format", "flush_cache"),
    "release_memory_occupation": ("tags",),
    "resume_memory_occupation": ("tags",),
    "flush_cache": (),
}
"""Methods of the engine that are called, with the arguments that they are called with."""
HINT = "`rollout.engine: hf` runs everywhere; memory: `rollout.sglang.memory_share`, `max_sequences`, `max_model_tokens`"
TAKEN_OVER = (signal.SIGTERM, signal.SIGQUIT)
END_SECONDS = 10.0
"""That a process of the engine gets between being asked to end and being ended."""


DIED = "a process of SGLang's engine has ended: its last lines in this rank's log say why"


class EngineDied(RftError):
    """A process of the engine has ended by itself: nothing more can be asked of it."""


@dataclass(slots=True, kw_only=True)
class Running:
    """A running engine and what this release of it can do."""

    engine: Any
    loop: Any
    """The event loop that its calls run in; it stands still between them."""
    processes: Sequence[Any]
    seeded: bool
    """Rows have seeds of their own."""
    keeps_weights: bool
    """Weights that are given up while it sleeps come back by themselves."""
    checkable: bool
    """It can call a function of ours on its model."""
    pack: Pack | None
    """None: weights travel as lists of tensors."""
    port: HeldPort
    """Where its processes meet."""
    dead: bool = False

    @contextmanager
    def alive(self) -> Iterator[Any]:
        """The engine, for as long as it is asked something. EngineDied where its processes end meanwhile, or have ended before."""
        if self.dead:
            raise EngineDied(DIED)
        try:
            yield self.engine
        except RuntimeError as error:  # a loop that is stopped says so with this one
            if self.dead:
                raise EngineDied(DIED) from error
            raise

    def died(self, number: int, frame: Any) -> None:
        """The handler of the signal that SGLang's processes send when they fail. What waits for them is waiting in the loop: an error raised there
        would only be logged."""
        self.dead = True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise EngineDied(DIED) from None
        loop.call_soon_threadsafe(loop.stop)

    def end(self) -> None:
        """End its processes, and only those."""
        atexit.unregister(self.end)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # SGLang's own watch reports every process that ends
        for act in ("terminate", "kill"):
            alive = [process for process in self.processes if process.is_alive()]
            for process in alive:
                getattr(process, act)()
            for process in alive:
                process.join(END_SECONDS / max(1, len(alive)))
        self.port.close()


def start(folder: str, arguments: Mapping[str, Any], options: Mapping[str, Any], device: torch.device) -> Running:
    """A running engine with random weights. `folder` holds the model's configuration; `arguments` are the plan's, `options` the person's; what this
    SGLang does not know of the first is left out. Raises MachineError where SGLang is missing, UsageError for what it refuses."""
    before = multiprocessing.active_children()
    with own_randomness(device), _own_process():
        try:
            import sglang
            from sglang.srt.server_args import ServerArgs
        except ImportError as error:
            raise MachineError(f"rollout.engine sglang needs the package `sglang`: {error}", hint="pip install 'rftcli[sglang]'") from error
        known = set(inspect.signature(ServerArgs).parameters)
        unknown = [name for name in options if name not in known]
        if unknown:
            raise UsageError(f"rollout.sglang.options: this version of SGLang has no argument `{unknown[0]}`")
        _refuse_lacking(sglang.Engine)
        port = HeldPort("127.0.0.1")
        wanted = {**arguments, "nccl_port": port.number, "custom_weight_loader": [sglang_worker.NAME], "custom_sigquit_handler": failed_to_start}
        named = {name if name in known else OTHER_NAMES.get(name, name): value for name, value in wanted.items()}
        asked = {name: value for name, value in named.items() if name in known} | dict(options)
        try:
            engine = sglang.Engine(model_path=folder, **asked)
            atexit.unregister(engine.shutdown)
            engine.flush_cache()  # its first call takes signals over
        except (ValueError, TypeError, NotImplementedError, RuntimeError, AssertionError, EOFError, EngineDied) as error:
            port.close()
            raise UsageError(f"SGLang does not start: {str(error).strip() or type(error).__name__}", hint=HINT) from error
        loop = getattr(engine, "loop", None) or asyncio.get_event_loop_policy().get_event_loop()
        loop.run_until_complete(_without_signals())
    found = Running(
        engine=engine,
        loop=loop,
        processes=[process for process in multiprocessing.active_children() if process not in before],
        seeded=bool(asked.get("enable_deterministic_inference", False)),
        keeps_weights=bool(asked.get("enable_weights_cpu_backup", False)),
        checkable="custom_weight_loader" in known,
        pack=_pack(),
        port=port,
    )
    atexit.register(found.end)  # a run that fails does not leave them behind, nor wait for them
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, found.died)
    return found


def _refuse_lacking(engine: type) -> None:
    for name, arguments in ASKED.items():
        method = getattr(engine, name, None)
        known = () if method is None else inspect.signature(method).parameters
        lacking = [argument for argument in arguments if argument not in known]
        if method is None or lacking:
            what = f"no `Engine.{name}`" if method is None else f"no argument `{lacking[0]}` of `Engine.{name}`"
            raise UsageError(f"this version of SGLang has {what}", hint="pip install -U 'rftcli[sglang]'")


def failed_to_start(number: int, frame: Any) -> None:
    """The handler of the signal that SGLang's processes send when they fail, until the engine runs."""
    raise EngineDied(DIED)


async def _without_signals() -> None:
    """The loop's own handlers end; some loops let go of them only while they run."""
    for number in TAKEN_OVER:
        asyncio.get_running_loop().remove_signal_handler(number)


def _pack() -> Pack | None:
    """How this release packs a flat bucket of tensors of any type; None where it cannot."""
    try:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
    except ImportError:
        return None

    def pack(named: list[tuple[str, torch.Tensor]], parts: int) -> list[Any]:
        bucket = FlattenedTensorBucket(named_tensors=named)
        found = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        return [MultiprocessingSerializer.serialize(found) for _ in range(parts)]

    return pack if getattr(FlattenedTensorBucket, "supports_multi_dtypes", False) else None


@contextmanager
def _own_process() -> Iterator[None]:
    """What SGLang changes of the process is as before, in the end."""
    environment, method, policy = dict(os.environ), multiprocessing.get_start_method(allow_none=True), asyncio.get_event_loop_policy()
    handlers, level = logging.root.handlers[:], logging.root.level
    signals = _handlers()
    for name in PLACE:
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        multiprocessing.set_start_method(method, force=True)
        asyncio.set_event_loop_policy(policy)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        for number, handler in signals.items():
            signal.signal(number, handler)


def _handlers() -> dict[int, Callable[..., Any] | int | None]:
    """Of the signals that SGLang takes over; only the main thread may set any."""
    return {number: signal.getsignal(number) for number in TAKEN_OVER} if threading.current_thread() is threading.main_thread() else {}

"""A rank from its first line to its last: `python -m rftcli.runtime.rank RUN_DIR ATTEMPT`, started by the launcher.

Joins the others, builds the plan, runs the loop, and writes down how it ended. Leaves out everything about the job itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from rftcli.errors import EXIT_MACHINE
from rftcli.runtime import disk
from rftcli.runtime.environment import launch_environment
from rftcli.runtime.rundir import AttemptDir, RunDir
from rftcli.runtime.travel import Place, interface_towards, place_of
from rftcli.runtime.verdict import process_start, record_failure, this_host

PARENT_CHECK_SECONDS = 1.0


def main() -> int:
    run = RunDir(sys.argv[1])
    attempt = run.attempt(int(sys.argv[2]))
    told = _told(attempt)
    place = place_of(os.environ)
    assert place is not None, "no launcher has told this rank its place"
    own = launch_environment(told.get("launch_env", {}), os.environ)
    os.environ.update({**told.get("env", {}), **own, **place.environment()})  # before anything heavy is imported: it reads them once
    rank = place.rank
    _log_to(attempt.log(rank))
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("rft").setLevel(logging.INFO)
    _leave_with_parent()
    if told.get("far") != "hosts":  # DeepSpeed's launcher of several machines ends ranks by it
        signal.signal(signal.SIGTERM, lambda number, frame: attempt.ask_to_stop())
    node = _node(place)
    record = {"pid": os.getpid(), "started": process_start(os.getpid()), "time": time.time(), "host": this_host(), "node": node}
    _write(attempt.ranks / f"rank_{rank}.json", json.dumps(record))
    reserve = disk.Reserve(attempt.failures / f".reserve_{rank}")
    if told.get("far") == "hosts" and place.local_rank == 0:
        _start_warden(attempt, node, place)
    try:
        _work(run, attempt, rank)
    except BaseException as error:
        reserve.release()  # the disk may be full: this leaves room for the last words
        text = traceback.format_exc()
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
        record_failure(attempt, rank, disk.told(error, run.path), text)  # also of an exit: a loss of the user's, or a library, has called it
        return 1
    reserve.release()
    _write(attempt.ranks / f"rank_{rank}.done", "")
    return 0


def _import_all() -> None:
    """What takes seconds to import, with the collector off: what imports make stays, and looking through it again and again takes a fifth of them."""
    gc.disable()
    importlib.import_module("rftcli.runtime.build")
    gc.freeze()
    gc.enable()


def _work(run: RunDir, attempt: AttemptDir, rank: int) -> None:
    _import_all()
    import torch

    from rftcli.plan.plan import plan_from_json
    from rftcli.runtime import memory_errors
    from rftcli.runtime import world as worlds
    from rftcli.runtime.chosen_kernels import attend_to_new_shapes, make_deterministic
    from rftcli.runtime.emit import Emitter
    from rftcli.runtime.environment import live_plan

    plan = live_plan(plan_from_json(attempt.plan.read_text(encoding="utf-8")), os.environ)
    told = _told(attempt)
    job: dict[str, Any] = told["job"]
    torch.set_num_threads(plan.world.threads_per_rank)
    if plan.world.deterministic:
        make_deterministic()
    if plan.rollout.lengths_vary:
        attend_to_new_shapes()
    world = worlds.join(plan.world.backend, _meeting(attempt, told, rank), plan.launch.timeout_minutes)
    emit = Emitter(run, attempt.number, writes=rank == 0, step=int(job.get("step", 0)))
    try:
        if job["mode"] == "eval":
            from rftcli.runtime.evaluation import evaluate_only

            _all_imported()
            evaluate_only(plan, run, attempt, world, emit, checkpoint=job["checkpoint"])
        else:
            _train(plan, run, attempt, world, emit, job)
    except (RuntimeError, MemoryError) as error:
        clear = memory_errors.told(error, plan)
        if clear is None:
            raise
        raise clear from error
    finally:
        emit.close()
    world.barrier("end")
    worlds.leave()


def _all_imported() -> None:
    """Modules stay, so that nothing looks for rubbish in them: neither while they are imported, which is an eighth of that time, nor in any step."""
    gc.freeze()
    gc.enable()


def _told(attempt: AttemptDir) -> dict[str, Any]:
    """launch.json: what the command says to the ranks beside the plan."""
    if not attempt.launch.is_file():
        why = "the run directory must lie on a file system that all nodes share"
        print(f"{attempt.path} is not seen from {socket.gethostname()}: {why}", file=sys.stderr)
        raise SystemExit(EXIT_MACHINE)
    return dict(json.loads(attempt.launch.read_text(encoding="utf-8")))


def _node(place: Place) -> str:
    """The name of this rank's node within the attempt; the ranks of one node are those that one launcher has started."""
    return f"{socket.gethostname()}_{os.environ.get('CROSS_RANK', os.environ.get('SLURM_NODEID', ''))}"


def _start_warden(attempt: AttemptDir, node: str, place: Place) -> None:
    command = [sys.executable, "-m", "rftcli.runtime.warden", str(attempt.run.path), str(attempt.number), node]
    expected = os.environ.get("LOCAL_SIZE", str(place.local_size))
    subprocess.Popen([*command, expected, str(os.getppid())], stdin=subprocess.DEVNULL, start_new_session=True)


def _meeting(attempt: AttemptDir, told: dict[str, Any], rank: int) -> Any:
    """Where this rank finds the others."""
    from rftcli.runtime.world import Meeting

    method, address = f"file://{attempt.rendezvous}", None
    if told.get("far") == "joined":
        chosen = "MASTER_ADDR" in os.environ and os.environ.get("MASTER_PORT", "0") != "0"  # torchrun hands a 0 on as it was given
        method, address = "env://", None if chosen else socket.gethostname()
    elif told.get("far") == "hosts":
        address = told["address"]
    towards = address or (os.environ["MASTER_ADDR"] if told.get("far") else None)
    interface = None if towards is None or "GLOO_SOCKET_IFNAME" in os.environ else interface_towards(towards)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    return Meeting(method=method, note=attempt.path / "meeting.json", address=address)


def _train(plan: Any, run: RunDir, attempt: AttemptDir, world: Any, emit: Any, job: dict[str, Any]) -> None:
    from rftcli.events import RunEnded
    from rftcli.runtime import checkpoint, loop, smoke
    from rftcli.runtime.build import build, device_of
    from rftcli.runtime.deadline import TimeLimits

    _all_imported()
    step = int(job.get("step", 0))
    emit.state("running", step=step)
    folder = Path(job["checkpoint"]) if job.get("checkpoint") else None
    weights = None if folder is None or (folder / "trainer").is_dir() else folder / "policy"
    limits = TimeLimits(plan.checkpoint, plan.max_hours, started=job.get("started"), deadline=job.get("deadline"))
    device = device_of(plan, int(os.environ.get("LOCAL_RANK", "0")))
    built = build(plan, run, attempt, world, device, emit, first_step=step + 1, limits=limits, weights=weights)
    for code, text in job.get("warnings", ()):
        emit.warn(code, text)
    if folder is not None:
        accept = bool(job.get("accept"))
        restored = checkpoint.restore(folder, learner=built.trained, registry=built.registry, world=world, accept=accept, warn=emit.warn)
        assert restored == step, (restored, step)
    if built.trackers is not None:
        built.trackers.start()
    try:
        stopped = loop.run(built)
        loop.settle(built, wait=True)
        if job.get("full_length") and stopped is None:
            emit.log(smoke.full_length(built, **job["full_length"]))
    finally:
        built.close()
    last = emit.step
    status, cause = ("done", built.early_stop.cause) if stopped is None else ("stopped", f"asked to stop ({stopped}); checkpoint committed")
    for code, text in built.trackers.last_news() if built.trackers is not None else ():
        emit.warn(code, text)
    emit.state(status, step=last, cause=cause)
    emit.emit(RunEnded(time=time.time(), attempt=attempt.number, step=last, status=status, cause=cause))
    if built.trackers is not None:
        built.trackers.close()


def _log_to(path: Path) -> None:
    """Everything this process and its libraries print goes to the rank's log."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _leave_with_parent() -> None:
    """End when the launcher is gone, whatever this rank waits for: no orphan holds a device."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def start() -> None:
    """os._exit: a library's stuck thread or atexit hook must not keep a finished rank, and the GPU it holds, alive."""
    gc.disable()  # until all is imported
    code = main()
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    start()

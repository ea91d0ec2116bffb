"""Runs one command and never outlives who asked for it: `python -m rftcli.runtime.engine_guard FD COMMAND...`

The command gets a session of its own, and a folder for the sockets that vLLM would leave behind. It is ended, with everything that it has started,
when this process is asked to end (SIGTERM), when its parent is gone, however that ended, or when the command itself ends. No torch: it has to be up
before anything can go wrong. How the command ended is written into the pipe FD at once, as text: what it has started takes a moment longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

LOOK_SECONDS = 0.3
GRACE_SECONDS = 8.0
"""For the command to end by itself after it was asked to."""
FAMILY_SECONDS = 4.0
"""The same for what it has started."""
PR_SET_PDEATHSIG = 1
SOCKETS = "VLLM_RPC_BASE_PATH"
"""Where vLLM's processes meet; paths of sockets are short, so it is no folder of the run."""


def main() -> int:
    """The command's exit code; -n for a signal n, as 128 + n."""
    with tempfile.TemporaryDirectory(prefix="rft-engine-", ignore_cleanup_errors=True) as folder:
        return _guarded({SOCKETS: folder, **os.environ})


def _guarded(env: Mapping[str, str]) -> int:
    parent, pipe = os.getppid(), int(sys.argv[1])
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: asked.append(number))

    def die_with_guard() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_guard, env=env)
    code = 128 + signal.SIGKILL
    try:
        while not asked and os.getppid() == parent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = _code(child.wait(LOOK_SECONDS))
                return code
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = _code(child.wait(GRACE_SECONDS))
        return code
    finally:
        with contextlib.suppress(OSError):
            os.write(pipe, str(code).encode())
        _end_family(child.pid)
        child.wait()


def _end_family(group: int) -> None:
    """What the command has started outlives it otherwise. It is asked first: who holds shared memory, hundreds of MiB of an engine, gives it back."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        end = time.monotonic() + FAMILY_SECONDS
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)


def _code(returned: int) -> int:
    return 128 - returned if returned < 0 else returned


if __name__ == "__main__":
    raise SystemExit(main())

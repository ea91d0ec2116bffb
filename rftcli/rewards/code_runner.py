"""Runs one program against its tests; a script of its own, started by `code_tests` for every answer, and never imported by a run.

Reads a job as JSON from standard input, writes {"passed": n, "of": n, "first": why the first one failed} or {"error": text} to standard output.
Every test is a fresh process with limits of its own, in a folder that is removed. What the program prints is compared here: expected outputs never
reach the process that runs it, and a program that leaves early has not passed.

Only the standard library; no module of the package, so that the program finds nothing of it either.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

OUTPUT_BYTES = 8 << 20
"""Of any file that the program writes, its printed output too."""
OPEN_FILES, PROCESSES = 64, 32
READABLE = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/dev/null", "/dev/zero",
            "/dev/random", "/dev/urandom")  # fmt: skip
WRITABLE_DEVICES = ("/dev/null",)

# Behind the program: its function with each arguments, or the asserts; then the word that says the end was reached. The word comes on a pipe.
_CALL = """
import json as _json, os as _os, sys as _sys
_job = _json.loads(_os.read({read}, 1 << 24))
_os.close({read})
{program_runs}
_function = _scope[_job["name"]] if _job["name"] in _scope else getattr(_scope["Solution"](), _job["name"])
_value = _function(*_job["arguments"])
_sys.stdout.flush()
_os.write({write}, _json.dumps({{"value": _value}}).encode())
"""
_ASSERT = """
import os as _os, sys as _sys
_scope = {{"__name__": "__main__"}}
exec(compile({program!r}, "answer.py", "exec"), _scope)
exec(compile({test!r}, "test.py", "exec"), _scope)
_sys.stdout.flush()
_os.write({write}, _os.read({read}, 64))
"""


def main():
    job = json.load(sys.stdin)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(job["whole_seconds"]))  # whoever started this may be gone
    try:
        protect_here(job)
        reply = run(job)
    except Exception as error:  # a fault of the machine, not of the program
        reply = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(reply))


def run(job):
    passed, first = 0, None
    for number, test in enumerate(job["tests"]):
        why = failure(job["program"], test, job)
        passed += why is None
        if why is not None:
            first = first or f"test {number + 1}: {why}"
            if not job["all"] or why == SLOW:
                break
    return {"passed": passed, "of": len(job["tests"]), "first": first}


SLOW = "it took too long"


def failure(program, test, job):
    """Why the program does not pass a test; None if it does."""
    kind = test["kind"]
    if kind == "stdin":
        ended, printed, _ = start(program, test["input"].encode(), job)
        return ended or (None if alike_text(printed, test["output"]) else "another output")
    if kind == "assert":
        word = secrets.token_hex(16).encode()
        ended, _, said = start(lambda read, write: _ASSERT.format(program=program, test=test["code"], read=read, write=write), b"", job, word)
        return ended or (None if said == word else "it ended before the test did")
    runs = f'_scope = {{"__name__": "__main__"}}\nexec(compile({program!r}, "answer.py", "exec"), _scope)'
    asked = json.dumps({"name": test["name"], "arguments": test["arguments"]}).encode()
    ended, _, said = start(lambda read, write: _CALL.format(program_runs=runs, read=read, write=write), b"", job, asked)
    if ended:
        return ended
    try:
        value = json.loads(said)["value"]
    except (ValueError, KeyError, TypeError):
        return "it ended before the test did"
    return None if alike(value, test["output"]) else "another value"


def start(source, given, job, told=b""):
    """(why it failed or None, what it printed, what it wrote to its pipe). `source`: text, or a function of two pipe ends that gives it."""
    with tempfile.TemporaryDirectory(dir=job["folder"]) as folder, tempfile.TemporaryFile(dir=job["folder"]) as printed:
        down, up = os.pipe(), os.pipe()
        text = source if isinstance(source, str) else source(down[0], up[1])
        script = Path(folder, "answer.py")
        script.write_text(text, encoding="utf-8", errors="surrogatepass")
        if told:
            os.write(down[1], told)
        os.close(down[1])
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(script)],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            pass_fds=(down[0], up[1]),
            preexec_fn=lambda: limit(job),
            start_new_session=True,
        )
        os.close(down[0])
        os.close(up[1])
        why = None
        try:
            process.communicate(given, timeout=job["seconds"])
        except subprocess.TimeoutExpired:
            why = SLOW
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it started, too
            process.wait()
        said = drain(up[0])
        if why is None and process.returncode != 0:
            why = f"it ended with code {process.returncode}" if process.returncode > 0 else f"killed by {signal.Signals(-process.returncode).name}"
            why = SLOW if process.returncode == -signal.SIGXCPU else why
        printed.seek(0)
        return why, printed.read(OUTPUT_BYTES), said


def drain(pipe):
    """What was written to a pipe. A process that escaped may hold its other end, so nobody waits."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 1 << 20)
    except BlockingIOError:
        return b""
    finally:
        os.close(pipe)


def limit(job):
    """In the new process, before the program: time, memory, size of files, number of files and processes."""
    seconds = math.ceil(job["seconds"]) + 1
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def alike_text(printed, expected):
    """Equal word by word; white space between words and at line ends does not matter."""
    return printed.decode("utf-8", errors="replace").split() == expected.split()


def alike(value, expected):
    """Equal as JSON; two numbers within 1e-6, relatively."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        return value == expected or math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(alike(one, other) for one, other in zip(value, expected))  # noqa: B905  lengths are compared
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(alike(value[key], expected[key]) for key in value)
    return type(value) is type(expected) and value == expected


def protect_here(job):
    """From here on, this process and all that it starts read only the system's and Python's own files, and write only into the job's folder, where
    the kernel has Landlock (Linux 5.13). Elsewhere nothing happens."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return
    handled = (1 << 13) - 1
    handled |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    reading = 0b1101  # execute, read file, read directory
    rules = ctypes.c_uint64(handled)
    ruleset = libc.syscall(444, ctypes.byref(rules), ctypes.c_size_t(8), ctypes.c_uint32(0))
    if ruleset < 0:
        return
    python = {str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    allowed = [(path, reading) for path in (*READABLE, *sorted(python))]
    allowed += [(job["folder"], handled), *((path, reading | 0b10) for path in WRITABLE_DEVICES)]
    for path, rights in allowed:
        add(libc, ruleset, path, rights)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges: the kernel asks for it
    libc.syscall(446, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)


class Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def add(libc, ruleset, path, rights):
    """One rule; a path that is not there is left out."""
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):  # noqa: PTH112
        rights &= 0b111 | 1 << 14
    rule = Beneath(rights, handle)
    libc.syscall(445, ruleset, ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))
    os.close(handle)


if __name__ == "__main__":
    main()

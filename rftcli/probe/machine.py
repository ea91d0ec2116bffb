"""Facts about this machine, without torch: cores, memory, GPUs."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from rftcli.plan.facts import MachineFacts

NVIDIA_SMI_SECONDS = 20
CGROUP = Path("/sys/fs/cgroup")


def machine_facts(*, use_gpus: bool = True) -> MachineFacts:
    """`use_gpus` False plans for the CPU although GPUs are there."""
    gpus = _gpus() if use_gpus else []
    return MachineFacts(
        cores=_cores(CGROUP),
        memory_gib=_memory_gib(CGROUP),
        gpus=len(gpus),
        gpu_name=gpus[0][0] if gpus else None,
        gpu_memory_gib=min((memory for _, memory in gpus), default=0.0),
        vllm=installed("vllm"),
        threads=_threads(os.environ),
    )


def _threads(environ: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS, unless torchrun has set it: it gives every process one where nothing is said."""
    word = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(word) if word.isdecimal() and int(word) > 0 and "TORCHELASTIC_RUN_ID" not in environ else None


def installed(package: str) -> bool:
    """Whether a package could be imported, without importing it. A folder of that name on the path is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _cores(cgroup: Path) -> int:
    """Cores that this process may run on; a container's share of processor time counts too, or its threads would take turns."""
    cores = len(os.sched_getaffinity(0))
    words = _limit(cgroup / "cpu.max").split()  # "150000 100000": microseconds of every period; "max 100000": no limit
    if len(words) == 2 and all(word.isdecimal() for word in words):
        cores = min(cores, math.ceil(int(words[0]) / int(words[1])))
    return max(1, cores)


def _memory_gib(cgroup: Path) -> float:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _limit(cgroup / "memory.max")
    if limit.isdecimal():
        total = min(total, int(limit))
    return round(total / 1024**3, 1)


def _limit(path: Path) -> str:
    """The text of a control file; empty where there is none."""
    return path.read_text(encoding="ascii").strip() if path.is_file() else ""


def _gpus() -> list[tuple[str, float]]:
    """(name, GiB) of each visible GPU, from nvidia-smi; CUDA_VISIBLE_DEVICES narrows it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if result.returncode != 0:
        return []
    rows = [line.rsplit(",", 1) for line in result.stdout.splitlines() if "," in line]
    found = [(name.strip(), _gpu_memory_gib(mib.strip())) for name, mib in rows]
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if setting is None else _visible(found, setting)


def _gpu_memory_gib(mib: str) -> float:
    """A GPU that shares the host's memory says `[N/A]` here."""
    return round(int(mib) / 1024, 1) if mib.isdecimal() else _memory_gib(CGROUP)


def _visible(found: list[tuple[str, float]], setting: str) -> list[tuple[str, float]]:
    """What CUDA makes of CUDA_VISIBLE_DEVICES: the devices in that order, up to the first entry that is none."""
    chosen = []
    for item in map(str.strip, setting.split(",")):
        if item.isdecimal() and int(item) < len(found):
            chosen.append(found[int(item)])
        elif item.startswith(("GPU-", "MIG-")) and found:
            chosen.append(found[0])  # by its name: the GPUs of a machine are taken to be alike
        else:
            break
    return chosen

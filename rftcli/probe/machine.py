"""Facts about this machine, without torch: cores, memory, GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from rftcli.plan.facts import MachineFacts

NVIDIA_SMI_SECONDS = 20


def machine_facts(*, use_gpus: bool = True) -> MachineFacts:
    """`use_gpus` False plans for the CPU although GPUs are there."""
    gpus = _gpus() if use_gpus else []
    return MachineFacts(
        cores=len(os.sched_getaffinity(0)),
        memory_gib=_memory_gib(),
        gpus=len(gpus),
        gpu_name=gpus[0][0] if gpus else None,
        gpu_memory_gib=gpus[0][1] if gpus else 0.0,
    )


def _memory_gib() -> float:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file():
        text = limit.read_text().strip()
        if text.isdigit():
            total = min(total, int(text))
    return round(total / 1024**3, 1)


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
    found = [(name.strip(), round(float(mib) / 1024, 1)) for name, mib in rows]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found = found[: len([item for item in visible.split(",") if item.strip() and item.strip() != "-1"])]
    return found

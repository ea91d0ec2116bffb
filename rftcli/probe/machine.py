"""Facts about this machine, without torch: cores, memory, GPUs."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rftcli.errors import UsageError
from rftcli.plan.facts import MachineFacts

NVIDIA_SMI_SECONDS = 20
CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
WITH_BFLOAT16 = ({"avx512bw", "avx512vl", "avx512dq"}, {"bf16"})
"""Flags of CPUs on which torch multiplies in bfloat16 with oneDNN: those of one of these sets (the last: ARM's). On others a plain loop does it."""


def machine_facts(*, use_gpus: bool = True) -> MachineFacts:
    """`use_gpus` False plans for the CPU although GPUs are there."""
    found = _gpus()
    gpus = found if use_gpus else []
    return MachineFacts(
        cores=_cores(CGROUP),
        memory_gib=_memory_gib(CGROUP),
        gpus=len(gpus),
        gpu_name=gpus[0][0] if gpus else None,
        gpu_memory_gib=min((memory for _, memory in gpus), default=0.0),
        vllm=installed("vllm"),
        liger=installed("liger_kernel"),
        gpus_left_alone=len(found) - len(gpus),
        threads=_threads(os.environ),
        cpu_bfloat16=_computes_bfloat16(CPUINFO),
    )


def left_alone(machine: MachineFacts) -> tuple[str, ...]:
    """What a person is told who has GPUs and asked for ranks on the CPU: at most one sentence."""
    count = machine.gpus_left_alone
    return (f"--ranks runs on the CPU: {count} GPU{'s are' if count > 1 else ' is'} left alone (--gpus {count})",) if count else ()


def _computes_bfloat16(cpuinfo: Path) -> bool:
    """True as well where nothing is told (another system than Linux)."""
    try:
        told = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return True
    return told is None or any(flags <= set(told[1].split()) for flags in WITH_BFLOAT16)


def _threads(environ: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS, unless torchrun has set it: it gives every process one where nothing is said."""
    word = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(word) if word.isdecimal() and int(word) > 0 and "TORCHELASTIC_RUN_ID" not in environ else None


OTHER = re.compile(r"(?:(?P<nodes>[1-9]\d*)x)?(?P<each>[1-9]\d*)x(?P<name>[A-Za-z][A-Za-z0-9_]*)(?:-(?P<gib>\d+(?:\.\d+)?))?")
"""A machine by name: 8xH100-80, 2x8xH100-80 (two of them), 8xH100 (its memory is known), 4xCPU-64 (ranks, and the memory that they share)."""
CORES_A_GPU = 8
HOST_MEMORY_A_GPU = 2.0
"""A machine by name has so many times its GPUs' memory, and so many cores: what large clouds rent out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherMachine:
    facts: MachineFacts
    each: int
    """Ranks of one machine: one for each of its GPUs unless fewer were asked for."""
    nodes: int


def other_machine(text: str, used: int | None = None) -> OtherMachine:
    """A machine that is not this one, for `rft plan --machine`. vLLM is taken to be installed beside GPUs. `used`: GPUs of each that train, where
    others are for servers. UsageError for a text that names none, or for more than there are."""
    found = OTHER.fullmatch(text)
    if found is None:
        hint = "for example 8xH100-80: GPUs, name, GiB of each; 2x8xH100-80: two of them; 4xCPU-64: ranks"
        raise UsageError(f"`{text}` names no machine", hint=hint)
    name, each, nodes = found["name"].upper(), int(found["each"]), int(found["nodes"] or 1)
    gib = float(found["gib"]) if found["gib"] else KNOWN_GIB.get(name, 0.0)
    if gib <= 0:
        raise UsageError(f"the memory of `{found['name']}` is not known", hint=f"write it: {text}-80; known are {', '.join(KNOWN_GIB)}")
    if used is not None and (name == "CPU" or used > each):
        raise UsageError(f"--gpus {used}, but {text} has {0 if name == 'CPU' else each} in each machine")
    if name == "CPU":
        return OtherMachine(facts=MachineFacts(cores=each, memory_gib=gib), each=each, nodes=nodes)
    facts = MachineFacts(
        cores=CORES_A_GPU * each, memory_gib=HOST_MEMORY_A_GPU * each * gib, gpus=each, gpu_name=found["name"], gpu_memory_gib=gib, vllm=True
    )
    return OtherMachine(facts=facts, each=each if used is None else used, nodes=nodes)


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


# How to add one: its name in capitals without a maker, and the GiB that it has in common use.
KNOWN_GIB: dict[str, float] = {
    "T4": 16, "V100": 32, "L4": 24, "A10": 24, "A10G": 24, "RTX4090": 24, "RTX5090": 32, "A6000": 48, "L40S": 48, "A100": 80, "H100": 80, "H200": 141,
    "B200": 180, "B300": 288,
}  # fmt: skip

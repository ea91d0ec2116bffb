"""What of the environment goes from the command to the ranks, on this machine and on others, and how a rank finds its place among them.

A remote shell starts with an environment of its own, so what matters travels in the attempt's launch.json and a rank puts it into place before it
imports anything. Secrets do not travel: launch.json lies on a disk that others read. Log in on the nodes (`wandb login`, `hf auth login`: both
keep the key in the home directory), or use a launcher that hands the environment on itself (srun, mpirun on one machine). No torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rftcli.redact import is_secret_name

if TYPE_CHECKING:
    from rftcli.plan.plan import Plan


ON_A_CPU = {
    "MKL_CBWR": "AUTO,STRICT",  # matrix products with the same bits for any thread count
    # glibc gives large blocks back at once, and every new one is filled page by page by the kernel: a tenth of an update of a small model
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TRIM_THRESHOLD_": str(8 * 2**30),
    "MALLOC_ARENA_MAX": "1",
}
"""For ranks on CPUs; `launch.env` goes before."""


def rank_environment(plan: Plan) -> dict[str, str]:
    """What every rank needs to be the same on any machine, then the recipe's `launch.env`. `plan`: with what the environment says."""
    return {**_same_everywhere(plan), **plan.launch.env}


def _same_everywhere(plan: Plan) -> dict[str, str]:
    package_root = str(Path(__file__).resolve().parents[2])
    threads = str(plan.world.threads_per_rank)
    paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        "DS_ACCELERATOR": plan.world.device,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **(ON_A_CPU if plan.world.device == "cpu" else {}),
    }


def travelling(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that ranks on other machines are given below the recipe's `launch.env`."""
    chosen = {name: value for name, value in environ.items() if _travels(name) and not is_secret_name(name)}
    return {**chosen, **_same_everywhere(plan)}


def left_behind() -> list[str]:
    """Names of secrets that ranks on other machines may miss."""
    return sorted(name for name in os.environ if is_secret_name(name) and name.startswith(("HF_", "HUGGING_FACE_", "WANDB_")))


def _travels(name: str) -> bool:
    return name not in STAYS and any(name == row or (row.endswith("*") and name.startswith(row[:-1])) for row in TRAVELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process stands in its job, as some launcher has told it."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    def environment(self) -> dict[str, str]:
        """The same in the names that torch and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
        }


def place_of(environ: Mapping[str, str]) -> Place | None:
    """The place that the environment describes; None outside of any launcher. The first row of PLACES that is there whole counts.

    >>> place_of({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"})
    Place(rank=5, size=8, local_rank=1, local_size=4)
    """
    for rank, size, local_rank, local_size in PLACES:
        if rank in environ and size in environ:
            count = int(environ[size])
            # "4(x2)", "4,2": tasks of each node; nodes are alike here
            on_node = environ.get(local_size, "").partition("(")[0].partition(",")[0]
            per_node = int(on_node) if on_node.isdecimal() else count
            number = int(environ[rank])
            local = environ.get(local_rank, "")
            return Place(rank=number, size=count, local_rank=int(local) if local.isdecimal() else number % per_node, local_size=per_node)
    return None


def interface_towards(address: str) -> str | None:
    """Name of the network interface through which `address` is reached; None where it is this machine or cannot be told.

    gloo takes the interface that this machine's own name resolves to, which on many machines is the loopback.
    """
    import psutil

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # a datagram socket sends nothing when it connects
            mine = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == mine for one in addresses):
            return None if mine.startswith("127.") else name
    return None


PLACES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun, DeepSpeed, Kubernetes operators
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),  # srun; the step's: a batch script has the others too
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI's mpirun
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)
"""Variables of rank, size, rank on the node, ranks on the node. To add a launcher: a row here."""

TRAVELS = {
    "PYTHONPATH": "the same code on every node",
    "PYTHONHASHSEED": "the same order of sets",
    "RFT_*": "this program's own: where its cache lies",
    "HF_*": "where models lie, offline mode, endpoints",
    "HUGGINGFACE_*": "the same, older names",
    "TRANSFORMERS_*": "offline mode, caches",
    "XDG_CACHE_HOME": "where caches lie",
    "TORCH_*": "debugging and time-outs of collectives",
    "TORCHINDUCTOR_*": "caches of compiled code",
    "TRITON_*": "caches of compiled code",
    "PYTORCH_*": "the allocator's settings",
    "CUDA_*": "device order, connections, blocking launches",
    "CUBLAS_*": "workspace size of deterministic products",
    "NVIDIA_*": "TF32, driver settings",
    "NCCL_*": "interfaces and transports of collectives on GPUs",
    "GLOO_*": "interfaces of collectives on the host",
    "UCX_*": "interfaces and transports below NCCL and MPI",
    "FI_*": "libfabric, on clouds that use it",
    "MKL_*": "numerics and threads of products on a CPU",
    "KMP_*": "threads of OpenMP",
    "OMP_*": "threads of OpenMP; the plan sets their number",
    "WANDB_*": "server, mode and directory of the tracker",
    "LC_ALL": "the same encoding of texts",
    "http_proxy": "downloads behind a proxy",
    "https_proxy": "downloads behind a proxy",
    "HTTP_PROXY": "downloads behind a proxy",
    "HTTPS_PROXY": "downloads behind a proxy",
    "no_proxy": "downloads behind a proxy",
    "NO_PROXY": "downloads behind a proxy",
}
"""Name (`*` at its end: all that begin so) -> why ranks on other machines need it. To add one: a row; names that look like a secret stay anyway."""

STAYS = {
    "CUDA_VISIBLE_DEVICES": "the launcher sets it on each node",
    "NCCL_COMM_ID": "of another job",
    "TORCHELASTIC_RUN_ID": "of another job",
}
"""Names that a row of TRAVELS covers and that still stay here, and why."""

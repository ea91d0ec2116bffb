"""Facts about the machine: read from the kernel's files and from what `nvidia-smi` prints, here a small script of that name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rftcli.errors import UsageError
from rftcli.probe import machine
from rftcli.probe.machine import installed, left_alone, machine_facts, other_machine


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Install an `nvidia-smi` that prints some lines and ends with a code."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def install(*lines: str, code: int = 0) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {code}\n")
        script.chmod(0o755)

    return install


def test_this_machine() -> None:
    facts = machine_facts(use_gpus=False)
    assert 1 <= facts.cores <= (os.cpu_count() or 1) and facts.memory_gib > 0
    assert (facts.gpus, facts.gpu_name, facts.gpu_memory_gib) == (0, None, 0.0)


@pytest.mark.parametrize(
    ("text", "computes"),
    [
        ("processor : 0\nflags\t\t: fpu sse2 avx2 bmi2\n\nprocessor : 1\nflags : fpu avx512bw avx512vl avx512dq\n", False),
        ("flags : fpu avx2 avx512f avx512cd\n", False),
        ("flags : fpu avx512f avx512dq avx512bw avx512vl\n", True),
        ("flags : fpu avx512f avx512dq avx512bw avx512vl avx512_bf16 amx_bf16\n", True),
        ("Features : fp asimd bf16 i8mm\n", True),
        ("Features : fp asimd\n", False),
        ("model name : one that tells no flags\n", True),
        (None, True),
    ],
)
def test_whether_the_cpu_computes_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, computes: bool) -> None:
    """Without, an update of SmolLM2 took minutes where it takes seconds in float32."""
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert machine_facts(use_gpus=False).cpu_bfloat16 is computes


def test_gpus(smi) -> None:  # type: ignore[no-untyped-def]
    smi("NVIDIA H100 80GB HBM3, 81559", "NVIDIA H100 80GB HBM3, 81559")
    facts = machine_facts()
    assert (facts.gpus, facts.gpu_name, facts.gpu_memory_gib) == (2, "NVIDIA H100 80GB HBM3", 79.6)
    without = machine_facts(use_gpus=False)
    assert (without.gpus, without.gpu_name, without.gpus_left_alone, facts.gpus_left_alone) == (0, None, 2, 0)
    assert left_alone(without) == ("--ranks runs on the CPU: 2 GPUs are left alone (--gpus 2)",) and left_alone(facts) == ()


def test_the_smallest_gpu_counts(smi) -> None:  # type: ignore[no-untyped-def]
    smi("A, Inc. Big, 81920", "Small, 24576")
    facts = machine_facts()
    assert (facts.gpus, facts.gpu_name, facts.gpu_memory_gib) == (2, "A, Inc. Big", 24.0)


@pytest.mark.parametrize(
    ("visible", "memory"),
    [
        (None, [10.0, 20.0, 30.0, 40.0]),
        ("0,1", [10.0, 20.0]),
        ("3, 2", [40.0, 30.0]),
        ("", []),
        ("-1", []),
        ("1,-1,2", [20.0]),  # CUDA stops at the first entry that is no device
        ("7", []),
        ("GPU-8f6d1c2a-0000", [10.0]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices(smi, monkeypatch: pytest.MonkeyPatch, visible: str | None, memory: list[float]) -> None:  # type: ignore[no-untyped-def]
    smi(*(f"G{index}, {1024 * 10 * (index + 1)}" for index in range(4)))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    facts = machine_facts()
    assert (facts.gpus, facts.gpu_memory_gib) == (len(memory), min(memory, default=0.0))


def test_a_gpu_that_shares_the_memory_of_its_host(smi) -> None:  # type: ignore[no-untyped-def]
    smi("NVIDIA GB10, [N/A]")
    facts = machine_facts()
    assert facts.gpus == 1 and facts.gpu_memory_gib == facts.memory_gib > 0


@pytest.mark.parametrize(("lines", "code"), [(("Failed to initialize NVML",), 0), (("A, 1024",), 9), ((), 0)])
def test_a_driver_that_does_not_answer_is_no_gpu(smi, lines: tuple[str, ...], code: int) -> None:  # type: ignore[no-untyped-def]
    smi(*lines, code=code)
    assert machine_facts().gpus == 0


def test_no_driver_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_facts().gpus == 0


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1), ("99999999 100000", None), ("", None)])
def test_a_containers_share_of_processor_time(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    here = len(os.sched_getaffinity(0))
    assert machine._cores(tmp_path) == (here if cores is None else min(here, cores))
    assert machine._cores(tmp_path / "nothing") == here


def test_a_containers_memory(tmp_path: Path) -> None:
    whole = machine._memory_gib(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._memory_gib(tmp_path) == whole
    (tmp_path / "memory.max").write_text(f"{512 * 1024**2}\n")
    assert machine._memory_gib(tmp_path) == 0.5
    (tmp_path / "memory.max").write_text(f"{10**18}\n")
    assert machine._memory_gib(tmp_path) == whole


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("json") and not installed("only_a_folder") and not installed("no_such_package_anywhere")


@pytest.mark.parametrize(
    ("environ", "threads"),
    [({}, None), *(({"OMP_NUM_THREADS": said}, threads) for said, threads in (("3", 3), ("4,2", 4), ("0", None), ("many", None)))],
)
def test_threads_that_the_environment_grants(environ: dict[str, str], threads: int | None) -> None:
    assert machine._threads(environ) == threads
    assert machine._threads({**environ, "TORCHELASTIC_RUN_ID": "none"}) is None  # torchrun's own default


@pytest.mark.parametrize(
    ("text", "gpus", "gpu_gib", "host_gib", "ranks", "nodes"),
    [
        ("8xH100-80", 8, 80.0, 1280.0, 8, 1), ("2x8xH100-80", 8, 80.0, 1280.0, 8, 2), ("1xH200", 1, 141.0, 282.0, 1, 1),
        ("4xMy_Card-12.5", 4, 12.5, 100.0, 4, 1), ("4xCPU-64", 0, 0.0, 64.0, 4, 1),
    ],
)  # fmt: skip
def test_a_machine_by_name(text: str, gpus: int, gpu_gib: float, host_gib: float, ranks: int, nodes: int) -> None:
    found = other_machine(text)
    facts = found.facts
    assert (facts.gpus, facts.gpu_memory_gib, facts.memory_gib, found.each, found.nodes) == (gpus, gpu_gib, host_gib, ranks, nodes)
    assert facts.vllm is (gpus > 0) and facts.cores >= ranks


@pytest.mark.parametrize("text", ["", "H100", "0xH100-80", "8xH100-", "8x-80", "8xH100-80x", "2xUnheard", "2xH100-0"])
def test_what_names_no_machine(text: str) -> None:
    with pytest.raises(UsageError):
        other_machine(text)

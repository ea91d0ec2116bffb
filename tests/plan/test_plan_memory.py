"""Bytes of weights, gradients and optimizer under each ZeRO stage (arXiv:1910.02054), and the lowest stage that fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.plan.facts import MachineFacts
from rftcli.plan.memory import GIB, TRAINING_SHARE, Keeping, training_bytes, zero_stage
from rftcli.plan.plan import WorldPlan


def world(ranks: int, device: str = "cuda") -> WorldPlan:
    return WorldPlan(ranks=ranks, device=device, backend="nccl" if device == "cuda" else "gloo", threads_per_rank=1)


@pytest.mark.parametrize(
    ("dtype", "stage", "per_parameter"),
    [
        ("float32", 0, 4 + 4 + 8), ("float32", 1, 4 + 4 + 8 / 4), ("float32", 2, 4 + 4 / 4 + 8 / 4), ("float32", 3, 16 / 4),
        ("bfloat16", 0, 2 + 4 + 12), ("bfloat16", 1, 2 + 4 + 12 / 4), ("bfloat16", 2, 2 + 4 / 4 + 12 / 4), ("bfloat16", 3, 18 / 4),
    ],
)  # fmt: skip
def test_bytes_a_parameter_on_four_ranks(dtype: str, stage: int, per_parameter: float) -> None:
    assert training_bytes(1000, dtype, stage, 4) == pytest.approx(1000 * per_parameter)


@given(st.integers(1, 10**12), st.sampled_from(["float32", "bfloat16"]), st.integers(1, 1024))
def test_a_higher_stage_never_needs_more(parameters: int, dtype: str, ranks: int) -> None:
    needs = [training_bytes(parameters, dtype, stage, ranks) for stage in range(4)]
    assert needs == sorted(needs, reverse=True)
    assert needs[3] * ranks == pytest.approx(needs[0])  # nothing is held twice


MACHINE = MachineFacts(cores=1, memory_gib=1.0, gpus=8, gpu_memory_gib=80.0)


@pytest.mark.parametrize(
    ("parameters", "ranks", "stage"),
    [
        (1_000_000_000, 8, 1),  # 6 + 12/8 = 7.5 bytes a parameter: 7 GiB of 40
        (5_700_000_000, 8, 1),  # 39.8 GiB
        (5_800_000_000, 8, 2),  # 40.5 GiB do not fit; 2 + 16/8 = 4 bytes: 21.6 GiB
        (10_700_000_000, 8, 2),  # 39.9 GiB
        (10_800_000_000, 8, 3),  # 40.2 GiB do not fit; 18/8 bytes: 22.6 GiB
        (2_300_000_000, 1, 1),  # 38.6 GiB on one rank, which has nobody to share with
    ],
)
def test_the_lowest_stage_that_fits(parameters: int, ranks: int, stage: int) -> None:
    found, reason = zero_stage(parameters, "bfloat16", world(ranks), MACHINE)
    need = training_bytes(parameters, "bfloat16", stage, ranks) / GIB
    assert found == stage and need <= TRAINING_SHARE * 80
    assert reason == f"{need:.2f} GiB a rank of weights, gradients and optimizer fit into 50% of 80 GiB"


@pytest.mark.parametrize(("ranks", "dtype", "stage"), [(1, "bfloat16", 1), (1, "float32", 0), (8, "bfloat16", 3)])
def test_too_large_for_any_stage(ranks: int, dtype: str, stage: int) -> None:
    found, reason = zero_stage(10**12, dtype, world(ranks), MACHINE)
    assert found == stage and "expect to run out of memory" in reason


@pytest.mark.parametrize(("ranks", "dtype", "stage"), [(1, "float32", 0), (1, "bfloat16", 1), (2, "float32", 2)])
def test_an_unknown_size(ranks: int, dtype: str, stage: int) -> None:
    assert zero_stage(None, dtype, world(ranks), MACHINE) == (stage, "the model's size is not known before it is loaded")


def test_ranks_on_a_cpu_share_its_memory() -> None:
    machine = MachineFacts(cores=2, memory_gib=32.0)
    assert zero_stage(10**9, "float32", world(1, "cpu"), machine)[0] == 0  # 14.9 of 16 GiB
    assert zero_stage(10**9, "float32", world(2, "cpu"), machine)[0] == 3  # 7.5 of 8 GiB; 9.3 under stage 2


@pytest.mark.parametrize(
    ("keeping", "dtype", "stage", "per_parameter"),
    [
        (Keeping(optimizer="adamw_8bit"), "bfloat16", 2, 2 + 4 / 4 + (4 + 2) / 4),
        (Keeping(optimizer="adamw_8bit"), "float32", 0, 4 + 4 + 2),
        (Keeping(master="bfloat16", gradients="bfloat16"), "bfloat16", 1, 2 + 2 + 6 / 4),
        (Keeping(gradients="bfloat16"), "bfloat16", 2, 2 + 2 / 4 + 12 / 4),
        (Keeping(offload_optimizer=True), "bfloat16", 2, 2 + 4 / 4),
        (Keeping(offload_optimizer=True, offload_parameters=True), "bfloat16", 3, 4 / 4),
    ],
)
def test_what_else_decides(keeping: Keeping, dtype: str, stage: int, per_parameter: float) -> None:
    assert training_bytes(1000, dtype, stage, 4, keeping) == pytest.approx(1000 * per_parameter)

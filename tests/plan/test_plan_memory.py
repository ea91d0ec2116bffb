"""The terms of memory in closed form, and against what was measured on GPUs (benchmarks/results). What autograd keeps is measured in tests/models."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.plan import memory
from rftcli.plan.deepspeed_config import BUCKET_ELEMENTS
from rftcli.plan.memory import GIB, Keeping, Pass, Shape, training_bytes

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WITHIN = 0.15
"""Of what was measured: what the plan promises."""
SMALL = Shape(parameters=1000, layers=3, hidden=4, inner=10, query_width=6, key_width=2, vocabulary=7, heads=3)


@pytest.mark.parametrize(
    ("dtype", "stage", "per_parameter"),
    [
        ("float32", 0, 4 + 4 + 8), ("float32", 1, 4 + 4 + 12 / 4), ("float32", 2, 4 + 4 / 4 + 12 / 4), ("float32", 3, 20 / 4),
        ("bfloat16", 0, 2 + 4 + 12), ("bfloat16", 1, 2 + 6 + 12 / 4), ("bfloat16", 2, 2 + 4 / 4 + 12 / 4), ("bfloat16", 3, 18 / 4),
    ],
)  # fmt: skip
def test_bytes_a_parameter_on_four_ranks(dtype: str, stage: int, per_parameter: float) -> None:
    assert training_bytes(1000, dtype, stage, 4) == pytest.approx(1000 * per_parameter)


@given(st.integers(1, 10**12), st.sampled_from(["float32", "bfloat16"]), st.integers(2, 1024))
def test_a_higher_stage_never_needs_more_where_there_is_someone_to_share_with(parameters: int, dtype: str, ranks: int) -> None:
    needs = [training_bytes(parameters, dtype, stage, ranks) for stage in range(0 if dtype == "float32" else 1, 4)]
    assert all(lower <= higher * (1 + 1e-12) for higher, lower in pairwise(needs))
    assert needs[-1] * ranks == pytest.approx(parameters * (20 if dtype == "float32" else 18))  # nothing is held twice under stage 3


@pytest.mark.parametrize(
    ("keeping", "dtype", "stage", "per_parameter"),
    [
        (Keeping(optimizer="adamw_8bit"), "bfloat16", 2, 2 + 4 / 4 + (4 + 2) / 4),
        (Keeping(optimizer="adamw_8bit"), "float32", 0, 4 + 4 + 2),
        (Keeping(master="bfloat16", gradients="bfloat16"), "bfloat16", 1, 2 + 2 + 6 / 4),
        (Keeping(gradients="bfloat16"), "bfloat16", 2, 2 + 2 / 4 + 12 / 4),
        (Keeping(offload_optimizer=True), "bfloat16", 2, 2 + 4 / 4),
        (Keeping(offload_optimizer=True), "bfloat16", 1, 2 + 4),
        (Keeping(offload_optimizer=True), "float32", 1, 4 + 4),
        (Keeping(offload_optimizer=True), "float32", 2, 4),
        (Keeping(offload_optimizer=True, gradients="bfloat16"), "bfloat16", 2, 2),
        (Keeping(offload_optimizer=True), "bfloat16", 3, 2 / 4),
        (Keeping(offload_optimizer=True, offload_parameters=True), "bfloat16", 3, 0),
    ],
)
def test_what_else_decides(keeping: Keeping, dtype: str, stage: int, per_parameter: float) -> None:
    assert training_bytes(1000, dtype, stage, 4, keeping) == pytest.approx(1000 * per_parameter)


def test_what_an_adapter_trains_has_gradients_alone() -> None:
    assert training_bytes(1000, "float32", 0, 1, trained=10) == 4 * 1000 + (4 + 8) * 10


def test_gradients_that_stay_between_updates() -> None:
    of = {"ranks": 4}
    assert memory.kept_gradients(1000, "bfloat16", stage=3, **of) == memory.gradients(1000, "bfloat16", stage=3, **of) == 1000
    assert memory.kept_gradients(1000, "bfloat16", stage=1, **of) == 4000  # float32 sums, and not the gradients of a pass
    assert memory.kept_gradients(1000, "bfloat16", stage=2, **of) == memory.kept_gradients(1000, "float32", stage=1, **of) == 0
    assert memory.kept_gradients(1000, "bfloat16", stage=3, keeping=Keeping(offload_optimizer=True), **of) == 0


def test_the_other_terms_in_numbers() -> None:
    assert memory.buckets("float32", stage=0, ranks=2) == memory.buckets("bfloat16", stage=1, ranks=2) == 0
    assert memory.buckets("bfloat16", stage=2, ranks=2) == 2 * BUCKET_ELEMENTS == memory.buckets("bfloat16", stage=3, ranks=2) / 2
    assert memory.update_copies(1000, "float32", stage=0, ranks=2) == 4000 and memory.update_copies(1000, "float32", stage=0, ranks=1) == 0
    assert memory.update_copies(1000, "float32", stage=2, ranks=4) == 1000 and memory.update_copies(1000, "bfloat16", stage=1, ranks=4) == 0
    assert memory.frozen_copy(1000, "bfloat16") == 2000 and memory.frozen_copy(1000, "bfloat16", bits=4, ranks=2) == 250
    assert memory.running_mean(1000, ranks=4) == 1000
    large = Shape(parameters=72 * 10**9, layers=80, hidden=1, inner=1, query_width=1, key_width=1, vocabulary=1)
    assert memory.gathered(SMALL, "bfloat16", stage=3, ranks=2) == 2000 and memory.gathered(large, "bfloat16", stage=3, ranks=8) == 2 * 2 * 72e9 / 80
    assert memory.gathered(large, "float32", stage=2, ranks=8) == memory.gathered(large, "float32", stage=3, ranks=1) == 0
    half = replace(large, parameters=36 * 10**9)
    assert memory.gathered(half, "bfloat16", stage=3, ranks=8) == 2e9  # as much as may be live, and more than two layers
    assert memory.cache_per_token(SMALL, "bfloat16") == 2 * 3 * 2 * 2 and memory.kv_cache(SMALL, "float32", sequences=5, tokens=7) == 48 * 35
    assert memory.chosen_scores(5, 7, "float32") == (4 + 16) * 5 * 7
    assert memory.chosen_scores(5, 7, "bfloat16", filters=["top_k", "top_p"]) == (6 + 50) * 5 * 7
    assert memory.passing(SMALL, "float32", positions=5) == 4 * 5 * (16 + 30)
    assert memory.head(SMALL, "float32", positions=5) == 4 * 4 * 5 * 7 + 4 * 7 * 4
    big = Shape(parameters=1, layers=1, hidden=1, inner=1, query_width=1, key_width=1, vocabulary=150_000)
    assert memory.head(big, "bfloat16", positions=16384) == 5 * 256 * 2**20 + 2 * 150_000


def test_what_an_offloaded_optimizer_takes_in_numbers() -> None:
    off = Keeping(offload_optimizer=True)
    assert [memory.on_the_way(1000, "bfloat16", stage=stage, keeping=off) for stage in (1, 2, 3)] == [2000, 2000, 0]
    assert memory.on_the_way(1000, "bfloat16", stage=2) == 0
    assert memory.buckets("bfloat16", stage=1, ranks=2, keeping=off) == 2 * memory.buckets("bfloat16", stage=2, ranks=2, keeping=off) > 0
    copies = [memory.update_copies(1000, dtype, stage=stage, ranks=4, keeping=off) for dtype in ("bfloat16", "float32") for stage in (1, 2, 3)]
    assert copies == [1000, 500, 0, 0, 1000, 0]
    assert [memory.pinned(size) for size in (0, 1, 1000, 1024, 1025)] == [0, 1, 1024, 1024, 2048]
    of: dict[str, Any] = {"ranks": 4, "keeping": off}
    assert memory.offloaded(4096, 512, "bfloat16", stage=2, **of) == {
        "optimizer": 3 * 4096, "gradients": 4096, "weights on the way": 2048 + 1024,
    }  # fmt: skip
    assert memory.offloaded(4096, 512, "float32", stage=1, **of)["gradients"] == 2 * 4096
    assert memory.offloaded(4096, 512, "bfloat16", stage=3, **of) == {"optimizer": 3 * 4096, "gradients": 2 * 4096}
    three = 12 * 10**9  # of one rank: three pieces, each rounded up
    assert memory.offloaded(three, 1, "bfloat16", stage=3, **of)["gradients"] == 3 * 2**32 + 2**34


def test_activations_in_numbers() -> None:
    norms, mlp = 2 * (4 + 2 * 2) * 4, 4 * 2 * 10
    plain = norms + 2 * (2 * 6 + 2 * 2) + mlp
    assert memory.layer_activations(SMALL, "bfloat16", Pass(positions=10)) == 10 * plain
    masked = norms + 2 * (2 * 6 + 2 * 6 + 5) + mlp
    assert memory.layer_activations(SMALL, "bfloat16", Pass(positions=10, mask_width=5)) == 10 * masked
    assert memory.layer_activations(SMALL, "bfloat16", Pass(positions=10, mask_width=5, eager=True)) == 10 * (masked + 6 * 3 * 5)
    adapter = 2 * (4 + 2) * 4 + 2 * (2 * 6 + 2 * 2) + mlp  # inputs and outputs of norms, attention, all of the MLP
    assert memory.layer_activations(SMALL, "bfloat16", Pass(positions=10, adapters=True)) == 10 * adapter
    below = 2 * 4 * 4 + 2 * (2 * 6 + 2 * 2) + 3 * 2 * 10  # inputs of norms, attention, gate, its activation and up
    assert memory.layer_activations(SMALL, "bfloat16", Pass(positions=10, adapters=True, widened=True)) == 10 * (below + 4 * (20 + 6 + 10))
    assert memory.layer_activations(SMALL, "bfloat16", Pass(positions=10, adapters=True, dropout=1)) == 10 * (below + 3 * (20 + 6 + 10))
    fused = 2 * (2 + 2) * 4 + 2 * (2 * 6 + 2 * 2) + 3 * 2 * 10  # input and output of norms; gate, up and product
    assert memory.layer_activations(SMALL, "bfloat16", Pass(positions=10, fused=True)) == 10 * fused
    below = 2 * 2 * 4 + 2 * (2 * 6 + 2 * 2) + 2 * 2 * 10
    one = Pass(positions=10, fused=True, adapters=True, widened=True)
    assert memory.layer_activations(SMALL, "bfloat16", one) == 10 * (below + 4 * (20 + 6 + 10))
    assert memory.layer_activations(SMALL, "bfloat16", Pass(positions=10, fused=True, adapters=True)) == 10 * fused
    below = 2 * 4 * 4 + 2 * (2 * 6 + 2 * 2) + 3 * 2 * 10
    dora = Pass(positions=10, adapters=True, widened=True, scaled=True)
    given = 6 + 2 * 2 + 2 * 4 + 2 * 10  # what queries, keys, values, output and the MLP's three give
    assert memory.layer_activations(SMALL, "bfloat16", dora) == 10 * (below + 4 * (20 + 6 + 10) + (2 + 4) * given)
    matrices = 4 * (2 * 6 + 2 * 2 + 3 * 10)
    dropped = memory.layer_activations(SMALL, "bfloat16", replace(dora, dropout=1))
    assert dropped == 10 * (below + (4 + 1) * (20 + 6 + 10) + (4 + 4) * given) + 4 * matrices
    assert memory.summing(SMALL, dora) == 4 * (10 * 10 + 2 * 10 * 4) and memory.summing(SMALL, Pass(positions=10)) == 0
    last = 10 * (4 + 4) * 4
    assert memory.activations(SMALL, "bfloat16", Pass(positions=10), checkpointing=False) == 3 * 10 * plain + last
    assert memory.activations(SMALL, "bfloat16", Pass(positions=10), checkpointing=True) == 10 * plain + 3 * 2 * 10 * 4 + last


@given(
    st.integers(1, 4096), st.integers(1, 4096), st.sampled_from(["float32", "bfloat16"]), st.booleans(), st.booleans(), st.integers(0, 100)
)
def test_activations_grow_with_positions_and_never_by_recomputing(
    few: int, more: int, dtype: str, checkpointing: bool, adapters: bool, mask: int
) -> None:
    def size(positions: int, again: bool) -> float:
        return memory.activations(SMALL, dtype, Pass(positions=positions, mask_width=mask, adapters=adapters), checkpointing=again)

    assert size(few + more, checkpointing) == pytest.approx(size(few, checkpointing) + size(more, checkpointing))
    assert size(few, True) <= size(few, False)


HALF = Shape(parameters=494_032_768, layers=24, hidden=896, inner=4864, query_width=896, key_width=128, vocabulary=151936, heads=14)
QUICKSTART = Shape(parameters=771_968, layers=3, hidden=128, inner=384, query_width=256, key_width=128, vocabulary=264, heads=4)


def result(name: str, *keys: str) -> float:
    found: Any = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    for key in keys:
        found = found[key]
    return float(found)


def learning(shape: Shape, dtype: str, stage: int, ranks: int, one: Pass) -> float:
    """GiB of the update's peak without the engine."""
    state = training_bytes(shape.parameters, dtype, stage, ranks) + memory.buckets(dtype, stage=stage, ranks=ranks) + memory.PROCESS_BYTES["cuda"]
    kept = memory.activations(shape, dtype, one, checkpointing=False) + memory.head(shape, dtype, positions=one.positions)
    return (state + kept) / GIB


def test_measured_half_a_billion_parameters_on_a_gpu() -> None:
    """Micro-batches of at most 16,384 tokens of rows of 1,280. Rows of one length need no mask, and 12 go together; others fill the budget."""
    equal = result("update-0.5b-1xH200.json", "results", "equal lengths", "padded", "memory_gib")
    assert learning(HALF, "bfloat16", 1, 1, Pass(positions=12 * 1280)) == pytest.approx(equal, rel=WITHIN)
    ended = result("update-0.5b-1xH200.json", "results", "lengths end by chance, 512 on average", "padded", "memory_gib")
    assert learning(HALF, "bfloat16", 1, 1, Pass(positions=16384, mask_width=1280)) == pytest.approx(ended, rel=WITHIN)
    packed = result("update-0.5b-1xH200.json", "results", "equal lengths", "varlen", "memory_gib")
    assert learning(HALF, "bfloat16", 1, 1, Pass(positions=12 * 1280)) == pytest.approx(packed, rel=WITHIN)


@pytest.mark.parametrize(("run", "fused"), [("", False), (" --liger", True)])
def test_measured_with_and_without_fused_kernels_on_a_gpu(run: str, fused: bool) -> None:
    """128 rows of 1,280 positions in six passes, of 22 rows at most: weights and gradients in half precision, no optimizer."""
    passes = json.loads((RESULTS / "passes-1xH200.json").read_text(encoding="utf-8"))["runs"]
    asked = f"--prompt 256 --response 1024 --cases padded,varlen,shared --tokens 32768{run}"
    cases = next(each["cases"] for each in passes if each["command"].endswith(asked))
    one = Pass(positions=22 * 1280, fused=fused)
    kept = memory.activations(HALF, "bfloat16", one, checkpointing=False) + memory.head(HALF, "bfloat16", positions=one.positions)
    assert kept / GIB + 2 * 2 * HALF.parameters / GIB == pytest.approx(cases[0]["memory_gib"], rel=0.05)


@pytest.mark.parametrize(
    ("run", "dtype", "stage"),
    [("quickstart-float32-zero0 (8 steps)", "float32", 0), ("quickstart-bfloat16-zero1", "bfloat16", 1), ("quickstart-bfloat16-zero2", "bfloat16", 2),
     ("quickstart-bfloat16-zero3", "bfloat16", 3), ("quickstart-float32-zero3", "float32", 3)],
)  # fmt: skip
def test_measured_a_tiny_model_at_every_stage(run: str, dtype: str, stage: int) -> None:
    """A million parameters: what is there is the buckets and the activations of 128 rows of 36 positions."""
    measured = result("runs-2xH200.json", "results", run, "memory_gib")
    assert learning(QUICKSTART, dtype, stage, 2, Pass(positions=128 * 36, mask_width=36)) == pytest.approx(measured, rel=WITHIN)


THREE = Shape(parameters=3_085_938_688, layers=36, hidden=2048, inner=11008, query_width=2048, key_width=256, vocabulary=151936, heads=16)
OFF = Keeping(offload_optimizer=True)


def idle(shape: Shape, stage: int, keeping: Keeping) -> float:
    """GiB on a GPU between updates, without an engine."""
    of: dict[str, Any] = {"stage": stage, "keeping": keeping}
    dtype, all_of = "bfloat16", {"ranks": 1, **of}
    held = memory.weights(shape.parameters, dtype, **all_of) + memory.optimizer(shape.parameters, dtype, **all_of)
    held += memory.kept_gradients(shape.parameters, dtype, **all_of) + memory.on_the_way(shape.vocabulary * shape.hidden, dtype, **of)
    return (held + memory.PROCESS_BYTES["cuda"] + (memory.buckets(dtype, **all_of) if stage == 3 else 0)) / GIB


@pytest.mark.parametrize(("name", "shape", "stages"), [("0.5b", HALF, (1, 2, 3)), ("3b", THREE, (2, 3))])
def test_measured_an_offloaded_optimizer(name: str, shape: Shape, stages: tuple[int, ...]) -> None:
    file = f"update-offload-{name}-1xH200.json"
    for stage in stages:
        found = result(file, "results", f"offload{stage}", "by_stage_gib", "measured", "credit")
        assert idle(shape, stage, OFF) == pytest.approx(found, rel=0.01)
        if name != "0.5b":
            continue
        assert idle(shape, stage, Keeping()) == pytest.approx(result(file, "results", f"zero{stage}", "by_stage_gib", "measured", "credit"), rel=0.01)
        saved = result(file, "results", f"zero{stage}", "memory_gib") - result(file, "results", f"offload{stage}", "memory_gib")
        of: dict[str, Any] = {"stage": stage, "ranks": 1}
        kept, moved = (
            training_bytes(shape.parameters, "bfloat16", stage, 1, keeping) + memory.buckets("bfloat16", keeping=keeping, **of)
            for keeping in (Keeping(), OFF)
        )
        moved += memory.on_the_way(shape.vocabulary * shape.hidden, "bfloat16", stage=stage, keeping=OFF)
        assert (kept - moved) / GIB == pytest.approx(saved, rel=0.01)
        host = sum(memory.offloaded(shape.parameters, shape.vocabulary * shape.hidden, "bfloat16", keeping=OFF, **of).values()) / GIB
        more = result(file, "results", f"offload{stage}", "host_gib") - result(file, "results", f"zero{stage}", "host_gib")
        assert host == pytest.approx(more, rel=WITHIN)

"""The host's memory beside GPUs, and where a checkpoint is written behind the next steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rftcli.plan.compile_host_memory import COPY, HOST_SHARE
from rftcli.plan.facts import MachineFacts
from rftcli.plan.memory import GIB
from rftcli.plan.plan import Plan
from rftcli.plan.show import plan_text

Compiled = Callable[..., Plan]
SEVEN = {
    "parameters": 7_600_000_000, "layers": 28, "hidden": 3584, "vocabulary": 152064, "key_width": 512, "query_width": 3584, "inner": 18944,
    "heads": 28, "max_positions": 32768,
}  # fmt: skip


def copy_gib(plan: Plan) -> float | None:
    assert plan.memory is not None
    rows = (*plan.memory.rows, *plan.memory.host)
    return next((max(row.gib.values()) for row in rows if row.name == COPY), None)


def test_a_copy_in_numbers(compiled: Compiled, gpus: MachineFacts) -> None:
    plan = compiled("train.deepspeed.zero_stage=2", machine=gpus, ranks=8, **SEVEN)
    # this rank's eighth of master weights and moments, the module's bfloat16 weights, and the policy once more
    assert copy_gib(plan) == pytest.approx(7.6e9 * (12 / 8 + 2 + 2) / GIB)
    assert plan.checkpoint.background and "host memory of a rank, GiB" in plan_text(plan) and COPY in plan_text(plan)
    alone = compiled("train.deepspeed.zero_stage=2", "checkpoint.trainer_state=false", machine=gpus, ranks=8, **SEVEN)
    assert copy_gib(alone) == pytest.approx(7.6e9 * 2 / GIB)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(32, 2000), st.integers(0, 2000))
def test_it_is_written_behind_where_host_memory_allows(compiled: Compiled, gpus: MachineFacts, little: int, more: int) -> None:
    small, large = (compiled(machine=replace(gpus, memory_gib=float(gib)), ranks=8, **SEVEN) for gib in (little, little + more))
    assert small.checkpoint.background <= large.checkpoint.background
    for gib, plan in ((little, small), (little + more, large)):
        assert plan.memory is not None and (copy_gib(plan) is not None) is plan.checkpoint.background
        held = 8 * sum(max(row.gib.values()) for row in plan.memory.host if row.name != COPY)
        stage = plan.learner.zero_stage
        copies = 7.6e9 * (12 + (2 if stage == 3 else 0) + (2 if stage < 3 else 0) + 2) / GIB  # of eight ranks, and what rank 0 keeps for all
        assert plan.checkpoint.background is (held + copies <= HOST_SHARE * gib)
        assert any(note.startswith(f"checkpoint.background {str(plan.checkpoint.background).lower()}: ") for note in plan.notes)


def test_what_the_recipe_says_stays_and_is_warned_of(compiled: Compiled, gpus: MachineFacts) -> None:
    small = replace(gpus, memory_gib=64.0)
    assert not compiled(machine=small, ranks=8, **SEVEN).checkpoint.background
    plan = compiled("checkpoint.background=true", machine=small, ranks=8, **SEVEN)
    assert plan.checkpoint.background and any("run out of it while a checkpoint is written" in note for note in plan.notes)
    assert not compiled("checkpoint.background=false", machine=gpus, ranks=8, **SEVEN).checkpoint.background
    assert not compiled(machine=gpus).checkpoint.background  # nothing is known of the model's size


def test_on_a_cpu_the_copy_lies_beside_everything_else(compiled: Compiled) -> None:
    small = {"parameters": 134_500_000, "layers": 30, "hidden": 576, "vocabulary": 49152, "key_width": 192, "inner": 1536, "max_positions": 8192}
    roomy = compiled("rollout.hf.batch_rows=8", machine=MachineFacts(cores=2, memory_gib=64.0), **small)
    # float32: moments, weights, and the policy once more
    assert roomy.checkpoint.background and copy_gib(roomy) == pytest.approx(134.5e6 * (8 + 4 + 4) / GIB)
    assert roomy.memory is not None and not roomy.memory.host and roomy.memory.fits
    assert not compiled("rollout.hf.batch_rows=8", machine=MachineFacts(cores=2, memory_gib=6.0), **small).checkpoint.background


def test_holes_that_scores_leave_are_told_where_they_may_not_fit(compiled: Compiled) -> None:
    wide = {"parameters": 78_374_144, "layers": 2, "hidden": 256, "vocabulary": 150_000, "key_width": 128, "inner": 768, "max_positions": 8192}
    roomy = compiled("checkpoint.background=false", machine=MachineFacts(cores=2, memory_gib=64.0), **wide)
    assert roomy.memory is not None and not any("blocks of scores" in note for note in roomy.notes)
    scores = next(row.gib["learn"] for row in roomy.memory.rows if row.name == "logits")
    assert scores == pytest.approx((4 * 256 * 2**20 + 4 * 150_000 * 256) / GIB)
    little = MachineFacts(cores=2, memory_gib=(roomy.memory.peak[1] + scores / 2) / 0.85)
    tight = compiled("checkpoint.background=false", machine=little, **wide)
    assert tight.memory is not None and tight.memory.fits and tight.memory.peak == roomy.memory.peak
    (note,) = [note for note in tight.notes if "blocks of scores" in note]
    assert f"may take {scores:.2f} GiB more" in note and "`launch.env: {MALLOC_MMAP_THRESHOLD_: '67108864'}`" in note
    told = compiled("checkpoint.background=false", "launch.env={MALLOC_MMAP_THRESHOLD_: '67108864'}", machine=little, **wide)
    assert not any("blocks of scores" in note for note in told.notes)


def test_what_waits_lies_on_the_host(compiled: Compiled, gpus: MachineFacts) -> None:
    sets = ("algorithm.kl.coefficient=0.1", "models.reference.offload=true", "models.policy.ema={}", "train.offload.optimizer=cpu")
    plan = compiled(*sets, machine=replace(gpus, memory_gib=4000.0), ranks=8, **SEVEN)
    assert plan.memory is not None
    assert {row.name for row in plan.memory.host} == {"process", "reference", "running mean", "optimizer", "gradients", "weights on the way", COPY}
    assert "optimizer" not in {row.name for row in plan.memory.rows}


def test_a_critic_has_room_of_its_own_for_what_is_offloaded(compiled: Compiled, gpus: MachineFacts) -> None:
    def sizes(*sets: str) -> dict[str, float]:
        off = ("train.offload.optimizer=cpu", "train.deepspeed.zero_stage=2")
        plan = compiled(*off, *sets, machine=replace(gpus, memory_gib=4000.0), ranks=8, **SEVEN)
        assert plan.memory is not None
        rows = {row.name: max(row.gib.values()) for row in plan.memory.host}
        return rows | {f"gpu {row.name}": max(row.gib.values()) for row in plan.memory.rows}

    alone, both = sizes(), sizes("algorithm.advantage.kind=gae", "models.critic={}")
    for name in ("optimizer", "gradients", "weights on the way", "gpu gradients on the way"):
        assert both[name] == pytest.approx(2 * alone[name])
    adapter = sizes("models.policy.lora={rank: 8}", "algorithm.advantage.kind=gae", "models.critic={}")
    assert adapter["gpu gradients on the way"] > 2 * alone["gpu gradients on the way"]  # the critic, in float32 as the adapter is


def test_a_host_that_is_too_small_is_told_with_what_fills_it(compiled: Compiled, gpus: MachineFacts) -> None:
    off = ("train.offload.optimizer=cpu", "train.deepspeed.zero_stage=2")
    small = compiled(*off, machine=replace(gpus, memory_gib=128.0), ranks=8, **SEVEN)
    (note,) = [note for note in small.notes if "run out of the host's" in note]
    assert small.memory is not None
    held = 8 * sum(max(row.gib.values()) for row in small.memory.host if row.name != COPY)
    assert f"{held:.1f} GiB of {HOST_SHARE * 128:.0f} GiB for 8 ranks, each with optimizer" in note and not small.checkpoint.background
    for plan in (compiled(*off, machine=replace(gpus, memory_gib=held / HOST_SHARE + 1), ranks=8, **SEVEN), compiled(machine=gpus, ranks=8, **SEVEN)):
        assert not any("run out of the host's" in note for note in plan.notes)

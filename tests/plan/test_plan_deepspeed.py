"""The configuration that DeepSpeed gets, for every stage, number type and rank count; that it works is shown by the distributed tests."""

from __future__ import annotations

import json

import pytest

from rftcli.plan.deepspeed_config import BUCKET_ELEMENTS, build


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 8])
def test_every_configuration(stage: int, dtype: str, ranks: int) -> None:
    config = build(stage=stage, dtype=dtype, ranks=ranks, max_grad_norm=0.5)
    assert json.loads(json.dumps(config)) == config
    assert config["train_batch_size"] == config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * ranks
    assert config["gradient_clipping"] == 0.5
    assert config["zero_optimization"]["stage"] == stage
    assert config["bf16"]["enabled"] is (dtype == "bfloat16") and "fp16" not in config
    assert config.get("data_types") == ({"grad_accum_dtype": "fp32"} if dtype == "bfloat16" else None)
    assert config.get("communication_data_type") == ("fp32" if dtype == "bfloat16" else None)


def test_buckets_belong_to_a_stage() -> None:
    zero = {stage: build(stage=stage, dtype="float32", ranks=2, max_grad_norm=1.0)["zero_optimization"] for stage in range(4)}
    assert zero[0] == {"stage": 0}
    assert zero[1].keys() == zero[2].keys() and zero[1]["allgather_bucket_size"] == BUCKET_ELEMENTS
    assert {name for name in zero[3] if name.startswith("stage3_")} and not any(name.startswith("stage3_") for name in zero[2])
    assert all(zero[stage]["overlap_comm"] is False and zero[stage]["contiguous_gradients"] is True for stage in (1, 2, 3))


def test_no_clipping_is_zero() -> None:
    assert build(stage=0, dtype="float32", ranks=1, max_grad_norm=None)["gradient_clipping"] == 0.0


def test_number_types() -> None:
    config = build(stage=2, dtype="bfloat16", ranks=2, max_grad_norm=1.0, master="bfloat16", gradients="bfloat16", reduce="bfloat16")
    assert config["bf16"] == {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert config["data_types"] == {"grad_accum_dtype": "bf16"} and config["communication_data_type"] == "bf16"


def test_offloading() -> None:
    config = build(stage=3, dtype="bfloat16", ranks=2, max_grad_norm=1.0, offload_optimizer="cpu", offload_parameters="cpu")
    assert config["zero_optimization"]["offload_optimizer"]["device"] == config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert config["zero_force_ds_cpu_optimizer"] is False
    plain = build(stage=3, dtype="bfloat16", ranks=2, max_grad_norm=1.0)
    assert not [name for name in plain["zero_optimization"] if name.startswith("offload")]


def test_extra_is_merged_deeply() -> None:
    extra = {"zero_optimization": {"overlap_comm": True, "zero_hpz_partition_size": 4}, "wall_clock_breakdown": True}
    config = build(stage=3, dtype="float32", ranks=8, max_grad_norm=1.0, extra=extra)
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"], zero["zero_hpz_partition_size"]) == (3, True, 4)
    assert zero["reduce_bucket_size"] == BUCKET_ELEMENTS and config["wall_clock_breakdown"] is True


def test_what_the_plan_writes_is_refused_in_extra() -> None:
    """Names with a value that follows from the recipe; the rest of zero_optimization is there to be changed."""
    from rftcli.recipe.update_rules import DERIVED, PASSED_ON

    config = build(stage=3, dtype="bfloat16", ranks=2, max_grad_norm=1.0, offload_optimizer="cpu", offload_parameters="cpu")
    internal = {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "steps_per_print"}
    assert not [name for name in config if (name,) not in DERIVED and name not in PASSED_ON and name not in internal]
    fixed = {"stage", "offload_optimizer", "offload_param", "stage3_gather_16bit_weights_on_model_save"}
    assert all(("zero_optimization", name) in DERIVED for name in fixed)

"""What a plan says of its models: adapters, frozen names, the reference and where it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rftcli.plan.compile_problems import CompileError
from rftcli.plan.facts import MachineFacts
from rftcli.plan.plan import Plan, plan_from_json, plan_to_json
from rftcli.plan.plan_models import ReferencePlan
from rftcli.plan.show import plan_text

Compiled = Callable[..., Plan]
KL = "algorithm.kl.coefficient=0.1"
SHAPES = {"model.embed_tokens.weight": (100, 8), "model.layers.0.mlp.up_proj.weight": (16, 8), "model.norm.weight": (8,)}


def held(plan: Plan) -> ReferencePlan:
    assert plan.reference_use is not None and plan.reference is not None
    return plan.reference_use


@pytest.mark.parametrize(
    ("sets", "kind"),
    [
        ((), "model"),
        (("models.policy.lora={}",), "adapter_off"),
        (("models.policy.lora.start_from=org/adapter",), "adapter_copy"),
        (("models.policy.lora={}", "models.reference.refresh.every=5"), "model"),
        (("models.policy.lora={}", "models.reference.from=org/ref"), "model"),
    ],
)
def test_how_a_reference_is_held(compiled: Compiled, sets: tuple[str, ...], kind: str) -> None:
    plan = compiled(KL, *sets, reference_path="/ref" if "models.reference.from=org/ref" in sets else None)
    assert held(plan).kind == kind
    assert plan_from_json(plan_to_json(plan)) == plan
    if kind != "model":
        assert any("no second copy" in note for note in plan.notes)


def test_a_reference_of_its_own_is_whole(compiled: Compiled) -> None:
    plan = compiled(
        KL,
        "models.policy.lora={}",
        "models.policy.quantise={}",
        "models.policy.add_tokens=[<a>]",
        "models.reference.from=org/ref",
        reference_path="/ref",
    )
    assert plan.reference is not None and plan.policy.lora is not None
    assert (plan.reference.path, plan.reference.lora, plan.reference.quantise, plan.reference.add_tokens) == ("/ref", None, None, ())


@pytest.mark.parametrize(
    ("asked", "parameters", "on_gpu", "expected"),
    [("auto", 7_000_000_000, True, False), ("auto", 14_000_000_000, True, True), ("true", 5, True, True), ("false", 14_000_000_000, True, False),
     ("auto", 14_000_000_000, False, False), ("true", 5, False, False)],
)  # fmt: skip
def test_where_a_reference_waits(
    compiled: Compiled, gpus: MachineFacts, cpu: MachineFacts, asked: str, parameters: int, on_gpu: bool, expected: bool
) -> None:
    """auto: more than a quarter of the GPU's 80 GiB; 7e9 x 2 bytes are 13 GiB, 14e9 are 26 GiB. On a CPU there is nowhere to go."""
    plan = compiled(KL, "rollout.engine=fake", f"models.reference.offload={asked}", machine=gpus if on_gpu else cpu, parameters=parameters, ranks=8)
    assert held(plan).offload is expected
    assert any("has no effect" in note for note in plan.notes) is (asked == "true" and not on_gpu)
    assert any("waits in CPU memory" in note for note in plan.notes) is (asked == "auto" and expected)


def test_frozen_names_are_looked_up_in_the_files(compiled: Compiled) -> None:
    plan = compiled("models.policy.freeze=['*.embed_tokens.*', model.norm.weight]", shapes=SHAPES)
    assert "models.policy.freeze: 2 of 3 tensors are frozen, 808 of 936 parameters" in plan.notes
    for patterns, path, message in (
        ("['*.mlp.*', 'vision.*']", "models.policy.freeze[1]", "`vision.*` matches no parameter"),
        ("['*']", "models.policy.freeze", "freezes all parameters: nothing is left to train"),
    ):
        with pytest.raises(CompileError) as caught:
            compiled(f"models.policy.freeze={patterns}", shapes=SHAPES)
        assert [(item.path, item.message) for item in caught.value.problems] == [(path, message)]
    assert compiled("models.policy.freeze=['vision.*']").policy.freeze == ("vision.*",)  # the files do not say: the ranks will
    assert compiled("models.policy.freeze=['transformer.model.norm.*']", shapes=SHAPES)  # files may lack a prefix that the model has


def test_an_adapter_is_trained_in_float32_whatever_the_base_is(compiled: Compiled, gpus: MachineFacts) -> None:
    full, adapted = compiled(machine=gpus), compiled("models.policy.lora={}", machine=gpus)
    assert full.learner.deepspeed["bf16"] == {"enabled": True} and adapted.learner.deepspeed["bf16"] == {"enabled": False}
    assert adapted.policy.dtype == "bfloat16"
    assert compiled("models.policy.lora={}", "train.deepspeed.zero_stage=0", machine=gpus).learner.zero_stage == 0


def test_memory_counts_what_is_trained(compiled: Compiled, gpus: MachineFacts) -> None:
    """7e9 parameters with Adam need stage 1 on eight of these GPUs in bfloat16; an adapter of rank 32 needs no sharding."""
    shapes = {f"w{index}": (10_000, 10_000) for index in range(70)}
    big: dict[str, Any] = {"machine": gpus, "ranks": 8, "parameters": 7_000_000_000, "shapes": shapes}
    assert compiled(**big).learner.zero_stage == 2
    assert compiled("models.policy.lora={}", **big).learner.zero_stage == 0


def test_quantised_weights_are_never_partitioned(compiled: Compiled) -> None:
    tiny = MachineFacts(cores=8, memory_gib=0.1)
    sets = ("models.policy.lora={}", "models.policy.quantise={}")
    assert compiled("rollout.engine=fake", machine=tiny, ranks=2, parameters=10**9).learner.zero_stage == 3
    assert compiled(*sets, machine=tiny, ranks=2, parameters=10**9).learner.zero_stage == 2


def test_an_adapters_dropout_needs_old_log_probs(compiled: Compiled) -> None:
    assert compiled("models.policy.lora={}").batch.needs_prepass is None
    assert (
        compiled("models.policy.lora.dropout=0.1").batch.needs_prepass
        == "the adapter's dropout changes the log-probs of the update's own forward pass"
    )


def test_the_commit_is_in_the_plan(compiled: Compiled) -> None:
    assert compiled("models.policy.revision=main", revision="0a1b").policy.revision == "0a1b"
    assert compiled(KL, revision="0a1b").reference.revision == "0a1b"  # type: ignore[union-attr]
    assert compiled().policy.revision is None


def test_a_mean_that_nothing_uses_is_told(compiled: Compiled) -> None:
    unused = [note for note in compiled("models.policy.ema={}").notes if "used by nothing" in note]
    assert unused and not [note for note in compiled("models.policy.ema.export=true").notes if "used by nothing" in note]


def test_models_in_words(compiled: Compiled) -> None:
    text = plan_text(
        compiled(
            KL, "models.policy.lora={rank: 8, options: {use_dora: true}, save_also: [lm_head]}", "models.policy.ema.export=true",
            "models.policy.add_tokens=[a, b]", "models.reference.refresh.every=5",
        )
    )  # fmt: skip
    for line in (
        "LoRA rank 8, alpha 64, on all-linear, whole: lm_head, use_dora True",
        "running mean decay 0.992 an update, exported to final/",
        "reference org/model, every 5 steps 0.6 of the policy mixed in",
        "tokenizer org/model, 2 tokens added",
    ):
        assert line in " ".join(text.split()), text
    text = plan_text(compiled(KL, "models.policy.lora={}", "models.policy.quantise.nested=true", revision="0a1b"))
    for line in ("frozen weights in 4 bits (nf4, nested scales), exported in float32", "org/model, adapter off", "revision 0a1b"):
        assert line in " ".join(text.split()), text

"""A reference of its own is partitioned over the ranks where the recipe says so, or where no device holds it whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from shapes_of_models import LARGE, SMALL

from rftcli.plan.facts import MachineFacts, ModelFacts
from rftcli.plan.plan import Plan

Compiled = Callable[..., Plan]
KL = ("rollout.engine=fake", "algorithm.kl.coefficient=0.1")


def held(plan: Plan) -> dict[str, float]:
    assert plan.memory is not None
    return next((dict(row.gib) for row in plan.memory.rows if row.name == "reference"), {})


@pytest.mark.parametrize(
    ("sets", "model", "ranks", "shard"),
    [
        ((), LARGE, 8, True),
        ((), SMALL, 8, False),
        (("models.reference.shard=true",), SMALL, 8, True),
        (("models.reference.shard=true",), SMALL, 1, False),
        (("models.reference.shard=false",), LARGE, 8, False),
        (("models.reference.offload=true",), LARGE, 8, False),
        (("models.reference.refresh.every=5",), LARGE, 8, False),
        (("models.policy.lora={rank: 8}",), LARGE, 8, False),
    ],
)
def test_where_it_is(compiled: Compiled, gpus: MachineFacts, sets: tuple[str, ...], model: dict[str, object], ranks: int, shard: bool) -> None:
    plan = compiled(*KL, *sets, machine=gpus, ranks=ranks, **model)
    use = plan.reference_use
    assert use is not None and use.shard is shard and not (use.shard and use.offload)
    assert any("the reference is partitioned over 8 ranks" in note for note in plan.notes) is shard


def test_each_rank_holds_its_part(compiled: Compiled, gpus: MachineFacts) -> None:
    whole = held(compiled(*KL, "models.reference={shard: false, offload: false}", machine=gpus, ranks=8, **SMALL))
    part = held(compiled(*KL, "models.reference.shard=true", machine=gpus, ranks=8, **SMALL))
    assert whole["credit"] == pytest.approx(8 * part["credit"]) and part["rollout"] == part["credit"] > 0


def test_a_model_of_its_own_counts_by_its_own_size(compiled: Compiled, gpus: MachineFacts) -> None:
    other = ModelFacts(path="/ref", **LARGE)
    plan = compiled(*KL, "models.reference.from=/ref", machine=gpus, ranks=8, reference_path="/ref", reference=other, **SMALL)
    assert plan.reference_use.shard and held(plan)["credit"] == pytest.approx(2 * 72e9 / 8 / 1024**3)


@pytest.mark.parametrize(("stored", "memory", "told"), [("bfloat16", 512.0, False), ("float32", 512.0, True), ("bfloat16", 150.0, True)])
def test_the_hosts_memory_while_it_is_cut(compiled: Compiled, gpus: MachineFacts, stored: str, memory: float, told: bool) -> None:
    facts = {**LARGE, "file_dtype": stored}
    plan = compiled(*KL, machine=replace(gpus, memory_gib=memory), ranks=8, **facts)
    assert any("while the reference is loaded" in note for note in plan.notes) is told


def test_a_reference_that_nothing_needs_is_told(compiled: Compiled, gpus: MachineFacts) -> None:
    plan = compiled("rollout.engine=fake", "models.reference.shard=true", machine=gpus, ranks=8, **SMALL)
    assert plan.reference is None and any(note.startswith("models.reference is not loaded") for note in plan.notes)


@pytest.mark.parametrize(
    ("sets", "ranks", "why"), [((), 1, "there is one rank"), (("models.policy.lora={rank: 8}",), 8, "the reference is the policy's own module")]
)
def test_where_there_is_nothing_to_partition(compiled: Compiled, gpus: MachineFacts, sets: tuple[str, ...], ranks: int, why: str) -> None:
    plan = compiled(*KL, "models.reference.shard=true", *sets, machine=gpus, ranks=ranks, **SMALL)
    assert f"models.reference.shard has no effect: {why}" in plan.notes

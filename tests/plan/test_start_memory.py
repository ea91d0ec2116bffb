"""A model that no device holds whole before ZeRO cuts it: it is cut in the machine's memory, and the plan says where even that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from shapes_of_models import LARGE, SMALL

from rftcli.plan.facts import MachineFacts, ModelFacts
from rftcli.plan.plan import Plan

Compiled = Callable[..., Plan]
FROM_HOST, TOO_LARGE = "is loaded into the machine's memory and cut from there", "at the start"


def said(plan: Plan, text: str = FROM_HOST) -> list[str]:
    return [note for note in plan.notes if text in note]


@pytest.mark.parametrize("sets", [(), ("train.deepspeed.zero_stage=3", "train.offload.parameters=cpu")])
def test_what_no_device_holds_whole_is_cut_on_the_host(compiled: Compiled, gpus: MachineFacts, sets: tuple[str, ...]) -> None:
    plan = compiled("rollout.engine=fake", *sets, machine=gpus, ranks=8, **LARGE)
    assert plan.learner.zero_stage == 3 and plan.learner.from_host
    (note,) = said(plan)
    assert note.startswith("the policy is loaded") and "134.1 GiB, and 73.6 GiB" in note and not said(plan, TOO_LARGE)
    larger = compiled("rollout.engine=fake", *sets, machine=replace(gpus, gpu_memory_gib=146.0), ranks=8, **LARGE)
    assert not said(larger) and not larger.learner.from_host


@pytest.mark.parametrize(
    ("memory", "stored", "ranks", "needed"),
    [
        (512.0, "bfloat16", 8, None),
        (150.0, "bfloat16", 8, "134.1 GiB of 150.0 GiB"),
        (512.0, "float32", 8, "1072.9 GiB of 512.0 GiB"),
        (512.0, None, 8, "1072.9 GiB of 512.0 GiB"),
        (1400.0, "float32", 8, None),
    ],
)
def test_the_hosts_memory(compiled: Compiled, gpus: MachineFacts, memory: float, stored: str | None, ranks: int, needed: str | None) -> None:
    """Files in the type that is trained in are mapped once a machine; others are read by every rank."""
    facts = {**LARGE, "file_dtype": stored}
    plan = compiled("rollout.engine=fake", "train.deepspeed.zero_stage=3", machine=replace(gpus, memory_gib=memory), ranks=ranks, **facts)
    assert said(plan) and plan.learner.from_host
    found = said(plan, "expect to run out of the machine's at the start")
    assert bool(found) == (needed is not None)
    assert needed is None or needed in found[0]


def test_a_machine_holds_its_own_ranks(compiled: Compiled, gpus: MachineFacts) -> None:
    facts = {**LARGE, "file_dtype": "float32"}
    sets = ("rollout.engine=fake", "train.deepspeed.zero_stage=3")
    plan = compiled(*sets, machine=replace(gpus, memory_gib=1400.0), ranks=16, nodes=2, **facts)
    assert plan.learner.from_host and not said(plan, TOO_LARGE)


def test_what_stays_whole_is_in_the_table_already(compiled: Compiled, gpus: MachineFacts) -> None:
    plan = compiled("rollout.engine=fake", "train.deepspeed.zero_stage=2", machine=gpus, ranks=8, **LARGE)
    assert not said(plan) and not plan.learner.from_host and any("expect to run out of it in" in note for note in plan.notes)


def test_few_bits_are_loaded_as_such(compiled: Compiled, gpus: MachineFacts) -> None:
    sets = ("rollout.engine=fake", "models.policy.lora={rank: 8}", "train.offload.parameters=none")
    assert compiled(*sets, "train.deepspeed.zero_stage=3", machine=gpus, ranks=8, **LARGE).learner.from_host
    assert not compiled(*sets, "models.policy.quantise={bits: 4}", machine=gpus, ranks=8, **LARGE).learner.from_host


def test_a_critic_goes_with_the_policy(compiled: Compiled, gpus: MachineFacts) -> None:
    sets = ("rollout.engine=fake", "algorithm.advantage.kind=gae", "train.deepspeed.zero_stage=3")
    critic = "models.critic={from: /models/judge}"
    plan = compiled(*sets, critic, machine=gpus, ranks=8, critic=ModelFacts(path="/models/judge", **LARGE), **SMALL)
    assert said(plan)[0].startswith("the critic is loaded") and plan.learner.from_host and plan.critic.learner.from_host
    assert not said(compiled(*sets, "models.critic={}", machine=gpus, ranks=8, **SMALL))

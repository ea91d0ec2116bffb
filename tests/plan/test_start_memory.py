"""A model that every rank loads whole before ZeRO cuts it: the plan says where that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rftcli.plan.facts import MachineFacts, ModelFacts
from rftcli.plan.plan import Plan

Compiled = Callable[..., Plan]
LARGE = {
    "parameters": 72_000_000_000, "layers": 80, "hidden": 8192, "vocabulary": 152064, "key_width": 1024, "query_width": 8192, "inner": 29568,
    "heads": 64, "max_positions": 32768,
}  # fmt: skip
SMALL = {**LARGE, "parameters": 500_000_000, "layers": 2}
AT_THE_START = "expect to run out of it at the start"


def said(plan: Plan) -> list[str]:
    return [note for note in plan.notes if AT_THE_START in note]


@pytest.mark.parametrize("sets", [(), ("train.deepspeed.zero_stage=3", "train.offload.parameters=cpu")])
def test_what_zero_would_cut_has_to_fit_whole_first(compiled: Compiled, gpus: MachineFacts, sets: tuple[str, ...]) -> None:
    plan = compiled("rollout.engine=fake", *sets, machine=gpus, ranks=8, **LARGE)
    assert plan.learner.zero_stage == 3
    (note,) = said(plan)
    assert "loads the policy whole" in note and "134.1 GiB of 73.6 GiB" in note
    assert not said(compiled("rollout.engine=fake", *sets, machine=replace(gpus, gpu_memory_gib=146.0), ranks=8, **LARGE))


def test_what_stays_whole_is_in_the_table_already(compiled: Compiled, gpus: MachineFacts) -> None:
    plan = compiled("rollout.engine=fake", "train.deepspeed.zero_stage=2", machine=gpus, ranks=8, **LARGE)
    assert not said(plan) and any("expect to run out of it in" in note for note in plan.notes)


def test_few_bits_are_loaded_as_such(compiled: Compiled, gpus: MachineFacts) -> None:
    sets = ("rollout.engine=fake", "models.policy.lora={rank: 8}", "train.offload.parameters=none")
    assert said(compiled(*sets, "train.deepspeed.zero_stage=3", machine=gpus, ranks=8, **LARGE))
    assert not said(compiled(*sets, "models.policy.quantise={bits: 4}", machine=gpus, ranks=8, **LARGE))


def test_a_critic_counts_too(compiled: Compiled, gpus: MachineFacts) -> None:
    sets = ("rollout.engine=fake", "algorithm.advantage.kind=gae", "train.deepspeed.zero_stage=3")
    critic = "models.critic={from: /models/judge}"
    (note,) = said(compiled(*sets, critic, machine=gpus, ranks=8, critic=ModelFacts(path="/models/judge", **LARGE), **SMALL))
    assert "loads the critic whole" in note
    assert not said(compiled(*sets, "models.critic={}", machine=gpus, ranks=8, **SMALL))

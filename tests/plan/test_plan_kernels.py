"""Fused kernels in the plan: on a GPU alone, for the policy and what is loaded beside it as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rftcli.plan.compile_problems import CompileError
from rftcli.plan.facts import MachineFacts, ModelFacts
from rftcli.plan.plan import Plan
from rftcli.runtime.changes import RISKY, changes

Compiled = Callable[..., Plan]
LIGER = "train.kernels=liger"


def test_a_cpu_is_refused(compiled: Compiled) -> None:
    with pytest.raises(CompileError) as caught:
        compiled(LIGER)
    (problem,) = caught.value.problems
    assert (problem.path, problem.message) == ("train.kernels", "`liger` needs a GPU, and this run is on a CPU")
    assert problem.hint is not None and "rft plan --machine" in problem.hint


def test_policy_reference_and_critic_have_them(compiled: Compiled, gpus: MachineFacts) -> None:
    together = ("algorithm.advantage.kind=gae", "models.critic={}", "algorithm.kl.coefficient=0.1", "models.teacher.path=org/teacher")
    plan = compiled(LIGER, *together, machine=gpus, ranks=8, reference_path="/other", critic=ModelFacts(path="/critic"))
    assert plan.reference is not None and plan.critic is not None and plan.teacher is not None and plan.teacher.model is not None
    assert [model.kernels for model in (plan.policy, plan.reference, plan.critic.model)] == ["liger"] * 3
    assert plan.teacher.model.kernels == "none"
    assert compiled(machine=gpus, ranks=8).policy.kernels == "none"


@pytest.mark.parametrize(
    ("sets", "architecture", "installed", "expected"),
    [
        ((), "Qwen2ForCausalLM", True, "liger"),
        ((), "Qwen2ForCausalLM", False, "none"),
        ((), "OtherForCausalLM", True, "none"),
        (("train.kernels=none",), "Qwen2ForCausalLM", True, "none"),
        (("train.compile=true",), "Qwen2ForCausalLM", True, "none"),
        (("models.policy.trust_remote_code=true",), "Qwen2ForCausalLM", True, "none"),
    ],
)
def test_auto_takes_them_where_they_are_installed_and_proved(
    compiled: Compiled, gpus: MachineFacts, sets: tuple[str, ...], architecture: str, installed: bool, expected: str
) -> None:
    plan = compiled(*sets, machine=replace(gpus, liger=installed), ranks=8, architecture=architecture)
    assert plan.policy.kernels == expected
    assert any("train.kernels liger" in note for note in plan.notes) is (expected == "liger")


def test_auto_is_none_on_a_cpu(compiled: Compiled, cpu: MachineFacts) -> None:
    assert compiled(machine=replace(cpu, liger=True), architecture="Qwen2ForCausalLM").policy.kernels == "none"


@pytest.mark.parametrize(
    "others",
    [
        ("models.policy.lora={}", "models.policy.quantise={}"),
        ("train.deepspeed.zero_stage=3",),
        ("models.policy.gradient_checkpointing=true",),
        ("train.deterministic=true",),
    ],
)
def test_what_goes_together(compiled: Compiled, gpus: MachineFacts, others: tuple[str, ...]) -> None:
    plan = compiled(LIGER, *others, machine=gpus, ranks=8, parameters=1_000_000_000)
    assert plan.policy.kernels == "liger"


def test_another_choice_on_the_way_has_to_be_accepted(compiled: Compiled, gpus: MachineFacts) -> None:
    before, after = compiled(machine=gpus, ranks=8), compiled(LIGER, machine=gpus, ranks=8)
    assert [(change.path, change.kind) for change in changes(before, after)] == [("policy.kernels", RISKY)]

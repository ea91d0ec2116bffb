"""The critic, the KL term, the frozen policy, the supervised stream and the router's loss in a plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rftcli.plan.compile_problems import CompileError
from rftcli.plan.facts import MachineFacts, ModelFacts
from rftcli.plan.plan import Plan
from rftcli.plan.show import plan_text

Compiled = Callable[..., Plan]
PPO = ("algorithm.advantage.kind=gae", "models.critic={}")


def test_a_critic_from_the_policy(compiled: Compiled) -> None:
    plan = compiled(*PPO, "batch.updates_per_step=2", "models.critic.warmup_steps=3", "models.policy.dropout=0.1", parameters=7)
    assert plan.critic is not None
    assert (plan.critic.model.path, plan.critic.model.parameters, plan.critic.model.dropout) == ("/models/policy", 7, 0.0)
    own = plan.critic.learner
    assert (own.lr, own.warmup_updates, own.schedule_updates, own.zero_stage) == (1e-5, 6, 20, plan.learner.zero_stage)
    assert plan.advantage.options == {"gamma": 1.0, "lam": 1.0} and plan.advantage.per_token
    assert "critic" in plan_text(plan)
    assert compiled().critic is None


def test_a_critic_of_its_own(compiled: Compiled) -> None:
    sets = (*PPO, "models.critic.from=org/reward", "models.critic.head=v_head", "models.critic.max_grad_norm=null", "models.policy.options={a: 1}")
    plan = compiled(*sets, critic=ModelFacts(path="/models/reward", parameters=5))
    assert plan.critic is not None
    assert (plan.critic.model.path, plan.critic.model.given, plan.critic.head) == ("/models/reward", "org/reward", "v_head")
    assert plan.critic.model.options == {} and plan.policy.options == {"a": 1}  # what the policy's configuration is told is not for another model
    assert plan.critic.learner.max_grad_norm is None and plan.critic.learner.deepspeed["gradient_clipping"] == 0.0
    assert plan.learner.deepspeed["gradient_clipping"] == 1.0


def test_the_critic_counts_in_the_memory(compiled: Compiled, gpus: MachineFacts) -> None:
    """Two billion parameters fit a card with the policy alone; with the critic the optimizer is sharded further."""
    alone = compiled(machine=gpus, ranks=8, parameters=3_000_000_000)
    both = compiled(*PPO, machine=gpus, ranks=8, parameters=3_000_000_000)
    assert alone.learner.zero_stage == 1 and both.learner.zero_stage == 2
    unknown = compiled(*PPO, "models.critic.from=org/other", machine=gpus, ranks=8, parameters=5, critic=ModelFacts(path="/other"))
    assert any("size is not known" in note for note in unknown.notes)


def test_a_frozen_policy_has_its_whole_schedule_still_before_it(compiled: Compiled) -> None:
    plan = compiled(*PPO, "train.freeze_policy_steps=4", "train.optimizer.schedule=linear")
    assert [step for step in range(1, 11) if not plan.trains_policy(step)] == [1, 2, 3, 4]
    assert plan.learner.schedule_updates == 6 and plan.critic is not None and plan.critic.learner.schedule_updates == 10


@pytest.mark.parametrize(
    ("kind", "level", "planned", "per_token"),
    [("gae", "auto", "token", True), ("reinforce", "auto", "token", True), ("rloo", "auto", "sequence", False), ("grpo", "mean", "mean", False),
     ("reinforce", "sequence", "sequence", False), ("gae", "sequence", "sequence", True)],
)  # fmt: skip
def test_levels_of_the_kl_in_the_reward(compiled: Compiled, kind: str, level: str, planned: str, per_token: bool) -> None:
    critic = ("models.critic={}",) if kind == "gae" else ()
    kl = f"algorithm.kl={{coefficient: 0.1, place: reward, estimator: k1, level: {level}}}"
    plan = compiled(f"algorithm.advantage.kind={kind}", kl, *critic)
    assert plan.kl is not None and (plan.kl.level, plan.kl.in_reward, plan.advantage.per_token) == (planned, True, per_token)
    assert plan.loss.kl_coefficient == 0.0 and plan.reference is not None
    assert plan.batch.needs_prepass == "the KL term in the reward reads the log-probs at rollout time"
    assert not any("biased" in note for note in plan.notes)


def test_a_biased_estimate_in_the_reward_is_said(compiled: Compiled) -> None:
    plan = compiled("algorithm.kl={coefficient: 0.1, place: reward}", "algorithm.advantage.kind=rloo")
    assert any("k3 in the reward" in note and "k1" in note for note in plan.notes)
    assert not any("biased" in note for note in compiled("algorithm.kl.coefficient=0.1").notes)


def test_discounted_reinforce_reads_rewards_per_token(compiled: Compiled) -> None:
    plain, discounted = compiled("algorithm.advantage.kind=reinforce"), compiled("algorithm.advantage={kind: reinforce, gamma: 0.9}")
    assert not plain.advantage.per_token and plain.advantage.options == {}
    assert discounted.advantage.per_token and discounted.advantage.options == {"gamma": 0.9}


def test_a_supervised_stream(compiled: Compiled) -> None:
    plan = compiled("train.supervised={data: {path: /s.jsonl}}", "batch.updates_per_step=2", "rollout.max_new_tokens=50")
    assert plan.supervised is not None and plan.supervised.data.answers
    assert (plan.supervised.rows_per_update, plan.supervised.coefficient, plan.supervised.max_answer_tokens) == (32, 0.1, 50)
    assert "supervised" in plan_text(plan)


def test_a_model_without_a_router_has_nothing_to_balance(compiled: Compiled) -> None:
    with pytest.raises(CompileError, match="the model has no router"):
        compiled("models.policy.router_loss=0.01")
    assert compiled("models.policy.router_loss=0.01", experts=8).loss.router_coefficient == 0.01

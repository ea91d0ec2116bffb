"""Recipe + facts -> plan. Pure: no disk, no clock, no environment; the same inputs give the same plan.

Problems that need facts (a batch that does not divide over the real ranks, a length beyond the model's positions) are collected and raised at
once as `CompileError`; the caller shows them at their place in the recipe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rftcli.plan.compile_algorithm import advantage_plan, loss_plan
from rftcli.plan.compile_data import data_plan, reward_plan
from rftcli.plan.compile_models import model_plan
from rftcli.plan.compile_problems import CompileError, PlanProblem
from rftcli.plan.compile_rollout import check_lengths, rollout_plan
from rftcli.plan.compile_run import eval_plan, launch_plan, profile_plan, track_plan
from rftcli.plan.compile_update import batch_plan, check_stage, learner_plan, steps_of, with_horizon
from rftcli.plan.facts import Facts
from rftcli.plan.plan import CheckpointPlan, Plan, WorldPlan

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


def compile_plan(recipe: Recipe, facts: Facts, *, name: str, search_path: str, policy_path: str, reference_path: str | None = None) -> Plan:
    """The plan for `recipe` on `facts`. `policy_path`: where the policy's files lie (`builtin:` resolved); `search_path`: the recipe's folder.

    Raises CompileError with every problem found.
    """
    problems: list[PlanProblem] = []
    notes: list[str] = []
    device = "cuda" if facts.machine.gpus else "cpu"
    world = WorldPlan(
        ranks=facts.ranks,
        device=device,
        backend="nccl" if device == "cuda" else "gloo",
        threads_per_rank=max(1, facts.machine.cores // max(1, facts.ranks // facts.nodes)),
        nodes=facts.nodes,
    )
    policy = model_plan(recipe, facts, device, policy_path)
    needs_reference = recipe.algorithm.kl.coefficient != 0.0
    reference = None
    if needs_reference:
        given = str(recipe.models.reference.from_)
        reference = policy if reference_path is None else replace(policy, path=reference_path, given=given, parameters=None)
    elif recipe.models.reference.from_ != "policy":
        notes.append("models.reference is not loaded: algorithm.kl.coefficient is 0, so nothing needs it")

    batch = batch_plan(recipe, facts, world, problems)
    learner = learner_plan(recipe, facts, world, policy, batch, notes)
    rollout = rollout_plan(recipe, learner)
    check_lengths(recipe, facts, problems)
    check_stage(recipe, policy, problems)
    steps = steps_of(recipe, facts, problems)
    if problems:
        raise CompileError(problems)
    assert batch is not None and learner is not None and rollout is not None
    learner = with_horizon(learner, recipe, steps, batch)
    return Plan(
        name=name,
        seed=recipe.seed,
        steps=steps,
        world=world,
        policy=policy,
        reference=reference,
        data=data_plan(recipe),
        rollout=rollout,
        rewards=reward_plan(recipe, search_path),
        advantage=advantage_plan(recipe),
        loss=loss_plan(recipe),
        batch=batch,
        learner=learner,
        eval=eval_plan(recipe),
        checkpoint=CheckpointPlan(every=recipe.checkpoint.every, keep=recipe.checkpoint.keep, save_hf=recipe.checkpoint.save_hf),
        track=track_plan(recipe, search_path),
        launch=launch_plan(recipe),
        profile=profile_plan(recipe),
        notes=tuple(notes),
    )

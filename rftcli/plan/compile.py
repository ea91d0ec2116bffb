"""Recipe + facts -> plan. Pure: no disk, no clock, no environment; the same inputs give the same plan.

Problems that need facts (a batch that does not divide over the real ranks, a length beyond the model's positions) are collected and raised at
once as `CompileError`; the caller shows them at their place in the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rftcli.plan.compile_algorithm import advantage_plan, check_loss, loss_plan
from rftcli.plan.compile_checkpoint import checkpoint_plan
from rftcli.plan.compile_data import data_plan, reward_plan
from rftcli.plan.compile_host_memory import with_host
from rftcli.plan.compile_judges import with_server
from rftcli.plan.compile_kernels import with_kernels
from rftcli.plan.compile_lengths import check_eval_lengths, check_lengths, with_length
from rftcli.plan.compile_memory import Asked, memory_plan, training_parts, with_memory
from rftcli.plan.compile_models import check_models, model_plan, reference_plans
from rftcli.plan.compile_packing import padding_notes, with_packing
from rftcli.plan.compile_ppo import check_router, critic_plan, kl_plan, supervised_plan
from rftcli.plan.compile_precision import check_update
from rftcli.plan.compile_problems import CompileError, PlanProblem
from rftcli.plan.compile_reference import with_reference
from rftcli.plan.compile_rewards import check_overlong, shaping_plan
from rftcli.plan.compile_rollout import check_replica, rollout_plan
from rftcli.plan.compile_run import check_profile, early_stop_plan, eval_plan, launch_plan, profile_plan, samples_plan, track_plan
from rftcli.plan.compile_scorers import beside_scorers, scorer_plans
from rftcli.plan.compile_sharing import with_sharing
from rftcli.plan.compile_start_memory import with_start
from rftcli.plan.compile_teacher import estimator_notes, teacher_plan
from rftcli.plan.compile_update import batch_plan, check_stage, learner_plan, steps_of, with_horizon
from rftcli.plan.compile_vllm import with_engine
from rftcli.plan.facts import Facts, ModelFacts, ScorerFacts
from rftcli.plan.plan import Plan, WorldPlan

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


def compile_plan(
    recipe: Recipe,
    facts: Facts,
    *,
    name: str,
    search_path: str,
    policy_path: str,
    reference_path: str | None = None,
    reference_revision: str | None = None,
    reference_facts: ModelFacts | None = None,
    critic: ModelFacts | None = None,
    teacher: ModelFacts | None = None,
    scorers: Mapping[str, ScorerFacts] | None = None,
) -> Plan:
    """The plan for `recipe` on `facts`. `policy_path`: where the policy's files lie (`builtin:` resolved); `search_path`: the recipe's folder;
    `critic`, `teacher`, `reference_facts`: what the files of a critic and a reference of their own and of a teacher say; `scorers`: what is known of
    each scorer by name.

    Raises CompileError with every problem found.
    """
    problems: list[PlanProblem] = []
    notes: list[str] = []
    recipe = with_length(recipe, facts, problems, notes)
    device = "cuda" if facts.machine.gpus else "cpu"
    world = WorldPlan(
        ranks=facts.ranks,
        device=device,
        backend="nccl" if device == "cuda" else "gloo",
        deterministic=recipe.train.deterministic,
        threads_per_rank=facts.machine.threads_of_a_rank(facts.ranks // facts.nodes),
        nodes=facts.nodes,
    )
    trained_on = (facts.model, reference_facts, critic, teacher)
    recipe = with_packing(recipe, trained_on, facts.machine, notes)
    recipe = with_sharing(recipe, trained_on, facts.machine, problems, notes)
    notes.extend(padding_notes(recipe, facts.machine))
    recipe = with_kernels(recipe, (facts.model, reference_facts, critic), facts.machine, problems, notes)
    scored_by = scorer_plans(recipe, facts, world, scorers or {}, problems, notes)
    own_reference = reference_facts or (None if reference_path is None else ModelFacts(path=reference_path))
    asked = Asked(
        recipe=recipe, facts=facts, world=world, policy=model_plan(recipe, facts, device, policy_path), critic=critic, reference=own_reference,
        teacher=teacher, scorers=scored_by,
    )  # fmt: skip
    asked = replace(asked, recipe=with_reference(asked, notes))
    asked_for, recipe = recipe, with_memory(asked, notes)
    policy = model_plan(recipe, facts, device, policy_path)
    asked = replace(asked, recipe=recipe, policy=policy)
    other = None if reference_path is None else ModelFacts(path=reference_path, revision=reference_revision)
    reference, reference_use = reference_plans(recipe, world, policy, other, notes)
    taught = with_server(teacher_plan(recipe, world, policy, teacher, notes), recipe, facts, world, teacher, problems)
    notes.extend(estimator_notes(recipe))
    check_models(recipe, facts, problems, notes)

    batch = batch_plan(recipe, facts, world, policy.attention, problems)
    room = beside_scorers(facts, scored_by, world)
    learner = with_start(asked, learner_plan(recipe, world, policy, batch, notes), notes)
    rollout = rollout_plan(recipe, learner, notes)
    rollout = with_engine(rollout, recipe, room, world, policy, training_parts(asked, learner, batch), problems, notes)
    if rollout is not None:
        check_replica(rollout, recipe, policy, world, room, problems, notes)
    check_lengths(recipe, facts, problems, notes)
    check_eval_lengths(recipe, facts, problems)
    check_overlong(recipe, problems)
    evaluation = eval_plan(recipe, facts, search_path, problems)
    check_stage(asked_for, policy, problems)
    check_update(recipe, world, policy, learner, problems)
    check_router(recipe, facts, problems)
    check_loss(recipe, rollout, problems, notes)
    check_profile(recipe, device, problems)
    steps = steps_of(recipe, facts, problems)
    if problems:
        raise CompileError(problems)
    assert batch is not None and learner is not None and rollout is not None
    learner = with_horizon(learner, recipe, steps, batch)
    table, background = with_host(memory_plan(asked, learner, batch, rollout), asked, learner, rollout, notes)
    return Plan(
        name=name,
        seed=recipe.seed,
        steps=steps,
        max_hours=recipe.train.max_hours,
        max_tokens=recipe.train.max_tokens,
        world=world,
        policy=policy,
        reference=reference,
        reference_use=reference_use,
        teacher=taught,
        data=data_plan(recipe),
        rollout=rollout,
        rewards=reward_plan(recipe, search_path),
        shaping=shaping_plan(recipe),
        advantage=advantage_plan(recipe),
        loss=loss_plan(recipe),
        batch=batch,
        learner=learner,
        eval=evaluation,
        early_stop=early_stop_plan(recipe),
        samples=samples_plan(recipe),
        checkpoint=checkpoint_plan(recipe, background=background),
        kl=kl_plan(recipe, notes),
        critic=critic_plan(recipe, policy, learner, batch, steps, critic),
        freeze_policy_steps=recipe.train.freeze_policy_steps,
        supervised=supervised_plan(recipe, batch),
        scorers=scored_by,
        track=track_plan(recipe, search_path),
        launch=launch_plan(recipe),
        profile=profile_plan(recipe),
        notes=tuple(notes),
        memory=table,
    )

"""Recipe + facts -> plan. Pure: no disk, no clock, no environment; the same inputs give the same plan.

Problems that need facts (a batch that does not divide over the real ranks, a length beyond the model's positions) are collected and raised at
once as `CompileError`; the caller shows them at their place in the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rftcli.algo import batchmath
from rftcli.data.spec import ChatSpec, Columns, DataSpec
from rftcli.errors import RftError
from rftcli.plan import deepspeed_config, memory
from rftcli.plan.facts import Facts
from rftcli.plan.plan import (
    AdvantagePlan,
    BatchPlan,
    CheckpointPlan,
    DataPlan,
    EvalPlan,
    LearnerPlan,
    LossPlan,
    ModelPlan,
    Plan,
    RewardPlan,
    RolloutPlan,
    TrackPlan,
    WorldPlan,
)
from rftcli.rewards.spec import PartSpec

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

TOKENS_PER_MICRO_BATCH = {"cpu": 8192, "cuda": 16384}
"""Positions of one backward pass when the recipe leaves the micro-batch to the plan: enough to fill the device, small beside its memory."""
CHECKPOINTING_FROM_PARAMETERS = 2_000_000_000
"""Above this, activations of a micro-batch outweigh a third more compute."""
MAX_BATCH_ROWS = 64
"""Rows of an hf decode pass; more makes every step wait for the longest answer of more groups."""
ROW_MULTIPLE = 8
"""Vector kernels treat the last few numbers of an oddly sized tensor apart, with other last bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    path: str
    """Dotted path of the recipe key."""
    message: str
    reason: str | None = None
    hint: str | None = None


class CompileError(RftError):
    """The recipe and the facts do not fit together."""

    exit_code = 2

    def __init__(self, problems: list[PlanProblem]) -> None:
        super().__init__("\n".join(f"{p.path}  {p.message}" for p in problems))
        self.problems = problems


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
        threads_per_rank=max(1, facts.machine.cores // max(1, facts.ranks)),
    )
    policy = _model(recipe, facts, device, policy_path)
    needs_reference = recipe.algorithm.kl.coefficient != 0.0
    reference = None
    if needs_reference:
        given = str(recipe.models.reference.from_)
        reference = policy if reference_path is None else replace(policy, path=reference_path, given=given, parameters=None)
    elif recipe.models.reference.from_ != "policy":
        notes.append("models.reference is not loaded: algorithm.kl.coefficient is 0, so nothing needs it")

    batch = _batch(recipe, facts, world, problems)
    learner = _learner(recipe, facts, world, policy, batch, notes)
    rollout = _rollout(recipe, learner)
    _check_lengths(recipe, facts, problems)
    _check_stage(recipe, policy, problems)
    steps = _steps(recipe, facts, problems)
    if problems:
        raise CompileError(problems)
    assert batch is not None and learner is not None and rollout is not None
    learner = _with_horizon(learner, recipe, steps, batch)
    return Plan(
        name=name,
        seed=recipe.seed,
        steps=steps,
        world=world,
        policy=policy,
        reference=reference,
        data=_data(recipe),
        rollout=rollout,
        rewards=_rewards(recipe, search_path),
        advantage=_advantage(recipe),
        loss=_loss(recipe),
        batch=batch,
        learner=learner,
        eval=_eval(recipe),
        checkpoint=CheckpointPlan(every=recipe.checkpoint.every, keep=recipe.checkpoint.keep, save_hf=recipe.checkpoint.save_hf),
        track=_track(recipe),
        notes=tuple(notes),
    )


def _model(recipe: Recipe, facts: Facts, device: str, path: str) -> ModelPlan:
    policy = recipe.models.policy
    dtype = policy.dtype if policy.dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
    checkpointing = policy.gradient_checkpointing
    if checkpointing == "auto":
        checkpointing = device == "cuda" and (facts.model.parameters or 0) >= CHECKPOINTING_FROM_PARAMETERS
    return ModelPlan(
        path=path,
        given=policy.path,
        dtype=dtype,
        attention="sdpa" if policy.attention == "auto" else policy.attention,
        dropout=policy.dropout,
        gradient_checkpointing=bool(checkpointing),
        trust_remote_code=policy.trust_remote_code,
        options=dict(policy.options),
        parameters=facts.model.parameters,
    )


def _batch(recipe: Recipe, facts: Facts, world: WorldPlan, problems: list[PlanProblem]) -> BatchPlan | None:
    section = recipe.batch
    samples = recipe.rollout.samples_per_prompt
    refusal = batchmath.refusal(section.prompts_per_step, section.updates_per_step, facts.ranks)
    if refusal is not None:
        problems.append(PlanProblem(path="batch.prompts_per_step", message=refusal, hint="`rft explain batch.prompts_per_step`"))
        return None
    rows = section.prompts_per_step // section.updates_per_step // facts.ranks * samples
    if section.micro_batch_size == "auto":
        longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
        most = max(1, min(rows, TOKENS_PER_MICRO_BATCH[world.device] // longest))
        micro = math.ceil(rows / math.ceil(rows / most))  # no more micro-batches than needed, as even as one size allows
    else:
        micro = min(section.micro_batch_size, rows)
    shape = batchmath.batch_shape(
        prompts_per_step=section.prompts_per_step,
        samples_per_prompt=samples,
        updates_per_step=section.updates_per_step,
        epochs=section.epochs,
        ranks=facts.ranks,
        micro_batch_size=micro,
    )
    return BatchPlan(
        prompts_per_step=section.prompts_per_step,
        samples_per_prompt=samples,
        updates_per_step=section.updates_per_step,
        epochs=section.epochs,
        micro_batch_size=micro,
        layout="padded" if section.layout == "auto" else section.layout,
        equation=batchmath.equation(shape),
        needs_prepass=_needs_prepass(recipe),
    )


def _needs_prepass(recipe: Recipe) -> str | None:
    """Why the log-probs at rollout time have to be computed apart; None: those of the only update's own forward pass are the same numbers."""
    if recipe.batch.updates_per_step * recipe.batch.epochs > 1:
        return "several updates use one rollout"
    if recipe.models.policy.dropout > 0:
        return "dropout changes the log-probs of the update's own forward pass"
    return None


def _learner(recipe: Recipe, facts: Facts, world: WorldPlan, policy: ModelPlan, batch: BatchPlan | None, notes: list[str]) -> LearnerPlan | None:
    if batch is None:
        return None
    optimizer = recipe.train.optimizer
    stage = recipe.train.deepspeed.zero_stage
    if stage == "auto":
        stage, why = memory.zero_stage(facts.model.parameters, policy.dtype, world, facts.machine)
        notes.append(f"ZeRO stage {stage}: {why}")
    return LearnerPlan(
        kind=optimizer.kind,
        lr=optimizer.lr,
        betas=(optimizer.betas[0], optimizer.betas[1]),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        schedule=optimizer.schedule,
        warmup_updates=optimizer.warmup_steps * batch.optimizer_updates_per_step,
        min_lr=optimizer.min_lr,
        schedule_updates=0,
        max_grad_norm=recipe.train.max_grad_norm,
        skip_at_most=recipe.train.nonfinite.skip_at_most,
        zero_stage=stage,
        deepspeed=deepspeed_config.build(stage=stage, dtype=policy.dtype, ranks=world.ranks, max_grad_norm=recipe.train.max_grad_norm),
    )


def _with_horizon(learner: LearnerPlan, recipe: Recipe, steps: int, batch: BatchPlan) -> LearnerPlan:
    horizon = recipe.train.optimizer.schedule_steps or steps
    return replace(learner, schedule_updates=horizon * batch.optimizer_updates_per_step)


def _rollout(recipe: Recipe, learner: LearnerPlan | None) -> RolloutPlan | None:
    if learner is None:
        return None
    section = recipe.rollout
    rows = section.hf.batch_rows
    if rows == "auto":
        # From the recipe alone, never from the rank count: the promise of equal bits on any number of ranks rests on it.
        step_rows = recipe.batch.prompts_per_step * section.samples_per_prompt
        groups = max(1, min(MAX_BATCH_ROWS, step_rows // 2) // section.samples_per_prompt)
        rows = -(-groups * section.samples_per_prompt // ROW_MULTIPLE) * ROW_MULTIPLE
    return RolloutPlan(
        engine="hf" if section.engine == "auto" else section.engine,
        shares_weights=learner.zero_stage < 3,
        batch_rows=rows,
        samples_per_prompt=section.samples_per_prompt,
        max_new_tokens=section.max_new_tokens,
        min_new_tokens=section.min_new_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        stop=tuple(section.stop),
        stop_token_ids=tuple(section.stop_token_ids),
        ignore_eos=section.ignore_eos,
    )


def _check_lengths(recipe: Recipe, facts: Facts, problems: list[PlanProblem]) -> None:
    limit = facts.model.max_positions
    if limit is None:
        return
    prompt = recipe.rollout.max_prompt_tokens
    lengths = {"rollout.max_new_tokens": recipe.rollout.max_new_tokens}
    if recipe.data.eval and recipe.eval.max_new_tokens is not None:
        lengths["eval.max_new_tokens"] = recipe.eval.max_new_tokens
    for path, new in lengths.items():
        if prompt + new > limit:
            message = f"max_prompt_tokens {prompt} + max_new_tokens {new} = {prompt + new} positions, the model has {limit}"
            problems.append(PlanProblem(path=path, message=message, hint=f"max_prompt_tokens + max_new_tokens must be at most {limit}"))


def _check_stage(recipe: Recipe, policy: ModelPlan, problems: list[PlanProblem]) -> None:
    if recipe.train.deepspeed.zero_stage == 0 and policy.dtype == "bfloat16":
        problems.append(
            PlanProblem(
                path="train.deepspeed.zero_stage",
                message="must be at least 1 for a policy in bfloat16",
                reason="float32 master weights and gradients are kept from there on",
                hint="or train in float32: `models.policy.dtype: float32`",
            )
        )


def _steps(recipe: Recipe, facts: Facts, problems: list[PlanProblem]) -> int:
    if recipe.train.steps is not None:
        return recipe.train.steps
    assert recipe.train.data_passes is not None
    if facts.train_rows is None:
        problems.append(PlanProblem(path="train.data_passes", message="the training rows have not been counted", hint="set train.steps"))
        return 0
    passes = Fraction(str(recipe.train.data_passes))  # the decimal that was written: 0.07 x 100 rows are 7 draws, not 7.000000000000001
    return max(1, math.ceil(passes * facts.train_rows / recipe.batch.prompts_per_step))


def _data(recipe: Recipe) -> DataPlan:
    chat = recipe.models.policy.chat
    train, evals = data_specs(recipe)
    return DataPlan(
        train=train,
        eval=evals,
        shuffle=recipe.data.shuffle,
        overlong_prompt=recipe.data.overlong_prompt,
        max_prompt_tokens=recipe.rollout.max_prompt_tokens,
        chat=ChatSpec(template=chat.template, options=dict(chat.options), system=chat.system, prefill=chat.prefill, score_prefill=chat.score_prefill),
    )


def data_specs(recipe: Recipe) -> tuple[tuple[DataSpec, ...], tuple[DataSpec, ...]]:
    """(training sets, evaluation sets) of a recipe."""
    train = [_data_spec(section.name or f"train{index or ''}", section, section.weight) for index, section in enumerate(recipe.data.train)]
    held_out = [_data_spec(name, section, 1.0) for name, section in recipe.data.eval.items()]
    return tuple(train), tuple(held_out)


def _data_spec(name: str, section: Any, weight: float) -> DataSpec:
    columns = section.columns
    return DataSpec(
        name=name,
        path=section.path,
        python=section.python,
        options=dict(section.options),
        weight=weight,
        limit=section.limit,
        label=section.label,
        system=section.system,
        as_chat=section.as_chat,
        columns=Columns(prompt=columns.prompt, reference=columns.reference, label=columns.label, id=columns.id),
        extract_reference=section.extract_reference,
        samples_per_prompt=getattr(section, "samples_per_prompt", 1),
    )


def _rewards(recipe: Recipe, search_path: str) -> RewardPlan:
    return RewardPlan(
        labels=reward_parts(recipe),
        max_error_rate=recipe.reward_shaping.max_error_rate,
        score_prefill=recipe.models.policy.chat.score_prefill,
        search_path=search_path,
    )


def reward_parts(recipe: Recipe) -> dict[str, tuple[PartSpec, ...]]:
    """Label -> its weighted parts."""
    return {label: tuple(_part(part) for part in entry.parts) for label, entry in recipe.rewards.items()}


def _part(part: Any) -> PartSpec:
    kind, target = ("rule", part.rule) if part.rule is not None else ("python", part.python)
    return PartSpec(
        name=part.name or (target if kind == "rule" else target.rsplit(":", 1)[1]),
        kind=kind,
        target=target,
        weight=part.weight,
        options=dict(part.options),
        on_error=part.on_error,
        text=part.text,
    )


def _advantage(recipe: Recipe) -> AdvantagePlan:
    section = recipe.algorithm.advantage
    options: Mapping[str, Any] = {"normalise_std": section.normalise_std, "std": section.std} if section.kind == "grpo" else {}
    return AdvantagePlan(kind=section.kind, options=options)


def _loss(recipe: Recipe) -> LossPlan:
    loss, kl = recipe.algorithm.loss, recipe.algorithm.kl
    return LossPlan(
        kind=loss.kind,
        options={"clip_low": loss.clip_low, "clip_high": loss.clip_high, "dual_clip": loss.dual_clip},
        aggregate=loss.aggregate,
        kl_coefficient=kl.coefficient,
        kl_estimator=kl.estimator,
    )


def _eval(recipe: Recipe) -> EvalPlan:
    section = recipe.eval
    return EvalPlan(
        before_training=section.before_training,
        every=section.every,
        at_end=section.at_end,
        temperature=section.temperature,
        max_new_tokens=section.max_new_tokens or recipe.rollout.max_new_tokens,
        pass_k=tuple(section.pass_k),
    )


def _track(recipe: Recipe) -> TrackPlan:
    tensorboard = recipe.track.tensorboard
    if tensorboard is True:
        tensorboard = "tensorboard"  # inside the run directory
    wandb = recipe.track.wandb
    return TrackPlan(tensorboard=tensorboard or None, wandb=None if wandb is None else wandb.model_dump(mode="json"))

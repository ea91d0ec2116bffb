"""The loop. Everything it calls is built by `build.py`; what it leaves out is in the stages: no branch on algorithm, modality, engine or tracker.

A step is: collect scored groups, give credit, learn, hand the new weights to the engine, tell. Stopping is agreed at the end of a step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rftcli.errors import RftError
from rftcli.events import CheckpointSaved, EvalDone, RunStarted, StepDone
from rftcli.plan.plan import Plan
from rftcli.rewards.failures import count_failures
from rftcli.runtime import checkpoint
from rftcli.runtime.build import Job
from rftcli.runtime.inputs import reward_sources
from rftcli.runtime.tell import all_records, evaluated, replaced_records, step_metrics, write_samples
from rftcli.stages.collect import Collected, collect
from rftcli.stages.credit import Credited, credit
from rftcli.stages.learn import learn
from rftcli.stages.shape import shape
from rftcli.types import Update

SAMPLER_GAP = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest accepted mean difference, in nats a token. Rounding gives about 1e-6 in float32 and 0.01 in bfloat16."""


def run(job: Job) -> str | None:
    """From `job.first_step` to the plan's last; None when it got there, else the reason it was asked to stop (a checkpoint is committed)."""
    plan, world, emit, watch = job.plan, job.world, job.emit, job.watch
    policy, sampler = job.roles.policy, job.sampler
    emit.emit(RunStarted(time=time.time(), attempt=emit.attempt, step=job.first_step - 1, info=job.info))
    sampler.load(policy.weights(), policy.version)
    job.prove_engine()
    watch.lap()  # start-up is no part of the first step
    if job.first_step == 1 and plan.eval.before_training and plan.data.eval:
        held_out(job, 0)

    for step in range(job.first_step, job.last_step + 1):
        emit.at(step)
        job.profiler.at(step)
        job.scorer.step = step
        collected = collect(job.source, sampler, job.scorer, plan, world, step=step, clock=watch.clock, tick=emit.progress, memory=job.memory)
        collected = shape(collected, plan.shaping, job.running_norm, world)
        watch.add("rollout", collected.rollout_seconds)
        watch.add("score", collected.score_seconds)
        job.rest()
        with watch.time("credit"):
            credited = credit(
                collected, job.roles, plan, world, pad_id=job.pad_id, device=job.device, kl_coefficient=job.kl_coefficient, estimator=job.estimator
            )
        with watch.time("learn"):
            updates = learn(
                credited.mini_batches, policy, plan, world, pad_id=job.pad_id, device=job.device, tick=emit.progress, beside=job.beside(step)
            )
        with watch.time("sync"):
            sampler.load(policy.weights(), policy.version)
            job.follow(step)
        step_done(job, step, collected, credited, updates)

        if plan.evaluates(step):
            held_out(job, step)
        due = job.step_over()
        if plan.saves(step) or due.save or job.early_stop.reached:
            save(job, step)
        if due.stop is not None and step < plan.steps:
            return due.stop
        if job.early_stop.reached:
            break
    job.export_final()
    return None


def step_done(job: Job, step: int, collected: Collected, credited: Credited, updates: Sequence[Update]) -> None:
    """Samples first, then the line that says the step is done."""
    settle(job, wait=False)
    write_samples(job, step, collected, credited)
    records = all_records(job, collected)
    metrics = {**step_metrics(job, records, credited, updates), **collected.metrics}
    control_kl(job, metrics, credited, completions=len(records))
    job.emit.emit(StepDone(time=time.time(), attempt=job.emit.attempt, step=step, metrics=metrics))
    job.emit.state("running", step=step)
    job.latest.see_step(step, metrics)
    job.early_stop.see_step(step, metrics)
    for code, text in job.news(metrics):
        job.emit.warn(code, text)
    engine_agrees(metrics, job.plan)
    job.errors.add(*count_failures([*records, *replaced_records(job, collected)]))  # raises on every rank alike, with the evidence already on disk


def control_kl(job: Job, metrics: Mapping[str, Any], credited: Credited, *, completions: int) -> None:
    """The coefficient of the next step, from the KL as it was applied. It stands still with the policy."""
    kl = credited.kl_applied if credited.kl_applied is not None else metrics.get("kl")
    if job.kl is not None and kl is not None and job.plan.trains_policy(job.emit.step):
        job.kl.after(kl, completions)


def engine_agrees(metrics: Mapping[str, Any], plan: Plan) -> None:
    """Stop when engine and trainer are two different policies. Raises RftError on every rank alike."""
    rough = plan.policy.quantise is not None and plan.policy.quantise.bits == 8  # activations are rounded to scales that depend on other rows
    gap, allowed = metrics.get("sampler_logprob_gap"), SAMPLER_GAP["bfloat16" if rough else plan.policy.dtype]
    if gap is not None and plan.rollout.samples_the_model and not gap["mean"] <= allowed:
        raise RftError(
            f"the engine's log-probs differ from the trainer's by {gap['mean']:.3g} nats a token on average (at most {allowed:g} is accepted)",
            hint="the engine samples from other weights or another distribution than the one that is trained; try models.policy.dtype: float32",
        )


def held_out(job: Job, step: int) -> Mapping[str, Any]:
    """Evaluate every set; write evals/step_N.json and its samples, then the event."""
    start = job.watch.clock()
    with job.watch.time("eval"):
        sets = evaluated(job, step)
    seconds = job.watch.clock() - start
    job.emit.emit(EvalDone(time=time.time(), attempt=job.emit.attempt, step=step, sets=sets, seconds=seconds))
    job.latest.see_eval(step, sets)
    job.early_stop.see_eval(step, sets)
    return sets


def save(job: Job, step: int) -> None:
    """Write the checkpoint of `step`, or copy what it holds and have it written behind the next steps, when the one before is committed."""
    start = job.watch.clock()
    with job.watch.time("checkpoint"):
        settle(job, wait=True)
        path = checkpoint.save(
            job.run,
            step,
            plan=job.written,
            learner=job.trained,
            registry=job.registry,
            export=job.export_checkpoint,
            reward_sources=reward_sources(job.plan),
            world=job.world,
            behind=job.behind,
        )
    if job.behind is None:
        saved(job, step, path, job.watch.clock() - start)
    else:
        job.limits.copied()


def settle(job: Job, *, wait: bool) -> None:
    """Tell of the checkpoint that has been committed behind the steps; RftError on every rank alike when it could not be written. `wait` for it."""
    done = None if job.behind is None else job.behind.settle(wait=wait)
    if done is not None:
        saved(job, done.step, done.target, done.seconds)


def saved(job: Job, step: int, path: Path, seconds: float) -> None:
    job.limits.saved(seconds, behind=job.behind is not None)
    job.emit.emit(CheckpointSaved(time=time.time(), attempt=job.emit.attempt, step=step, path=str(path), seconds=seconds))

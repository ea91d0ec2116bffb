"""`--smoke`: the real models, tiny: two steps with a save and a resume between them, an evaluation, then one micro-batch as long as any can be.

`smoke_plan` and `run_smoke` are the command's part (no torch); `full_length` runs on the ranks. Leaves out trackers, and whether anything is learnt.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcli.algo.batchmath import counted
from rftcli.plan.plan import Plan, plan_to_json
from rftcli.protocols import Observer
from rftcli.runtime.launch import Outcome, launch
from rftcli.runtime.rundir import RunDir, step_name, write_text

if TYPE_CHECKING:
    from rftcli.runtime.build import Job

NEW_TOKENS = 16
"""Longest completion of the two steps."""


def smoke_plan(plan: Plan, steps: int) -> Plan:
    """The plan with one group per rank and update, short completions, and a checkpoint at its last step."""
    batch = plan.batch
    prompts = plan.world.ranks * batch.updates_per_step
    rollout = plan.rollout
    short = min(rollout.max_new_tokens, NEW_TOKENS)
    by_label = {
        label: replace(own, max_new_tokens=min(own.max_new_tokens, short), min_new_tokens=min(own.min_new_tokens, short))
        for label, own in rollout.by_label.items()
    }
    return replace(
        plan,
        steps=steps,
        max_hours=None,
        max_tokens=None,
        data=replace(plan.data, eval=tuple(replace(spec, limit=min(spec.limit or plan.world.ranks, plan.world.ranks)) for spec in plan.data.eval)),
        rollout=replace(rollout, max_new_tokens=short, min_new_tokens=min(rollout.min_new_tokens, short), by_label=by_label),
        batch=replace(batch, prompts_per_step=prompts, micro_batch_size=min(batch.micro_batch_size, batch.samples_per_prompt)),
        eval=replace(plan.eval, before_training=False, every=0, at_end=True, max_new_tokens=min(plan.eval.max_new_tokens, NEW_TOKENS)),
        checkpoint=replace(plan.checkpoint, every=1, every_minutes=None, before_deadline=False, keep=2, keep_best=None, max_gib=None),
        track=replace(plan.track, tensorboard=None, wandb=None),
    )


def run_smoke(plan: Plan, run_dir: Path, checkpoint: Path | None, step: int, observers: Sequence[Observer]) -> tuple[RunDir, Outcome]:
    """Both attempts under `<run_dir>/smoke/`, which is made anew; `checkpoint` of `step`: where the first one goes on from."""
    run = RunDir(run_dir / "smoke")
    shutil.rmtree(run.path, ignore_errors=True)
    run.create()
    first, second = smoke_plan(plan, step + 1), smoke_plan(plan, step + 2)
    rows, prompt, new = plan.batch.micro_batch_size, plan.data.max_prompt_tokens, plan.rollout.max_new_tokens
    write_text(run.plan, plan_to_json(first))
    with run.locked():
        outcome = _attempt(run, first, {"step": step, "checkpoint": None if checkpoint is None else str(checkpoint), "accept": True}, observers)
        if outcome.exit_code != 0:
            return run, outcome
        saved = run.checkpoints / step_name(step + 1)
        longest = {"rows": rows, "prompt_tokens": prompt, "new_tokens": new}
        job = {"step": step + 1, "checkpoint": str(saved), "full_length": longest, "accept": not plan.checkpoint.trainer_state}
        return run, _attempt(run, second, job, observers)


def _attempt(run: RunDir, plan: Plan, job: dict[str, Any], observers: Sequence[Observer]) -> Outcome:
    attempt = run.attempt(run.last_attempt() + 1)
    attempt.create()
    write_text(attempt.plan, plan_to_json(plan))
    return launch(run, attempt, plan, job={"mode": "train", **job}, observers=observers)


def full_length(job: Job, *, rows: int, prompt_tokens: int, new_tokens: int) -> str:
    """One update of every trained role from a micro-batch of `rows` completions as long as they can be, on every rank. What it needed, in words.
    Collective."""
    import torch

    from rftcli.stages.learn import one_update, policy_loss
    from rftcli.stages.values import critic_update
    from rftcli.types import Experience

    job.rest()
    plan = replace(job.plan, batch=replace(job.plan.batch, micro_batch_size=rows))
    vocabulary = job.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(plan.seed + job.world.rank)
    reference = torch.full((new_tokens,), -1.0) if plan.reference is not None else None
    experiences = [
        Experience(
            sample=None,  # type: ignore[arg-type]
            token_ids=torch.randint(vocabulary, (prompt_tokens + new_tokens,), generator=generator),
            prompt_tokens=prompt_tokens,
            mask=torch.ones(new_tokens, dtype=torch.bool),
            advantages=torch.full((new_tokens,), 1.0 if row % 2 else -1.0),
            old_logprobs=None,
            reference_logprobs=reference,
            values=torch.zeros(new_tokens) if job.roles.critic is not None else None,
            returns=torch.ones(new_tokens) if job.roles.critic is not None else None,
        )
        for row in range(rows)
    ]
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    loss = policy_loss(plan.loss, new_tokens)
    one_update(experiences, job.roles.policy, loss, plan, job.world, pad_id=job.pad_id, device=job.device)
    through = "the policy"
    if job.roles.critic is not None:
        critic_update(experiences, job.roles.critic, plan, job.world, pad_id=job.pad_id, device=job.device)
        through += " and the critic"
    size = f"{rows} x {prompt_tokens + new_tokens} tokens"
    text = f"a micro-batch of {size} went forward and backward through {through} on {counted(job.world.size, 'rank')}"
    if job.device.type == "cuda":
        (peak,) = job.world.max([torch.cuda.max_memory_allocated(job.device) / 1024**3])
        text += f", peak {peak:.1f} GiB of GPU memory"
    return text

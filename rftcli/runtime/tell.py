"""What a step leaves behind for people: samples, the step line, evaluation files. Collective where it says so; rank 0 writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rftcli.algo.advantages import ADVANTAGES
from rftcli.algo.stats import Moments
from rftcli.observe.lessons import LessonState
from rftcli.plan.plan import Plan
from rftcli.protocols import World
from rftcli.runtime.averaged import evaluate_weights
from rftcli.runtime.parts import PartFile, merge_parts
from rftcli.runtime.rundir import step_name, write_json
from rftcli.runtime.speed import card_of, speed_metrics
from rftcli.stages.collect import Collected
from rftcli.stages.credit import Credited
from rftcli.stages.records import SampleRecord, length_metrics, records_of, reward_metrics, sample_line
from rftcli.types import Update

if TYPE_CHECKING:
    from rftcli.runtime.build import Job

WEIGHTED = ("loss", "policy_loss", "value_loss", "ptx_loss", "router_loss", "entropy_coefficient", "idle_fraction")
"""Metrics of several updates of a step, averaged with their trained tokens as weights."""
MEASURED = (
    "entropy", "kl", "kl_update", "ratio_mean", "ratio_std", "clip_low_fraction", "clip_high_fraction", "off_policy_fraction", "sampler_gap_mean",
)  # fmt: skip
"""The same of means over the tokens that passed through the model, which are the weights."""


def lesson_state(plan: Plan) -> LessonState:
    """What the warnings of a run start from: whether a group without spread teaches nothing, and rewards anything, follows from the estimator. gdpo
    looks at the parts of a reward, whose sum may be the same by chance."""
    advantage = plan.advantage
    return LessonState(
        on_policy=plan.batch.needs_prepass is None and not plan.loss.reads_sampler,
        compares=ADVANTAGES[advantage.kind].baseline and advantage.kind != "gdpo" and advantage.teacher_coefficient is None,
        rewarded=advantage.kind != "distill",
    )


def all_records(job: Job, collected: Collected) -> list[SampleRecord]:
    """One record for each completion of the step on any rank, by draw and sample, the same on every rank. Collective."""
    records = [item for part in job.world.gather(records_of(collected.groups)) for item in part]
    return sorted(records, key=lambda item: (item.draw, item.sample))


def replaced_records(job: Job, collected: Collected) -> list[SampleRecord]:
    """The same of completions that were scored and whose groups lost their places: what failed there has failed too. Collective where there can be
    any."""
    if job.plan.rollout.dynamic is None:
        return []
    return sorted((item for part in job.world.gather(collected.replaced) for item in part), key=lambda item: (item.draw, item.sample))


def step_metrics(job: Job, records: Sequence[SampleRecord], credited: Credited, updates: Sequence[Update]) -> dict[str, Any]:
    """The step event, from the completions of all ranks together. Collective."""
    metrics = {**reward_metrics(records), **length_metrics(records)}
    if credited.advantages:
        moments = Moments.of(credited.advantages.values())
        metrics["advantage_mean"], metrics["advantage_std"] = moments.mean, moments.sample_std
        metrics["advantage_min"], metrics["advantage_max"] = min(credited.advantages.values()), max(credited.advantages.values())
    metrics.update(update_metrics(updates))
    metrics.update(credited.metrics)  # a KL in the reward was measured over all completions, in an update over those that passed
    job.totals.tokens += metrics["tokens"]
    metrics["tokens_total"] = job.totals.tokens
    metrics["policy_version"] = job.roles.policy.version
    passes = job.source.passes(job.source.next_draw)
    if passes is not None:
        metrics["data_passes"] = passes
    if job.kl_coefficient is not None:
        metrics["kl_coefficient"] = job.kl_coefficient
    seconds = job.watch.lap()
    rows = job.world.gather(seconds)
    metrics["seconds"] = max(rows, key=lambda row: row["rollout"] + row["score"])  # the slowest rank's own account
    size, total = job.info["parameters"], metrics["seconds"]["total"]
    passed = metrics["tokens"] * (1 - metrics.get("idle_fraction", 0.0))
    card, ranks = card_of(job.device), job.world.size
    metrics.update(speed_metrics(tokens=metrics["tokens"], passed=passed, seconds=total, ranks=ranks, parameters=size, card=card))
    peaks = job.watch.peaks()
    if peaks:
        metrics["memory_gib"] = dict(zip(peaks, job.world.max(list(peaks.values())), strict=True))
    return metrics


def update_metrics(updates: Sequence[Update]) -> dict[str, Any]:
    """Of all updates of a step: token-weighted means, maxima, the last learning rate, the largest gradient norm."""
    applied = [update for update in updates if update.applied]
    metrics: dict[str, Any] = {"updates_skipped": len(updates) - len(applied)}
    measured = [update for update in updates if update.tokens]
    for name in (*WEIGHTED, *MEASURED):
        seen = [update for update in measured if name in update.metrics]
        values = [(update.metrics[name], update.passed if name in MEASURED and update.passed else update.tokens) for update in seen]
        if values:
            metrics[name] = sum(value * tokens for value, tokens in values) / sum(tokens for _, tokens in values)
    for name in ("ratio_max", "sampler_gap_max"):
        peaks = [update.metrics[name] for update in measured if name in update.metrics]
        if peaks:
            metrics[name] = max(peaks)
    if "sampler_gap_mean" in metrics:
        metrics["sampler_logprob_gap"] = {"mean": metrics.pop("sampler_gap_mean"), "max": metrics.pop("sampler_gap_max")}
    for role, prefix in (("policy", ""), ("critic", "critic_")):
        mine = [update for update in updates if update.role == role]
        norms = [update.grad_norm for update in mine if update.applied and update.grad_norm is not None]
        if norms:
            metrics[f"{prefix}grad_norm"] = max(norms)
        if mine:
            metrics[f"{prefix}lr"] = mine[-1].lr
    return metrics


def write_samples(job: Job, step: int, collected: Collected, credited: Credited) -> None:
    """samples/step_N.jsonl from every rank's part, ordered by draw and sample, as often and as many as the plan says. Collective."""
    if not job.plan.samples.writes(step):
        return
    kept = first_draws(job.world, [group.prompt.draw for group in collected.groups], job.plan)
    lines = [
        sample_line(sample, step=step, advantage=credited.advantages.get((group.prompt.draw, sample.completion.sample)))
        for group in collected.groups
        if group.prompt.draw in kept
        for sample in group.samples
    ]
    merge_parts(job.world, job.run.samples / f"{step_name(step)}.jsonl", lines)


def first_draws(world: World, draws: Sequence[int], plan: Plan) -> set[int]:
    """The draws whose groups are written: all, or the smallest ones of all ranks, whole groups up to `samples.max`, one at least."""
    if plan.samples.max is None:
        return set(draws)
    everywhere = sorted(draw for part in world.gather(list(draws)) for draw in part)
    return set(everywhere[: max(1, plan.samples.max // plan.batch.samples_per_prompt)])


def evaluated(job: Job, step: int) -> dict[str, Mapping[str, Any]]:
    """Evaluate every set; evals/step_N.samples.jsonl, then evals/step_N.json. Collective."""
    job.eval_scorer.step = step
    samples = PartFile(job.world, job.run.evals / f"{step_name(step)}.samples.jsonl")
    sets = evaluate_weights(job, step, samples.write)
    samples.merge()
    if job.world.rank == 0:
        write_json(job.run.evals / f"{step_name(step)}.json", {"step": step, "sets": sets})
    return sets

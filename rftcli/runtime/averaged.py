"""Evaluation under the weights the plan names: those of the last update, their running mean, or both.

Leaves out what an evaluation is (the stage's).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rftcli.stages.evaluate import Evaluation, evaluate

if TYPE_CHECKING:
    from rftcli.runtime.build import Job

BOTH = "@ema"
"""Behind the name of a set that was evaluated under the running mean beside the live weights."""


def evaluate_weights(job: Job, step: int) -> Evaluation:
    """Every set under the weights of `eval.weights`; under the running mean too where the plan asks for both. Collective."""
    plan = job.plan

    def scores(of: str) -> Evaluation:
        with sampling_from(job, of):
            return evaluate(job.eval_sets, job.sampler, job.scorer, plan, job.world, step=step, tick=job.emit.progress)

    result = scores(plan.eval.weights)
    if plan.policy.ema is None or not plan.policy.ema.evaluate:
        return result
    mean = scores("ema")
    sets = {**result.sets, **{f"{name}{BOTH}": values for name, values in mean.sets.items()}}
    return replace(result, sets=sets, lines=(*result.lines, *({**line, "set": f"{line['set']}{BOTH}"} for line in mean.lines)))


@contextmanager
def sampling_from(job: Job, of: str) -> Iterator[None]:
    """The engine samples from these weights for as long; live weights come back bit for bit. Collective."""
    learner = job.roles.policy
    if of == "live":
        yield
    elif job.plan.rollout.shares_weights:
        with learner.present(list(learner.trained().values()), of):
            yield
    else:
        job.sampler.load(learner.weights(of), learner.version)
        yield
        job.sampler.load(learner.weights(), learner.version)

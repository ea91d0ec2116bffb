"""Evaluation under the weights the plan names: those of the last update, their running mean, or both.

Leaves out what an evaluation is (the stage's).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rftcli.stages.evaluate import Write, evaluate

if TYPE_CHECKING:
    from rftcli.runtime.build import Job

BOTH = "@ema"
"""Behind the name of a set that was evaluated under the running mean beside the live weights."""


def evaluate_weights(job: Job, step: int, write: Write) -> dict[str, Mapping[str, Any]]:
    """Every set under the weights of `eval.weights`; under the running mean too where the plan asks for both. `write` gets this rank's samples.
    Collective."""
    plan = job.plan

    def scores(of: str, write: Write) -> dict[str, Mapping[str, Any]]:
        with sampling_from(job, of):
            return evaluate(
                job.eval_sets, job.sampler, job.eval_scorer, plan, job.world, step=step, tick=job.emit.progress, write=write, answers=job.answers
            )

    sets = scores(plan.eval.weights, write)
    if plan.policy.ema is None or not plan.policy.ema.evaluate:
        return sets
    mean = scores("ema", lambda line: write({**line, "set": f"{line['set']}{BOTH}"}))
    return {**sets, **{f"{name}{BOTH}": values for name, values in mean.items()}}


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

"""What a run reads and is scored by: prompts, rewards, functions of the user. No model; cheap to make, so it comes first.

What it leaves out: engines, learners and everything else that `build` ties together.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rftcli.algo.own_loss import own_loss as call_own_loss
from rftcli.data.prompts import PromptBuilder
from rftcli.data.rows import RowReader, read_rows
from rftcli.data.source import PromptSource
from rftcli.plan.plan import Plan
from rftcli.rewards.answers import Answers
from rftcli.rewards.grace import nobody_asks
from rftcli.rewards.scorers.desk import Desk
from rftcli.rewards.table import RewardTable
from rftcli.runtime.own_loss import load_loss
from rftcli.stages.evaluate import EvalSet


def search_paths(plan: Plan, checkpoint: Path | None = None) -> list[Path]:
    """Where user modules and relative files are looked for: the recipe's folder, then the copies in the checkpoint."""
    paths = [Path(plan.rewards.search_path)]
    if checkpoint is not None:
        paths.append(checkpoint / "reward_sources")
    return paths


def make_source(plan: Plan, builder: PromptBuilder, paths: list[Path]) -> PromptSource:
    """The training prompts; streamed sets are opened when their first row is drawn."""
    sets = [(spec, partial(RowReader, spec, paths) if spec.streaming else read_rows(spec, paths)) for spec in plan.data.train]
    return PromptSource(sets, builder, seed=plan.data.seed, shuffle=plan.data.shuffle)


def make_eval_sets(plan: Plan, builder: PromptBuilder, paths: list[Path]) -> list[EvalSet]:
    sets = []
    for spec in plan.data.eval:
        source = PromptSource([(spec, read_rows(spec, paths))], builder, seed=plan.seed, shuffle=False)
        assert source.num_rows is not None, "evaluation sets are read whole"
        sets.append(EvalSet(name=spec.name, prompts=source.draw(0, source.num_rows), samples_per_prompt=spec.samples_per_prompt))
    return sets


def make_desk(plan: Plan) -> Desk:
    """Where parts ask scorers; filled when models are loaded."""
    return Desk(spec.name for spec in plan.scorers)


def make_eval_scorer(plan: Plan, paths: list[Path], desk: Desk, stop_asked: Callable[[], bool] = nobody_asks) -> RewardTable:
    return make_scorer(replace(plan, rewards=plan.eval_rewards), paths, desk, stop_asked)


def make_answers(plan: Plan) -> Answers:
    return Answers(plan.eval_rewards.labels, score_prefill=plan.eval_rewards.score_prefill)


def make_scorer(plan: Plan, paths: list[Path], desk: Desk, stop_asked: Callable[[], bool] = nobody_asks) -> RewardTable:
    """`stop_asked`: whether the run has been asked to stop."""
    rewards = plan.rewards
    own = {"combine": rewards.combine, "score_prefill": rewards.score_prefill, "total_steps": plan.steps}
    return RewardTable(rewards.labels, search_path=paths, desk=desk, stop_asked=stop_asked, **own)


def bound_loss(plan: Plan, paths: list[Path]) -> Callable[..., Any] | None:
    """The plan's own loss, ready to be called as those of the table; None without one."""
    if plan.loss.python is None:
        return None
    own = load_loss(plan.loss.python, plan.loss.options, paths)
    return partial(call_own_loss, function=own.function, asks=own.asks, own_options=plan.loss.options)


def reward_sources(plan: Plan) -> tuple[Path, ...]:
    """Source files of the user's reward functions and scorers, so that a checkpoint can be evaluated without them."""
    found = []
    tables = (*plan.rewards.labels.values(), *plan.eval_rewards.labels.values())
    targets = [part.target for parts in tables for part in parts if part.kind == "python"]
    others = (*plan.rewards.combine.values(), *plan.eval_rewards.combine.values(), *plan.scorers)
    for target in (*targets, *(spec.target for spec in others if spec.target is not None)):
        module = sys.modules.get(target.partition(":")[0])
        file = None if module is None else inspect.getsourcefile(module)
        if file is not None and Path(file).is_relative_to(plan.rewards.search_path):
            found.append(Path(file))
    return tuple(dict.fromkeys(found))

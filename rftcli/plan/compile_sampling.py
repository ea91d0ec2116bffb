"""Which completions are asked for and trained on: refill, replay, filtering, labels with sampling of their own, curriculum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rftcli.plan.plan_sampling import CurriculumPlan, DynamicPlan, KeepPlan, LabelSampling, OverSamplePlan, PartialPlan, ReplayPlan
from rftcli.recipe.sections.algorithm import GROUP_ESTIMATORS

if TYPE_CHECKING:
    from rftcli.recipe.sections import Curriculum, Recipe, Rollout


def strategies(section: Rollout) -> dict[str, Any]:
    """The fields of a `RolloutPlan` that say which completions there are."""
    dynamic, keep, replay = section.dynamic, section.keep, section.replay
    low, high = (None, None) if dynamic is None or dynamic.range is None else dynamic.range
    return {
        "first_token_temperature": section.first_token_temperature,
        "by_label": {label: _label_sampling(section, own) for label, own in section.by_label.items()},
        "dynamic": None
        if dynamic is None
        else DynamicPlan(max_extra_rollouts=dynamic.max_extra_rollouts, low=low, high=high, metric=dynamic.metric),
        "over_sample": None if section.over_sample is None else OverSamplePlan(**section.over_sample.model_dump()),
        "partial": None
        if section.partial is None
        else PartialPlan(budget_tokens=section.partial.budget_tokens, max_version_lag=section.max_version_lag),
        "keep": None if keep is None else KeepPlan(best=keep.best, worst=keep.worst),
        "replay": None if replay is None else ReplayPlan(**replay.model_dump()),
    }


def _label_sampling(section: Rollout, own: Any) -> LabelSampling:
    names = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids")
    values = {name: getattr(section, name) if getattr(own, name) is None else getattr(own, name) for name in names}
    return LabelSampling(**values)


def curriculum_plan(section: Curriculum | None) -> CurriculumPlan | None:
    if section is None:
        return None
    if section.kind == "python":
        return CurriculumPlan(kind="python", target=section.python, options=dict(section.options))
    low, high = section.range
    return CurriculumPlan(
        kind="pass_rate", low=low, high=high, share=section.share, metric=section.metric, pass_mark=section.pass_mark, memory=section.memory
    )


def strategy_notes(recipe: Recipe) -> list[str]:
    """What the strategies mean for the numbers of a run."""
    rollout, notes = recipe.rollout, []
    kind, taught = recipe.algorithm.advantage.kind, recipe.models.teacher is not None
    for name in ("dynamic", "replay"):
        if getattr(rollout, name) is not None and (taught or kind not in GROUP_ESTIMATORS):
            what = "replaced" if name == "dynamic" else "asked again"
            why = "the teacher" if taught else f"`{kind}`"
            notes.append(f"rollout.{name}: groups whose rewards are alike are {what}, though with {why} they teach as well")
    if rollout.dynamic is not None:
        extra = rollout.dynamic.max_extra_rollouts
        notes.append(
            f"rollout.dynamic: a step draws between {recipe.batch.prompts_per_step} and {recipe.batch.prompts_per_step * (1 + extra)} prompts and "
            f"trains on {recipe.batch.prompts_per_step} groups; `train.data_passes` and `eval.every: pass` count the latter"
        )
    if rollout.over_sample is not None:
        times = f"rollout.over_sample: {rollout.over_sample.factor:g} times the prompts are"
        dropped = " sampled and the groups with the longest answers dropped, so training sees shorter answers than the policy gives; which ones"
        notes.append(times + (dropped if rollout.partial is None else " in work; which groups a step trains on") + " depends on the number of ranks")
    if rollout.partial is not None:
        notes.append(
            f"rollout.partial: tokens may be up to {rollout.max_version_lag} updates old when they are trained on, those of long answers most; "
            "what is still kept at the end of the run is never trained on"
        )
    if rollout.keep is not None:
        kept = rollout.keep.best + rollout.keep.worst
        notes.append(f"rollout.keep: {kept} of {rollout.samples_per_prompt} completions of a prompt are trained on; baselines see all of them")
    if rollout.first_token_temperature is not None:
        notes.append(
            f"rollout.first_token_temperature: the first token is sampled at {rollout.first_token_temperature:g}, and its log-prob in training is "
            "taken at the same temperature, so its gradient is smaller by the ratio of the two"
        )
    return notes

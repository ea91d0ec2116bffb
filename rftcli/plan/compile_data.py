"""Data sets and rewards of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rftcli.data.spec import ChatSpec, Columns, DataSpec
from rftcli.plan.compile_rewards import combine_specs
from rftcli.plan.compile_sampling import curriculum_plan
from rftcli.plan.plan import (
    DataPlan,
    RewardPlan,
)
from rftcli.rewards.spec import KINDS, PartSpec

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe



def data_plan(recipe: Recipe) -> DataPlan:
    chat = recipe.models.policy.chat
    train, evals = data_specs(recipe)
    return DataPlan(
        train=train,
        eval=evals,
        seed=recipe.seed if recipe.data.seed is None else recipe.data.seed,
        shuffle=recipe.data.shuffle,
        check_reference=recipe.data.check_reference,
        overlong_prompt=recipe.data.overlong_prompt,
        max_prompt_tokens=recipe.rollout.max_prompt_tokens,
        curriculum=curriculum_plan(recipe.data.curriculum),
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
        split=section.split,
        where=section.where,
        template=section.template,
        streaming=getattr(section, "streaming", False),
        weight=weight,
        limit=section.limit,
        label=section.label,
        system=section.system,
        as_chat=section.as_chat,
        columns=Columns(prompt=columns.prompt, reference=columns.reference, label=columns.label, id=columns.id),
        extract_reference=section.extract_reference,
        samples_per_prompt=getattr(section, "samples_per_prompt", 1),
    )


def reward_plan(recipe: Recipe, search_path: str) -> RewardPlan:
    return RewardPlan(
        labels=reward_parts(recipe),
        max_error_rate=recipe.reward_shaping.max_error_rate,
        score_prefill=recipe.models.policy.chat.score_prefill,
        search_path=search_path,
        combine=combine_specs(recipe),
    )


def reward_parts(recipe: Recipe) -> dict[str, tuple[PartSpec, ...]]:
    """Label -> its weighted parts."""
    return {label: tuple(_part(part) for part in entry.parts) for label, entry in recipe.rewards.items()}


def _part(part: Any) -> PartSpec:
    kind, target = next((kind, target) for kind in KINDS if (target := getattr(part, kind)) is not None)
    return PartSpec(
        name=part.name or (target.rsplit(":", 1)[1] if kind == "python" else target),
        kind=kind,
        target=target,
        weight=part.weight,
        options=dict(part.options),
        on_error=part.on_error,
        text=part.text,
        clip=part.clip,
        timeout_seconds=part.timeout_seconds,
    )

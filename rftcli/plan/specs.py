"""What a recipe says of its rows, rewards and scorers, as the rooms that read them take it.

Needs no plan, so that a recipe can be checked without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rftcli.data.spec import Columns, DataSpec
from rftcli.rewards.spec import KINDS, PartSpec

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


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


def supervised_data(recipe: Recipe) -> DataSpec | None:
    """The rows of the supervised stream; None where there is none."""
    if recipe.train.supervised is None:
        return None
    source = recipe.train.supervised.data
    return DataSpec(
        name="supervised",
        path=source.path,
        python=source.python,
        options=dict(source.options),
        limit=source.limit,
        system=source.system,
        as_chat=source.as_chat,
        columns=Columns(prompt=source.columns.prompt, reference=source.columns.reference),
        answers=True,
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


def scoring(recipe: Recipe) -> Recipe:
    """The recipe as evaluation scores it: with `eval.rewards` in the place of `rewards` where it has them."""
    return recipe if recipe.eval.rewards is None else recipe.model_copy(update={"rewards": recipe.eval.rewards})


def used_scorers(recipe: Recipe) -> set[str]:
    """Names that a part of `rewards` or `eval.rewards` has as its `model`."""
    tables = (recipe.rewards, recipe.eval.rewards or {})
    return {part.model for table in tables for entry in table.values() for part in entry.parts if part.model is not None}


def unused_text(names: Sequence[str]) -> str:
    return f"models.scorers: no reward uses {', '.join(f'`{name}`' for name in names)}, so nothing is loaded for it"


def needs_vllm_here(recipe: Recipe) -> bool:
    """Must the ranks' own Python have vLLM? Not where servers run already, or are started by a command of the recipe."""
    server = recipe.rollout.vllm.server
    if server is None:
        return recipe.rollout.engine == "vllm"
    return recipe.rollout.engine in ("auto", "vllm") and server.start is not None and not server.start.command

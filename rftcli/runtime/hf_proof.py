"""The hf engine before the first rollout: how it decodes, found out with the model itself, the same on every rank, and told."""

from __future__ import annotations

from typing import Any

from rftcli.engines.trial import Found
from rftcli.protocols import World
from rftcli.runtime.emit import Emitter


def prove_hf(sampler: Any, world: World, emit: Emitter) -> None:
    """Tokens go through the own decode step on all ranks or on none, and rows of a pass are counted alike. Collective."""
    every = world.gather(sampler.prove())
    plain = next((found.plain for found in every if found.plain is not None), None)
    sampler.found = Found(
        rows_alike=all(found.rows_alike for found in every), plain=plain, padding_drops=plain is None and all(found.padding_drops for found in every)
    )
    emit.log("hf engine: tokens go through " + ("its own decode step" if plain is None else f"the model's forward ({plain})"))

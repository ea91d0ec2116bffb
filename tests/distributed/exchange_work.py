"""What ranks send each other. Functions of (world, ...), run by `rank.py`."""

from __future__ import annotations

from typing import Any


def parcels(world: Any) -> list[Any]:
    """From each rank to each other one: nothing, a text, and tensors of unlike sizes."""
    import torch

    def parcel(place: int) -> Any:
        kinds = (None, f"{world.rank} to {place}", {"ids": torch.arange(1000 * (world.rank + 1)), "mask": torch.ones(place, dtype=torch.bool)})
        return kinds[(world.rank + place) % 3]

    found = world.exchange([parcel(place) for place in range(world.size)])
    return [{name: tensor.tolist() for name, tensor in item.items()} if isinstance(item, dict) else item for item in found]


def nothing(world: Any) -> list[Any]:
    return world.exchange([[] for _ in range(world.size)])


def own(world: Any) -> bool:
    """What a rank keeps is the very same object."""
    kept = object()
    return world.exchange([kept if place == world.rank else None for place in range(world.size)])[world.rank] is kept

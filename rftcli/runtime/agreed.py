"""Work that each rank does by itself, and that has failed on all of them where it has failed on one. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rftcli.errors import RftError
from rftcli.protocols import World

T = TypeVar("T")


def agreed(world: World, work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
    """What `work` returns; its RftError on every rank alike, where `undo` lets go of what this one had. Collective; `work` speaks to no rank."""
    problem: RftError | None = None
    try:
        found = work()
    except RftError as error:
        problem = error
    failed = next((one for one in world.gather(problem and (type(problem), problem.message, problem.hint)) if one is not None), None)
    if problem is not None:
        raise problem
    if failed is not None:
        if undo is not None:
            undo(found)
        raise failed[0](failed[1], hint=failed[2])
    return found

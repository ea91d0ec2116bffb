"""A decode step inside a block gets the answer that vLLM's cache manager would give, without asking it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rftcli.engines.vllm_decode import PROOFS, Room, quicken

BLOCK = 4


class FullAttentionManager:
    block_size = BLOCK


class SlidingWindowManager(FullAttentionManager):
    pass


@dataclass
class Manager:
    """Gives a sequence a block whenever it needs one; `eager`: one too early."""

    eager: bool = False
    held: dict[str, int] = field(default_factory=dict)
    empty_kv_cache_blocks: Any = field(default_factory=lambda: SimpleNamespace(blocks=([],)))
    coordinator: Any = field(default_factory=lambda: SimpleNamespace(single_type_managers=(FullAttentionManager(),)))

    def allocate_slots(self, request: Any, num_new_tokens: int, new_computed_blocks: Any = None, num_lookahead_tokens: int = 0) -> Any:
        needed = -(-(request.num_computed_tokens + num_new_tokens + num_lookahead_tokens + self.eager) // BLOCK)
        new = list(range(self.held.get(request.name, 0), needed))
        self.held[request.name] = max(needed, self.held.get(request.name, 0))
        return SimpleNamespace(blocks=(new,))


def engine(manager: Manager, connector: Any = None) -> Any:
    core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=manager, connector=connector))
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)))


def decoded(manager: Manager, name: str, steps: int, prompt: int = 3) -> list[list[int]]:
    """Blocks that a sequence gets for its prompt and for each token."""
    request = SimpleNamespace(name=name, num_computed_tokens=0)
    found = [manager.allocate_slots(request, prompt, new_computed_blocks=None).blocks[0]]
    for done in range(steps):
        request.num_computed_tokens = prompt + done
        found.append(manager.allocate_slots(request, 1, num_lookahead_tokens=0).blocks[0])
    return found


def test_the_same_blocks_and_a_quarter_of_the_questions() -> None:
    plain, quick = Manager(), Manager()
    room = quicken(engine(quick))
    assert room is not None and quicken(engine(quick)) is room
    for name in ("a", "b"):
        assert decoded(quick, name, PROOFS) == decoded(plain, name, PROOFS)
    before = room.asked
    assert decoded(quick, "c", 4 * BLOCK) == decoded(plain, "c", 4 * BLOCK)
    assert room.asked - before == 1 + 4  # the prompt, and the first token of each block
    assert quick.held == plain.held


def test_more_than_one_token_and_all_that_prompts_and_guesses_need_is_asked() -> None:
    manager = Manager()
    room = quicken(engine(manager))
    assert room is not None
    decoded(manager, "a", 2 * PROOFS)
    request, before = SimpleNamespace(name="b", num_computed_tokens=5), room.asked
    manager.allocate_slots(request, 2)
    manager.allocate_slots(request, 1, None)
    manager.allocate_slots(request, 1, new_computed_blocks=None)
    manager.allocate_slots(request, 1, num_lookahead_tokens=1)
    assert room.asked - before == 4


def test_a_manager_that_gives_blocks_otherwise_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    manager, plain = Manager(eager=True), Manager(eager=True)
    assert quicken(engine(manager)) is not None
    assert decoded(manager, "a", 2 * PROOFS) == decoded(plain, "a", 2 * PROOFS)
    assert not isinstance(manager.allocate_slots, Room) and "left as it is" in caplog.text


@pytest.mark.parametrize("other", ["sliding", "two kinds", "connector", "another process"])
def test_what_is_not_known_is_left_alone(other: str) -> None:
    manager = Manager()
    if other == "sliding":
        manager.coordinator.single_type_managers = (SlidingWindowManager(),)
    if other == "two kinds":
        manager.coordinator.single_type_managers = (FullAttentionManager(), FullAttentionManager())
    apart = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace()))
    llm = apart if other == "another process" else engine(manager, other == "connector" or None)
    assert quicken(llm) is None and not isinstance(manager.allocate_slots, Room)

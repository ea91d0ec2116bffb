"""Cheaper decode steps in vLLM's scheduler: a token that falls into a block its sequence has already needs no new one.

vLLM's scheduler asks its cache for room for every sequence at every step, with all that a prompt might need in mind, and that is a quarter of what a
step costs the host; with a thousand sequences of a small model the GPU waits for it. A block holds 16 tokens and more, so all but one of so many
questions have the same answer: nothing new. Here they have it without being asked. The first PROOFS answers are compared with vLLM's own.

What it leaves out: caches of several kinds and sliding windows, which give blocks back at every step; speculative tokens; caches that other processes
fill. A block of an answer that is full comes into the prefix cache with the next block, not with its last token.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger("rft")
PROOFS = 512


class Room:
    """In the place of `allocate_slots` of vLLM's cache manager. `asked`: how often vLLM's own was asked, in vain or not."""

    def __init__(self, manager: Any, block_tokens: int) -> None:
        self.asked = 0
        self._own, self._nothing, self._block = manager.allocate_slots, manager.empty_kv_cache_blocks, block_tokens
        self._manager, self._proofs = manager, PROOFS

    def __call__(self, request: Any, num_new_tokens: int, *more: Any, num_lookahead_tokens: int = 0, **options: Any) -> Any:
        inside = num_new_tokens == 1 and request.num_computed_tokens % self._block
        if inside and not (self._proofs or more or num_lookahead_tokens or options):
            return self._nothing
        self.asked += 1
        found = self._own(request, num_new_tokens, *more, num_lookahead_tokens=num_lookahead_tokens, **options)
        if inside and self._proofs and not (more or num_lookahead_tokens or options):
            self._proofs -= 1
            if found is None or any(found.blocks):
                self.undo()
                _log.warning("vllm: this version gives a sequence new blocks within a block; its scheduler is left as it is")
        return found

    def use(self) -> None:
        self._manager.allocate_slots = self

    def undo(self) -> None:
        self._manager.allocate_slots = self._own


def quicken(llm: Any) -> Room | None:
    """For an engine in this process; again: what is there. None: its cache is of a kind that is not known here, and nothing is changed."""
    core = getattr(getattr(getattr(llm, "llm_engine", None), "engine_core", None), "engine_core", None)
    scheduler = getattr(core, "scheduler", None)
    manager = getattr(scheduler, "kv_cache_manager", None)
    if isinstance(getattr(manager, "allocate_slots", None), Room):
        return manager.allocate_slots  # type: ignore[union-attr]
    kinds = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    known = len(kinds) == 1 and type(kinds[0]).__name__ == "FullAttentionManager"
    if not known or getattr(scheduler, "connector", None) is not None or not hasattr(manager, "empty_kv_cache_blocks"):
        return None
    room = Room(manager, kinds[0].block_size)
    room.use()
    return room

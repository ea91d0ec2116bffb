"""Decode steps of vLLM, several for one turn of its scheduler.

vLLM's scheduler looks at every sequence at every step, before and after: some 20 us each, and with a thousand sequences of a small model the GPU
waits for it. While all sequences decode and nobody new can be let in, there is nothing to decide. So room is taken for STEPS tokens of each, that
many steps go to vLLM's own model runner as the scheduler would have sent them, and the scheduler is told afterwards what became of each sequence.
What the device computes is the same; a sequence leaves the steps as soon as it ends.

Everything else stays vLLM's: prompts, who is let in, who has to give way where memory is short, ends, outputs. Left out, and done by vLLM step by
step: forms (`structured`), drafts, caches of several kinds and sliding windows, pipeline stages, connectors, data parallel servers, and stop strings
where this vLLM would keep what is behind one.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rftcli.engines.vllm_tape import Row, Tape
from rftcli.errors import RftError

STEPS = 64
FREE = 16
"""Where sequences wait, a turn ends and the scheduler is asked again as soon as one of so many has ended."""
PATIENCE = 2
"""Or after so many turns: who waits may wait for something else than an end (a form that is compiled, its turn among prompts)."""
UNKNOWN = (
    "connector", "ec_connector", "aux_output_connector", "enable_return_routed_experts", "return_sampling_mask", "num_spec_tokens", "use_pp",
    "use_eagle", "defer_block_free", "needs_kv_cache_zeroing",
)  # fmt: skip
"""Of a scheduler: what is not understood here, when it is in use."""
UNKNOWN_OF_A_SEQUENCE = ("use_structured_output", "has_encoder_inputs", "resumable")
UNDER_WAY = ("num_output_placeholders", "spec_token_ids", "num_stale_output_tokens", "async_tokens_to_discard")
"""Of a sequence: what vLLM waits for."""
BUSY = (
    "preempted_req_ids", "has_structured_output_requests", "kv_connector_metadata", "ec_connector_metadata", "kv_cache_block_copies",
    "free_encoder_mm_hashes", "encoder_input_updates", "new_block_ids_to_zero",
)  # fmt: skip
"""Of a scheduler's output: what is done once, and would be done again in every step that is made from it."""
NEEDED = (
    "running", "requests", "finished_req_ids", "max_model_len", "pause_state", "get_request_counts", "schedule", "update_from_output",
    "_update_request_with_output",
)  # fmt: skip
NEEDED_OF_THE_CACHE = ("allocate_slots", "cache_blocks", "new_step_starts")


class Burst:
    """In the place of `EngineCore.step_fn`. `steps`, `turns`: how many steps were taken here, in how many turns."""

    def __init__(self, core: Any, cache: Any) -> None:
        self.steps = self.turns = 0
        self._core, self._scheduler, self._cache = core, core.scheduler, cache
        self._own, self._schedule = core.step_fn, core.scheduler.schedule
        self._settled, self._template = False, None
        self._left, self._waiting, self._unasked = 0, 0, 0
        self._inbox = getattr(core, "input_queue", None)  # of an engine in a process of its own: who knocks is not left waiting
        self._later = core.batch_queue is not None
        self._words = _ends_at_words()
        self._before = None if getattr(core.scheduler, "use_v2_model_runner", False) else getattr(core.scheduler, "prev_step_scheduled_req_ids", None)
        """Who was in the step before, as vLLM's first model runner has to know."""

    def use(self) -> None:
        self._core.step_fn, self._scheduler.schedule = self, self._asked

    def undo(self) -> None:
        self._core.step_fn, self._scheduler.schedule = self._own, self._schedule
        self._settled = False

    def __call__(self) -> tuple[Any, bool]:
        """(outputs by client or None, whether the model ran), as vLLM's own."""
        if not self._undecided():
            return self._own()
        if self._core.batch_queue:
            return self._landed()
        rows = self._rows()
        return (self._run(rows), True) if rows else self._own()

    # when

    def _asked(self, *arguments: Any, **options: Any) -> Any:
        """vLLM's scheduler, watched."""
        found = self._schedule(*arguments, **options)
        self._settled = decodes_alone(found) and all(map(self._is_known, self._scheduler.running))
        self._template = found
        self._left, self._unasked = len(found.num_scheduled_tokens), 0
        _, self._waiting = self._scheduler.get_request_counts()
        return found

    def _undecided(self) -> bool:
        """Whether there is nothing to decide: the scheduler's last turn was for decoding alone, and another would let nobody in."""
        if not self._settled or self._scheduler.pause_state.name != "UNPAUSED":
            return False
        running, waiting = self._scheduler.get_request_counts()
        nobody_fits = waiting <= self._waiting and running * FREE > self._left * (FREE - 1) and self._unasked < PATIENCE
        return running > 0 and (waiting == 0 or nobody_fits)

    def _is_known(self, row: Any) -> bool:
        """Decided with the scheduler's turn, before anything that is under way is waited for: vLLM keeps the pace of its own steps."""
        params = row.sampling_params
        if params is None or params.prompt_logprobs is not None or getattr(params, "repetition_detection", None) is not None:
            return False
        return (not params.stop or self._words) and not any(getattr(row, name, None) for name in UNKNOWN_OF_A_SEQUENCE)

    def _rows(self) -> list[Row]:
        """Those that have room, with it; none where vLLM waits for something, or one has no token left to make."""
        ends, longest = [], self._scheduler.max_model_len
        for row in self._scheduler.running:
            if row.num_tokens != row.num_computed_tokens + 1 or any(getattr(row, name, None) for name in UNDER_WAY):
                return []
            ends.append(min(row.max_tokens - row.num_output_tokens, longest - row.num_tokens))
        if min(ends) < 1:
            return []
        self._cache.new_step_starts()
        rows = []
        for row, end in zip(self._scheduler.running, ends, strict=True):
            room = self._cache.allocate_slots(row, min(STEPS, end))
            if room is None:  # somebody has to give way, which the scheduler decides after this turn
                self._settled = False
            else:
                rows.append(Row(row, end, room.get_block_ids(allow_none=True)))
        return rows

    # steps

    def _landed(self) -> tuple[Any, bool]:
        """The oldest step that is under way is told to the scheduler, and no new one begins."""
        future, output, begun = self._core.batch_queue.pop()
        return self._told(output, _made(future, begun)), True

    def _told(self, output: Any, made: Any) -> Any:
        self._core._process_aborts_queue()
        found = self._scheduler.update_from_output(output, made)
        if hasattr(self._core, "_attach_weight_version"):
            self._core._attach_weight_version(found)
        return found

    def _run(self, rows: list[Row]) -> Any:
        tape, depth = Tape(rows, STEPS), 2 if self._later else 1  # a step is sent before the one before it is read
        computed = np.array([row.request.num_computed_tokens for row in rows])
        written = np.array([row.request.num_output_tokens for row in rows])
        alive, names, sent = tape.alive(), dict.fromkeys(tape.names, 1), dict[str, int]()
        first = self._first(rows)
        under_way: deque[Any] = deque()
        while alive.size and not (tape.step and self._is_wanted(len(rows) - len(alive), len(rows))):
            counts = {"num_computed_tokens": (computed[alive] + tape.step).tolist(), "num_output_tokens": (written[alive] + tape.step).tolist()}
            output = self._output(names, counts | first)
            under_way.append((tape.step, alive, list(names), self._sent(output)))
            tape.step, sent, first = tape.step + 1, names, {}
            if len(under_way) == depth:
                tape.read(*under_way.popleft())
            if len(going := tape.alive()) < len(alive):
                alive, names = going, dict.fromkeys([tape.names[place] for place in going], 1)
        while under_way:
            tape.read(*under_way.popleft())
        if self._before is not None:
            self._before.clear()
            self._before.update(sent)
        self.steps, self.turns, self._unasked = self.steps + tape.step, self.turns + 1, self._unasked + 1
        if self.turns == 1 and self._inbox is not None:
            logging.getLogger("rft").warning("rft: up to %d decode steps for a turn of the scheduler", STEPS)  # vLLM shows nothing below a warning
        return self._settle(rows, tape)

    def _is_wanted(self, ended: int, whole: int) -> bool:
        """Whether there is something to decide before a turn's last step: somebody knocks, or there is room for those who wait."""
        return (self._inbox is not None and not self._inbox.empty()) or (self._waiting > 0 and ended * FREE >= whole)

    def _first(self, rows: list[Row]) -> dict[str, Any]:
        """What only the first step tells: new blocks, and to vLLM's first model runner the tokens of sequences that were not in the step before."""
        away = () if self._before is None else [row.request for row in rows if row.request.request_id not in self._before]
        return {"new_block_ids": [row.blocks for row in rows], "all_token_ids": {one.request_id: list(one.all_token_ids) for one in away}}

    def _output(self, names: dict[str, int], told: dict[str, Any]) -> Any:
        """What the scheduler would send for one more token of each."""
        told = {"req_ids": list(names), "new_block_ids": [None] * len(names), "all_token_ids": {}} | told
        cached = replace(self._template.scheduled_cached_reqs, **told)
        ended, self._scheduler.finished_req_ids = self._scheduler.finished_req_ids, set()
        whole = {"num_scheduled_tokens": names, "total_num_scheduled_tokens": len(names), "finished_req_ids": ended}
        return replace(self._template, scheduled_cached_reqs=cached, **whole)

    def _sent(self, output: Any) -> Callable[[], Any]:
        """A step on its way, and how to wait for what it makes."""
        executor = self._core.model_executor
        begun = executor.execute_model(output, non_block=True)
        if self._later:
            return partial(_made, executor.sample_tokens(None, non_block=True), begun)
        made = begun.result()
        made = executor.sample_tokens(None) if made is None else made
        return lambda: made

    def _settle(self, rows: list[Row], tape: Tape) -> Any:
        """Tell the scheduler all tokens at once; those of a sequence that goes on are written down without a look at each."""
        scheduler, counts = self._scheduler, tape.counts.tolist()
        going = {name for name, ended in zip(tape.names, tape.may_have_ended().tolist(), strict=True) if not ended}
        own = scheduler._update_request_with_output

        def written(request: Any, ids: list[int], *arguments: Any, **options: Any) -> tuple[list[int], bool]:
            if request.request_id not in going:
                found = own(request, ids, *arguments, **options)
                if not self._later:  # as at the step that made its last token
                    self._cache.cache_blocks(request, request.num_tokens - 1)
                return found  # type: ignore[no-any-return]
            request.append_output_token_ids(ids)
            if self._later:
                request.num_output_placeholders -= len(ids)
            return ids, False

        for row, count in zip(rows, counts, strict=True):
            row.request.num_computed_tokens += count
            if hasattr(row.request, "num_in_flight_tokens"):
                row.request.num_in_flight_tokens += count
            if self._later:
                row.request.num_output_placeholders += count
        whole = {"num_scheduled_tokens": dict(zip(tape.names, counts, strict=True)), "total_num_scheduled_tokens": sum(counts)}
        scheduler._update_request_with_output = written
        try:
            return self._told(replace(self._template, **whole), tape.as_one_step())
        finally:
            del scheduler._update_request_with_output


def _ends_at_words() -> bool:
    """Whether this vLLM drops the tokens behind a stop string, and takes the string that ends first, where several tokens come at once."""
    with contextlib.suppress(ImportError, OSError):
        from vllm.v1.engine.output_processor import OutputProcessor

        return hasattr(OutputProcessor, "_trim_surplus_tokens")
    return False


def _made(future: Any, begun: Any) -> Any:
    made = future.result()
    if made is None:
        begun.result()  # raises what went wrong
        raise RftError("vLLM made nothing in a step", hint="its log above says why")
    return made


def decodes_alone(output: Any) -> bool:
    """Whether a turn of the scheduler sent one token of each sequence, and nothing else."""
    cached = output.scheduled_cached_reqs
    return (
        0 < len(output.num_scheduled_tokens) == output.total_num_scheduled_tokens == len(cached.req_ids)
        and not (cached.resumed_req_ids or cached.new_token_ids or output.scheduled_spec_decode_tokens or output.scheduled_encoder_inputs)
        and not any(getattr(output, name, None) for name in BUSY)
    )


def quicken(llm: Any) -> Burst | None:
    """For an engine in this process; again: what is there. None: it is of a kind that is not known here, and nothing is changed."""
    core = getattr(getattr(getattr(llm, "llm_engine", None), "engine_core", None), "engine_core", None)
    return _attached(core)


def quicken_engines_to_come() -> None:
    """For the processes of a vLLM server: whatever engine begins its work here."""
    try:
        from vllm.v1.engine.core import EngineCoreProc
    except (ImportError, OSError):
        return
    work = getattr(EngineCoreProc, "run_busy_loop", None)
    if work is not None:

        def quick(core: Any) -> Any:
            _attached(core)
            return work(core)

        EngineCoreProc.run_busy_loop = quick


def _attached(core: Any) -> Burst | None:
    if isinstance(getattr(core, "step_fn", None), Burst):
        return core.step_fn  # type: ignore[union-attr,no-any-return]
    scheduler = getattr(core, "scheduler", None)
    cache = getattr(scheduler, "kv_cache_manager", None)
    kinds = getattr(getattr(cache, "coordinator", None), "single_type_managers", ())
    known = (
        type(scheduler).__name__ in ("Scheduler", "AsyncScheduler")
        and all(hasattr(core, name) for name in ("step_fn", "batch_queue", "model_executor", "_process_aborts_queue"))
        and (core.batch_queue is not None) == (type(scheduler).__name__ == "AsyncScheduler")
        and all(hasattr(scheduler, name) for name in NEEDED)
        and all(hasattr(cache, name) for name in NEEDED_OF_THE_CACHE)
        and not any(getattr(scheduler, name, None) for name in UNKNOWN)
        and [type(kind).__name__ for kind in kinds] == ["FullAttentionManager"]
    )
    if not known:
        return None
    burst = Burst(core, cache)
    burst.use()
    return burst

"""Decode steps of vLLM, several for one turn of its scheduler.

vLLM's scheduler looks at every sequence at every step, before and after: some 20 us each, and with a thousand sequences of a small model the GPU
waits for it. While all sequences decode and nobody new can be let in, there is nothing to decide. So room is taken for STEPS tokens of each, that
many steps go to vLLM's own model runner as the scheduler would have sent them, and the scheduler is told afterwards what became of each sequence.
What the device computes is the same; a sequence leaves the steps as soon as it ends.

Everything else stays vLLM's: prompts, who is let in, who has to give way where memory is short, ends, outputs. Left out, and done by vLLM step by
step: forms (`structured`), drafts, caches of several kinds and sliding windows, pipeline stages, connectors, data parallel servers.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rftcli.errors import RftError

STEPS = 32
FREE = 16
"""Where sequences wait, the scheduler is asked again as soon as one of so many has ended."""
UNKNOWN = (
    "connector", "ec_connector", "aux_output_connector", "enable_return_routed_experts", "return_sampling_mask", "num_spec_tokens", "use_pp",
    "use_eagle", "defer_block_free",
)  # fmt: skip
"""Of a scheduler: what is not understood here, when it is in use."""
UNKNOWN_OF_A_SEQUENCE = (
    "use_structured_output", "num_output_placeholders", "spec_token_ids", "has_encoder_inputs", "resumable", "num_stale_output_tokens",
    "async_tokens_to_discard",
)  # fmt: skip
NEEDED = ("running", "waiting", "requests", "finished_req_ids", "max_model_len", "update_from_output", "_update_request_with_output", "schedule")


class Burst:
    """In the place of `EngineCore.step_fn`. `steps`, `turns`: how many steps were taken here, in how many turns."""

    def __init__(self, core: Any, cache: Any) -> None:
        self.steps = self.turns = 0
        self._core, self._scheduler, self._cache = core, core.scheduler, cache
        self._own, self._schedule = core.step_fn, core.scheduler.schedule
        self._settled, self._template = False, None
        self._left, self._waiting = 0, 0
        self._inbox = getattr(core, "input_queue", None)  # of an engine in a process of its own: who knocks is not left waiting
        self._later = any(kind.__name__ == "AsyncScheduler" for kind in type(core.scheduler).__mro__)

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
        if not rows:
            self._settled = False
            return self._own()
        return self._run(rows), True

    # when

    def _asked(self, *arguments: Any, **options: Any) -> Any:
        """vLLM's scheduler, watched."""
        found = self._schedule(*arguments, **options)
        self._settled = _decodes_alone(found)
        self._template = found
        self._left, self._waiting = len(found.num_scheduled_tokens), self._count()
        return found

    def _count(self) -> int:
        counts = getattr(self._scheduler, "get_request_counts", None)
        return int(counts()[1]) if counts else len(self._scheduler.waiting)

    def _undecided(self) -> bool:
        """Whether there is nothing to decide: the scheduler's last turn was for decoding alone, and another would let nobody in."""
        if not self._settled:
            return False
        waiting, running = self._count(), len(self._scheduler.running)
        return running > 0 and (waiting == 0 or (waiting <= self._waiting and running * FREE > self._left * (FREE - 1)))

    def _rows(self) -> list[Row]:
        """Those that have room, with it; none where one is of a kind that is not known here."""
        ends, longest = [], self._scheduler.max_model_len
        for row in self._scheduler.running:
            params = row.sampling_params
            if params is None or params.prompt_logprobs is not None or getattr(params, "repetition_detection", None) is not None:
                return []
            if row.num_tokens != row.num_computed_tokens + 1 or any(getattr(row, name, None) for name in UNKNOWN_OF_A_SEQUENCE):
                return []
            ends.append(min(row.max_tokens - row.num_output_tokens, longest - row.num_tokens))
        if min(ends) < 1:
            return []
        if hasattr(self._cache, "new_step_starts"):
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
        future, output, *begun = self._core.batch_queue.pop()
        return self._told(output, _made(future, begun[-1] if begun else future)), True

    def _told(self, output: Any, made: Any) -> Any:
        self._core._process_aborts_queue()
        found = self._scheduler.update_from_output(output, made)
        if hasattr(self._core, "_attach_weight_version"):
            self._core._attach_weight_version(found)
        return found

    def _run(self, rows: list[Row]) -> Any:
        tape = Tape(rows)
        computed = np.array([row.request.num_computed_tokens for row in rows])
        written = np.array([row.request.num_output_tokens for row in rows])
        blocks: list[Any] = [row.blocks for row in rows]
        depth = 1 if self._core.batch_queue is None else 2  # a step is sent before the one before it is read
        under_way: deque[Any] = deque()
        while (alive := tape.alive()).size and not (tape.step and self._knocked()):
            names = tape.names if len(alive) == len(rows) else [tape.names[place] for place in alive]
            output = self._output(names, (computed[alive] + tape.step).tolist(), (written[alive] + tape.step).tolist(), blocks, rows)
            under_way.append((tape.step, alive, names, self._sent(output)))
            blocks, tape.step = [], tape.step + 1
            if len(under_way) == depth:
                tape.read(*under_way.popleft())
        while under_way:
            tape.read(*under_way.popleft())
        self.steps, self.turns = self.steps + tape.step, self.turns + 1
        if self.turns == 1 and self._inbox is not None:
            sys.stderr.write(f"rft: up to {STEPS} decode steps for a turn of the scheduler\n")  # into a server's log
        return self._settle(rows, tape)

    def _knocked(self) -> bool:
        return self._inbox is not None and not self._inbox.empty()

    def _output(self, names: list[str], computed: list[int], written: list[int], blocks: list[Any], rows: list[Row]) -> Any:
        """What the scheduler would send for one more token of each. `blocks`: the new ones of every sequence, in the first step."""
        scheduler, template, first = self._scheduler, self._template, bool(blocks)
        one = dict.fromkeys(names, 1)
        cached = replace(
            template.scheduled_cached_reqs, req_ids=names, new_block_ids=blocks or [None] * len(names), num_computed_tokens=computed,
            num_output_tokens=written, **self._rejoining(one, rows),
        )  # fmt: skip
        fresh = scheduler._get_new_block_ids_to_zero() if first and hasattr(scheduler, "_get_new_block_ids_to_zero") else None
        more = {"new_block_ids_to_zero": fresh} if hasattr(template, "new_block_ids_to_zero") else {}
        ended, scheduler.finished_req_ids = scheduler.finished_req_ids, set()
        whole = {"num_scheduled_tokens": one, "total_num_scheduled_tokens": len(one), "finished_req_ids": ended}
        return replace(template, scheduled_cached_reqs=cached, **whole, **more)

    def _rejoining(self, names: dict[str, int], rows: list[Row]) -> dict[str, Any]:
        """vLLM's first model runner is told the tokens of sequences that were not in the step before."""
        before = getattr(self._scheduler, "prev_step_scheduled_req_ids", None)
        if before is None or getattr(self._scheduler, "use_v2_model_runner", False):
            return {}
        missing = {row.request.request_id: list(row.request.all_token_ids) for row in rows if row.request.request_id not in before}
        before.clear()
        before.update(names)
        return {"all_token_ids": {name: missing[name] for name in names if name in missing}}

    def _sent(self, output: Any) -> Callable[[], Any]:
        """A step on its way, and how to wait for what it makes."""
        executor = self._core.model_executor
        begun = executor.execute_model(output, non_block=True)
        if self._core.batch_queue is not None:
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
                return own(request, ids, *arguments, **options)  # type: ignore[no-any-return]
            request.append_output_token_ids(ids)
            if self._later:
                request.num_output_placeholders -= len(ids)
                self._cache.cache_blocks(request, request.num_computed_tokens)
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


class Row(NamedTuple):
    """A sequence, after how many tokens it ends at the latest, and its new blocks."""

    request: Any
    end: int
    blocks: Any


class Tape:
    """What the steps of one turn gave R sequences. `counts`: (R,) their tokens; `step`: the number of the next."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.names, self.step = [row.request.request_id for row in rows], 0
        self.counts = np.zeros(len(rows), dtype=np.int64)
        self._ends = np.array([row.end for row in rows])
        self._limits = np.minimum(self._ends, STEPS)
        self._stops = np.array(sorted(_stops(rows)), dtype=np.int64)
        self._ids = np.zeros((len(rows), int(self._limits.max())), dtype=np.int64)
        self._hit = np.zeros(len(rows), dtype=bool)
        self._made: list[tuple[Any, Any]] = []

    def alive(self) -> Any:
        """(A,) places of the sequences that take the next step, as far as steps were read."""
        return np.flatnonzero((self._limits > self.step) & ~self._hit)

    def read(self, step: int, alive: Any, names: list[str], wait: Callable[[], Any]) -> None:
        """One step's tokens, in whatever order they come. RftError where there is not one for each."""
        made = wait()
        if list(made.req_ids) != names:
            places = dict(zip(names, alive.tolist(), strict=True))
            alive = np.array([places[name] for name in made.req_ids])
        ids = [token for one in made.sampled_token_ids for token in one]
        if len(ids) != len(alive):
            raise RftError(f"vLLM made {len(ids)} tokens in a step of {len(alive)} sequences")
        self._ids[alive, step] = ids
        self.counts[alive] += 1
        self._hit[alive] |= np.isin(self._ids[alive, step], self._stops)
        self._made.append((alive, made))

    def may_have_ended(self) -> Any:
        """(R,) bool: there is a token that ends some sequence, or no more is allowed."""
        return self._hit | (self.counts >= self._ends)

    def as_one_step(self) -> Any:
        """A step that gave every sequence several tokens, as vLLM's scheduler knows them from drafts."""
        last = self._made[-1][1]
        ids = [row[:count] for row, count in zip(self._ids.tolist(), self.counts.tolist(), strict=True)]
        index = {name: place for place, name in enumerate(self.names)}
        return replace(last, req_ids=self.names, req_id_to_index=index, sampled_token_ids=ids, logprobs=self._logprobs(last.logprobs))

    def _logprobs(self, last: Any) -> Any:
        """Flat, sequence by sequence."""
        if last is None:
            return None
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        found: dict[str, Any] = {"cu_num_generated_tokens": starts.tolist()}
        for name in set(last._fields) - set(found):
            one = np.asarray(getattr(last, name))
            found[name] = np.empty((int(starts[-1]), *one.shape[1:]), dtype=one.dtype)
            for step, (alive, made) in enumerate(self._made):
                found[name][starts[alive] + step] = getattr(made.logprobs, name)
        return last._replace(**found)


def _stops(rows: Sequence[Row]) -> set[int]:
    """Tokens that may end one of them."""
    found: set[int] = set()
    for row in rows:
        params = row.request.sampling_params
        found.update(params.stop_token_ids or ())
        for owner in (params, row.request):
            if not params.ignore_eos and getattr(owner, "eos_token_id", None) is not None:
                found.add(owner.eos_token_id)
    return found


def _made(future: Any, begun: Any) -> Any:
    made = future.result()
    if made is None:
        begun.result()  # raises what went wrong
        raise RftError("vLLM made nothing in a step", hint="its log above says why")
    return made


def _decodes_alone(output: Any) -> bool:
    """Whether a turn of the scheduler sent one token of each sequence, and nothing else."""
    cached = output.scheduled_cached_reqs
    busy = ("preempted_req_ids", "has_structured_output_requests", "kv_connector_metadata", "ec_connector_metadata", "kv_cache_block_copies")
    return (
        0 < len(output.num_scheduled_tokens) == output.total_num_scheduled_tokens == len(cached.req_ids)
        and not (output.scheduled_new_reqs or cached.resumed_req_ids or cached.new_token_ids)
        and not (output.scheduled_spec_decode_tokens or output.scheduled_encoder_inputs)
        and not any(getattr(output, name, None) for name in busy)
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
    whole = all(hasattr(core, name) for name in ("step_fn", "batch_queue", "model_executor", "_process_aborts_queue"))
    known = whole and all(hasattr(scheduler, name) for name in NEEDED) and not any(getattr(scheduler, name, None) for name in UNKNOWN)
    if not known or len(kinds) != 1 or type(kinds[0]).__name__ != "FullAttentionManager":
        return None
    burst = Burst(core, cache)
    burst.use()
    return burst

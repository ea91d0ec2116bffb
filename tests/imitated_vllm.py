"""As much of vLLM's engine core as decides what is sent to its model runner: who is let in, who gives way, blocks, ends, what is told when."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple

from imitated_vllm_runner import BLOCK, LONGEST, Cached, Made, Output, Params, Runner, Sequence


class FullAttentionManager:
    block_size = BLOCK


class Room(NamedTuple):
    new: list[int]

    def get_block_ids(self, allow_none: bool = False) -> Any:
        return (self.new,) if self.new or not allow_none else None


class Cache:
    def __init__(self, blocks: int) -> None:
        self.free, self.held, self.cached = list(range(blocks)), {}, {}  # type: ignore[var-annotated]
        self.left_behind: dict[str, int] = {}
        """Of sequences that are gone: how many of their tokens others may find."""
        self.begun = 0
        self.coordinator = SimpleNamespace(single_type_managers=(FullAttentionManager(),))

    def allocate_slots(self, request: Sequence, num_new_tokens: int, **more: Any) -> Room | None:
        held = self.held.setdefault(request.request_id, [])
        needed = -(-min(request.num_computed_tokens + num_new_tokens, LONGEST) // BLOCK) - len(held)
        if needed > len(self.free):
            return None
        new = [self.free.pop() for _ in range(needed)]
        held += new
        self.cache_blocks(request, min(request.num_computed_tokens + num_new_tokens, request.num_tokens))
        return Room(new)

    def new_step_starts(self) -> None:
        """As in vLLM; the state of its managers for one step is not imitated."""
        self.begun += 1

    def cache_blocks(self, request: Sequence, tokens: int) -> None:
        assert self.cached.get(request.request_id, 0) <= tokens <= request.num_tokens
        self.cached[request.request_id] = tokens

    def give_back(self, request: Sequence) -> None:
        self.free += self.held.pop(request.request_id, [])
        self.left_behind[request.request_id] = self.cached.pop(request.request_id, 0)


class Scheduler:
    """One turn for one step. `later`: tokens of a step are told after the next was sent."""

    later = False
    connector = None

    def __init__(self, rows: int, blocks: int) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.requests: dict[str, Sequence] = {}
        self.finished_req_ids: set[str] = set()
        self.max_model_len, self.most, self.kv_cache_manager = LONGEST, rows, Cache(blocks)
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.pause_state = SimpleNamespace(name="UNPAUSED")
        self.turns = self.preempted = self.looked = 0

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def add(self, request: Sequence) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> Output:
        self.turns += 1
        self.kv_cache_manager.new_step_starts()
        sent: dict[str, int] = {}
        rooms: dict[str, Room] = {}
        gone: set[str] = set()
        going: list[Sequence] = []
        for request in list(self.running):
            if request not in self.running or self.pause_state.name == "PAUSED_ALL":
                continue
            if request.num_output_placeholders and request.num_output_tokens + request.num_output_placeholders >= request.max_tokens:
                continue
            if request.num_tokens + request.num_output_placeholders >= LONGEST:
                continue
            while (room := self.kv_cache_manager.allocate_slots(request, 1)) is None:
                last = self.running.pop()
                self._preempt(last)
                gone.add(last.request_id)
                if last in going:
                    going.remove(last)
                    sent.pop(last.request_id)
                if last is request:
                    break
            if room is not None:
                sent[request.request_id], rooms[request.request_id] = 1, room
                going.append(request)
        new: list[Sequence] = []
        while self.waiting and len(self.running) < self.most and not gone and self.pause_state.name == "UNPAUSED":
            request = self.waiting[0]
            if request.compiled_at > self.turns:
                break
            room = self.kv_cache_manager.allocate_slots(request, request.num_tokens)
            if room is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            new.append(request)
            sent[request.request_id], rooms[request.request_id] = request.num_tokens, room
        cached = Cached(
            req_ids=[one.request_id for one in going],
            all_token_ids={one.request_id: list(one.all_token_ids) for one in going if one.request_id not in self.prev_step_scheduled_req_ids},
            new_block_ids=[rooms[one.request_id].get_block_ids(allow_none=True) for one in going],
            num_computed_tokens=[one.num_computed_tokens for one in going],
            num_output_tokens=[one.num_output_tokens + one.num_output_placeholders for one in going],
        )
        ended, self.finished_req_ids = self.finished_req_ids, set()
        blocks = {one.request_id: rooms[one.request_id].new for one in new}
        output = Output(new, cached, sent, sum(sent.values()), ended, blocks, preempted_req_ids=gone)
        self.prev_step_scheduled_req_ids.clear()
        self.prev_step_scheduled_req_ids.update(sent)
        for one in (*going, *new):
            one.num_computed_tokens += sent[one.request_id]
            one.num_in_flight_tokens += sent[one.request_id]
            one.num_output_placeholders += self.later
        return output

    def _preempt(self, request: Sequence) -> None:
        assert not request.num_output_placeholders, "the tests leave room where tokens are told later"
        self.kv_cache_manager.give_back(request)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)
        self.preempted += 1

    def update_from_output(self, output: Output, made: Made) -> dict[int, Any]:
        told = []
        assert all(made.req_ids[place] == name for name, place in made.req_id_to_index.items())
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is None:
                continue
            request.num_in_flight_tokens -= count
            assert request.num_in_flight_tokens >= 0
            place = made.req_id_to_index[name]
            ids, stopped = self._update_request_with_output(request, made.sampled_token_ids[place])
            asked = request.sampling_params.logprobs
            logprobs = None if asked is None or made.logprobs is None else made.logprobs.of(place, len(ids), asked + 1)
            if stopped:
                self.finish(request)
            told.append(SimpleNamespace(request_id=name, new_token_ids=ids, finish=request.finish, logprobs=logprobs))
        return {0: told}

    def finish(self, request: Sequence) -> None:
        self.kv_cache_manager.give_back(request)
        self.running = [one for one in self.running if one is not request]
        if request in self.waiting:
            self.waiting.remove(request)
        self.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]

    def _update_request_with_output(self, request: Sequence, ids: list[int]) -> tuple[list[int], bool]:
        for number, token in enumerate(ids, 1):
            self.looked += 1
            request.append_output_token_ids(token)
            params = request.sampling_params
            if token in params.stop_token_ids or token == params.eos_token_id:
                request.finish = "stop"
            elif request.num_output_tokens >= request.max_tokens or request.num_tokens >= LONGEST:
                request.finish = "length"
            if request.finish:
                del ids[number:]
                return ids, True
        return ids, False


class AsyncScheduler(Scheduler):
    later = True

    def _update_request_with_output(self, request: Sequence, ids: list[int]) -> tuple[list[int], bool]:
        found, stopped = super()._update_request_with_output(request, ids)
        request.num_output_placeholders -= len(found)
        assert request.num_output_placeholders >= 0
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
        return found, stopped


class Core:
    def __init__(self, rows: int = 8, blocks: int = 10_000, *, later: bool) -> None:
        self.scheduler: Scheduler = (AsyncScheduler if later else Scheduler)(rows, blocks)
        self.model_executor = Runner(rows, waits=later)
        self.batch_queue: deque[Any] | None = deque(maxlen=2) if later else None
        self.step_fn = self._step_later if later else self._step
        self.given_up: list[Sequence] = []

    def _process_aborts_queue(self) -> None:
        while self.given_up:
            self.scheduler.finish(self.given_up.pop())

    def _step(self) -> tuple[Any, bool]:
        output = self.scheduler.schedule()
        self.model_executor.execute_model(output, non_block=True)
        made = self.model_executor.sample_tokens(None)
        self._process_aborts_queue()
        return self.scheduler.update_from_output(output, made), True

    def _step_later(self) -> tuple[Any, bool]:
        assert self.batch_queue is not None
        output = self.scheduler.schedule()
        begun = self.model_executor.execute_model(output, non_block=True)
        self.batch_queue.appendleft((self.model_executor.sample_tokens(None, non_block=True), output, begun))
        if len(self.batch_queue) < 2 and output.num_scheduled_tokens:
            return None, True
        future, output, _ = self.batch_queue.pop()
        made = future.result()
        self._process_aborts_queue()
        return self.scheduler.update_from_output(output, made), True

    @property
    def llm(self) -> Any:
        return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=self)))

    def run(self, limit: int = 5_000) -> dict[str, tuple[list[int], str, list[Any]]]:
        """(tokens, why it ended, log-probs) of everybody."""
        found: dict[str, tuple[list[int], list[Any]]] = {}
        ended: dict[str, tuple[list[int], str, list[Any]]] = {}
        for _ in range(limit):
            if not self.scheduler.requests:
                return ended
            told, _ = self.step_fn()
            for one in (told or {}).get(0, ()):
                ids, chances = found.setdefault(one.request_id, ([], []))
                ids += one.new_token_ids
                chances += one.logprobs or []
                if one.finish:
                    ended[one.request_id] = ids, one.finish, chances
        raise AssertionError("it does not end")


def filled(core: Core, count: int, seed: int = 0, **more: Any) -> Core:
    draw = random.Random(seed)
    for number in range(count):
        params = Params(**{"stop_token_ids": (number % 11,), "ignore_eos": number % 3 == 0, "logprobs": (None, 0, 3, 1)[number % 4]} | more)
        core.scheduler.add(Sequence(f"s{number}", [1] * draw.randint(1, 30), draw.choice([1, 2, 31, 32, 33, 64, 90, 150]), params))
    return core

"""As much of vLLM's engine core as decides what is sent to its model runner, and a runner that checks it: counts, blocks, who has ended.

Tokens are a function of the sequence and the position, so whatever the way, the same answers have to come out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

BLOCK, VOCABULARY, LONGEST = 4, 50, 400
END = 7


@dataclass
class Params:
    stop_token_ids: tuple[int, ...] = ()
    eos_token_id: int | None = END
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(eq=False)
class Sequence:
    request_id: str
    all_token_ids: list[int]
    max_tokens: int
    sampling_params: Params
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_output_placeholders: int = 0
    use_structured_output: bool = False
    compiled_at: int = 0
    """The first turn of the scheduler that may let it in."""
    finish: str | None = None

    def __post_init__(self) -> None:
        self.prompt = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.prompt

    def append_output_token_ids(self, ids: int | list[int]) -> None:
        self.all_token_ids.extend([ids] if isinstance(ids, int) else ids)


@dataclass
class Cached:
    req_ids: list[str]
    resumed_req_ids: set[str] = field(default_factory=set)
    new_token_ids: list[Any] = field(default_factory=list)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[Any] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass
class Output:
    scheduled_new_reqs: list[Sequence]
    scheduled_cached_reqs: Cached
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    new_blocks_of_new: dict[str, list[int]] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, Any] = field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, Any] = field(default_factory=dict)
    preempted_req_ids: set[str] = field(default_factory=set)
    new_block_ids_to_zero: list[int] | None = None


class Logprobs(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: list[int] | None = None

    def of(self, place: int, count: int, columns: int) -> list[Any]:
        """What a request sees of it: for each of its tokens the ids, the log-probs and the rank."""
        start = place if self.cu_num_generated_tokens is None else self.cu_num_generated_tokens[place]
        ids, values, ranks = (part[start : start + count] for part in self[:3])
        return [(*one[:columns].tolist(), *two[:columns].tolist(), int(rank)) for one, two, rank in zip(ids, values, ranks, strict=True)]


@dataclass
class Made:
    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    logprobs: Logprobs | None = None


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
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is None:
                continue
            request.num_in_flight_tokens -= count
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
            if token in params.stop_token_ids or (token == params.eos_token_id and not params.ignore_eos):
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


class Runner:
    """Takes steps, and does not believe them."""

    def __init__(self, rows: int, *, waits: bool) -> None:
        self.rows, self.waits, self.steps = rows, waits, 0
        self.known: dict[str, list[int]] = {}
        """Tokens that it has read or drawn."""
        self.read: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.asked: dict[str, Sequence] = {}
        self.before: set[str] = set()
        """Who was in the last step."""
        self._sent: Made | None = None
        self.unread = self.most_unread = 0

    def execute_model(self, output: Output, non_block: bool = False) -> Any:
        assert self._sent is None and len(output.num_scheduled_tokens) <= self.rows
        self.steps += bool(output.num_scheduled_tokens)
        for name in output.finished_req_ids | output.preempted_req_ids:
            for told in (self.known, self.read, self.blocks, self.asked):
                del told[name]  # once, and only what it knows
        for one in output.scheduled_new_reqs:
            self.known[one.request_id], self.read[one.request_id] = list(one.all_token_ids), 0
            self.blocks[one.request_id], self.asked[one.request_id] = len(output.new_blocks_of_new[one.request_id]), one
        cached = output.scheduled_cached_reqs
        columns = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        for name, blocks, computed, written in columns:
            assert computed == self.read[name] == len(self.known[name]) - 1 and written == len(self.known[name]) - self.asked[name].prompt
            assert name in self.before or cached.all_token_ids[name] == self.known[name]
            self.blocks[name] += len(blocks[0]) if blocks else 0
        assert not self.before.intersection(cached.all_token_ids) and output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        self.before = set(output.num_scheduled_tokens)
        names = list(reversed(output.num_scheduled_tokens))  # an order of its own
        ids = []
        for name in names:
            self.read[name] += output.num_scheduled_tokens[name]
            assert self.read[name] == len(self.known[name]) <= self.blocks[name] * BLOCK
            self.known[name].append(token(name, self.read[name]))
            ids.append([self.known[name][-1]])
        index = {name: place for place, name in enumerate(names)}
        self._sent = Made(names, index, ids, self._logprobs(names))
        return done(None)

    def _logprobs(self, names: list[str]) -> Logprobs | None:
        """As wide as somebody in this step asks for; none where nobody does."""
        asked = [count for name in names if (count := self.asked[name].sampling_params.logprobs) is not None]
        if not asked:
            return None
        others = np.arange(max(asked) + 1)
        ids = np.array([[token(name, self.read[name])] for name in names]) + others
        values = np.array([[chance(name, self.read[name])] for name in names]) - others
        return Logprobs(ids, values, np.array([self.read[name] for name in names]))

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        made, self._sent = self._sent, None
        if not non_block:
            return made
        self.unread += 1
        self.most_unread = max(self.unread, self.most_unread)
        return SimpleNamespace(result=lambda: self._read(made))

    def _read(self, made: Any) -> Any:
        self.unread -= 1
        return made


def token(name: str, position: int) -> int:
    return (sum(map(ord, name)) * 31 + position * position * 17 + position) % VOCABULARY


def chance(name: str, position: int) -> float:
    return -float(token(name, position)) - position / 1000


def done(value: Any) -> Any:
    return SimpleNamespace(result=lambda: value)


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

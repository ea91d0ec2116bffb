"""vLLM's model runner, imitated: it takes a scheduler's output, checks all of it against what it was told before, and makes tokens.

Tokens and log-probs are a function of the sequence and the position, so whatever the way, the same answers have to come out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

BLOCK, VOCABULARY, LONGEST = 4, 50, 800
END = 7


@dataclass
class Params:
    stop_token_ids: tuple[int, ...] = ()
    eos_token_id: int | None = END
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.eos_token_id = None if self.ignore_eos else self.eos_token_id


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
        self.unread = self.most_unread = self.drawn = 0

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
            self.drawn += 1
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

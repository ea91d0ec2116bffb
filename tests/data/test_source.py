"""The order of the data: purity, passes, proportions, resume; and what is left when prompts are too long."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.data.prompts import PromptBuilder
from rftcli.data.rows import Row
from rftcli.data.source import Interleave, PromptSource, SetCounts
from rftcli.data.spec import ChatSpec, DataSpec
from rftcli.errors import ResumeError, UsageError

Build = Callable[..., PromptSource]


@pytest.fixture
def build(make_tokenizer: Callable[..., Any]) -> Build:
    def make(
        sets: Sequence[tuple[str, float, Sequence[Row]]], *, seed: int = 0, shuffle: bool = True, limit: int = 16, overlong: str = "refuse"
    ) -> PromptSource:
        builder = PromptBuilder(make_tokenizer(), ChatSpec(), limit, overlong)
        datasets = [(DataSpec(name=name, path=f"{name}.jsonl", weight=weight), rows) for name, weight, rows in sets]
        return PromptSource(datasets, builder, seed=seed, shuffle=shuffle)

    return make


@pytest.fixture
def some(make_row: Callable[..., Row]) -> Callable[..., list[Row]]:
    return lambda count, source="train": [make_row("a b", index, source) for index in range(count)]


def indices(source: PromptSource, first: int, count: int) -> list[int]:
    return [prompt.row for prompt in source.draw(first, count)]


def test_file_order_and_the_third_step_after_a_resume(build: Build, some: Any) -> None:
    straight = build([("train", 1.0, some(10))], shuffle=False)
    assert [indices(straight, 2 * step, 2) for step in range(6)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1]]
    stopped = build([("train", 1.0, some(10))], shuffle=False)
    stopped.draw(0, 2), stopped.draw(2, 2)
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = build([("train", 1.0, some(10))], shuffle=False)
    resumed.load_state_dict(state)
    assert resumed.next_draw == 4
    assert indices(resumed, resumed.next_draw, 2) == [4, 5]


def test_every_pass_is_a_permutation_of_its_own(build: Build, some: Any) -> None:
    source = build([("train", 1.0, some(10))])
    passes = [indices(source, 10 * number, 10) for number in range(4)]
    assert all(sorted(order) == list(range(10)) for order in passes)
    assert len({tuple(order) for order in passes}) == 4


def test_an_interrupted_pass_sees_every_row_once(build: Build, some: Any) -> None:
    before = build([("train", 1.0, some(10))], seed=5)
    seen = indices(before, 0, 4)
    after = build([("train", 1.0, some(10))], seed=5)
    after.load_state_dict(before.state_dict())
    seen += indices(after, after.next_draw, 6)
    assert sorted(seen) == list(range(10))
    assert seen == indices(build([("train", 1.0, some(10))], seed=5), 0, 10)


def test_the_tail_wraps_and_a_set_may_be_smaller_than_a_step(build: Build, some: Any) -> None:
    source = build([("train", 1.0, some(3))])
    assert Counter(indices(source, 0, 8)) == Counter(indices(source, 0, 6)) + Counter(indices(source, 6, 2))
    assert Counter(indices(source, 0, 6)) == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("size", [1, 3, 7, 50])
def test_a_draw_does_not_depend_on_the_draws_before(build: Build, some: Any, size: int) -> None:
    sets = [("one", 0.3, some(4, "one")), ("two", 0.7, some(7, "two"))]
    whole = build(sets, seed=3).draw(0, 50)
    source = build(sets, seed=3)
    for first in reversed(range(0, 50, size)):
        assert source.draw(first, min(size, 50 - first)) == whole[first : first + size]


def test_a_row_drawn_twice_is_two_groups(build: Build, make_row: Callable[..., Row]) -> None:
    source = build([("train", 1.0, [make_row("a b", 0), make_row("a b", 1)])], shuffle=False)
    prompts = source.draw(0, 4)
    assert [prompt.draw for prompt in prompts] == [0, 1, 2, 3]
    assert [prompt.row for prompt in prompts] == [0, 1, 0, 1]
    assert len({prompt.token_ids for prompt in prompts}) == 1


def test_seed_and_name_key_the_order(build: Build, some: Any) -> None:
    orders = [indices(build([(name, 1.0, some(20))], seed=seed), 0, 20) for name, seed in (("train", 0), ("train", 1), ("other", 0), ("train", 0))]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] and orders[0] != orders[2]


def test_prompts_can_be_sent_to_another_process(build: Build, some: Any) -> None:
    prompts = build([("train", 1.0, some(3))]).draw(0, 3)
    assert pickle.loads(pickle.dumps(prompts)) == prompts


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_are_exact_over_a_period(build: Build, some: Any, shuffle: bool) -> None:
    sets = [("one", 0.7, some(5, "one")), ("two", 0.2, some(50, "two")), ("three", 0.1, some(3, "three"))]
    source = build(sets, shuffle=shuffle)
    for first in (0, 10, 990):
        assert Counter(source.row(draw).source for draw in range(first, first + 10)) == {"one": 7, "two": 2, "three": 1}
    rows = [source.row(draw) for draw in range(150)]
    assert Counter(row.index for row in rows if row.source == "one") == dict.fromkeys(range(5), 21)
    assert Counter(row.index for row in rows if row.source == "three") == dict.fromkeys(range(3), 5)
    assert len({row.index for row in rows if row.source == "two"}) == 30


def test_without_shuffle_the_first_set_begins(build: Build, some: Any) -> None:
    source = build([("one", 1.0, some(2, "one")), ("two", 1.0, some(2, "two"))], shuffle=False)
    assert [prompt.row_id for prompt in source.draw(0, 6)] == ["one:0", "two:0", "one:1", "two:1", "one:0", "two:0"]


@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    phases=st.lists(st.fractions(0, Fraction(255, 256), max_denominator=256), min_size=5, max_size=5),
    draws=st.integers(0, 300),
)
def test_interleave_numbers_each_set_without_gaps_and_keeps_its_share(weights: list[int], phases: list[Fraction], draws: int) -> None:
    interleave = Interleave(weights, phases[: len(weights)])
    turns: Counter[int] = Counter()
    for draw in range(draws):
        index, turn = interleave.locate(draw)
        assert turn == turns[index]
        turns[index] += 1
    off, left = 0.0, float(sum(weights))  # how far a line may be from its exact place: what came from the line above, and its own rounding
    for index, weight in enumerate(weights):
        assert abs(turns[index] - draws * weight / sum(weights)) <= off * weight / left + 1
        off, left = off * (1 - weight / left) + 1, left - weight
    period = sum(weights)
    assert all(interleave.locate(period + draw)[0] == interleave.locate(draw)[0] for draw in range(min(draws, period)))


def test_passes_count_rows_of_all_sets(build: Build, some: Any) -> None:
    assert build([("train", 1.0, some(10))]).passes(25) == 2.5
    source = build([("one", 0.9, some(6, "one")), ("two", 0.1, some(4, "two"))])
    assert (source.num_rows, source.passes(5)) == (10, 0.5)


def test_next_draw_is_after_the_furthest(build: Build, some: Any) -> None:
    source = build([("train", 1.0, some(10))])
    source.draw(4, 2), source.draw(0, 2)
    assert source.next_draw == 6
    source.row(100)
    assert source.next_draw == 6


def test_other_data_is_refused_on_resume(build: Build, some: Any, make_row: Callable[..., Row]) -> None:
    base = build([("gsm8k", 1.0, some(10)), ("chat", 0.5, some(4))])
    base.draw(0, 4)
    state = base.state_dict()
    edited = [*some(9), make_row("a b", 9, columns={"prompt": "a b", "number": 10})]
    cases = {
        "data set `gsm8k` has changed: its rows was 10 and is 3": [("gsm8k", 1.0, some(3)), ("chat", 0.5, some(4))],
        "data set `gsm8k` has changed: its fingerprint": [("gsm8k", 1.0, edited), ("chat", 0.5, some(4))],
        "data set `chat` has changed: its weight was 0.5 and is 0.25": [("gsm8k", 1.0, some(10)), ("chat", 0.25, some(4))],
        "data set `chat` is gone": [("gsm8k", 1.0, some(10))],
        "data set `code` is new": [("gsm8k", 1.0, some(10)), ("chat", 0.5, some(4)), ("code", 1.0, some(2))],
        "the order of the data sets has changed: gsm8k, chat": [("chat", 0.5, some(4)), ("gsm8k", 1.0, some(10))],
    }
    for message, sets in cases.items():
        other = build(sets)
        with pytest.raises(ResumeError) as caught:
            other.load_state_dict(state)
        assert message in caught.value.message
        assert other.next_draw == 0


@pytest.mark.parametrize(("change", "message"), [({"seed": 1}, "seed was 0 and is 1"), ({"shuffle": False}, "shuffle was True and is False")])
def test_another_order_is_refused_on_resume(build: Build, some: Any, change: dict, message: str) -> None:
    with pytest.raises(ResumeError, match=message):
        build([("train", 1.0, some(10))], **change).load_state_dict(build([("train", 1.0, some(10))]).state_dict())


@pytest.fixture
def uneven(make_row: Callable[..., Row]) -> list[Row]:
    """Prompts of 2, 40, 16, 17 and 3 tokens."""
    return [make_row(" ".join(["a", "b"] * 20)[: 2 * tokens - 1], index) for index, tokens in enumerate((2, 40, 16, 17, 3))]


def test_too_long_prompts_are_refused_together(build: Build, uneven: list[Row]) -> None:
    with pytest.raises(UsageError) as caught:
        build([("train", 1.0, uneven)])
    assert "train.jsonl:2: the prompt needs 40 tokens, `rollout.max_prompt_tokens` allows 16" in caught.value.message
    assert "(2 of 5 rows are too long, the longest needs 40 tokens)" in caught.value.message


def test_dropped_rows_are_counted_and_never_drawn(build: Build, uneven: list[Row]) -> None:
    source = build([("train", 1.0, uneven)], overlong="drop", shuffle=False)
    assert source.counts == {"train": SetCounts(rows=5, overlong=2, kept=3)}
    assert indices(source, 0, 6) == [0, 2, 4, 0, 2, 4]
    assert (source.num_rows, source.passes(3)) == (3, 1.0)


@pytest.mark.parametrize(("overlong", "first", "last"), [("cut_left", 6, 7), ("cut_right", 6, 7)])
def test_cut_rows_are_counted_and_fit(build: Build, uneven: list[Row], overlong: str, first: int, last: int) -> None:
    source = build([("train", 1.0, uneven)], overlong=overlong, shuffle=False)
    assert source.counts == {"train": SetCounts(rows=5, overlong=2, kept=5)}
    assert [len(prompt.token_ids) for prompt in source.draw(0, 5)] == [2, 16, 16, 16, 3]
    cut = source.draw(1, 1)[0].token_ids
    assert (cut[0], cut[-1]) == (first, last)
    assert source.draw(3, 1)[0].token_ids[0] == (7 if overlong == "cut_left" else 6)


def test_nothing_left_is_an_error(build: Build, uneven: list[Row], some: Any) -> None:
    with pytest.raises(UsageError, match=r"data set `train`: nothing is left to draw: all 5 prompts need more than 1 tokens"):
        build([("train", 1.0, uneven)], overlong="drop", limit=1)
    with pytest.raises(UsageError, match="data set `long`: nothing is left to draw"):
        build([("short", 1.0, some(2)), ("long", 1.0, uneven[1:2])], overlong="drop")
    with pytest.raises(UsageError, match="nothing is left to draw: it has no rows"):
        build([("train", 1.0, [])])


def test_sets_need_names_of_their_own(build: Build, some: Any) -> None:
    with pytest.raises(UsageError, match="data sets need names of their own"):
        build([("train", 1.0, some(2)), ("train", 1.0, some(2))])
    with pytest.raises(UsageError, match="there is no data set"):
        build([])

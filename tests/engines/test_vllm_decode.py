"""Several steps for a turn of vLLM's scheduler: what is sent, what comes out, and when the scheduler is asked all the same."""

from __future__ import annotations

from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from imitated_vllm import Core, filled
from imitated_vllm_runner import BLOCK, LONGEST, Made, Params, Sequence, token

from rftcli.engines.vllm_decode import PATIENCE, STEPS, Burst, quicken
from rftcli.errors import RftError

LATER = pytest.mark.parametrize("later", [False, True], ids=["told at once", "told a step later"])


def quick(core: Core) -> Burst:
    burst = quicken(core.llm)
    assert burst is not None and quicken(core.llm) is burst
    return burst


@LATER
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 8, 40], ids=["one", "all fit", "most wait"])
def test_the_same_answers_with_fewer_turns(later: bool, count: int, seed: int) -> None:
    plain, core = filled(Core(later=later), count, seed), filled(Core(later=later), count, seed)
    quick(core)
    assert core.run() == (found := plain.run()) and len(found) == count
    assert core.scheduler.turns <= plain.scheduler.turns
    own, cache = plain.scheduler.kv_cache_manager, core.scheduler.kv_cache_manager
    assert len(cache.free) == 10_000  # everything was given back
    assert cache.left_behind == own.left_behind  # and as much of it can be found by who comes later


@LATER
def test_a_long_answer_takes_a_turn_for_thirty_two_steps(later: bool) -> None:
    core = Core(later=later)
    core.scheduler.add(Sequence("s", [1] * 5, 3 * STEPS + 9, Params(ignore_eos=True)))
    burst = quick(core)
    ids, finish, _ = core.run()["s"]
    assert ids == [token("s", position) for position in range(5, 5 + len(ids))] and (len(ids), finish) == (3 * STEPS + 9, "length")
    assert burst.turns == 4 and burst.steps >= 3 * STEPS and core.scheduler.turns <= 3
    assert core.model_executor.steps == len(ids)  # not one for nothing
    assert core.scheduler.looked < 12 and core.scheduler.kv_cache_manager.begun == core.scheduler.turns + burst.turns
    assert core.model_executor.most_unread == (2 if later else 0)  # a step is on its way while the one before it is read


@LATER
@pytest.mark.parametrize("end", [Params(stop_token_ids=(token("c", 9),), ignore_eos=True), Params(eos_token_id=token("c", 9))], ids=["stop", "end"])
def test_nobody_goes_on_behind_its_end(later: bool, end: Params) -> None:
    """One ends early, the other does not wait for a turn's end to be alone; only the step that was sent already is too much."""
    core = Core(later=later)
    for name, most in (("a", 3), ("b", 100)):
        core.scheduler.add(Sequence(name, [1], most, Params(ignore_eos=True)))
    core.scheduler.add(Sequence("c", [1], 100, end))
    quick(core)
    found = core.run()
    assert {name: (len(ids), finish) for name, (ids, finish, _) in found.items()} == {"a": (3, "length"), "b": (100, "length"), "c": (9, "stop")}
    assert core.model_executor.drawn == 3 + 100 + 9 + later


@LATER
@pytest.mark.parametrize("count", [3, 4, 40])
def test_the_longest_sequence_of_the_engine_is_not_passed(later: bool, count: int) -> None:
    """Nor is room taken behind its end: there are as many blocks as it needs."""
    core = Core(blocks=LONGEST // BLOCK, later=later)
    core.scheduler.add(Sequence("s", [1] * (LONGEST - count), 1_000, Params(ignore_eos=True)))
    burst = quick(core)
    ids, finish, _ = core.run()["s"]
    assert (len(ids), finish) == (count, "length")
    assert core.scheduler.turns == 2 and burst.steps == count - 2


@LATER
def test_no_room_is_taken_behind_an_end(later: bool) -> None:
    core = Core(blocks=2, later=later)
    core.scheduler.add(Sequence("s", [1] * 3, 6, Params(ignore_eos=True)))
    burst = quick(core)
    assert len(core.run()["s"][0]) == 6 and burst.steps == 4


def test_where_memory_is_short_the_scheduler_says_who_gives_way() -> None:
    blocks = 8 * (36 // BLOCK)
    plain, core = (filled(Core(later=False, blocks=blocks), 8, stop_token_ids=(), ignore_eos=True) for _ in range(2))
    burst = quick(core)
    assert core.run() == plain.run()
    assert core.scheduler.preempted and plain.scheduler.preempted and burst.steps > STEPS
    assert len(core.scheduler.kv_cache_manager.free) == blocks


def test_who_found_no_room_is_not_left_behind() -> None:
    core = Core(blocks=32, later=False)
    for name, most in (("a", 86), ("b", 110)):
        core.scheduler.add(Sequence(name, [1], most, Params(ignore_eos=True)))
    burst, alone = quick(core), 0
    while core.scheduler.requests:
        turns, before = core.scheduler.turns, burst.turns
        told, _ = core.step_fn()
        if burst.turns > before and len(told[0]) < len(core.scheduler.running):
            alone += 1
            core.step_fn()
            assert core.scheduler.turns == turns + 1
    assert alone


@LATER
def test_who_is_given_up_within_a_turn_is_not_told(later: bool) -> None:
    core = Core(later=later)
    for name in "ab":
        core.scheduler.add(Sequence(name, [1], 4 * STEPS, Params(ignore_eos=True)))
    gone, own = core.scheduler.requests["a"], core.model_executor.execute_model
    burst = quick(core)
    while burst.turns < 1:
        core.step_fn()

    def execute_model(output: Any, non_block: bool) -> Any:
        core.given_up = [gone] if gone.request_id in core.scheduler.requests else []
        return own(output, non_block=non_block)

    core.model_executor.execute_model = execute_model  # type: ignore[method-assign]
    told, _ = core.step_fn()
    assert burst.turns == 2 and [one.request_id for one in told[0]] == ["b"]
    assert len(core.run()["b"][0]) + len(told[0][0].new_token_ids) < 4 * STEPS and "a" not in core.model_executor.known


@LATER
def test_who_knocks_waits_for_one_step(later: bool, caplog: pytest.LogCaptureFixture) -> None:
    """An engine in a process of its own: it takes messages between its turns."""
    core = Core(later=later)
    core.input_queue = Queue()  # type: ignore[attr-defined]
    core.scheduler.add(Sequence("s", [1], 3 * STEPS, Params(ignore_eos=True)))
    burst = quick(core)
    while burst.turns < 1:
        core.step_fn()
    assert burst.steps == STEPS and "decode steps for a turn" in caplog.text
    core.input_queue.put("a message")  # type: ignore[attr-defined]
    for count in range(1, 4):
        core.step_fn()
        assert (burst.turns, burst.steps) == (1 + count, STEPS + count)
    core.input_queue.get()  # type: ignore[attr-defined]
    core.step_fn()
    assert core.scheduler.requests["s"].num_in_flight_tokens == 0
    assert burst.steps == STEPS + 3 + STEPS and len(caplog.records) == 1


@LATER
def test_the_version_of_weights_is_attached_where_vllm_does_it(later: bool) -> None:
    core = filled(Core(later=later), 3)
    seen: list[Any] = []
    core._attach_weight_version = seen.append  # type: ignore[attr-defined]
    burst = quick(core)
    core.run()
    assert len(seen) >= burst.turns and all(set(one) == {0} for one in seen)


def test_a_model_runner_that_samples_at_once_is_not_asked_to_sample() -> None:
    core = filled(Core(later=False), 8)
    runner, burst = core.model_executor, quick(core)
    own, sample = runner.execute_model, runner.sample_tokens

    def execute_model(output: Any, non_block: bool) -> Any:
        own(output, non_block=non_block)
        return SimpleNamespace(result=partial(sample, None))

    while burst.turns < 1:
        core.step_fn()
    earlier = {name: one.num_output_tokens for name, one in core.scheduler.requests.items()}
    burst._own = lambda: pytest.fail("its own step would sample")  # type: ignore[method-assign, assignment]
    runner.execute_model, runner.sample_tokens = execute_model, None  # type: ignore[method-assign, assignment]
    name = max(earlier, key=lambda name: core.scheduler.requests[name].max_tokens)
    core.step_fn()
    assert core.scheduler.requests[name].num_output_tokens > earlier[name]


@LATER
def test_who_comes_later_is_let_in_at_the_next_step(later: bool) -> None:
    core = Core(later=later)
    core.scheduler.add(Sequence("first", [1], 150, Params(ignore_eos=True)))
    burst = quick(core)
    while burst.turns < 1:
        core.step_fn()
    core.scheduler.add(Sequence("second", [1], 2, Params(ignore_eos=True)))
    before = burst.turns
    while "second" in core.scheduler.requests:
        core.step_fn()
    assert burst.turns <= before + 1 and "first" in core.scheduler.requests


@LATER
def test_who_is_given_up_between_two_turns_is_gone(later: bool) -> None:
    core = Core(later=later)
    gone, stays = (Sequence(name, [1], 120, Params(ignore_eos=True)) for name in "ab")
    core.scheduler.add(gone)
    core.scheduler.add(stays)
    burst = quick(core)
    while burst.turns < 1:
        core.step_fn()
    core.scheduler.finish(gone)
    core.run()
    assert stays.num_output_tokens == 120 and gone.num_output_tokens < 120 and "a" not in core.model_executor.known


@LATER
def test_a_pause_is_kept(later: bool) -> None:
    core = Core(later=later)
    core.scheduler.add(Sequence("s", [1], 150, Params(ignore_eos=True)))
    burst = quick(core)
    while burst.turns < 1:
        core.step_fn()
    core.scheduler.pause_state.name = "PAUSED_ALL"
    written, turns = core.scheduler.requests["s"].num_output_tokens, burst.turns
    for _ in range(4):
        core.step_fn()
    assert core.scheduler.requests["s"].num_output_tokens == written and burst.turns == turns
    core.scheduler.add(Sequence("new", [1], 2, Params(ignore_eos=True)))
    core.step_fn()
    core.scheduler.pause_state.name = "UNPAUSED"
    while "new" in core.scheduler.requests:
        core.step_fn()
    assert core.scheduler.requests["s"].num_output_tokens < written + 8
    assert core.run()["s"][1] == "length" and burst.turns > turns


@LATER
def test_who_waits_for_something_else_than_an_end_is_looked_at(later: bool) -> None:
    """A form that is compiled, say: it could be let in long before anybody ends."""
    core = Core(later=later)
    core.scheduler.add(Sequence("first", [1], 790, Params(ignore_eos=True)))
    core.scheduler.add(Sequence("second", [1], 2, Params(ignore_eos=True), compiled_at=4))
    burst = quick(core)
    while "second" in core.scheduler.requests:
        core.step_fn()
    assert "first" in core.scheduler.requests and burst.turns >= 2 * PATIENCE


@LATER
def test_who_waits_for_a_place_gets_it_as_soon_as_one_has_ended(later: bool) -> None:
    core = Core(rows=2, later=later)
    for name, most in (("a", 40), ("b", 390), ("c", 2)):
        core.scheduler.add(Sequence(name, [1], most, Params(ignore_eos=True)))
    quick(core)
    while "a" in core.scheduler.requests:
        core.step_fn()
    waited = core.scheduler.requests["b"].num_output_tokens
    assert waited < 40 + 4  # not to the end of a turn
    while "c" in core.scheduler.requests:
        core.step_fn()
    assert core.scheduler.requests["b"].num_output_tokens < waited + 8


@LATER
def test_the_model_runner_hears_of_the_last_end(later: bool) -> None:
    core = filled(Core(later=later), 3)
    quick(core)
    core.run()
    for _ in range(2):
        core.step_fn()
    assert not core.model_executor.known and not core.model_executor.asked


def test_what_is_undone_is_vllms_own_again() -> None:
    core = filled(Core(later=True), 8)
    burst = quick(core)
    burst.undo()
    assert core.step_fn == core._step_later and core.scheduler.schedule == type(core.scheduler).schedule.__get__(core.scheduler)
    found, turns = core.run(), core.scheduler.turns
    assert not burst.steps and turns > 100
    again = filled(Core(later=True), 8)
    quick(again)
    assert again.run() == found and again.scheduler.turns < turns / 2


def test_after_a_time_by_itself_the_scheduler_is_asked_first() -> None:
    core = filled(Core(later=False), 4)
    burst = quick(core)
    while burst.turns < 1:
        core.step_fn()
    burst.undo()
    burst.use()
    turns = core.scheduler.turns
    core.step_fn()
    assert burst.turns == 1 and core.scheduler.turns == turns + 1


def test_a_step_that_does_not_give_everybody_a_token_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(later=False)
    core.scheduler.add(Sequence("s", [1], 100, Params(ignore_eos=True)))
    quick(core)
    core.step_fn()
    core.step_fn()
    monkeypatch.setattr(core.model_executor, "sample_tokens", lambda grammar: Made(["s"], {"s": 0}, [[]]))
    with pytest.raises(RftError, match="0 tokens in a step of 1"):
        core.run()


def test_what_vllm_raises_in_a_step_is_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(later=True)
    core.scheduler.add(Sequence("s", [1], 100, Params(ignore_eos=True)))
    burst = quick(core)
    while burst.turns < 1:
        core.step_fn()

    def fails() -> Any:
        raise ValueError("out of memory")

    monkeypatch.setattr(core.model_executor, "execute_model", lambda output, non_block: SimpleNamespace(result=fails))
    monkeypatch.setattr(core.model_executor, "sample_tokens", lambda grammar, non_block: SimpleNamespace(result=lambda: None))
    with pytest.raises(ValueError, match="out of memory"):
        core.run()

"""From draws to whole scored groups: every rank its own, together all of them, each once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rftcli.engines.fake import FakeSampler
from rftcli.errors import RftError
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import Collected, collect, group_up, settings_of
from rftcli.types import Completion, Prompt, SamplingSettings


class Rows:
    """A source that remembers which draws were asked for, as one that draws ahead would move on."""

    def __init__(self, made: SimpleNamespace, first: int) -> None:
        self.next_draw = first
        self.drawn: list[int] = []
        self._made = made

    def draw(self, first: int, count: int) -> Sequence[Prompt]:
        self.drawn += range(first, first + count)
        self.next_draw = max(self.next_draw, first + count)
        return [self._made.prompt(draw) for draw in range(first, first + count)]

    def state_dict(self) -> Mapping[str, Any]:
        return {"next_draw": self.next_draw}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next_draw = state["next_draw"]


def fake() -> FakeSampler:
    return FakeSampler(lambda ids, skip_special_tokens=True: " ".join(map(str, ids)), vocab_size=11, eos_ids=(0,))


def gather(made: SimpleNamespace, world: Any, step: int = 3, first: int = 8, **extra: Any) -> tuple[Rows, Collected]:
    source = Rows(made, first)
    plan = made.plan("batch.updates_per_step=2", "batch.prompts_per_step=8", "rollout.samples_per_prompt=3", ranks=world.size)
    clock = extra.pop("clock", lambda: 0.0)
    tick = extra.pop("tick", lambda *_: None)
    scores = made.Scores(lambda completion: float(len(completion.trace.ids)))
    return source, collect(source, fake(), scores, plan, world, step=step, clock=clock, tick=tick)


def test_one_rank_has_all_groups_in_order_of_samples(made: SimpleNamespace) -> None:
    source, found = gather(made, SoloWorld())
    assert sorted(group.prompt.draw for group in found.groups) == list(range(8, 16)) == sorted(source.drawn)
    assert [len(mini_batch) for mini_batch in found.mini_batches] == [4, 4]
    assert all([sample.completion.sample for sample in group.samples] == [0, 1, 2] for group in found.groups)
    assert all(sample.completion.prompt.draw == group.prompt.draw for group in found.groups for sample in group.samples)
    assert source.next_draw == 16


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_groups_and_keep_the_mini_batches(made: SimpleNamespace, size: int) -> None:
    _, solo = gather(made, SoloWorld())
    ranks = made.on_ranks(size, lambda world: gather(made, world))
    assert all(source.next_draw == 16 for source, _ in ranks)  # also where a rank drew none of the last ones
    assert sorted(draw for source, _ in ranks for draw in source.drawn) == list(range(8, 16))  # no rank renders another's prompts
    for index, mini_batch in enumerate(solo.mini_batches):
        parts = [found.mini_batches[index] for _, found in ranks]
        assert [len(part) for part in parts] == [4 // size] * size
        one = {group.prompt.draw: [sample.completion.trace for sample in group.samples] for group in mini_batch}
        assert one == {group.prompt.draw: [sample.completion.trace for sample in group.samples] for part in parts for group in part}


def test_steps_cut_their_groups_differently(made: SimpleNamespace) -> None:
    cuts = {tuple(sorted(group.prompt.draw for group in gather(made, SoloWorld(), step=step)[1].mini_batches[0])) for step in range(1, 9)}
    assert len(cuts) > 1


def test_the_end_of_the_rollout_parts_the_seconds(made: SimpleNamespace) -> None:
    """The clock is read at the start, when the last completion has come, and when the last is scored."""
    times = iter([10.0, 14.0, 17.0])
    _, found = gather(made, SoloWorld(), clock=lambda: next(times))
    assert (found.rollout_seconds, found.score_seconds) == (4.0, 3.0)


def test_progress_counts_completions(made: SimpleNamespace) -> None:
    ticks: list[tuple[str, int, int]] = []
    gather(made, SoloWorld(), tick=lambda *tick: ticks.append(tick))
    assert ticks == [("rollout", done, 24) for done in range(1, 25)]


def test_settings_are_the_plans(made: SimpleNamespace) -> None:
    plan = made.plan(
        "rollout={max_new_tokens: 7, min_new_tokens: 2, temperature: 0.9, top_p: 0.8, top_k: 5, min_p: 0.1}",
        "rollout={stop: [x], stop_token_ids: [4], ignore_eos: true}",
    )
    shaped = made.plan(
        "rollout.penalties={repetition: 1.2, presence: 0.3, frequency: 0.4}",
        "rollout={logit_bias: {'3': 1.5}, structured: {regex: a+}, hf: {options: {typical_p: 0.9}}}",
    )
    assert settings_of(shaped.rollout, seed=1) == SamplingSettings(
        max_new_tokens=4, seed=1, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4, logit_bias={"3": 1.5},
        structured={"regex": "a+"}, options={"typical_p": 0.9},
    )  # fmt: skip
    assert settings_of(made.plan("rollout.bad_words=[w]").rollout, seed=1).bad_words == ("w",)
    assert settings_of(plan.rollout, seed=11) == SamplingSettings(
        max_new_tokens=7, seed=11, min_new_tokens=2, temperature=0.9, top_p=0.8, top_k=5, min_p=0.1, stop=("x",), stop_token_ids=(4,), ignore_eos=True
    )


def test_the_engine_is_asked_for_log_probs_when_the_plan_compares_them(made: SimpleNamespace) -> None:
    for step, asked in ((1, True), (2, False), (51, True)):
        groups = gather(made, SoloWorld(), step=step)[1].groups
        assert {sample.completion.trace.logprobs is not None for group in groups for sample in group.samples} == {asked}


def test_whole_groups_or_an_error(made: SimpleNamespace) -> None:
    samples = [made.sample(draw, index) for draw in (5, 6) for index in (1, 0)]
    groups = group_up(samples, [5, 6], 2)
    assert list(groups) == [5, 6] and [sample.completion.sample for sample in groups[6].samples] == [0, 1]
    with pytest.raises(RftError, match="1 of 2 samples of draw 6"):
        group_up(samples[:-1], [5, 6], 2)
    with pytest.raises(RftError, match="0 of 2 samples of draw 7"):
        group_up(samples, [5, 6, 7], 2)
    with pytest.raises(RftError, match="sample 1 of draw 5, which was not asked for or came twice"):
        group_up([*samples, samples[0]], [5, 6], 2)
    with pytest.raises(RftError, match="sample 0 of draw 9, which was not asked for"):
        group_up([*samples, made.sample(9)], [5, 6], 2)
    assert group_up([], [], 2) == {}


def test_an_engine_that_loses_a_completion_is_found_out(made: SimpleNamespace) -> None:
    class Loses(FakeSampler):
        def generate(self, requests: Any, settings: Any) -> Iterator[Completion]:
            return iter(list(super().generate(requests, settings))[:-1])

    engine = Loses(lambda ids, skip_special_tokens=True: "", vocab_size=11, eos_ids=(0,))
    source = Rows(made, 0)
    with pytest.raises(RftError, match="1 of 2 samples of draw"):
        collect(source, engine, made.Scores(lambda _: 1.0), made.plan(), SoloWorld(), step=1, clock=lambda: 0.0, tick=lambda *_: None)


@pytest.mark.parametrize("size", [1, 2])
def test_several_rollouts_bring_what_one_brings(made: SimpleNamespace, size: int) -> None:
    """Each with its part of the rank's requests, the next one only when the one before is through."""

    class Counted(FakeSampler):
        def generate(self, requests: Any, settings: SamplingSettings) -> Iterator[Completion]:
            calls.append(len(requests))
            yield from super().generate(requests, settings)

    def groups(count: int) -> list[list[tuple[int, list[tuple[int, ...]]]]]:
        plan = made.plan(f"batch.rollouts_per_update={count}", "batch.prompts_per_step=8", ranks=size)

        def work(world: Any) -> Any:
            sampler = Counted(lambda ids, skip_special_tokens=True: " ".join(map(str, ids)), vocab_size=11, eos_ids=(0,))
            scores = made.Scores(lambda completion: 1.0)
            found = collect(Rows(made, 0), sampler, scores, plan, world, step=1, clock=lambda: 0.0, tick=lambda *_: None)
            return [(group.prompt.draw, [sample.completion.trace.ids for sample in group.samples]) for group in found.groups]

        return made.on_ranks(size, work)

    calls: list[int] = []
    one = groups(1)
    assert calls == [8 // size] * size
    calls.clear()
    assert groups(2) == one
    assert calls == [4 // size] * 2 * size

"""Held-out scores: closed forms over prompts, each set by itself, the same on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rftcli.algo.keyed import key64
from rftcli.engines.fake import FakeSampler
from rftcli.errors import RftError
from rftcli.plan.plan import RewardPlan
from rftcli.rewards.spec import PartSpec
from rftcli.runtime.world import SoloWorld
from rftcli.stages.evaluate import EvalSet, evaluate
from rftcli.stages.held_out_metrics import summarise
from rftcli.stages.records import record, records_of
from rftcli.types import Completion, FinishReason, Request, SamplingSettings


def rewards(**labels: Sequence[float]) -> RewardPlan:
    """Label -> weights of its parts."""
    parts = {
        label: tuple(PartSpec(name=f"p{index}", kind="rule", target="exact", weight=weight) for index, weight in enumerate(weights))
        for label, weights in labels.items()
    }
    return RewardPlan(labels=parts, max_error_rate=0.05, score_prefill=True, search_path="/")


ONE = rewards(default=[1.0])


def wilson(right: int, n: int) -> tuple[float, float]:
    """The roots of (p - q)^2 = z^2 q (1 - q) / n, which is how Wilson's interval is defined."""
    z2, p = 1.96**2, right / n
    a, b, c = 1 + z2 / n, -(2 * p + z2 / n), p * p
    root = math.sqrt(b * b - 4 * a * c)
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


@pytest.mark.parametrize(("right", "n"), [(0, 10), (3, 10), (10, 10), (57, 128), (1, 1)])
def test_greedy_accuracy_has_wilsons_interval(made: SimpleNamespace, right: int, n: int) -> None:
    found = summarise(records_of(made.groups({draw: [float(draw < right)] for draw in range(n)})), ONE, 1, [1])
    low, high = wilson(right, n)
    assert found["mean@1"] == {"value": right / n, "low": pytest.approx(low, abs=1e-12), "high": pytest.approx(high, abs=1e-12)}
    assert found["pass@1"] == found["mean@1"]
    assert (found["prompts"], found["prompts_scored"], found["samples_per_prompt"]) == (n, n, 1)
    assert "best@1" not in found


def test_means_best_and_pass_at_k(made: SimpleNamespace) -> None:
    """Per prompt 2, 1 and 0 right answers of four; pass@k = 1 - C(4 - c, k) / C(4, k), then the mean over prompts."""
    found = summarise(records_of(made.groups({0: [1.0, 1.0, 0.0, 0.0], 1: [0.0, 0.0, 0.0, 1.0], 2: [0.0] * 4})), ONE, 4, [1, 2, 3, 4, 8])
    assert found["mean@4"]["value"] == pytest.approx(0.25)
    half = 1.96 * 0.25 / math.sqrt(3)  # sample deviation of 0.5, 0.25, 0
    assert found["mean@4"]["low"] == pytest.approx(0.25 - half) and found["mean@4"]["high"] == pytest.approx(0.25 + half)
    assert found["best@4"]["value"] == pytest.approx(2 / 3)
    assert (found["best@4"]["low"], found["best@4"]["high"]) == pytest.approx(wilson(2, 3))
    passes = {k: found[f"pass@{k}"]["value"] for k in (1, 2, 3, 4)}
    assert passes == pytest.approx({1: (1 / 2 + 1 / 4) / 3, 2: (5 / 6 + 1 / 2) / 3, 3: (1 + 3 / 4) / 3, 4: 2 / 3})
    assert "pass@8" not in found  # there are four samples


def test_a_failed_completion_is_left_out(made: SimpleNamespace) -> None:
    found = summarise(records_of(made.groups({0: [1.0, None], 1: [None, None], 2: [0.0, 1.0]})), ONE, 2, [1, 2])
    assert (found["prompts"], found["prompts_scored"], found["reward_errors"]) == (3, 2, 3)
    assert found["mean@2"]["value"] == pytest.approx((1.0 + 0.5) / 2)
    assert found["pass@1"]["value"] == pytest.approx((1.0 + 0.5) / 2)
    assert found["pass@2"]["value"] == 1.0  # only prompt 2 has two scored samples
    assert found["parts"] == {"p": {"mean": pytest.approx(2 / 3), "std": pytest.approx((1 / 3) ** 0.5), "errors": 3}}


def test_nothing_could_be_scored(made: SimpleNamespace) -> None:
    found = summarise(records_of(made.groups({0: [None], 1: [None]})), ONE, 1, [1])
    assert found["prompts_scored"] == 0 and found["reward_errors"] == 2
    assert not [name for name in found if "@" in name]


def test_one_prompt_has_no_interval(made: SimpleNamespace) -> None:
    assert summarise(records_of(made.groups({0: [0.3]})), ONE, 1, [])["mean@1"] == {"value": 0.3}


@pytest.mark.parametrize(
    ("weights", "reward", "passes"),
    [
        ([0.7, 0.1, 0.2], 0.1 + 0.2 + 0.7, True),  # 1.0000000000000002 or 0.9999999999999999, as the sum goes
        ([0.9, 0.1], 0.9, False),
        ([1.0, -0.5], 1.0, True),  # a penalty that did not strike
        ([1.0, -0.5], 0.5, False),
        ([2.0], 1.99999, False),
        ([2.0], 2.0, True),
        ([2.0], 2.0 - 1e-9, True),
    ],
)
def test_a_completion_passes_at_its_labels_full_mark(made: SimpleNamespace, weights: list[float], reward: float, passes: bool) -> None:
    found = summarise(records_of(made.groups({0: [reward]})), rewards(default=weights), 1, [1])
    assert found["pass@1"]["value"] == float(passes)


def test_labels_have_full_marks_of_their_own(made: SimpleNamespace) -> None:
    table = rewards(math=[2.0], default=[1.0], free=[-1.0])
    samples = [made.sample(0, 0, 1.0, label="math"), made.sample(1, 0, 1.0, label="else"), made.sample(2, 0, 0.0, label="free")]
    found = summarise([record(sample) for sample in samples], table, 1, [1])
    assert found["pass@1"]["value"] == 0.5  # `else` is served by default; where nothing is rewarded nothing passes or fails


def test_lengths_are_told(made: SimpleNamespace) -> None:
    samples = [made.sample(0, 0, ids=(1, 2, 3)), made.sample(1, 0, ids=(1,), finish=FinishReason.LENGTH)]
    found = summarise([record(sample) for sample in samples], ONE, 1, [])
    assert (found["response_tokens"], found["truncated_fraction"]) == (2.0, 0.5)


class Recording(FakeSampler):
    """The fake engine, with a memory of what it was asked."""

    def __init__(self) -> None:
        super().__init__(lambda ids, skip_special_tokens=True: " ".join(map(str, ids)), vocab_size=11, eos_ids=(0,))
        self.calls: list[tuple[Sequence[Request], SamplingSettings]] = []

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
        self.calls.append((requests, settings))
        return super().generate(requests, settings)


def sets_of(made: SimpleNamespace, sizes: dict[str, tuple[int, int]]) -> list[EvalSet]:
    """Name -> (prompts, samples)."""
    return [
        EvalSet(name=name, prompts=[made.prompt(draw) for draw in range(count)], samples_per_prompt=samples)
        for name, (count, samples) in sizes.items()
    ]


class First:
    """The answer is the first token; a 4 is none; label `mute` does not vote."""

    def votes(self, label: str) -> bool:
        return label != "mute"

    def read(self, completion: Completion) -> str | None:
        first = completion.trace.ids[0]
        return None if first == 4 else str(first)


PLAN = (
    "data.eval={a: {path: a, samples_per_prompt: 2}, b: {path: b, sampling: {temperature: 0, top_p: 0.5, top_k: 1, max_new_tokens: 2}}}",
    "eval={temperature: 0.7, max_new_tokens: 3, pass_k: [1], vote_k: [1, 2]}", "rollout.min_new_tokens=4", "rollout.top_k=5", "seed=9",
)  # fmt: skip


def run(made: SimpleNamespace, world: Any, sampler: FakeSampler, ticks: list[Any] | None = None) -> SimpleNamespace:
    """sets: the results; lines: this rank's samples."""
    scores = made.Scores(lambda completion: None if completion.trace.ids[0] == 3 else float(completion.trace.ids[0] % 2))
    lines: list[Mapping[str, Any]] = []
    found = evaluate(
        sets_of(made, {"a": (5, 2), "b": (1, 1)}), sampler, scores, made.plan(*PLAN), world, step=6,
        tick=lambda *tick: None if ticks is None else ticks.append(tick), write=lines.append, answers=First(),
    )  # fmt: skip
    return SimpleNamespace(sets=found, lines=lines)


def test_every_row_of_every_set_once(made: SimpleNamespace) -> None:
    sampler, ticks = Recording(), []
    found = run(made, SoloWorld(), sampler, ticks)
    assert list(found.sets) == ["a", "b"] and found.sets["a"]["prompts"] == 5 and found.sets["b"]["prompts"] == 1
    assert sorted((line["set"], line["draw"], line["sample"]) for line in found.lines) == [
        *(("a", draw, sample) for draw in range(5) for sample in range(2)), ("b", 0, 0),
    ]  # fmt: skip
    assert {line["step"] for line in found.lines} == {6} and {line["advantage"] for line in found.lines} == {None}
    assert ticks == [("eval", done, 10) for done in range(1, 11)] + [("eval", 1, 1)]


def test_settings_of_evaluation(made: SimpleNamespace) -> None:
    sampler = Recording()
    run(made, SoloWorld(), sampler)
    (_, first), (_, second) = sampler.calls
    assert (first.temperature, first.max_new_tokens, first.top_k) == (0.7, 3, 5)
    assert first.min_new_tokens == 3  # never longer than what is allowed
    assert (second.temperature, second.max_new_tokens, second.top_k, second.top_p, first.top_p) == (0.0, 2, 1, 0.5, 1.0)
    assert (first.seed, second.seed) == (key64(9, "eval", "a"), key64(9, "eval", "b")) and first.seed != second.seed


def test_the_same_on_any_number_of_ranks(made: SimpleNamespace) -> None:
    solo = run(made, SoloWorld(), Recording())
    for size in (2, 3):  # with three ranks, two have no prompt of set b
        parts = made.on_ranks(size, lambda world: run(made, world, Recording()))
        assert all(part.sets == solo.sets for part in parts)
        lines = [line for part in parts for line in part.lines]
        key = ("set", "draw", "sample")
        assert sorted(lines, key=lambda line: [line[name] for name in key]) == sorted(solo.lines, key=lambda line: [line[name] for name in key])


def test_lines_say_what_was_answered(made: SimpleNamespace) -> None:
    for line in run(made, SoloWorld(), Recording()).lines:
        assert line["answer"] is None or line["answer"].isdecimal()


def test_worst_spread_and_votes(made: SimpleNamespace) -> None:
    """Answers a a b and b c c: the majority is right in the first prompt and wrong in the second."""
    rows = [(0, "a", 1.0), (0, "a", 1.0), (0, "b", 0.0), (1, "b", 1.0), (1, "c", 0.0), (1, "c", 0.0)]
    samples = [record(made.sample(draw, index % 3, reward), answer=answer, votes=True) for index, (draw, answer, reward) in enumerate(rows)]
    found = summarise(samples, ONE, 3, [], [1, 3])
    assert (found["best@3"]["value"], found["worst@3"]["value"]) == (1.0, 0.0)
    assert found["std@3"]["value"] == pytest.approx((1 / 3) ** 0.5)
    assert found["maj@3"]["value"] == 0.5 and found["maj@1"]["value"] == pytest.approx(found["mean@3"]["value"])
    assert not [name for name in summarise([record(made.sample(0, i, 1.0)) for i in range(2)], ONE, 2, [], [2]) if name.startswith("maj")]


def test_best_of_all_needs_all(made: SimpleNamespace) -> None:
    found = summarise(records_of(made.groups({0: [1.0, None], 1: [0.0, 0.5]})), ONE, 2, [])
    assert found["best@2"] == {"value": 0.5} and found["worst@2"]["value"] == 0.0  # one prompt is left
    assert found["mean@2"]["value"] == pytest.approx(0.625)


def test_each_label_has_its_own_numbers(made: SimpleNamespace) -> None:
    table = rewards(math=[2.0], default=[1.0])
    samples = [made.sample(draw, 0, reward, label=label) for draw, (label, reward) in enumerate([("math", 2.0), ("math", 0.0), ("else", 1.0)])]
    found = summarise([record(sample) for sample in samples], table, 1, [1])
    assert {label: (own["mean@1"]["value"], own["pass@1"]["value"], own["prompts_scored"]) for label, own in found["labels"].items()} == {
        "math": (1.0, 0.5, 2), "else": (1.0, 1.0, 1),
    }  # fmt: skip
    pairs = [made.sample(draw, n, reward, label=label) for draw, label in ((0, "math"), (1, "else")) for n, reward in ((0, float(draw)), (1, 2.0))]
    labels = summarise([record(sample) for sample in pairs], table, 2, [])["labels"]
    assert {label: (own["best@2"]["value"], own["worst@2"]["value"], own["std@2"]["value"]) for label, own in labels.items()} == {
        "math": (2.0, 0.0, pytest.approx(2**0.5)), "else": (2.0, 1.0, pytest.approx(0.5**0.5)),
    }  # fmt: skip
    assert "labels" not in summarise([record(sample) for sample in samples[:2]], table, 1, [1])  # they would say the same twice


def test_evaluation_has_rewards_of_its_own(made: SimpleNamespace) -> None:
    """The full mark of pass@1 is that of the evaluation's table."""
    plan = made.plan("data.eval.a.path=a", "eval.rewards.default=[{rule: exact, weight: 3}]", "eval.pass_k=[1]")
    scores = made.Scores(lambda completion: 3.0 if completion.prompt.draw else 1.0)
    found = evaluate(sets_of(made, {"a": (2, 1)}), Recording(), scores, plan, SoloWorld(), step=0, tick=lambda *_: None, write=lambda _: None)
    assert found["a"]["pass@1"]["value"] == 0.5
    assert plan.rewards.labels["default"][0].weight == 1.0


def test_a_lost_or_doubled_completion_is_told(made: SimpleNamespace) -> None:
    class Careless(Recording):
        def __init__(self, change: Any) -> None:
            super().__init__()
            self.change = change

        def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
            return iter(self.change(list(super().generate(requests, settings))))

    for change, text in ((lambda found: found[:-1], "returned no sample"), (lambda found: [*found, found[0]], "came twice")):
        with pytest.raises(RftError, match=text):
            run(made, SoloWorld(), Careless(change))

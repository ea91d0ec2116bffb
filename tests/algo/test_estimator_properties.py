"""Every row of ADVANTAGES against a loop of plain Python floats, and what must not change it: order, names, shifts, scales, other groups."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.algo.advantages import ADVANTAGES
from rftcli.algo.returns import token_rewards, value_loss

EPS = 1e-4


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One scored completion with everything that an estimator may read of it."""

    group: int
    reward: float
    greedy: float
    parts: tuple[float | None, float | None]
    weights: tuple[float, float]
    penalties: tuple[float, ...]
    """Of each trained token: the KL term."""
    values: tuple[float, ...]
    behind: float
    old: tuple[float, ...]
    teacher: tuple[float, ...]


OPTIONS: dict[str, tuple[Mapping[str, Any], ...]] = {
    "grpo": (
        *({"normalise_std": True, "std": std, "min_std": least} for std, least in itertools.product(("group", "batch"), (0.0, 0.5))),
        {"normalise_std": False, "std": "group", "min_std": 0.0},
    ),
    "reinforce": ({"baseline": "none"}, {"baseline": "batch"}),
    "grpo_passk": ({}, {"normalise_std": True}, {"normalise_std": True, "min_std": 0.5}),
    "gdpo": ({}, {"min_std": 0.5}),
    "gae": ({}, {"gamma": 0.9, "lam": 0.95}, {"gamma": 1.0, "lam": 0.0}),
    "distill": ({"coefficient": 0.3},),
}
"""Options that an estimator is looked at under; one without a row has none."""


def flat(values: Sequence[float]) -> bool:
    return max(values) - min(values) < 1e-6 * max(1.0, *map(abs, values))


def by_group(answers: Sequence[Answer], formula: Callable[[list[Answer]], list[float]]) -> list[float]:
    """A group's own numbers, 0 in those without spread."""
    found = [0.0] * len(answers)
    for name in {answer.group for answer in answers}:
        places = [index for index, answer in enumerate(answers) if answer.group == name]
        members = [answers[index] for index in places]
        if not flat([member.reward for member in members]):
            for index, value in zip(places, formula(members), strict=True):
                found[index] = value
    return found


def rewards(answers: Sequence[Answer]) -> list[float]:
    return [answer.reward for answer in answers]


def mean(answers: Sequence[Answer]) -> float:
    return math.fsum(rewards(answers)) / len(answers)


def deviation(values: Sequence[float], least: float = 0.0) -> float:
    return max(least, statistics.stdev(values) if len(values) > 1 else 0.0) + EPS


def grpo(answers: Sequence[Answer], *, normalise_std: bool, std: str, min_std: float) -> list[float]:
    def formula(members: list[Answer]) -> list[float]:
        over = deviation(rewards(answers if std == "batch" else members), min_std) if normalise_std else 1.0
        return [(member.reward - mean(members)) / over for member in members]

    return by_group(answers, formula)


def centred(answers: Sequence[Answer]) -> list[float]:
    return by_group(answers, lambda members: [member.reward - mean(members) for member in members])


def rloo(answers: Sequence[Answer]) -> list[float]:
    def formula(members: list[Answer]) -> list[float]:
        return [member.reward - mean([other for other in members if other is not member]) for member in members]

    return by_group(answers, formula)


def opo(answers: Sequence[Answer]) -> list[float]:
    def formula(members: list[Answer]) -> list[float]:
        lengths = [len(member.old) for member in members]
        lengths = lengths if any(lengths) else [1] * len(members)
        baseline = math.fsum(length * member.reward for length, member in zip(lengths, members, strict=True)) / sum(lengths)
        return [member.reward - baseline for member in members]

    return by_group(answers, formula)


def gpg(answers: Sequence[Answer]) -> list[float]:
    groups = [[answer.reward for answer in answers if answer.group == name] for name in {answer.group for answer in answers}]
    useful = sum(not flat(group) for group in groups)
    return [value * len(groups) / useful if useful else 0.0 for value in centred(answers)]


def grpo_passk(answers: Sequence[Answer], *, normalise_std: bool = False, min_std: float = 0.0) -> list[float]:
    def formula(members: list[Answer]) -> list[float]:
        first, second = sorted(rewards(members), reverse=True)[:2]
        lead = 0.0 if flat([first, second]) else (first - second) / (deviation(rewards(members), min_std) if normalise_std else 1.0)
        return [lead if member.reward == first else 0.0 for member in members]

    return by_group(answers, formula)


def gdpo(answers: Sequence[Answer], *, min_std: float = 0.0) -> list[float]:
    found = [0.0] * len(answers)
    for part in (0, 1):
        there = [index for index, answer in enumerate(answers) if answer.parts[part] is not None]
        alone = [replace(answers[index], reward=answers[index].parts[part]) for index in there]
        for index, value in zip(there, grpo(alone, normalise_std=True, std="group", min_std=min_std), strict=True):
            found[index] += answers[index].weights[part] * value
    return found


def reinforce(answers: Sequence[Answer], *, baseline: str) -> list[float]:
    taken = mean(answers) if baseline == "batch" else 0.0
    return [0.0 if baseline == "batch" and flat(rewards(answers)) else answer.reward - taken for answer in answers]


def remax(answers: Sequence[Answer]) -> list[float]:
    return [0.0 if flat([answer.reward, answer.greedy]) else answer.reward - answer.greedy for answer in answers]


def per_token(answer: Answer) -> list[float]:
    found = [-penalty for penalty in answer.penalties]
    if found:
        found[-1] += answer.reward
    return found


def reinforce_pp(answers: Sequence[Answer], *, gamma: float = 1.0) -> list[float]:
    found = []
    for answer in answers:
        tokens = per_token(answer)
        found += [math.fsum(gamma ** (later - here) * tokens[later] for later in range(here, len(tokens))) for here in range(len(tokens))]
    return found


def gae(answers: Sequence[Answer], *, gamma: float = 1.0, lam: float = 1.0) -> list[float]:
    """Sums of the critic's errors, forwards: sum over k of (gamma lam)^k delta_{t+k}."""
    found = []
    for answer in answers:
        tokens, values = per_token(answer), [*answer.values, answer.behind]
        errors = [tokens[t] + gamma * values[t + 1] - values[t] for t in range(len(tokens))]
        found += [math.fsum((gamma * lam) ** (later - t) * errors[later] for later in range(t, len(errors))) for t in range(len(errors))]
    return found


def distill(answers: Sequence[Answer], *, coefficient: float) -> list[float]:
    pairs = [pair for answer in answers for pair in zip(answer.old, answer.teacher, strict=True)]
    return [-coefficient * min(20.0, max(-20.0, old - teacher)) for old, teacher in pairs]


REFERENCES: dict[str, Callable[..., list[float]]] = {
    "grpo": grpo, "rloo": rloo, "reinforce": reinforce, "reinforce_pp": reinforce_pp, "reinforce_pp_baseline": centred, "remax": remax, "opo": opo,
    "gpg": gpg, "grpo_passk": grpo_passk, "gdpo": gdpo, "cpgd": centred, "gae": gae, "distill": distill, "python": rewards,
}  # fmt: skip
"""To add one: the estimator once more, over plain floats, from its formula and not from its code."""


def columns(answers: Sequence[Answer]) -> dict[str, torch.Tensor]:
    """The inputs of estimators, as `Advantage.inputs` names them."""
    lengths = torch.tensor([len(answer.old) for answer in answers], dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(answers)), lengths)

    def of(values: Iterator[float] | Sequence[float]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float64)

    def tokens(name: str) -> torch.Tensor:
        return of(value for answer in answers for value in getattr(answer, name))

    parts = [answer.parts for answer in answers]
    return {
        "rewards": of(rewards(answers)), "own": of(rewards(answers)), "group": torch.tensor([answer.group for answer in answers], dtype=torch.int64),
        "lengths": lengths, "greedy_rewards": of([answer.greedy for answer in answers]),
        "scores": torch.tensor([[value or 0.0 for value in row] for row in parts], dtype=torch.float64).reshape(-1, 2),
        "present": torch.tensor([[value is not None for value in row] for row in parts], dtype=torch.bool).reshape(-1, 2),
        "weights": torch.tensor([answer.weights for answer in answers], dtype=torch.float64).reshape(-1, 2),
        "token_rewards": token_rewards(of(rewards(answers)), sequence, tokens("penalties")), "sequence": sequence, "values": tokens("values"),
        "bootstrap": of([answer.behind for answer in answers]), "old": tokens("old"), "teacher": tokens("teacher"),
    }  # fmt: skip


def run(name: str, answers: Sequence[Answer], options: Mapping[str, Any]) -> torch.Tensor:
    given = columns(answers)
    return ADVANTAGES[name].function(*(given[key] for key in ADVANTAGES[name].inputs), **options)


THOUSANDTHS = st.integers(-3000, 3000).map(lambda value: value / 1000)
"""So that a spread is either 0 or plain."""


@st.composite
def steps(draw: st.DrawFn) -> list[Answer]:
    found = []
    for _ in range(draw(st.integers(1, 12))):
        length = draw(st.integers(0, 4))

        def vector(numbers: Any, size: int = length) -> tuple[float, ...]:
            return tuple(draw(numbers) for _ in range(size))

        maybe = st.one_of(st.none(), st.integers(0, 3).map(float))
        found.append(
            Answer(
                group=draw(st.integers(-1, 2)), reward=draw(THOUSANDTHS), greedy=draw(THOUSANDTHS), parts=(draw(maybe), draw(maybe)),
                weights=(0.9, -0.3), penalties=vector(THOUSANDTHS), values=vector(THOUSANDTHS), behind=draw(THOUSANDTHS),
                old=vector(st.floats(-30, 0)), teacher=vector(st.floats(-30, 0)),
            )
        )  # fmt: skip
    return found


CASES = [(name, options) for name in REFERENCES for options in OPTIONS.get(name, ({},))]


def test_every_estimator_is_here() -> None:
    assert set(REFERENCES) == set(ADVANTAGES) and set(OPTIONS) <= set(ADVANTAGES)
    for name, row in ADVANTAGES.items():
        assert {option for options in OPTIONS.get(name, ({},)) for option in options} == set(row.options), name


def close(found: torch.Tensor, expected: Sequence[float]) -> None:
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx(list(expected), rel=2e-6, abs=2e-6)


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=25)
@given(answers=steps())
def test_the_same_as_its_formula_in_plain_python(name: str, options: Mapping[str, Any], answers: list[Answer]) -> None:
    close(run(name, answers, options), REFERENCES[name](answers, **options))


@settings(max_examples=15)
@given(answers=steps(), gamma=st.sampled_from([1.0, 0.9, 0.5]))
def test_the_form_per_token_of_an_estimator_of_answers(answers: list[Answer], gamma: float) -> None:
    given_columns = columns(answers)
    form = ADVANTAGES["reinforce"].per_token
    assert form is not None
    close(form(given_columns["token_rewards"], given_columns["sequence"], gamma=gamma), reinforce_pp(answers, gamma=gamma))


def split(values: torch.Tensor, answers: Sequence[Answer], level: str) -> list[list[float]]:
    """What belongs to each answer."""
    sizes = [len(answer.old) if level == "token" else 1 for answer in answers]
    return [part.tolist() for part in values.split(sizes)]


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=8)
@given(answers=steps(), data=st.data())
def test_the_order_of_answers_and_the_names_of_groups_do_not_matter(
    name: str, options: Mapping[str, Any], answers: list[Answer], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(answers))))
    mixed = [replace(answers[index], group=40 - 3 * answers[index].group) for index in order]
    level = ADVANTAGES[name].level
    straight, shuffled = split(run(name, answers, options), answers, level), split(run(name, mixed, options), mixed, level)
    for place, index in enumerate(order):
        assert shuffled[place] == pytest.approx(straight[index], rel=1e-5, abs=1e-6)


def shifted(answer: Answer, by: float) -> Answer:
    parts = tuple(None if value is None else value + by for value in answer.parts)
    return replace(answer, reward=answer.reward + by, greedy=answer.greedy + by, parts=parts)


SHIFTED = [(name, options) for name, options in CASES if ADVANTAGES[name].baseline or name == "remax" or options.get("baseline") == "batch"]


@pytest.mark.parametrize(("name", "options"), SHIFTED)
@settings(max_examples=8)
@given(answers=steps(), by=st.sampled_from([-5.0, 0.25, 4.0]))
def test_a_shift_of_all_rewards_changes_nothing(name: str, options: Mapping[str, Any], answers: list[Answer], by: float) -> None:
    moved = run(name, [shifted(answer, by) for answer in answers], options)
    assert torch.allclose(moved, run(name, answers, options), rtol=1e-5, atol=1e-5)


def scaled(answer: Answer, by: float) -> Answer:
    def times(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(by * value for value in values)

    parts = tuple(None if value is None else by * value for value in answer.parts)
    return replace(
        answer, reward=by * answer.reward, greedy=by * answer.greedy, parts=parts, penalties=times(answer.penalties), values=times(answer.values),
        behind=by * answer.behind,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "options"), [(name, options) for name, options in CASES if name != "distill"])
@settings(max_examples=8)
@given(answers=steps(), by=st.sampled_from([0.5, 2.0, 100.0]))
def test_scaled_rewards(name: str, options: Mapping[str, Any], answers: list[Answer], by: float) -> None:
    """Advantages scale along; those over a deviation stay, where the epsilon and the least deviation scale along."""
    over = name == "gdpo" or options.get("normalise_std", False)
    given_options = dict(options)
    if over:
        given_options |= {"eps": EPS * by, **({"min_std": options["min_std"] * by} if "min_std" in options else {})}
    found = run(name, [scaled(answer, by) for answer in answers], given_options)
    assert torch.allclose(found, (1.0 if over else by) * run(name, answers, options), rtol=1e-4, atol=1e-5)


WHOLE_STEP = ("gpg",)
"""Estimators whose formula reads all groups at once."""


@pytest.mark.parametrize(
    ("name", "options"),
    [case for case in CASES if case[0] not in WHOLE_STEP and case[1].get("std") != "batch" and case[1].get("baseline") != "batch"],
)
@settings(max_examples=8)
@given(answers=steps(), others=steps())
def test_other_groups_change_nothing(name: str, options: Mapping[str, Any], answers: list[Answer], others: list[Answer]) -> None:
    """So that neither ranks nor the rest of a step matter."""
    apart = [replace(answer, group=answer.group + 50) for answer in others]
    together = torch.cat([run(name, answers, options), run(name, apart, options)])
    assert torch.allclose(run(name, [*answers, *apart], options), together, rtol=1e-6, atol=1e-7)


@settings(max_examples=25)
@given(
    numbers=st.lists(st.tuples(THOUSANDTHS, THOUSANDTHS, THOUSANDTHS), min_size=1, max_size=6), clip=st.one_of(st.none(), st.sampled_from([0.1, 0.5]))
)
def test_the_critics_loss_against_its_formula_and_by_finite_differences(numbers: list[tuple[float, float, float]], clip: float | None) -> None:
    def loss(value: float, old: float, target: float) -> float:
        held = old + min(max(value - old, -clip), clip) if clip is not None else value
        return 0.5 * max((value - target) ** 2, (held - target) ** 2)

    values, old, returns = (torch.tensor(column, dtype=torch.float64) for column in zip(*numbers, strict=True))
    values.requires_grad_()
    found = value_loss(values, old, returns, clip=clip)
    assert found.tolist() == pytest.approx([loss(*row) for row in numbers], rel=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), values)
    step = 1e-7
    for row, slope in zip(numbers, gradient.tolist(), strict=True):
        right, left = (loss(row[0] + sign * step, *row[1:]) for sign in (1, -1))
        ahead, behind = ((loss(row[0] + step, *row[1:]) - loss(*row)) / step, (loss(*row) - loss(row[0] - step, *row[1:])) / step)
        corner = abs(ahead - behind) > 1e-3  # the two branches meet: any slope between theirs is one
        low, high = sorted((ahead, behind)) if corner else ((right - left) / (2 * step),) * 2
        assert low - 1e-4 <= slope <= high + 1e-4

"""A whole step of credit for every estimator: the numbers of its definition, whitened as published and with signal alone, on one rank and on two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.engines.fake import FakeSampler
from rftcli.errors import RftError
from rftcli.protocols import Roles
from rftcli.rewards.failures import count_failures
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import Collected, collect
from rftcli.stages.credit import Credited, credit
from rftcli.stages.records import records_of, reward_metrics
from rftcli.stages.twins import GREEDY, asked_samples, with_twin_apart
from rftcli.types import Batch, Completion, Experience, FinishReason, Group, PartScore, Prompt, Shaped

PAIR = {0: [1.0, 0.0, 0.0, 0.0], 1: [1.0] * 4}
"""A group with spread and one without."""
LOG_PROBS = {"policy": -0.1, "reference": -0.2, "teacher": -0.15}
"""Log-prob of token t, per unit of t."""


def group(made: SimpleNamespace, draw: int, rewards: Sequence[float | None], lengths: Sequence[int] | None = None, **fields: Any) -> Group:
    """One group; answers are ones, as long as asked."""
    sizes = lengths or [2] * len(rewards)
    samples = tuple(
        made.sample(draw, index, reward, ids=(1,) * size, **fields) for index, (reward, size) in enumerate(zip(rewards, sizes, strict=True))
    )
    return Group(prompt=made.prompt(draw), samples=samples)


def run(made: SimpleNamespace, groups: Sequence[Group], *sets: str, size: int = 1, **arguments: Any) -> list[Credited]:
    """Credit of a step on each of `size` ranks, groups dealt out in turn."""
    plan = made.plan("rollout.max_new_tokens=16", "batch.tokens_per_micro_batch=64", *sets)

    def work(world: Any) -> Credited:
        tables = {name: made.Table(world, [slope * token for token in range(10)]) for name, slope in LOG_PROBS.items()}
        roles = Roles(
            policy=tables["policy"],
            reference=None if plan.reference is None else tables["reference"],
            critic=None if plan.critic is None else Worth(),
            teacher=None if plan.teacher is None else tables["teacher"],
        )
        mine = tuple(groups[world.rank :: world.size])
        collected = Collected(mini_batches=(mine,), rollout_seconds=0.0, score_seconds=0.0)
        return credit(collected, roles, plan, world, pad_id=0, device=made.cpu, **arguments)

    return [work(SoloWorld())] if size == 1 else made.on_ranks(size, work)


def everything(credited: Sequence[Credited]) -> list[Experience]:
    found = [item for part in credited for mini_batch in part.mini_batches for item in mini_batch]
    return sorted(found, key=lambda item: (item.sample.completion.prompt.draw, item.sample.completion.sample))


def first_tokens(credited: Sequence[Credited]) -> list[float]:
    """The advantage of the first token of every completion."""
    return [float(item.advantages[0]) for item in everything(credited)]


def near(*values: float) -> object:
    return pytest.approx(list(values), abs=1e-4)


class Worth:
    """A critic whose value at a position is a tenth of the token there: `select` says which positions are asked for."""

    def values(self, batch: Batch) -> torch.Tensor:
        return batch.input_ids.flatten()[batch.select].float() / 10


THIRD = 1 / 3
CASES: dict[str, tuple[str, Mapping[int, Sequence[float | None]], Mapping[int, Sequence[int]] | None, Sequence[float]]] = {
    "rloo": ("{kind: rloo}", PAIR, None, [1, *[-THIRD] * 3, *[0] * 4]),
    "rloo, whitened": ("{kind: rloo, whiten: all}", PAIR, None, [2.290763, *[-0.763588] * 3, *[0] * 4]),
    "grpo over the batch": (
        "{kind: grpo, std: batch}",
        {0: [1, 0, 0, 0], 1: [1, 1, 1, 0]},
        None,
        [1.402859, *[-0.467620] * 3, *[0.467620] * 3, -1.402859],
    ),
    "reinforce, batch": ("{kind: reinforce, baseline: batch}", PAIR, None, [0.375, *[-0.625] * 3, *[0.375] * 4]),
    "reinforce, batch, whitened": (
        "{kind: reinforce, baseline: batch, whiten: all}",
        {0: [1, 0, 0, 0]},
        {0: [10, 1, 1, 1]},
        [0.5477, *[-1.8257] * 3],
    ),
    "reinforce_pp": ("{kind: reinforce_pp, whiten: 'off'}", {0: [1, 0]}, None, [1, 0]),
    "reinforce_pp, whitened": ("{kind: reinforce_pp}", PAIR, None, [0.7746, *[-1.2910] * 3, *[0.7746] * 4]),
    "baseline, equal lengths": ("{kind: reinforce_pp_baseline}", {0: [1, 0, 0, 0]}, None, [1.7321, *[-0.5774] * 3]),
    "baseline, lengths": ("{kind: reinforce_pp_baseline}", {0: [1, 0, 0, 0]}, {0: [10, 1, 1, 1]}, [0.5477, *[-1.8257] * 3]),
    "baseline, all": (
        "{kind: reinforce_pp_baseline, whiten: all}",
        PAIR,
        {0: [10, 1, 1, 1], 1: [1] * 4},
        [0.8222, *[-1.5074] * 3, *[-0.9250] * 4],
    ),
    "baseline, with signal": (
        "{kind: reinforce_pp_baseline}",
        PAIR,
        {0: [10, 1, 1, 1], 1: [1] * 4},
        [0.5477, *[-1.8257] * 3, *[0] * 4],
    ),
    "baseline, off": ("{kind: reinforce_pp_baseline, whiten: 'off'}", PAIR, None, [0.75, *[-0.25] * 3, *[0] * 4]),
    "opo": ("{kind: opo}", {0: [1, 0, 0, 0]}, {0: [10, 1, 1, 1]}, [0.230769, *[-0.769231] * 3]),
    "gpg": ("{kind: gpg}", PAIR, None, [1.5, *[-0.5] * 3, *[0] * 4]),
    "grpo_passk": ("{kind: grpo_passk}", {0: [0.2, 1, 0.4, 0], 1: [1, 1, 0, 0]}, None, [0, 0.6, 0, 0, *[0] * 4]),
    "cpgd": ("{kind: cpgd}", PAIR, None, [0.75, *[-0.25] * 3, *[0] * 4]),
    "unscored": ("{kind: opo}", {0: [1, None, 0, None], 1: [None] * 4, 2: [0.3, None, None, None]}, None, [0.5, 0, -0.5, 0, *[0] * 8]),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", sorted(CASES))
def test_a_step_in_numbers(made: SimpleNamespace, case: str, size: int) -> None:
    written, rewards, lengths, expected = CASES[case]
    groups = [group(made, draw, values, None if lengths is None else lengths[draw]) for draw, values in rewards.items()]
    if len(groups) < size:  # every rank has a group; one without a score changes nothing
        groups.append(group(made, 9, [None, None]))
        expected = [*expected, 0, 0]
    credited = run(made, groups, f"algorithm.advantage={written}", size=size)
    assert first_tokens(credited) == near(*expected)
    for item in everything(credited):
        assert torch.isfinite(item.advantages).all() and bool(item.mask.any()) is (item.sample.reward is not None)
        assert bool((item.advantages == item.advantages[0]).all())
    scored = {(draw, index) for draw, values in rewards.items() for index, value in enumerate(values) if value is not None}
    for found in credited:
        assert set(found.advantages) == scored
    exact = [value for value, wanted in zip(first_tokens(credited), expected, strict=True) if wanted == 0]
    if "all" not in written:
        assert exact == [0.0] * len(exact)  # exactly, not nearly


PARTS = {
    0: ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]),
    1: ([1.0] * 4, [0.0] * 4),
}


def parts_group(made: SimpleNamespace, draw: int, penalties: Sequence[float] = (0.0,) * 4) -> Group:
    samples = []
    for index, (first, second, penalty) in enumerate(zip(*PARTS[draw], penalties, strict=True)):
        parts = [PartScore(name=name, value=value, weight=1.0, seconds=0.0) for name, value in (("a", first), ("b", second))]
        silent = PartScore(name="c", value=None, weight=1.0, seconds=0.0)
        logged = PartScore(name="d", value=float(index), weight=0.0, seconds=0.0)
        sample = made.sample(draw, index, first + second + penalty, parts=[*parts, silent, logged])
        samples.append(replace(sample, shaped=Shaped(combined=first + second, penalty=penalty)))
    return Group(prompt=made.prompt(draw), samples=tuple(samples))


@pytest.mark.parametrize("size", [1, 2])
def test_gdpo_in_numbers(made: SimpleNamespace, size: int) -> None:
    """Parts that abstain or are only logged change nothing; a flat group stays out of the moments, and exactly at 0, unless `all` is asked for."""
    alone = [1.332031, 0.206077, -0.769054, -0.769054]
    one = run(made, [parts_group(made, 0)], "algorithm.advantage.kind=gdpo", size=1)
    assert first_tokens(one) == pytest.approx(alone, abs=2e-6)
    groups = [parts_group(made, 0), parts_group(made, 1)]
    assert first_tokens(run(made, groups, "algorithm.advantage.kind=gdpo", size=size)) == [
        *map(lambda x: pytest.approx(x, abs=2e-6), alone),
        *[0.0] * 4,
    ]
    plain = torch.tensor(first_tokens(run(made, groups, "algorithm.advantage={kind: gdpo, whiten: 'off'}", size=size)))
    assert plain.tolist() == pytest.approx([2.36557, 0.36599, -1.36578, -1.36578, 0, 0, 0, 0], abs=1e-4)
    all_of_them = first_tokens(run(made, groups, "algorithm.advantage={kind: gdpo, whiten: all}", size=size))
    assert all_of_them == pytest.approx(((plain - plain.mean()) / (plain.std() + 1e-4)).tolist(), abs=1e-5)


def test_a_penalty_is_one_more_part_of_gdpo(made: SimpleNamespace) -> None:
    """What shaping added, -1 for the last answer alone, is normalised like a part of its own."""
    found = run(made, [parts_group(made, 0, (0.0, 0.0, 0.0, -1.0))], "algorithm.advantage={kind: gdpo, whiten: 'off'}")
    plain = [2.36557, 0.36599, -1.36578, -1.36578]
    assert first_tokens(found) == pytest.approx([value + 0.4999 for value in plain[:3]] + [plain[3] - 1.4997], abs=1e-4)


def test_reinforce_pp_with_a_kl_term_in_numbers(made: SimpleNamespace) -> None:
    """k1 of .1, .2, .3 at the tokens 1, 2, 3, coefficient 0.1, reward 1: returns to go 0.94, 0.95, 0.97."""
    sample = made.sample(0, 0, 1.0, ids=(1, 2, 3))
    groups = [Group(prompt=made.prompt(0), samples=(sample, made.sample(0, 1, None)))]
    kl = "algorithm.kl={coefficient: 0.1, estimator: k1, place: reward}"
    (found,) = run(made, groups, "algorithm.advantage={kind: reinforce_pp, whiten: 'off'}", kl)
    assert everything([found])[0].advantages.tolist() == pytest.approx([0.94, 0.95, 0.97])
    (white,) = run(made, groups, "algorithm.advantage.kind=reinforce_pp", kl)
    raw = torch.tensor([0.94, 0.95, 0.97], dtype=torch.float64)
    assert everything([white])[0].advantages.tolist() == pytest.approx(((raw - raw.mean()) / raw.std(correction=0)).tolist(), abs=1e-4)


def test_a_mean_of_the_step_below_rewards_of_tokens(made: SimpleNamespace) -> None:
    """reinforce with a discount and a baseline: reward minus the mean of all ranks, then the return to go."""
    groups = [group(made, 0, [1.0, 0.0]), group(made, 1, [0.0, 0.0])]
    for size in (1, 2):
        credited = run(made, groups, "algorithm.advantage={kind: reinforce, baseline: batch, gamma: 0.5}", size=size)
        assert [item.advantages.tolist() for item in everything(credited)] == [[0.375, 0.75], *[[-0.125, -0.25]] * 3]


# ReMax


def twin_group(made: SimpleNamespace, draw: int, greedy: float | None, rewards: Sequence[float | None]) -> Group:
    samples = tuple(made.sample(draw, index, reward) for index, reward in enumerate(rewards))
    return with_twin_apart(Group(prompt=made.prompt(draw), samples=(made.sample(draw, GREEDY, greedy), *samples)))


@pytest.mark.parametrize("size", [1, 2])
def test_remax_in_numbers(made: SimpleNamespace, size: int) -> None:
    """The twin is subtracted, measured under its own key, and in nothing else; without its reward the group has none."""
    groups = [twin_group(made, 0, 0.5, [1.0, 0.0]), twin_group(made, 1, None, [1.0, 0.0]), twin_group(made, 2, 1.0, [1.0, None])]
    credited = run(made, groups, "algorithm.advantage.kind=remax", "batch.balance=false", size=size)
    assert first_tokens(credited) == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    for found in credited:
        assert found.metrics == {"greedy_reward_mean": 0.75, "greedy_dropped": 1.0}
        assert found.advantages == {(0, 0): 0.5, (0, 1): -0.5, (2, 0): 0.0}
    assert [bool(item.mask.any()) for item in everything(credited)] == [True, True, False, False, True, False]
    metrics = reward_metrics(records_of(groups))
    assert metrics["reward_mean"] == pytest.approx(2 / 3) and metrics["samples_dropped"] == 3


def test_a_twin_that_cannot_be_scored_is_the_cause_that_is_told(made: SimpleNamespace) -> None:
    broken = PartScore(name="right", value=None, weight=1.0, seconds=0.0, error="no luck")
    for parts, cause in (([broken], "right: no luck"), ([replace(broken, error=None)], "every part with a weight abstained (returned None)")):
        twin = made.sample(0, GREEDY, None, parts=parts)
        group = with_twin_apart(Group(prompt=made.prompt(0), samples=(twin, made.sample(0, 0, 1.0), made.sample(0, 1, None, parts=[broken]))))
        total, failures = count_failures(group.samples)
        assert (total, failures) == (2, {f"its greedy twin could not be scored: {cause}": 1, "right: no luck": 1})


class Numbers:
    next_draw = 0

    def __init__(self, made: SimpleNamespace) -> None:
        self._made = made

    def draw(self, first: int, count: int) -> Sequence[Prompt]:
        return [self._made.prompt(draw) for draw in range(first, first + count)]


def test_a_twin_has_a_key_of_its_own(made: SimpleNamespace) -> None:
    """The engine is asked for sample -1 beside the others, once a prompt; the others are what they are without it, and on any number of ranks."""
    sets = ("rollout.engine=fake",)
    plan, plain = made.plan("algorithm.advantage.kind=remax", *sets), made.plan(*sets)
    assert (asked_samples(plan), asked_samples(plain)) == ((0, 1, -1), (0, 1))
    assert plan.rollout.greedy_twin and not plain.rollout.greedy_twin
    seen: list[Completion] = []

    def value(completion: Completion) -> float:
        seen.append(completion)
        return float(len(completion.trace.ids))

    def gather(plan: Any, world: Any) -> Collected:
        engine = FakeSampler(lambda ids, skip_special_tokens=True: " ".join(map(str, ids)), vocab_size=11, eos_ids=(0,))
        return collect(Numbers(made), engine, made.Scores(value), plan, world, step=1, clock=lambda: 0.0, tick=lambda *_: None)

    with_twins, without = gather(plan, SoloWorld()), gather(plain, SoloWorld())
    assert sum(completion.sample == GREEDY for completion in seen) == 4
    traces = [[sample.completion.trace for item in collected.groups for sample in item.samples] for collected in (with_twins, without)]
    assert traces[0] == traces[1] and len(traces[0]) == 8
    twins = {item.prompt.draw: item.greedy for item in with_twins.groups}
    assert all(twin is not None and twin.completion.sample == GREEDY and twin.reward is not None for twin in twins.values())
    on_two = [
        item
        for part in made.on_ranks(2, lambda world: gather(made.plan("algorithm.advantage.kind=remax", *sets, ranks=2), world))
        for item in part.groups
    ]
    assert {item.prompt.draw: item.greedy for item in on_two} == twins
    again = gather(plan, SoloWorld())
    assert {item.prompt.draw: item.greedy for item in again.groups} == twins  # a resumed step asks for the same


# The teacher


@pytest.mark.parametrize("size", [1, 2])
def test_distill_alone_and_added(made: SimpleNamespace, size: int) -> None:
    """old - teacher = t/20 at token t: -0.1 x that alone, and on top of a finished advantage that was clipped to 0.2."""
    answer = (1, 2, 3)
    groups = [
        Group(prompt=made.prompt(draw), samples=(made.sample(draw, 0, 1.0, ids=answer), made.sample(draw, 1, None, ids=answer))) for draw in range(2)
    ]
    teacher = "models.teacher.path=org/teacher"
    term = [-0.005, -0.010, -0.015]
    alone = run(made, groups, teacher, "algorithm.advantage={kind: distill, distill_coefficient: 0.1}", size=size)
    added = run(made, groups, teacher, "algorithm.advantage={kind: reinforce, clip: 0.2, distill_coefficient: 0.1}", size=size)
    for credited, expected in ((alone, term), (added, [0.2 + value for value in term])):
        for item in everything(credited):
            assert item.advantages.tolist() == pytest.approx(expected if item.sample.reward is not None else [0.0] * 3, abs=1e-7)
        for found in credited:
            assert found.metrics["teacher_kl"] == pytest.approx(0.1)
            assert found.advantages == {(draw, 0): pytest.approx(sum(expected) / 3) for draw in range(2)}
    assert added[0].metrics["advantage_clip_fraction"] == 1.0 and "advantage_clip_fraction" not in alone[0].metrics
    free = run(made, groups, teacher, "algorithm.advantage={kind: reinforce, clip: 0.995, distill_coefficient: 0.1}", size=size)
    for item in everything(free)[::2]:  # the bound is that of the task's advantage alone, and the term is added once
        assert item.advantages.tolist() == pytest.approx([0.995 + value for value in term], abs=1e-7)
    unbounded = run(made, groups, teacher, "algorithm.advantage={kind: reinforce, distill_coefficient: 0.1}", size=size)
    assert everything(unbounded)[0].advantages.tolist() == pytest.approx([1.0 + value for value in term], abs=1e-7)


# A critic's value behind a cut


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_gae_goes_on_behind_answers_that_were_cut(made: SimpleNamespace, layout: str) -> None:
    """Values are a tenth of the token before: prompt 1, 2, answers 3, 4 and 5, 6, 7. Behind the cut one stands 0.7, behind the other nothing."""
    ended = made.sample(0, 0, 1.0, ids=(3, 4))
    cut = made.sample(0, 1, 1.0, ids=(5, 6, 7), finish=FinishReason.LENGTH)
    groups = [Group(prompt=made.prompt(0), samples=(ended, cut))]
    sets = ("models.critic={}", f"batch.layout={layout}")
    on = "algorithm.advantage={kind: gae, whiten: 'off', bootstrap_truncated: true, lam: 0.0}"
    first, second = everything(run(made, groups, *sets, on))
    assert first.advantages.tolist() == pytest.approx([0.3 - 0.2, 1.0 - 0.3])
    assert second.advantages.tolist() == pytest.approx([0.5 - 0.2, 0.6 - 0.5, 1.0 + 0.7 - 0.6])
    assert second.returns is not None and second.returns.tolist() == pytest.approx([0.5, 0.6, 1.7])
    first, second = everything(run(made, groups, *sets, "algorithm.advantage={kind: gae, whiten: 'off', lam: 0.0}"))
    assert second.advantages.tolist() == pytest.approx([0.5 - 0.2, 0.6 - 0.5, 1.0 - 0.6])


# A function of one's own


OWN = ("algorithm.advantage={kind: python, python: 'some:where', options: {factor: 2}}",)


@pytest.mark.parametrize("size", [1, 2])
def test_an_own_estimator_sees_all_ranks_once(made: SimpleNamespace, size: int) -> None:
    calls = []

    def estimator(record: Mapping[str, Any]) -> Sequence[float]:
        calls.append({name: value if isinstance(value, list) else None for name, value in record.items()})
        assert record["group"].tolist() == [0, 0, 1] and record["sample"].tolist() == [0, 2, 1] and record["lengths"].tolist() == [2, 2, 2]
        assert record["parts"]["p"].tolist() == record["rewards"].tolist() and record["weights"]["p"].tolist() == [1.0] * 3
        return [10.0 * draw + reward for draw, reward in zip(record["group"].tolist(), record["rewards"].tolist(), strict=True)]

    groups = [group(made, 0, [1.0, None, 0.5]), group(made, 1, [None, 0.25, None])]
    credited = run(made, groups, *OWN, size=size, estimator=estimator)
    assert [found.advantages for found in credited] == [{(0, 0): 1.0, (0, 2): 0.5, (1, 1): 10.25}] * size
    assert len(calls) == 1 and calls[0]["labels"] == ["default"] * 3


def test_an_own_estimator_fails_on_every_rank_alike(made: SimpleNamespace) -> None:
    def estimator(record: Mapping[str, Any]) -> Sequence[float]:
        raise RftError("it broke", hint="mend it")

    def work(world: Any) -> str:
        plan = made.plan(*OWN)
        collected = Collected(mini_batches=((group(made, world.rank, [1.0, 0.0]),),), rollout_seconds=0.0, score_seconds=0.0)
        with pytest.raises(RftError) as caught:
            credit(collected, Roles(policy=None), plan, world, pad_id=0, device=made.cpu, estimator=estimator)
        return f"{caught.value.message}, {caught.value.hint}"

    assert made.on_ranks(2, work) == ["it broke, mend it"] * 2


# Properties of a whole step

KINDS = ("grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "opo", "gpg", "grpo_passk", "gdpo", "cpgd")
STEPS = st.lists(
    st.lists(st.tuples(st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.5, 1.0])), st.integers(0, 3)), min_size=2, max_size=4),
    min_size=2,
    max_size=4,
)


@pytest.mark.parametrize("whiten", ["with_signal", "all"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(step=STEPS)
def test_no_step_gives_what_is_not_a_number_and_ranks_agree(
    made: SimpleNamespace, kind: str, whiten: str, step: list[list[tuple[float | None, int]]]
) -> None:
    """Groups unscored in whole or part, answers without a token: numbers everywhere, 0 where nothing is trained, the same on one and two ranks."""
    groups = [group(made, draw, [reward for reward, _ in rows], [size for _, size in rows]) for draw, rows in enumerate(step)]
    sets = (
        f"algorithm.advantage={{kind: {kind}, whiten: {whiten}}}",
        "batch={prompts_per_step: 4, micro_batch_size: 3}",
        "batch.tokens_per_micro_batch=auto",
    )
    solo, two = everything(run(made, groups, *sets)), everything(run(made, groups, *sets, size=2))
    for alone, shared in zip(solo, two, strict=True):
        assert torch.isfinite(alone.advantages).all() and not alone.advantages[~alone.mask].any()
        assert torch.allclose(alone.advantages, shared.advantages, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("reinforce", "reinforce_pp")])
@settings(max_examples=12, deadline=None)
@given(step=STEPS)
def test_groups_without_spread_stay_at_exactly_zero(made: SimpleNamespace, kind: str, step: list[list[tuple[float | None, int]]]) -> None:
    groups = [group(made, draw, [reward for reward, _ in rows], [size for _, size in rows]) for draw, rows in enumerate(step)]
    for item in everything(run(made, groups, f"algorithm.advantage.kind={kind}")):
        rewards = {reward for reward, _ in step[item.sample.completion.prompt.draw] if reward is not None}
        if len(rewards) < 2:
            assert not item.advantages.any()

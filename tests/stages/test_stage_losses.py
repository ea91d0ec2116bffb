"""What losses and corrections do to an update: closed forms on a policy that is a table, tokens chosen over all ranks, controllers, old log-probs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.errors import RftError
from rftcli.plan.plan import Plan
from rftcli.plan.plan_loss import EntropyPlan, LossPlan
from rftcli.protocols import Roles
from rftcli.runtime.entropy_control import EntropyControl
from rftcli.runtime.loop import engine_agrees
from rftcli.runtime.world import SoloWorld
from rftcli.stages.beside import Beside
from rftcli.stages.collect import Collected
from rftcli.stages.correction import correct
from rftcli.stages.credit import credit
from rftcli.stages.learn import learn, one_update, policy_loss
from rftcli.stages.selection import pick
from rftcli.types import Experience, Update

CORRECTION = "algorithm.loss.correction"


def answer(made: SimpleNamespace, ids: tuple[int, ...], advantage: float = 1.0, *, draw: int = 0, sample: int = 0, **fields: Any) -> Experience:
    """A completion of `ids`, every token of which has old log-prob -1 unless said."""
    length = len(ids)
    return Experience(
        sample=made.sample(draw, sample, ids=ids),
        token_ids=torch.tensor([0, *ids]),
        prompt_tokens=1,
        mask=torch.tensor(fields.pop("mask", [True] * length), dtype=torch.bool),
        advantages=torch.full((length,), advantage),
        **{name: torch.tensor(values, dtype=torch.float32) for name, values in {"old_logprobs": [-1.0] * length, **fields}.items()},
    )


def update(made: SimpleNamespace, rows: list[Experience], *sets: str, table: float = -1.0) -> tuple[Update, torch.Tensor]:
    """(the update, minus the gradient of each table entry); the current log-prob of every token is `table`."""
    plan = made.plan(*sets)
    learner = made.Table(SoloWorld(), [table] * 12)
    loss = policy_loss(plan.loss, 4)
    found = one_update(rows, learner, loss, plan, SoloWorld(), pad_id=0, device=made.cpu)
    return found, (learner.table.detach() - table) / learner.lr


# the correction


def corrected(made: SimpleNamespace, rows: list[Experience], setting: str) -> dict[str, Any]:
    return correct(rows, made.plan(f"{CORRECTION}={setting}").loss, SoloWorld())["correction"]


def samp(*ratios: float) -> list[float]:
    """What the sampler reported so that the trainer's -1 over it is each ratio."""
    return [-1.0 - math.log(ratio) if ratio > 0 else math.nan for ratio in ratios]


def test_truncated_weights_multiply_the_policy_term_alone(made: SimpleNamespace) -> None:
    """Ratios .3, 1, 3 and one that was not reported, cap 2; KL k2 with d = 1 stays whole."""
    rows = [answer(made, (1, 2, 3, 4), sampler_logprobs=samp(0.3, 1.0, 3.0, 0.0), reference_logprobs=[-2.0] * 4)]
    metrics = corrected(made, rows, "{cap: 2}")
    assert rows[0].correction is not None and rows[0].correction.tolist() == pytest.approx([0.3, 1.0, 2.0, 1.0])
    assert metrics == {
        "mean": pytest.approx(5.3 / 4), "max": pytest.approx(3.0), "masked_fraction": 0.0, "missing": 1,
        "effective": pytest.approx(5.3**2 / (4 * (0.09 + 1 + 9 + 1))),
        "k3": pytest.approx(sum(r - 1 - math.log(r) for r in (0.3, 1.0, 3.0, 1.0)) / 4),
    }  # fmt: skip
    found, moved = update(made, rows, f"{CORRECTION}={{cap: 2}}", "algorithm.kl={coefficient: 0.1, estimator: k2}")
    assert found.metrics["policy_loss"] == pytest.approx(-4.3 / 4)
    assert found.metrics["loss"] == pytest.approx(-4.3 / 4 + 0.1 * 0.5)
    assert moved[1:5].tolist() == pytest.approx([(0.3 - 0.1) / 4, (1 - 0.1) / 4, (2 - 0.1) / 4, (1 - 0.1) / 4])


def test_masked_weights_leave_the_denominator(made: SimpleNamespace) -> None:
    rows = [answer(made, (1, 2, 3), sampler_logprobs=samp(0.3, 1.0, 3.0))]
    metrics = corrected(made, rows, "{kind: mask, band: [0.5, 2]}")
    assert rows[0].correction.tolist() == [0.0, 1.0, 0.0] and metrics["masked_fraction"] == pytest.approx(2 / 3)
    found, moved = update(made, rows)
    assert found.tokens == 3 and found.metrics["policy_loss"] == pytest.approx(-1 / 3) and moved[1:4].tolist() == pytest.approx([0, 1 / 3, 0])


def test_rejected_answers_leave_mask_and_denominators(made: SimpleNamespace) -> None:
    rows = [answer(made, (1, 2), sampler_logprobs=samp(1.0, 1.0)), answer(made, (3, 4, 5), sample=1, sampler_logprobs=samp(2.0, 1.0, 2.0))]
    metrics = corrected(made, rows, "{kind: reject, reject: {by: k1, band: [0.9, 1.1]}}")
    assert metrics["rejected_fraction"] == 0.5 and metrics["masked_fraction"] == pytest.approx(3 / 5) and metrics["max"] == pytest.approx(2.0)
    assert rows[1].mask.tolist() == [False] * 3 and rows[0].mask.all()
    found, moved = update(made, rows)
    assert found.tokens == 2 and moved[1:6].tolist() == pytest.approx([0.5, 0.5, 0, 0, 0])


def test_normalised_weights_have_the_mean_1(made: SimpleNamespace) -> None:
    for level, share in (("token", [2 / 5, 3 / 5]), ("geometric", [0.5, 0.5])):
        rows = [answer(made, (1, 2), sampler_logprobs=samp(1.2, 1.2)), answer(made, (3, 4, 5), sample=1, sampler_logprobs=samp(0.9, 0.9, 0.9))]
        corrected(made, rows, f"{{level: {level}, batch_normalise: true}}")
        weights = [float(row.correction[0]) for row in rows]
        assert sum(part * weight for part, weight in zip(share, weights, strict=True)) == pytest.approx(1.0)
        assert weights[0] / weights[1] == pytest.approx(1.2 / 0.9)


def test_an_engine_that_reports_nothing(made: SimpleNamespace) -> None:
    rows = [answer(made, (1, 2)), answer(made, (), sample=1), answer(made, (3,), sample=2, mask=[False], sampler_logprobs=[-9.0])]
    for setting in ("{}", "{kind: mask, level: sequence}", "{kind: reject, reject: {by: max, bound: 1}}"):
        metrics = corrected(made, rows, setting)
        assert metrics["missing"] == 2 and metrics["mean"] == metrics["max"] == metrics["effective"] == 1.0 and metrics["k3"] == 0.0
        assert rows[0].correction.tolist() == [1.0, 1.0] and rows[1].correction.tolist() == []
    nothing = [answer(made, (3,), mask=[False])]
    assert correct(nothing, made.plan(f"{CORRECTION}={{}}").loss, SoloWorld()) == {}


def test_without_a_correction_nothing_is_touched(made: SimpleNamespace) -> None:
    rows = [answer(made, (1, 2), sampler_logprobs=samp(2.0, 2.0))]
    assert correct(rows, made.plan().loss, SoloWorld()) == {} and rows[0].correction is None


# old log-probs


def test_old_log_probs_of_the_sampler(made: SimpleNamespace) -> None:
    """The ratio starts at the engine's numbers; where it reported none it is 1, with the gradient of the score function."""
    rows = [answer(made, (1, 2, 3), sampler_logprobs=[-1.1, math.nan, -2.0])]
    plan = made.plan("algorithm.loss.old=sampler")
    assert correct(rows, plan.loss, SoloWorld()) == {"correction": {"missing": 1}}
    found, moved = update(made, rows, "algorithm.loss.old=sampler")
    assert found.metrics["ratio_max"] == pytest.approx(math.e) and found.metrics["clip_high_fraction"] == pytest.approx(1 / 3)
    assert moved[1:4].tolist() == pytest.approx([math.exp(0.1) / 3, 1 / 3, 0])
    assert found.metrics["sampler_gap_mean"] == pytest.approx(0.55) and found.metrics["sampler_gap_max"] == pytest.approx(1.0)


def test_a_gap_of_what_is_known_alone(made: SimpleNamespace) -> None:
    found, _ = update(made, [answer(made, (1, 2, 3), sampler_logprobs=[-1.2, math.nan, math.nan])])
    assert found.metrics["sampler_gap_mean"] == found.metrics["sampler_gap_max"] == pytest.approx(0.2)
    found, _ = update(made, [answer(made, (1,), sampler_logprobs=[math.nan])])
    assert not {"sampler_gap_mean", "sampler_gap_max"} & set(found.metrics)


# masks


def test_the_off_policy_mask(made: SimpleNamespace) -> None:
    """Current log-probs -1.5: the mean log-ratio of old to current is .5 and .2. Only a negative advantage is masked, and only above the bound."""
    rows = [
        answer(made, (1, 2), -1.0), answer(made, (3,), 1.0, sample=1), answer(made, (4, 5), -1.0, sample=2, old_logprobs=[-1.3, -1.3]),
    ]  # fmt: skip
    found, moved = update(made, rows, "algorithm.loss={kind: kl_cov, options: {beta: 0}, off_policy_mask: 0.4}", "batch.epochs=2", table=-1.5)
    assert found.metrics["off_policy_fraction"] == pytest.approx(2 / 5) and found.tokens == 5
    assert moved[1:6].tolist() == pytest.approx([0, 0, math.exp(-0.5) / 5, -math.exp(-0.2) / 5, -math.exp(-0.2) / 5])


def test_the_share_of_highest_entropy(made: SimpleNamespace) -> None:
    """Two of five tokens keep their policy term; the denominator stays five, and the KL term whole."""
    rows = [answer(made, (1, 2, 3), entropies=[0.1, 0.9, 0.2], reference_logprobs=[-2.0] * 3),
            answer(made, (4, 5), sample=1, entropies=[0.8, 0.3], reference_logprobs=[-2.0] * 2)]  # fmt: skip
    found, moved = update(made, rows, "algorithm.loss.top_entropy_share=0.4", "algorithm.kl={coefficient: 0.1, estimator: k2}")
    assert moved[1:6].tolist() == pytest.approx([-0.02, 0.18, -0.02, 0.18, -0.02])
    assert found.metrics["policy_loss"] == pytest.approx(-2 / 5)


# tokens chosen over the whole update


def chosen_of(made: SimpleNamespace, plan: Plan, size: int, seed: int, rows: int, update_number: int = 0) -> set[tuple[int, int, int]]:
    generator = torch.Generator().manual_seed(seed)
    everything = []
    for index in range(rows):
        length = int(torch.randint(0, 7, (), generator=generator))
        advantage, old = float(torch.randn((), generator=generator)), torch.randn(length, generator=generator).tolist()
        mask = (torch.rand(length, generator=generator) < 0.8).tolist()
        everything.append(
            answer(made, tuple(range(1, length + 1)), advantage, draw=index // 2, sample=index % 2, old_logprobs=old, mask=mask)
        )
    tokens = sum(int(row.mask.sum()) for row in everything)

    def work(world: Any) -> None:
        pick(everything[world.rank :: world.size], plan, world, tokens=max(1, tokens), update=update_number)

    if size == 1:
        work(SoloWorld())
    else:
        made.on_ranks(size, work)
    found = {(row.sample.completion.prompt.draw, row.sample.completion.sample, int(token)) for row in everything for token in row.chosen.nonzero()}
    assert all(bool(row.mask[row.chosen].all()) for row in everything)
    return found


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), kind=st.sampled_from(["clip_cov", "kl_cov"]))
def test_the_same_tokens_are_chosen_on_any_number_of_ranks(made: SimpleNamespace, seed: int, kind: str) -> None:
    options = {"clip_cov": "{share: 0.2, low: -0.5, high: 9}", "kl_cov": "{share: 0.2}"}[kind]
    plan = made.plan(f"algorithm.loss={{kind: {kind}, options: {options}}}")
    expected = chosen_of(made, plan, 1, seed, 8)
    assert chosen_of(made, plan, 2, seed, 8) == chosen_of(made, plan, 3, seed, 8) == expected


def test_numbers_of_the_covariance(made: SimpleNamespace) -> None:
    """cov 3.2, 0.3, 1.3 of (2, -1, -1) and (-.1, -2, -3): the highest, and of those between 1 and 3 the only one."""
    def rows() -> list[Experience]:
        return [answer(made, (index + 1,), a, sample=index, old_logprobs=[old]) for index, (a, old) in enumerate(((2, -0.1), (-1, -2), (-1, -3)))]

    for kind, options, expected in (("kl_cov", "{}", [1, 0, 0]), ("kl_cov", "{share: 0.7}", [1, 0, 1]), ("clip_cov", "{high: 3}", [0, 0, 1]),
                                    ("clip_cov", "{low: 4}", [0, 0, 0]), ("clip_cov", "{share: 1}", [1, 0, 1])):  # fmt: skip
        found = rows()
        pick(found, made.plan(f"algorithm.loss={{kind: {kind}, options: {options}}}"), SoloWorld(), tokens=3, update=0)
        assert [int(row.chosen[0]) for row in found] == expected, (kind, options)


def test_the_choice_is_random_and_another_in_every_update(made: SimpleNamespace) -> None:
    plan = made.plan("algorithm.loss={kind: clip_cov, options: {share: 0.1, low: -99, high: 99}}")
    seen = [chosen_of(made, plan, 1, 5, 30, number) for number in range(8)]
    assert len({frozenset(item) for item in seen}) == 8 and len({len(item) for item in seen}) == 1
    other = made.plan("seed=1", "algorithm.loss={kind: clip_cov, options: {share: 0.1, low: -99, high: 99}}")
    assert chosen_of(made, other, 1, 5, 30, 0) != seen[0] == chosen_of(made, plan, 1, 5, 30, 0)


def test_equal_covariances_are_cut_at_the_number(made: SimpleNamespace) -> None:
    """All advantages alike: every covariance is 0, and exactly the asked number is chosen, the first by draw, sample and token."""
    plan = made.plan("algorithm.loss={kind: kl_cov, options: {share: 0.4}}")
    rows = [answer(made, (1, 2, 3), draw=1), answer(made, (4, 5), draw=0)]
    pick(rows, plan, SoloWorld(), tokens=5, update=0)
    assert [row.chosen.tolist() for row in rows] == [[False] * 3, [True, True]]


# the entropy bonus


def control(target: float | None, start: float = 0.005) -> EntropyControl:
    controller = None if target is None else EntropyPlan(target=target, delta=0.005, min=0.0, max=1.0)
    plan = LossPlan(kind="ppo_clip", options={}, aggregate="token_mean", kl_coefficient=0.0, kl_estimator="k3", entropy_coefficient=start,
                    entropy_controller=controller)  # fmt: skip
    return EntropyControl(plan)


def test_the_bonus_is_applied_up_to_the_target_alone() -> None:
    bonus = control(0.2)
    assert bonus.coefficient == 0.005  # nothing is known before the first update
    for entropy, applied in ((0.2, 0.01), (0.3, 0.0), (0.25, 0.0), (0.1, 0.005)):
        bonus.after(entropy)
        assert bonus.coefficient == pytest.approx(applied)
        resumed = control(0.2)
        resumed.load_state_dict(bonus.state_dict())
        bonus = resumed
    fixed = control(None, start=0.1)
    fixed.after(9.0)
    assert fixed.coefficient == 0.1


class Entropic:
    """A policy of one number for every token, whose entropy is its square."""

    def __init__(self, made: SimpleNamespace, skips: bool = False) -> None:
        self.inner = made.Table(SoloWorld(), [-1.0] * 12)
        self.skips = skips

    @property
    def version(self) -> int:
        return int(self.inner.version)

    lr = 0.5

    def backward(self, batch: Any, loss: Any, last: bool, temperature: float | None = None) -> Any:
        new = self.inner.table[batch.target_ids]
        value, measured = loss(new, new.square(), batch)
        (value + 0.0 * self.inner.table.sum()).backward()
        return measured

    def step(self) -> Any:
        outcome = self.inner.step()
        return SimpleNamespace(applied=not self.skips, lr=outcome.lr, grad_norm=outcome.grad_norm)


def test_the_bonus_raises_entropy_and_follows_each_update(made: SimpleNamespace) -> None:
    """Entropy 1 of every token: the loss falls by the coefficient, and its gradient is -coefficient x 2 new over the tokens. Two updates a step."""
    plan = made.plan("algorithm.loss.entropy_coefficient=0.005", "batch.epochs=2")
    bonus, policy = control(0.5), Entropic(made)
    rows = [answer(made, (1, 2), 0.0)]
    found = learn([rows], policy, plan, SoloWorld(), pad_id=0, device=made.cpu, tick=lambda *_: None, beside=Beside(entropy=bonus))
    assert [item.metrics["entropy_coefficient"] for item in found] == [0.005, 0.0]  # entropy 1 is above the target of 0.5
    assert found[0].metrics["loss"] == pytest.approx(-0.005) and found[0].metrics["policy_loss"] == 0.0
    assert policy.inner.table.detach()[1:3].tolist() == pytest.approx([-1 - 0.5 * 0.005 * 2 / 2] * 2)  # away from 0: more entropy
    assert found[1].grad_norm == 0.0
    stopped = control(0.5)
    learn([rows], Entropic(made, skips=True), plan, SoloWorld(), pad_id=0, device=made.cpu, tick=lambda *_: None, beside=Beside(entropy=stopped))
    assert stopped.state_dict() == {"coefficient": 0.005, "entropy": None}  # it stands still with the policy


def test_what_is_not_asked_for_is_absent(made: SimpleNamespace) -> None:
    found, _ = update(made, [answer(made, (1, 2))])
    assert not {"off_policy_fraction", "entropy_coefficient", "kl", "sampler_gap_mean"} & set(found.metrics)


# through credit


def credited(made: SimpleNamespace, *sets: str, logprobs: tuple[float, ...] | None) -> Any:
    """Two groups of two answers of two tokens each, the table's log-probs -0.1 x id; the engine reports `logprobs`."""
    plan = made.plan(*sets)
    groups = made.groups({0: (1.0, 0.0), 1: (0.0, 1.0)}, logprobs=logprobs)
    policy = made.Table(SoloWorld(), [-0.1 * index for index in range(12)])
    collected = Collected(mini_batches=(tuple(groups),), rollout_seconds=0.0, score_seconds=0.0)
    return credit(collected, Roles(policy=policy), plan, SoloWorld(), pad_id=0, device=made.cpu)


def test_credit_settles_correction_and_entropies(made: SimpleNamespace) -> None:
    """Old log-probs -.3, -.4 of ids 3, 4 against reported -.5, -.4: ratios exp(.2) and 1."""
    found = credited(made, f"{CORRECTION}={{cap: 1.1}}", "algorithm.loss.top_entropy_share=0.5", logprobs=(-0.5, -0.4))
    for item in found.mini_batches[0]:
        assert item.correction.tolist() == pytest.approx([1.1, 1.0]) and item.entropies.tolist() == [0.25, 0.25]
    assert found.metrics["correction"]["max"] == pytest.approx(math.exp(0.2)) and found.metrics["correction"]["missing"] == 0


def test_rejected_answers_keep_their_place_in_the_baseline(made: SimpleNamespace) -> None:
    found = credited(made, f"{CORRECTION}={{kind: reject, reject: {{band: [0.9, 1.05]}}}}", logprobs=(-0.5, -0.4))
    assert not any(bool(item.mask.any()) for item in found.mini_batches[0])
    assert sorted(found.advantages.values()) == pytest.approx([-0.707, -0.707, 0.707, 0.707], abs=1e-3)
    assert found.metrics["correction"]["rejected_fraction"] == 1.0


def test_the_samplers_log_probs_need_no_pass(made: SimpleNamespace) -> None:
    found = credited(made, "algorithm.loss.old=sampler", "batch.epochs=2", logprobs=(-0.5, -0.4))
    assert all(item.old_logprobs.tolist() == pytest.approx([-0.5, -0.4]) for item in found.mini_batches[0])
    found = credited(made, "algorithm.loss.old=sampler", logprobs=None)
    assert all(item.old_logprobs.isnan().all() for item in found.mini_batches[0]) and found.metrics["correction"] == {"missing": 8}


def test_a_fake_engine_is_not_held_against_the_trainer(made: SimpleNamespace) -> None:
    gap = {"sampler_logprob_gap": {"mean": 3.0, "max": 4.0}}
    engine_agrees(gap, made.plan(f"{CORRECTION}={{}}", "rollout.engine=fake"))
    with pytest.raises(RftError, match="differ from the trainer's by 3 nats"):
        engine_agrees(gap, made.plan(f"{CORRECTION}={{}}"))

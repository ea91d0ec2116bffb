"""The loss as a sum of named terms with global denominators, and the metrics of an update, against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.runtime.world import SoloWorld
from rftcli.stages import batches
from rftcli.stages.learn import learn, one_update, policy_loss
from rftcli.types import Denominators, Experience, Update


def experience(ids: list[int], advantages: list[float], mask: list[bool] | None = None, **fields: list[float]) -> Experience:
    """A prompt of one token 0 and the sampled `ids`."""
    return Experience(
        sample=None,  # type: ignore[arg-type]
        token_ids=torch.tensor([0, *ids]),
        prompt_tokens=1,
        mask=torch.tensor([True] * len(ids) if mask is None else mask, dtype=torch.bool),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        **{name: torch.tensor(values, dtype=torch.float64) for name, values in fields.items()},
    )


def update(
    made: SimpleNamespace, experiences: list[Experience], *sets: str, table: list[float] | None = None, world: Any = None
) -> tuple[Update, Any]:
    plan = made.plan(*sets)
    world = SoloWorld() if world is None else world
    learner = made.Table(world, table or [-1.0] * 12)
    loss = policy_loss(plan.loss, plan.rollout.max_new_tokens)
    return one_update(experiences, learner, loss, plan, world, pad_id=0, device=made.cpu), learner


UNEVEN = [experience([1], [-4.0]), experience([2, 3, 4], [-1.0] * 3)]
"""One token with loss 4, three with loss 1: at ratio 1 the loss is minus the advantage."""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("aggregate", "value"),
    [("token_mean", 7 / 4), ("sequence_mean", 2.5), ("sequence_sum", 7 / 2), ("fixed_length", 7 / (2 * 4))],
)
def test_the_loss_does_not_depend_on_the_cut(made: SimpleNamespace, size: int, aggregate: str, value: float) -> None:
    found, learner = update(made, UNEVEN, f"batch.micro_batch_size={size}", f"algorithm.loss.aggregate={aggregate}")
    assert found.metrics["loss"] == found.metrics["policy_loss"] == pytest.approx(value)
    assert len(learner.seen) == 3 - size and learner.lasts == [False, True][size - 1 :]
    assert found.tokens == 4 and found.applied and (found.policy_version, found.lr) == (1, 0.5)


def test_tokens_that_are_not_trained_leave_the_denominator_too(made: SimpleNamespace) -> None:
    found, _ = update(made, [experience([1, 2, 3], [-2.0] * 3), experience([4] * 5, [-9.0] * 5, [False] * 5)])
    assert found.metrics["loss"] == pytest.approx(2.0) and found.tokens == 3


@pytest.mark.parametrize(
    ("estimator", "reference", "kl", "gradient"),
    [("k3", 0.25, 0.193147, 0.5), ("k2", 0.25, 0.240227, 0.693147), ("abs", 0.25, 0.693147, 1.0), ("k3", 1.0, 0.306853, -1.0)],
)
def test_the_kl_term_pulls_towards_the_reference(made: SimpleNamespace, estimator: str, reference: float, kl: float, gradient: float) -> None:
    """One token at log 0.5 with policy loss 0.2: loss = 0.2 + 0.1 kl, never less; the gradient is that of both terms."""
    rows = [experience([1], [-0.2], reference_logprobs=[math.log(reference)])]
    found, learner = update(made, rows, "algorithm.kl.coefficient=0.1", f"algorithm.kl.estimator={estimator}", table=[0.0, math.log(0.5)])
    assert found.metrics["kl"] == pytest.approx(kl, abs=1e-6)
    assert found.metrics["loss"] == pytest.approx(0.2 + 0.1 * kl, abs=1e-6) and found.metrics["policy_loss"] == pytest.approx(0.2)
    moved = (float(learner.table[1].detach()) - math.log(0.5)) / -0.5  # one step of gradient descent at rate 0.5
    assert moved == pytest.approx(0.2 + 0.1 * gradient, abs=1e-6)


def test_without_a_coefficient_there_is_no_kl(made: SimpleNamespace) -> None:
    found, _ = update(made, UNEVEN)
    assert "kl" not in found.metrics and "sampler_gap_mean" not in found.metrics and "sampler_gap_max" not in found.metrics


RATIOS, SIGNS = [1.3, 1.3, 1.3, 0.7, 1.0, 9.0], [1.0, 1.0, -1.0, -1.0, 1.0, 1.0]


def test_clipping_is_counted_where_it_binds(made: SimpleNamespace) -> None:
    """Ratios 1.3, 1.3, 1.3, 0.7, 1.0 with signs ++--+ and a sixth, masked token of ratio 9."""
    rows = [experience([1, 2, 3, 4, 5, 6], SIGNS, [True] * 5 + [False], old_logprobs=[-1.0 - math.log(ratio) for ratio in RATIOS])]
    found, _ = update(made, rows)
    metrics = found.metrics
    assert (metrics["clip_high_fraction"], metrics["clip_low_fraction"]) == pytest.approx((0.4, 0.2))
    assert metrics["loss"] == pytest.approx((-1.2 - 1.2 + 1.3 + 0.8 - 1.0) / 5)
    assert metrics["ratio_mean"] == pytest.approx(1.12) and metrics["ratio_max"] == pytest.approx(1.3)
    assert metrics["ratio_std"] == pytest.approx(0.24)  # mean of squares 1.312 minus 1.12 squared
    assert metrics["kl_update"] == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in RATIOS[:5]) / 5)
    assert metrics["entropy"] == pytest.approx(0.25)


def test_on_policy_ratios_are_exactly_one(made: SimpleNamespace) -> None:
    metrics = update(made, UNEVEN)[0].metrics
    assert (metrics["ratio_mean"], metrics["ratio_max"], metrics["ratio_std"], metrics["kl_update"]) == (1.0, 1.0, 0.0, 0.0)


def test_huge_differences_stay_numbers(made: SimpleNamespace) -> None:
    """Log-probs 300 nats apart overflow an exponential: they are held within +-20 before anything exponentiates them."""
    metrics = update(made, [experience([1, 2], [1.0, -1.0], old_logprobs=[-300.0, 300.0])])[0].metrics
    assert metrics["kl_update"] == pytest.approx((math.exp(20) - 21 + math.exp(-20) + 19) / 2)
    assert all(math.isfinite(value) for value in metrics.values())


def test_what_is_not_a_number_stays_visible(made: SimpleNamespace) -> None:
    metrics = update(made, [experience([1, 2], [1.0, 1.0])], table=[0.0, math.nan, -1.0])[0].metrics
    names = ("loss", "policy_loss", "ratio_mean", "ratio_max", "ratio_std", "kl_update")
    assert [name for name in names if not math.isnan(metrics[name])] == []


def test_the_samplers_own_log_probs(made: SimpleNamespace) -> None:
    metrics = update(made, [experience([1, 2], [1.0, 1.0], sampler_logprobs=[-1.0, -1.3])])[0].metrics
    assert metrics["sampler_gap_mean"] == pytest.approx(0.15) and metrics["sampler_gap_max"] == pytest.approx(0.3)


def test_nothing_to_train_is_no_update(made: SimpleNamespace) -> None:
    found, learner = update(made, [experience([1, 2], [1.0, 1.0], [False, False])])
    assert found == Update(applied=False, policy_version=0, lr=0.5, grad_norm=None, metrics={}, tokens=0)
    assert learner.steps == 0 and learner.seen == []


def many() -> list[Experience]:
    """Eight rows of 0 to 4 trained tokens."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(8):
        length = 1 + index % 4
        ids = torch.randint(1, 12, (length,), generator=generator).tolist()
        values = torch.randn(3, length, generator=generator, dtype=torch.float64)
        mask = [token % 5 != 0 for token in ids] if index != 6 else [False] * length
        rows.append(
            experience(ids, values[0].tolist(), mask, old_logprobs=(0.3 * values[1] - 1).tolist(), reference_logprobs=(values[2] - 1).tolist())
        )
    return rows


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "sequence_sum", "fixed_length"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_gradient_is_that_of_the_whole_batch(made: SimpleNamespace, aggregate: str, layout: str) -> None:
    """Any number of ranks, any size of micro-batches, either layout: one gradient, one set of metrics."""
    sets = ("algorithm.kl.coefficient=0.1", f"algorithm.loss.aggregate={aggregate}")
    whole, reference = update(made, many(), *sets, "batch.micro_batch_size=8", "batch.layout=padded")
    for ranks, size in ((1, 3), (2, 2), (2, 3), (4, 1)):
        extra = (f"batch.micro_batch_size={size}", f"batch.layout={layout}", "batch.prompts_per_step=32")
        results = made.on_ranks(ranks, lambda world: update(made, many()[world.rank :: world.size], *sets, *extra, world=world))  # noqa: B023
        for found, learner in results:
            assert found.metrics == pytest.approx(dict(whole.metrics), rel=1e-6) and found.tokens == whole.tokens
            assert learner.table.tolist() == pytest.approx(reference.table.tolist(), rel=1e-6)
        assert len({len(learner.lasts) for _, learner in results}) == 1


def test_a_filler_alone_adds_nothing(made: SimpleNamespace) -> None:
    plan = made.plan()
    untrained = experience([1, 2], [1.0, 1.0], [False, False], reference_logprobs=[-1.0, -1.0])
    batch = batches.make_batch([untrained], plan.batch, Denominators(tokens=5, sequences=2), pad_id=0, device=made.cpu)
    loss = policy_loss(replace(plan.loss, kl_coefficient=0.1), 4)
    value, measured = loss(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64), batch)
    assert float(value) == 0.0 and {float(item) for item in measured.values()} == {0.0}


def test_a_step_goes_over_its_mini_batches_in_epochs(made: SimpleNamespace) -> None:
    plan = made.plan("batch.updates_per_step=2", "batch.epochs=2")
    learner = made.Table(SoloWorld(), [-1.0] * 12)
    ticks: list[Any] = []
    mini_batches = [[experience([1], [1.0], old_logprobs=[-1.0])], [experience([2], [1.0], old_logprobs=[-1.0])]]
    found = learn(mini_batches, learner, plan, SoloWorld(), pad_id=0, device=made.cpu, tick=lambda *tick: ticks.append(tick))
    assert [batch.target_ids.tolist() for batch in learner.seen] == [[1], [2], [1], [2]]
    assert [item.policy_version for item in found] == [1, 2, 3, 4]
    assert ticks == [("learn", done, 4) for done in (1, 2, 3, 4)]
    assert found[0].metrics["ratio_mean"] == 1.0 and found[2].metrics["ratio_mean"] == pytest.approx(math.exp(0.5))  # moved by 0.5 x 1
    assert found[2].metrics["clip_high_fraction"] == 1.0 and found[2].grad_norm == 0.0

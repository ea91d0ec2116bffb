"""Every row of LOSSES: the numbers its page names, a reference in plain Python floats, gradients by finite differences, properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.algo.losses import CHOOSING, LOSSES
from rftcli.algo.own_loss import own_loss
from rftcli.algo.reduce import token_weights
from rftcli.errors import RftError
from rftcli.recipe.sections.passing import MORE_THAN_ADVANTAGES

CLIPS = {"clip_low": 0.2, "clip_high": 0.2}
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo_clip": {**CLIPS, "dual_clip": None},
    "rloo_sequence": {**CLIPS, "dual_clip": None},
    "gspo": {**CLIPS, "dual_clip": None},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "cispo": {"clip_low": 1.0, "clip_high": 0.28},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "cpg": {**CLIPS, "drift": 0.0, "drift_bound": None},
    "clip_cov": {**CLIPS, "dual_clip": None},
    "kl_cov": {"beta": 1.0},
    "reinforce": {"importance_weight": False},
    "dro": {"beta": 0.1},
    "python": {"function": lambda new, old, advantages: -advantages * new * 2},
}
VARIANTS = [
    *OPTIONS.items(),
    ("ppo_clip", {**CLIPS, "dual_clip": 3.0}),
    ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}),
    ("rloo_sequence", {**CLIPS, "dual_clip": 3.0}),
    ("cispo", {"clip_low": 0.2, "clip_high": 4.0}),
    ("cpg", {"clip_low": 1.0, "clip_high": 0.2, "drift": 0.3}),
    ("cpg", {**CLIPS, "drift": 0.3, "drift_bound": 0.25}),
    ("reinforce", {"importance_weight": True}),
    ("sapo", {"tau_positive": 2.0, "tau_negative": 0.5}),
]


def test_every_loss_is_here() -> None:
    assert set(OPTIONS) == set(LOSSES)
    for name, row in LOSSES.items():
        assert set(OPTIONS[name]) - {"function"} == set(row.options) - set(CHOOSING) and row.summary and row.source


def without_advantage(name: str, options: dict[str, Any]) -> list[float]:
    """Every term and gradient of tokens whose advantage is 0, near and far from the old policy."""
    terms, gradient = run(name, [0.0, 0.7, -0.9, 5.0, -5.0], [0.0] * 5, options, chosen=[True] * 5)
    return [*terms.loss.tolist(), *gradient]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_what_has_no_advantage_has_no_term_and_no_gradient(name: str, options: dict[str, Any]) -> None:
    if LOSSES[name].only_advantages:
        assert not any(without_advantage(name, options))


def test_the_others_have_another_term() -> None:
    others = {"cpg": {**CLIPS, "drift": 0.3}, "dro": OPTIONS["dro"], "kl_cov": OPTIONS["kl_cov"]}
    others["python"] = {"function": lambda new, old, advantages: (1 - advantages) * new}
    assert {name for name, row in LOSSES.items() if not row.only_advantages} == set(others) == set(MORE_THAN_ADVANTAGES)
    for name, options in others.items():
        assert any(without_advantage(name, options)), name


def run(
    name: str,
    differences: list[float],
    advantages: list[float],
    options: dict[str, Any] | None = None,
    *,
    lengths: list[int] | None = None,
    old: list[float] | None = None,
    chosen: list[bool] | None = None,
) -> tuple[Any, list[float]]:
    """(terms, d sum of loss / d new) in float64; new = old + differences."""
    start = torch.tensor(old or [-1.5] * len(differences), dtype=torch.float64)
    new = (start + torch.tensor(differences, dtype=torch.float64)).requires_grad_()
    lengths = [len(differences)] if lengths is None else lengths
    known = {
        "sequence": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        "num_sequences": len(lengths),
        "chosen": torch.tensor(chosen or [False] * len(differences)),
    }
    row = LOSSES[name]
    terms = row.function(
        new, start, torch.tensor(advantages, dtype=torch.float64), **(OPTIONS[name] if options is None else options),
        **{key: known[key] for key in row.reads},
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(terms.loss.sum(), new)
    return terms, gradient.tolist()


# loss, options, difference, advantage, old, loss, gradient
NUMBERS = [
    ("ppo_clip", {}, 0.0, 1, -1.5, -1, -1),
    ("ppo_clip", {}, 0.5, 1, -1.5, -1.2, 0),
    ("ppo_clip", {}, -0.5, 1, -1.5, -0.606531, -0.606531),
    ("ppo_clip", {}, 0.5, -1, -1.5, 1.648721, 1.648721),
    ("ppo_clip", {}, -0.5, -1, -1.5, 0.8, 0),
    ("ppo_clip", {}, 2.0, -1, -1.5, 7.389056, 7.389056),
    ("ppo_clip", {"dual_clip": 3.0}, 2.0, -1, -1.5, 3, 0),
    ("ppo_clip", {"dual_clip": 4.0}, 2.0, -1, -1.5, 4, 0),
    ("sapo", {}, 0.0, 1, -1.5, -2, -1),
    ("sapo", {}, 0.0, -1, -1.5, 1.904762, 1),
    ("sapo", {}, 0.5, 1, -1.5, -2.626889, None),
    ("sapo", {}, 0.5, -1, -1.5, 2.529512, None),
    ("cispo", {}, 0.5, 1, -1.5, 1.28, -1.28),
    ("cpg", {}, 0.5, 1, -1.0, 0.817678, 0),
    ("cpg", {}, -0.5, -1, -1.0, -1.223144, 0),
    ("cpg", {}, -0.5, 1, -1.0, 1.5, -1),
    ("dro", {}, 0.5, 1, -1.5, 1.0125, -0.95),
    ("reinforce", {}, 0.5, 2, -1.5, 2.0, -2),
    ("reinforce", {"importance_weight": True}, 0.5, 2, -1.5, 2 * math.exp(0.5), -2 * math.exp(0.5)),
    ("clip_cov", {}, 0.5, 1, -1.5, -1.2, 0),
    ("kl_cov", {}, 0.5, 1, -1.5, -math.exp(0.5), -math.exp(0.5)),
    ("rloo_sequence", {}, 0.5, 1, -1.5, -1.2, 0),
    ("gspo", {}, 0.5, -1, -1.5, 1.648721, 1.648721),
]


@pytest.mark.parametrize(("name", "options", "difference", "advantage", "old", "loss", "gradient"), NUMBERS)
def test_numbers(name: str, options: dict[str, Any], difference: float, advantage: float, old: float, loss: float, gradient: float | None) -> None:
    terms, found = run(name, [difference], [advantage], {**OPTIONS[name], **options}, old=[old])
    assert terms.loss.tolist() == pytest.approx([loss], abs=5e-7)
    assert gradient is None or found == pytest.approx([gradient], abs=5e-7)


def test_gspo_in_numbers() -> None:
    """(.1, -.3, .5): s = exp(.1); in the token form each token has the gradient -A s."""
    terms, gradient = run("gspo", [0.1, -0.3, 0.5], [1.0] * 3)
    assert terms.ratio.tolist() == pytest.approx([1.105171] * 3, abs=5e-7)
    assert terms.loss.tolist() == pytest.approx([-1.105171] * 3, abs=5e-7) and gradient == pytest.approx([-1.105171] * 3, abs=5e-7)
    narrow = {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}
    terms, gradient = run("gspo", [0.1, -0.3, 0.5], [1.0] * 3, narrow)
    assert terms.loss.tolist() == pytest.approx([-1.0004] * 3) and gradient == [0.0] * 3 and terms.clipped_high.all()


@pytest.mark.parametrize(("advantage", "loss"), [(1.0, -1.068939), (-1.0, 1.262802)])
def test_gmpo_in_numbers(advantage: float, loss: float) -> None:
    terms, gradient = run("gmpo", [0.1, -0.3, 0.9], [advantage] * 3)
    assert terms.loss.tolist() == pytest.approx([loss] * 3, abs=5e-7)
    held = advantage > 0
    assert terms.clipped_high.tolist() == [False, False, held] and not terms.clipped_low.any()
    assert gradient == pytest.approx([loss, loss, 0.0 if held else loss], abs=2e-6)  # three equal terms, each moved by a third


def test_rloo_takes_the_product() -> None:
    terms, gradient = run("rloo_sequence", [0.1, -0.3, 0.25], [1.0, 1.0, -1.0], lengths=[2, 1])
    assert terms.ratio.tolist() == pytest.approx([math.exp(-0.2)] * 2 + [math.exp(0.25)])
    assert gradient == pytest.approx([-2 * math.exp(-0.2)] * 2 + [math.exp(0.25)])  # the sequence's term stands at both of its tokens
    terms, _ = run("rloo_sequence", [0.15, 0.15], [1.0, 1.0])
    assert terms.loss.tolist() == pytest.approx([-1.2] * 2) and terms.clipped_high.all()  # neither ratio alone is above 1.2


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    terms, gradient = run("cispo", [1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0], {"clip_low": 0.2, "clip_high": 0.28})
    assert gradient == pytest.approx([-1.28, -0.8, 1.28, 0.8])
    assert terms.clipped_high.tolist() == [True, False, False, False] and terms.clipped_low.tolist() == [False, False, False, True]
    assert run("cispo", [-3.0], [1.0])[1] == pytest.approx([-math.exp(-3)])  # clip_low 1 is no floor


def test_the_drift_of_cpg() -> None:
    options = {**CLIPS, "drift": 0.5}
    terms, gradient = run("cpg", [0.5], [0.0], options)
    assert terms.loss.item() == pytest.approx(0.5 * (math.exp(0.5) - 1 - 0.5)) and gradient == pytest.approx([0.5 * (math.exp(0.5) - 1)])


def test_the_bounded_drift_of_cpg() -> None:
    """Its pull is min(rho - 1, c): 0.648721 at rho = exp(.5), held at 0.25 by c 0.25, also where rho is out of every range."""
    options = {**CLIPS, "drift": 0.5, "drift_bound": 0.25}
    terms, gradient = run("cpg", [0.5, 0.2, -0.5, 100.0, -100.0], [0.0] * 5, options, old=[-101.0] * 5)
    assert gradient == pytest.approx([0.125, 0.5 * (math.exp(0.2) - 1), 0.5 * (math.exp(-0.5) - 1), 0.125, -0.5])
    assert terms.loss[0].item() == pytest.approx(0.5 * (0.25 - math.log(1.25) + 0.25 * (0.5 - math.log(1.25))))
    assert terms.loss[1].item() == pytest.approx(0.5 * (math.exp(0.2) - 1 - 0.2))  # below the bound it is the drift itself
    assert torch.isfinite(terms.loss).all()


def test_chosen_tokens() -> None:
    terms, gradient = run("clip_cov", [0.5, 0.1, -0.5], [1.0, 1.0, -1.0], chosen=[True, True, False])
    assert terms.loss.tolist() == pytest.approx([0.0, 0.0, 0.8]) and gradient[:2] == [0.0, 0.0]
    assert terms.clipped_high.tolist() == [False] * 3 and terms.clipped_low.tolist() == [False, False, True]
    terms, gradient = run("kl_cov", [0.5, -0.5, 0.0], [1.0, 1.0, 1.0], {"beta": 2.0}, chosen=[True, True, False])
    assert terms.loss.tolist() == pytest.approx([-math.exp(0.5) + 1.0, -math.exp(-0.5) + 1.0, -1.0])
    assert gradient == pytest.approx([-math.exp(0.5) + 2.0, -math.exp(-0.5) - 2.0, -1.0])
    assert terms.clipped_low is None and terms.clipped_high is None


def reference(name: str, d: list[float], old: list[float], a: list[float], lengths: list[int], o: dict[str, Any], chosen: list[bool]) -> list[float]:
    """The loss of each token, written again with `math` alone."""

    def clip(x: float, low: float, high: float) -> float:
        return min(max(x, low), high)

    def ppo(rho: float, advantage: float) -> float:
        value = max(-advantage * rho, -advantage * clip(rho, 1 - o["clip_low"], 1 + o["clip_high"]))
        c = o["dual_clip"]
        return min(value, -c * advantage) if c is not None and advantage < 0 else value

    spans, first = [], 0
    for length in lengths:
        spans.append(range(first, first + length))
        first += length
    found = []
    for span in spans:
        total = sum(d[i] for i in span)
        for i in span:
            rho, new, n = math.exp(clip(d[i], -20, 20)), old[i] + d[i], len(span)
            if name == "ppo_clip":
                value = ppo(rho, a[i])
            elif name == "rloo_sequence":
                value = ppo(math.exp(clip(total, -20, 20)), a[i])
            elif name == "gspo":
                value = ppo(math.exp(clip(total / n, -20, 20)), a[i])
            elif name == "gmpo":
                held = [min(d[j], o["clip_high"]) if a[j] > 0 else max(d[j], -o["clip_low"]) if a[j] < 0 else d[j] for j in span]
                value = -a[i] * math.exp(sum(held) / n)
            elif name == "cispo":
                value = -clip(rho, 1 - o["clip_low"], 1 + o["clip_high"]) * a[i] * new
            elif name == "sapo":
                tau = o["tau_positive"] if a[i] > 0 else o["tau_negative"]
                value = -a[i] * 4 / tau / (1 + math.exp(-tau * (rho - 1)))
            elif name == "cpg":
                floor = old[i] + math.log(1 - o["clip_low"]) if o["clip_low"] < 1 else -math.inf
                bounded = min(new, old[i] + math.log(1 + o["clip_high"])) if a[i] > 0 else max(new, floor)
                away = rho - 1 - d[i]
                if o.get("drift_bound") is not None and rho - 1 > o["drift_bound"]:
                    corner = math.log(1 + o["drift_bound"])
                    away = o["drift_bound"] - corner + o["drift_bound"] * (d[i] - corner)
                value = (-a[i] * bounded if a[i] else 0.0) + o["drift"] * away
            elif name == "clip_cov":
                value = 0.0 if chosen[i] else ppo(rho, a[i])
            elif name == "kl_cov":
                value = -a[i] * rho + (o["beta"] * abs(d[i]) if chosen[i] else 0.0)
            elif name == "reinforce":
                value = -a[i] * new * (rho if o["importance_weight"] else 1.0)
            elif name == "dro":
                value = -(a[i] * new - o["beta"] / 2 * d[i] ** 2)
            else:
                value = -2 * a[i] * new
            found.append(value)
    return found


@st.composite
def updates(draw: st.DrawFn) -> dict[str, Any]:
    """Sequences of 1 to 5 tokens with one advantage each, log-probs and differences away from every corner of the losses."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    total, seed = sum(lengths), draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    spread = draw(st.sampled_from([0.01, 0.3, 1.5]))
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return {
        "differences": (spread * torch.randn(total, generator=generator, dtype=torch.float64)).tolist(),
        "advantages": torch.repeat_interleave(advantages, torch.tensor(lengths)).tolist(),
        "lengths": lengths,
        "old": (-3 * torch.rand(total, generator=generator, dtype=torch.float64)).tolist(),
        "chosen": (torch.rand(total, generator=generator) < 0.4).tolist(),
    }


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@settings(max_examples=25, deadline=None)
@given(update=updates())
def test_against_a_reference(name: str, options: dict[str, Any], update: dict[str, Any]) -> None:
    terms, _ = run(name, update["differences"], update["advantages"], options, **{key: update[key] for key in ("lengths", "old", "chosen")})
    known = {"dual_clip": None, **options}
    expected = reference(name, update["differences"], update["old"], update["advantages"], update["lengths"], known, update["chosen"])
    assert terms.loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


STOPPED = {"cispo", "gspo", "reinforce"}
"""Losses whose gradient is not the derivative of their value, because a weight is held: their gradient has closed forms above and below."""


@pytest.mark.parametrize(("name", "options"), [variant for variant in VARIANTS if variant[0] not in STOPPED])
@settings(max_examples=15, deadline=None)
@given(update=updates())
def test_gradients_by_finite_differences(name: str, options: dict[str, Any], update: dict[str, Any]) -> None:
    more = {key: update[key] for key in ("lengths", "old", "chosen")}
    known = {"dual_clip": None, **options}
    _, gradient = run(name, update["differences"], update["advantages"], options, **more)
    step = 1e-6
    for index in range(len(update["differences"])):
        sums = []
        for sign in (1, -1):
            moved = list(update["differences"])
            moved[index] += sign * step
            sums.append(math.fsum(reference(name, moved, update["old"], update["advantages"], update["lengths"], known, update["chosen"])))
        measured = (sums[0] - sums[1]) / (2 * step)
        assert gradient[index] == pytest.approx(measured, rel=1e-4, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(update=updates())
def test_gradients_with_held_weights(update: dict[str, Any]) -> None:
    d, a = update["differences"], update["advantages"]
    more = {key: update[key] for key in ("lengths", "old")}
    _, gradient = run("cispo", d, a, {"clip_low": 0.2, "clip_high": 0.28}, **more)
    assert gradient == pytest.approx([-min(max(math.exp(x), 0.8), 1.28) * y for x, y in zip(d, a, strict=True)])
    _, gradient = run("reinforce", d, a, {"importance_weight": True}, **more)
    assert gradient == pytest.approx([-math.exp(x) * y for x, y in zip(d, a, strict=True)])
    terms, gradient = run("gspo", d, a, {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": None}, **more)
    held = (terms.clipped_low | terms.clipped_high).tolist()
    assert gradient == pytest.approx([0.0 if out else -s * y for out, s, y in zip(held, terms.ratio.tolist(), a, strict=True)])


@pytest.mark.parametrize("name", sorted(OPTIONS))
@settings(max_examples=15, deadline=None)
@given(update=updates())
def test_on_policy_every_loss_has_the_gradient_of_the_score_function(name: str, update: dict[str, Any]) -> None:
    """At old = sg(new) d loss / d new = -A times the weight of a token; for a product of ratios that of a sum over tokens. rho is exactly 1."""
    lengths, advantages = update["lengths"], torch.tensor(update["advantages"], dtype=torch.float64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    new = torch.tensor(update["old"], dtype=torch.float64).requires_grad_()
    row = LOSSES[name]
    known = {"sequence": sequence, "num_sequences": len(lengths), "chosen": torch.zeros(len(new), dtype=torch.bool)}
    terms = row.function(new, new.detach(), advantages, **OPTIONS[name], **{key: known[key] for key in row.reads})
    weights = token_weights("sequence_mean", sequence, len(lengths), tokens=len(new), sequences=len(lengths), max_new_tokens=9).double()
    (weights * terms.loss).sum().backward()
    lengths_of = torch.tensor(lengths)[sequence].double()
    factor = {"python": 2.0, "rloo_sequence": lengths_of}.get(name, 1.0)
    assert new.grad is not None and new.grad.tolist() == pytest.approx((-factor * weights * advantages).tolist(), rel=1e-6)
    assert terms.ratio.tolist() == [1.0] * len(new)
    for flags in (terms.clipped_low, terms.clipped_high):
        assert flags is None or not flags.any()


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@settings(max_examples=10, deadline=None)
@given(update=updates(), data=st.data())
def test_the_order_of_sequences_does_not_matter(name: str, options: dict[str, Any], update: dict[str, Any], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(update["lengths"]))))
    starts = [sum(update["lengths"][:index]) for index in range(len(update["lengths"]))]
    moved = [starts[index] + token for index in order for token in range(update["lengths"][index])]
    terms, _ = run(name, update["differences"], update["advantages"], options, **{key: update[key] for key in ("lengths", "old", "chosen")})
    shuffled = {key: [update[key][index] for index in moved] for key in ("differences", "advantages", "old", "chosen")}
    other, _ = run(
        name, shuffled["differences"], shuffled["advantages"], options, old=shuffled["old"], chosen=shuffled["chosen"],
        lengths=[update["lengths"][index] for index in order],
    )  # fmt: skip
    assert other.loss.tolist() == pytest.approx(terms.loss[moved].tolist(), rel=1e-12)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_signs_of_the_clip_flags(name: str, options: dict[str, Any]) -> None:
    terms, _ = run(name, [3.0, -3.0, 3.0, -3.0, 3.0, -3.0], [1.0, 1.0, -1.0, -1.0, 0.0, 0.0], options, lengths=[1] * 6)
    if terms.clipped_low is None:
        assert terms.clipped_high is None and not {"clip_low", "clip_high"} & set(options)
        return
    floor = name in ("cispo", "cpg") and options["clip_low"] == 1.0
    assert terms.clipped_low.tolist() == [False, False, False, not floor, False, False]
    assert terms.clipped_high.tolist() == [True, False, False, False, False, False]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_no_trained_token_and_sequences_without_any(name: str, options: dict[str, Any]) -> None:
    row = LOSSES[name]
    for count, sequences in ((0, 0), (0, 3), (2, 3)):
        new = torch.full((count,), -1.0, requires_grad=True)
        known = {"sequence": torch.full((count,), 1), "num_sequences": sequences, "chosen": torch.zeros(count, dtype=torch.bool)}
        terms = row.function(new, new.detach() - 0.1, torch.ones(count), **options, **{key: known[key] for key in row.reads})
        assert terms.loss.shape == terms.ratio.shape == (count,)
        terms.loss.sum().backward()
        assert new.grad is not None and torch.isfinite(new.grad).all() and torch.isfinite(terms.loss).all()


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_far_off_policy_stays_finite(name: str, options: dict[str, Any]) -> None:
    for advantage in (1.0, -1.0):
        terms, gradient = run(name, [500.0, -500.0, 500.0, -500.0], [advantage] * 4, options, old=[-501.0] * 4, lengths=[1, 1, 2])
        assert torch.isfinite(terms.loss).all() and torch.isfinite(terms.ratio).all() and all(map(math.isfinite, gradient))


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_nothing_flows_into_old_and_advantages(name: str, options: dict[str, Any]) -> None:
    new, old, advantages = (torch.tensor([-1.0, -1.2], requires_grad=True) for _ in range(3))
    row = LOSSES[name]
    known = {"sequence": torch.tensor([0, 1]), "num_sequences": 2, "chosen": torch.tensor([True, False])}
    row.function(new, old, advantages, **options, **{key: known[key] for key in row.reads}).loss.sum().backward()
    assert old.grad is None and advantages.grad is None


def test_an_own_loss_that_returns_something_else() -> None:
    known = {"sequence": torch.zeros(3, dtype=torch.int64), "num_sequences": 1}
    values = torch.zeros(3)
    for wrong, shown in ((lambda new, old, advantages: new.mean(), r"\(\)"), (lambda new, old, advantages: 1.0, "float")):
        with pytest.raises(RftError, match=rf"returned {shown} for 3 trained tokens"):
            own_loss(values, values, values, function=wrong, **known)


def test_an_own_loss_without_a_gradient() -> None:
    """It would train for nights and move no weight."""
    known = {"sequence": torch.zeros(3, dtype=torch.int64), "num_sequences": 1}
    new = torch.zeros(3, requires_grad=True)
    for without in (lambda new, old, advantages: (-advantages * new).detach(), lambda new, old, advantages: -advantages * old):
        with pytest.raises(RftError, match="has no gradient"):
            own_loss(new, new, torch.ones(3), function=without, **known)
        with torch.no_grad():
            own_loss(new.detach(), new, torch.ones(3), function=without, **known)
        assert own_loss(new[:0], new[:0], torch.ones(0), function=without, **known).loss.numel() == 0


def test_an_own_loss_gets_what_it_asks_for() -> None:
    def mine(new: Any, old: Any, advantages: Any, *, num_sequences: int, power: int) -> Any:
        assert not old.requires_grad
        return (new - old) ** power / num_sequences

    new = torch.tensor([1.0, 2.0], requires_grad=True)
    known = {"sequence": torch.tensor([0, 1]), "num_sequences": 2}
    terms = own_loss(new, torch.zeros(2), torch.ones(2), function=mine, asks=("num_sequences",), own_options={"power": 3}, **known)
    assert terms.loss.tolist() == [0.5, 4.0] and terms.clipped_low is None

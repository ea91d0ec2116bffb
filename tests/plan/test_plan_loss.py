"""The loss of a plan: options with their defaults, what needs facts of the rest of the plan, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rftcli.plan.compile_problems import CompileError
from rftcli.plan.plan import Plan
from rftcli.plan.plan_loss import CorrectionPlan, EntropyPlan, RejectPlan
from rftcli.plan.show import plan_text

Compiled = Callable[..., Plan]
LOSS = "algorithm.loss"
GAE = ("algorithm.advantage.kind=gae", "models.critic={}")


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("{}", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
        ("{kind: gspo}", {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}),
        ("{kind: gmpo}", {"clip_low": 0.4, "clip_high": 0.4}),
        ("{kind: cispo, clip_high: 4}", {"clip_low": 1.0, "clip_high": 4}),
        ("{kind: sapo, options: {tau_negative: 1.2}}", {"tau_positive": 1.0, "tau_negative": 1.2}),
        ("{kind: cpg}", {"clip_low": 0.2, "clip_high": 0.2, "drift": 0.0, "drift_bound": None}),
        ("{kind: clip_cov}", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "share": 2e-4, "low": 1.0, "high": 5.0}),
        ("{kind: kl_cov}", {"share": 2e-3, "beta": 1.0}),
        ("{kind: reinforce}", {"importance_weight": False}),
        ("{kind: dro}", {"beta": 0.1}),
        ("{kind: python, python: 'm:f', options: {a: [1]}}", {"a": [1]}),
    ],
)
def test_options_are_whole(compiled: Compiled, setting: str, options: dict[str, object]) -> None:
    assert compiled(f"{LOSS}={setting}").loss.options == options


def test_what_is_off_is_absent(compiled: Compiled) -> None:
    loss = compiled().loss
    assert (loss.correction, loss.entropy_controller, loss.off_policy_mask, loss.python) == (None, None, None, None)
    assert not loss.reads_sampler and not loss.entropy_in_loss and loss.kl_gradient == "own"


def test_records(compiled: Compiled) -> None:
    plan = compiled(
        f"{LOSS}={{correction: {{kind: mask, gate: tv, bound: 0.1, reject: {{by: k3, bound: 0.2}}}}, entropy_controller: {{target: 0.3}}}}",
        "algorithm.kl={coefficient: 0.1, ratio_weighted: true}",
    )
    assert plan.loss.correction == CorrectionPlan(
        kind="mask", level="token", cap=2.0, band=(0.5, 5.0), gate="tv", bound=0.1, batch_normalise=False,
        reject=RejectPlan(by="k3", band=None, bound=0.2),
    )  # fmt: skip
    assert plan.loss.entropy_controller == EntropyPlan(target=0.3, delta=0.005, min=0.0, max=1.0) and plan.loss.entropy_in_loss
    assert plan.loss.kl_gradient == "ratio_weighted"


def test_the_engine_reports_its_log_probs_where_the_loss_reads_them(compiled: Compiled) -> None:
    assert [step for step in range(1, 103) if compiled().probes(step)] == [1, 51, 101]
    for setting in ("correction={}", "old=sampler"):
        plan = compiled(f"{LOSS}.{setting}", "rollout.engine=fake")
        assert all(plan.probes(step) for step in range(1, 60)) and not plan.rollout.samples_the_model


@pytest.mark.parametrize(
    ("sets", "path", "message"),
    [
        *(((f"{LOSS}.kind={kind}", *GAE), "algorithm.loss.kind", f"`{kind}` has one term an answer, and `gae` an advantage for each token")
          for kind in ("gmpo", "rloo_sequence")),
        ((f"{LOSS}.old=current", "batch.epochs=2"), "algorithm.loss.old", "`current` is not enough"),
        ((f"{LOSS}={{old: current, correction: {{}}}}",), "algorithm.loss.old", "`current` is not enough"),
    ],
)
def test_refused(compiled: Compiled, sets: tuple[str, ...], path: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        compiled(*sets)
    assert {problem.path: problem.message for problem in caught.value.problems} == {path: message}


def test_advantages_per_token_suit_a_loss_with_terms_per_token(compiled: Compiled) -> None:
    assert compiled(f"{LOSS}.kind=gspo", *GAE).loss.kind == "gspo"


def test_it_is_shown(compiled: Compiled) -> None:
    text = plan_text(
        compiled(f"{LOSS}={{correction: {{reject: {{by: k3, bound: 1}}}}, entropy_controller: {{target: 0.3}}, top_entropy_share: 0.2}}")
    )
    for line in ("token ratios truncated at 2, answers rejected by k3", "0, towards 0.3 nats a token", "of the 20% of tokens with the highest"):
        assert line in text
    own = plan_text(compiled(f"{LOSS}={{kind: python, python: 'm:f', old: sampler}}"))
    assert "m:f, token_mean" in own and "as the engine reports them" in own


def test_a_product_of_ratios_is_warned_about(compiled: Compiled) -> None:
    assert any("rloo_sequence multiplies" in note for note in compiled(f"{LOSS}.kind=rloo_sequence").notes)

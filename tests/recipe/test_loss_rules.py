"""Keys of the policy loss: defaults by kind, and what is refused where, in which words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rftcli.plan.plan import RolloutPlan
from rftcli.recipe.load import load_text
from rftcli.recipe.loss_rules import OPTION_WORDS, RULES, reshaping
from rftcli.recipe.problems import Problem
from rftcli.recipe.schema import resolved_yaml
from rftcli.recipe.sections.loss import LOSS_OPTIONS

Problems = Callable[..., list[Problem]]
LOSS = "algorithm.loss"

BREACHES = [
    ("loss-keys", ["kind=sapo", "clip_low=0.1"], "clip_low", "has no effect with `sapo`"),
    ("loss-keys", ["kind=gmpo", "dual_clip=3"], "dual_clip", "has no effect with `gmpo`"),
    ("loss-keys", ["kind=reinforce", "clip_high=0.3"], "clip_high", "has no effect with `reinforce`"),
    ("loss-keys", ["kind=cispo"], "kind", "`cispo` needs `clip_high`"),
    ("loss-keys", ["kind=gmpo", "aggregate=token_mean"], "aggregate", "must be sequence_mean for `gmpo`, got token_mean"),
    ("loss-keys", ["kind=rloo_sequence", "aggregate=sequence_sum"], "aggregate", "must be sequence_mean for `rloo_sequence`, got sequence_sum"),
    ("loss-keys", ["kind=python"], "kind", "`python` needs the key `python`"),
    ("loss-keys", ["python='m:f'"], "python", "has no effect with `ppo_clip`"),
    ("loss-options", ["options={tau: 1}"], "options.tau", "`ppo_clip` has no option `tau`"),
    ("loss-options", ["options={clip_low: 0.1}"], "options.clip_low", "`clip_low` has a key of its own"),
    ("loss-options", ["kind=sapo", "options={tau_positive: 0}"], "options.tau_positive", "must be above 0, got 0"),
    ("loss-options", ["kind=cpg", "options={drift: 0.1, drift_bound: 0}"], "options.drift_bound", "must be above 0, got 0"),
    ("loss-options", ["kind=cpg", "options={drift: null}"], "options.drift", "must be at least 0, got None"),
    ("loss-options", ["kind=cpg", "options={drift_bound: 1}"], "options.drift_bound", "has no effect without `drift`"),
    ("loss-options", ["kind=kl_cov", "options={share: 1.5}"], "options.share", "must be above 0 and at most 1, got 1.5"),
    ("loss-options", ["kind=dro", "options={beta: x}"], "options.beta", "must be at least 0, got 'x'"),
    ("loss-options", ["kind=reinforce", "options={importance_weight: 1}"], "options.importance_weight", "must be true or false, got 1"),
    ("loss-options", ["kind=clip_cov", "options={low: 7}"], "options.low", "`low` must be below `high`, got 7 and 5"),
    ("correction", ["correction={kind: mask, cap: 3}"], "correction.cap", "has no effect with the gate `ratio`"),
    ("correction", ["correction={band: [0.1, 2]}"], "correction.band", "has no effect with `kind: truncate`"),
    ("correction", ["correction={bound: 0.1}"], "correction.bound", "has no effect with `kind: truncate`"),
    ("correction", ["correction={kind: mask, band: [2, 0.5]}"], "correction.band", "must rise, got 2 and 0.5"),
    ("correction", ["correction={kind: reject}"], "correction.kind", "`reject` needs the key `reject`"),
    ("correction", ["correction={kind: mask, gate: tv}"], "correction.gate", "`tv` needs a `bound`"),
    ("correction", ["correction={kind: mask, gate: kl, bound: 1, level: sequence}"], "correction.level", "must be token for the gate `kl`"),
    ("correction", ["correction={reject: {by: k1}}"], "correction.reject.by", "`k1` needs a `band`"),
    ("correction", ["correction={reject: {}}"], "correction.reject", "`k1` needs a `band`"),
    ("correction", ["correction={reject: {by: k3, bound: 1, band: [1, 2]}}"], "correction.reject.band", "has no effect with `by: k3`"),
    ("correction", ["correction={reject: {band: [1, 1]}}"], "correction.reject.band", "must rise, got 1 and 1"),
    ("correction", ["correction={}", "kind=gmpo"], "correction.level", "must be sequence or geometric"),
    ("sampler-logprobs", ["correction={}", "old=sampler"], "correction", "has no effect with `old: sampler`"),
    ("sampler-logprobs", ["kind=kl_cov", "old=sampler"], "old", "must not be sampler for `kl_cov`"),
    ("loss-masks", ["kind=gmpo", "top_entropy_share=0.2"], "top_entropy_share", "must be 1 for `gmpo`"),
    ("loss-masks", ["off_policy_mask=0.1"], "off_policy_mask", "has no effect with one update per rollout"),
    (
        "entropy-controller",
        ["entropy_controller={target: 0.2, max: 0.1}", "entropy_coefficient=0.2"],
        "entropy_controller",
        "`entropy_coefficient` 0.2 lies outside [0, 0.1]",
    ),
    ("entropy-controller", ["entropy_controller={target: 0.2, min: 2}"], "entropy_controller.min", "must be at most `max`, got 2 above 1"),
]


@pytest.mark.parametrize(("code", "sets", "path", "message"), BREACHES)
def test_breaches(minimal: str, problems_of: Problems, code: str, sets: list[str], path: str, message: str) -> None:
    (problem,) = problems_of(minimal, sets=[f"{LOSS}.{item}" for item in sets])
    assert (problem.code, problem.path, problem.message) == (code, f"{LOSS}.{path}", message)
    assert problem.place is not None and problem.hint


KL_BREACHES = [
    (["unbiased_gradient=true", "place=reward"], "unbiased_gradient", "has no effect with `place: reward`"),
    (["ratio_weighted=true", "place=reward"], "ratio_weighted", "has no effect with `place: reward`"),
    (["unbiased_gradient=true", "estimator=k2"], "unbiased_gradient", "is what `k2` has already"),
    (["unbiased_gradient=true", "ratio_weighted=true"], "ratio_weighted", "`unbiased_gradient` and `ratio_weighted` exclude each other"),
]


@pytest.mark.parametrize(("sets", "path", "message"), KL_BREACHES)
def test_breaches_of_the_kl_term(minimal: str, problems_of: Problems, sets: list[str], path: str, message: str) -> None:
    (problem,) = problems_of(minimal, sets=[f"algorithm.kl.{item}" for item in ["coefficient=0.1", *sets]])
    assert (problem.code, problem.path, problem.message) == ("kl-gradient", f"algorithm.kl.{path}", message)


def test_every_rule_is_broken_above() -> None:
    assert {code for code, *_ in BREACHES} | {"kl-gradient"} == set(RULES)


RESHAPED = ["top_p=0.9", "top_k=5", "min_p=0.1", "min_new_tokens=2", "penalties={repetition: 1.1}", "logit_bias={a: 1.0}", "bad_words=[a]",
            "structured={regex: a}", "hf.options={typical_p: 0.9}"]  # fmt: skip


@pytest.mark.parametrize("reshaped", RESHAPED)
@pytest.mark.parametrize("asked", ["correction={}", "old=sampler"])
def test_the_samplers_log_probs_need_the_trained_distribution(minimal: str, problems_of: Problems, reshaped: str, asked: str) -> None:
    (problem,) = problems_of(minimal, sets=[f"rollout.{reshaped}", f"{LOSS}.{asked}"])
    assert problem.code == "sampler-logprobs" and problem.path == f"rollout.{reshaped.partition('=')[0]}"
    assert problem.message == f"and `{LOSS}.{asked.partition('=')[0]}` exclude each other"


def test_the_rule_knows_what_the_plan_calls_reshaped(minimal: str) -> None:
    """Every name that `RolloutPlan.reshaped_by` can have, with penalties and options under one key each."""
    plan = RolloutPlan(
        engine="hf", shares_weights=True, batch_rows=8, samples_per_prompt=1, max_new_tokens=1, temperature=1.0, stop=(), stop_token_ids=(),
        ignore_eos=False, top_p=0.5, top_k=3, min_p=0.1, min_new_tokens=1, repetition_penalty=1.1, logit_bias={"a": 1.0}, bad_words=("a",),
        structured={"regex": "a"}, options={"typical_p": 0.9},
    )  # fmt: skip
    known = set(reshaping(load_text(minimal, env={}).recipe.rollout))
    assert {name.partition(".options")[0] + ".options" * (".options" in name) for name in plan.reshaped_by} == known


def test_nothing_is_said_where_all_is_well(minimal: str) -> None:
    fine = [
        ["kind=cispo", "clip_high=4"],
        ["kind=gspo", "aggregate=sequence_sum"],
        ["kind=python", "python='m:f'", "options={anything: [1]}"],
        ["correction={kind: mask, level: geometric, band: [0.5, 2], batch_normalise: true, reject: {by: max, bound: 1}}"],
        ["correction={kind: reject, reject: {band: [0.9, 1.1]}}", "kind=gmpo"],
        ["correction={}", "off_policy_mask=0.1"],
        ["old=sampler", "off_policy_mask=0.1", "top_entropy_share=0.2"],
        ["entropy_controller={target: 0.2}"],
        ["kind=gspo", "top_entropy_share=0.2", "dual_clip=3"],
    ]
    for sets in fine:
        load_text(minimal, sets=[f"{LOSS}.{item}" for item in sets], env={})
    k1 = "algorithm.kl={coefficient: 0.1, estimator: k1, %s: true}"
    for option in ("unbiased_gradient", "ratio_weighted"):
        load_text(minimal, sets=[k1 % option], env={})


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([], (0.2, 0.2, "token_mean")),
        (["kind=gspo"], (3e-4, 4e-4, "sequence_mean")),
        (["kind=gspo", "clip_high=0.1"], (3e-4, 0.1, "sequence_mean")),
        (["kind=gmpo"], (0.4, 0.4, "sequence_mean")),
        (["kind=sapo"], (0.2, 0.2, "sequence_mean")),
        (["kind=rloo_sequence"], (0.2, 0.2, "sequence_mean")),
        (["kind=cispo", "clip_high=0.28"], (1.0, 0.28, "token_mean")),
    ],
)
def test_defaults_are_those_of_the_kind(minimal: str, sets: list[str], expected: tuple[float, float, str]) -> None:
    loaded = load_text(minimal, sets=[f"{LOSS}.{item}" for item in sets], env={})
    loss = loaded.recipe.algorithm.loss
    assert (loss.clip_low, loss.clip_high, loss.aggregate) == expected
    assert load_text(resolved_yaml(loaded), env={}).recipe == loaded.recipe


def test_options_have_words() -> None:
    assert {name for options in LOSS_OPTIONS.values() for name in options} == set(OPTION_WORDS)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms" / "losses.md"


def test_what_is_called_otherwise_elsewhere_is_a_setting_here(minimal: str) -> None:
    """Every row of the page's table of corrections is a recipe that is accepted, and no two are the same."""
    _, table = PAGE.read_text(encoding="utf-8").split("| as elsewhere", 1)
    cells = re.findall(r"^\|[^|]+\| `([^`]+)`", table.split("\n\n", 1)[0], flags=re.MULTILINE)
    assert len(cells) == 11
    found = [load_text(minimal, sets=[f"{LOSS}.{cell.replace(': ', '=', 1)}"], env={}).recipe.algorithm.loss for cell in cells]
    assert len({loss.model_dump_json() for loss in found}) == len(cells)
    assert all(loss.correction is not None or loss.old == "sampler" for loss in found)

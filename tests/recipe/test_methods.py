"""`rft explain loss:gspo` and its like: what they say is what documentation, sections and tables say, and nothing is without a word."""

from __future__ import annotations

import re

import pytest
import yaml

from rftcli.algo.advantages import ADVANTAGES
from rftcli.algo.kl import KLS
from rftcli.algo.losses import LOSSES
from rftcli.errors import RecipeError, UsageError
from rftcli.recipe.explain import explain
from rftcli.recipe.kinds import keys
from rftcli.recipe.load import load_text
from rftcli.recipe.methods import CORRECTION_KEYS, FAMILIES, estimator_keys, loss_keys, shipped_pages
from rftcli.recipe.scorer_rules import KEYS
from rftcli.recipe.sections.loss import LOSS_OPTIONS, NAMED_OPTIONS, OPTION_MEANINGS
from rftcli.rewards.rules import RULES, TYPES

ALL = [(prefix, name) for prefix, family in FAMILIES.items() for name in family.names]
TABLES = {"advantage": ADVANTAGES, "loss": LOSSES}
BASE = "models: {policy: {path: org/m}}\ndata: {train: {path: t.jsonl}}\nrewards: {default: [{rule: exact}]}\ntrain: {steps: 1}\n"


@pytest.mark.parametrize(("prefix", "name"), ALL)
def test_every_kind_has_a_page_with_all_its_knobs(prefix: str, name: str) -> None:
    page = explain(f"{prefix}:{name}")
    family = FAMILIES[prefix]
    assert page.startswith(f"{prefix}:{name}\n\n  ") and "\n  used  " in page and f"\n  page  {shipped_pages()}" in page
    knobs = family.knobs(name)
    assert all(knob.meaning and knob.default and f"  {knob.key} " in page for knob in knobs)
    patterns = {key.pattern for key in keys()}
    assert all(knob.key in patterns or ".options." in knob.key for knob in knobs)


def test_families_are_the_tables() -> None:
    assert set(FAMILIES["advantage"].names) == set(ADVANTAGES) and set(FAMILIES["loss"].names) == set(LOSSES)
    assert set(FAMILIES["kl"].names) == set(KLS) and set(FAMILIES["scorer"].names) == set(KEYS)


@pytest.mark.parametrize(("prefix", "name"), [pair for pair in ALL if pair[0] in TABLES and pair[1] != "python"])
def test_a_page_has_the_papers_of_its_row_and_what_differs_elsewhere(prefix: str, name: str) -> None:
    page = explain(f"{prefix}:{name}")
    assert re.search(r"\belsewhere\b", page, re.IGNORECASE), "what other implementations do differently"
    whole = page if prefix == "advantage" else (shipped_pages() / "algorithms/losses.md").read_text()
    for paper in re.findall(r"arXiv:[\d.]+\d", TABLES[prefix][name].source):
        assert paper in whole, f"{prefix}:{name} does not name {paper}"


def test_every_option_of_a_loss_has_a_meaning_and_is_a_knob() -> None:
    assert {kind: set(options) for kind, options in LOSS_OPTIONS.items() if options} == {kind: set(words) for kind, words in OPTION_MEANINGS.items()}
    for kind, row in LOSSES.items():
        named = {key.removeprefix("options.") for key in loss_keys(kind)}
        assert set(row.options) <= named, kind
        assert named <= {*row.options, *NAMED_OPTIONS[kind], *LOSS_OPTIONS[kind], "aggregate", "old", "correction", "python", "options"}, kind


def test_every_option_of_a_rule_has_a_meaning() -> None:
    for name, rule in RULES.items():
        page = explain(f"rule:{name}", RULES)
        assert page == explain(name, RULES)
        for option, (what, meaning) in rule.words.items():
            assert re.search(rf"^  {option} .*{re.escape(what)} - {re.escape(meaning)}$", page, re.MULTILINE)
    assert all(meaning.endswith(".") and len(meaning.split()) > 3 for _, _, meaning in TYPES.values())


def test_what_the_documents_say_of_a_rule_is_on_its_page() -> None:
    page = explain("rule:math_answer", RULES)
    assert "  `math_answer`: of nested boxes the inner, whatever follows;" in page
    assert "What the sandbox protects" not in explain("rule:code_tests", RULES) and "  `code_tests`: tests are" in explain("rule:code_tests", RULES)
    assert "`exact`" not in explain("rule:exact", RULES)


def test_every_key_of_an_estimator_or_a_scorer_has_a_meaning() -> None:
    described = {key.pattern for key in keys() if key.info.description}
    assert {f"algorithm.advantage.{key}" for kind in ADVANTAGES for key in estimator_keys(kind)} <= described
    assert {f"models.scorers.NAME.{key}" for own in KEYS.values() for key in own} <= described


OTHER = {"cap": "3", "level": "sequence", "batch_normalise": "true", "band": "[0.1, 7]", "gate": "tv", "bound": "0.5"}


@pytest.mark.parametrize("kind", CORRECTION_KEYS)
def test_a_correction_has_the_knobs_that_it_may_be_given(kind: str) -> None:
    """Every key that is not among them is refused."""
    more = {"reject": "reject: {by: k1, band: [0.9, 1.1]}"}.get(kind)
    for key, value in OTHER.items():
        needed = {"gate": "bound: 0.5", "bound": "gate: tv"}.get(key)
        parts = [f"kind: {kind}", f"{key}: {value}", *(text for text in (more, needed if kind == "mask" else None) if text)]
        text = f"{BASE}algorithm: {{loss: {{correction: {{{', '.join(parts)}}}}}}}\nrollout: {{engine: vllm}}\n"
        try:
            load_text(text, env={})
            taken = True
        except RecipeError as error:
            assert f"correction.{key}  has no effect" in error.message
            taken = False
        assert taken == (key in CORRECTION_KEYS[kind]), (kind, key)


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("loss:gpso", "did you mean `loss:gspo`?"),
        ("loss:grpo", "did you mean `advantage:grpo`?"),
        ("advantage:ppo_clip", "did you mean `loss:ppo_clip`?"),
        ("advantage:groupnorm", "advantage: grpo, rloo"),
        ("correction:trunc", "did you mean `correction:truncate`?"),
        ("estimator:grpo", "did you mean `advantage:grpo`?"),
        ("nothing:zzz", "there are advantage, loss, correction, kl, scorer"),
        ("gspo", "did you mean `loss:gspo` or `preset:gspo`?"),
        ("rloo", "did you mean `advantage:rloo` or `preset:rloo`?"),
        ("rule:exat", "did you mean `rule:exact`?"),
        ("rule:gspo", "did you mean `loss:gspo`?"),
        ("loss:", "loss: ppo_clip, "),
        ("num_generations", "did you mean `rollout.samples_per_prompt`?"),
        ("kl", "did you mean a key such as `algorithm.kl`, or `kl:NAME` with one of k1, k2, k3, abs?"),
    ],
)
def test_unknown_names(topic: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        explain(topic, RULES)
    assert caught.value.hint is not None and caught.value.hint.startswith(hint) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("setting", "label"),
    [
        ("algorithm.loss.kind=grpo", "`grpo` is something else: `algorithm: {advantage: {kind: grpo}}` or `extends: [presets/grpo]`"),
        ("algorithm.loss.kind=dapo", "`dapo` is something else: `extends: [presets/dapo]`"),
        ("algorithm.advantage.kind=ppo", "`ppo` is something else: `extends: [presets/ppo]`"),
        ("algorithm.advantage.kind=gspo", "`gspo` is something else: `algorithm: {loss: {kind: gspo}}` or `extends: [presets/gspo]`"),
        ("algorithm.loss.kind=gpso", "did you mean `gspo`?"),
        ("rollout.engine=grpo", None),
    ],
)
def test_a_name_that_belongs_elsewhere(setting: str, label: str | None) -> None:
    with pytest.raises(RecipeError) as caught:
        load_text(BASE, sets=[setting])
    assert [problem.label for problem in caught.value.problems] == [label]


def test_an_option_of_another_loss_is_told() -> None:
    with pytest.raises(RecipeError) as caught:
        load_text(BASE, sets=["algorithm.loss.options={drift: 1, share: 0.1, nothing: 3}"])
    told = {problem.path.rpartition(".")[2]: problem.label for problem in caught.value.problems}
    assert told == {"drift": "`cpg` has it", "share": "`clip_cov`, `kl_cov` have it", "nothing": None}


@pytest.mark.parametrize(
    ("setting", "label"),
    [
        ("rewards.default.parts=[{rule: regex, pattern: abc}]", "an option of `regex`: `options: {pattern: abc}`"),
        ("rewards.default.parts=[{rule: math_answer, read: [boxed]}]", "an option of `math_answer`: `options: {read: ...}`"),
        ("rewards.default.parts=[{rule: exact, wieght: 2}]", "did you mean `weight`?"),
        ("algorithm.loss={kind: cpg, drift: 0.1}", "an option of `cpg`: `options: {drift: 0.1}`"),
        ("algorithm.loss.share=0.1", "an option of `clip_cov` or `kl_cov`: `options: {share: 0.1}`"),
    ],
)
def test_an_option_that_stands_beside_its_rule_or_loss(setting: str, label: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_text(BASE, sets=[setting], known_rules={name: tuple(rule.options) for name, rule in RULES.items()})
    (problem,) = [problem for problem in caught.value.problems if problem.code == "unknown-key"]
    assert problem.label == label


def test_the_overview_and_the_keys_lead_to_the_pages() -> None:
    overview = explain(None, RULES)
    assert all(f"{prefix}:NAME" in overview for prefix in (*FAMILIES, "rule"))
    assert "pages    `rft explain loss:NAME` of each" in explain("algorithm.loss.kind")
    assert "not  the key of that name: " in explain("overlong", RULES) and "`rft explain reward_shaping.overlong`" in explain("overlong", RULES)
    assert "`rft explain rule:NAME` has those of a rule" in explain("rewards.default.parts.options")
    assert "\n  drift              cpg: Coefficient of the drift" in explain("algorithm.loss.options")
    assert "`rft explain scorer:NAME` of each" in explain("models.scorers.judge.kind")


def test_defaults_are_those_of_the_kind() -> None:
    knobs = {knob.key: knob.default for knob in FAMILIES["loss"].knobs("gspo")}
    assert (knobs["algorithm.loss.clip_low"], knobs["algorithm.loss.aggregate"]) == ("0.0003", "sequence_mean")
    assert {knob.key: knob.default for knob in FAMILIES["loss"].knobs("cispo")}["algorithm.loss.clip_high"] == "needed"
    assert {knob.key: knob.default for knob in FAMILIES["scorer"].knobs("http")}["models.scorers.NAME.urls"] == "needed"


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of every row of the tables of a page whose first line begins like `heading`."""
    text = (shipped_pages() / page).read_text()
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for table in re.findall(rf"^\| {re.escape(heading)}.*\n\|[-|: ]+\n((?:\|.*\n?)+)", text, re.MULTILINE)
        for line in table.splitlines()
    ]


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "python"])
def test_the_defaults_on_a_page_of_an_estimator_are_the_sections(name: str) -> None:
    knobs = {knob.key.rpartition(".")[2]: knob.default for knob in FAMILIES["advantage"].knobs(name)}
    for keys_cell, defaults, *_ in rows_of(f"algorithms/{name}.md", "key of `algorithm.advantage`"):
        for key, default in zip(re.findall(r"`(\w+)`", keys_cell), defaults.split(", "), strict=True):
            word = default.partition(" (")[0]
            assert key in knobs, f"{name}: `{key}` is no knob"
            assert yaml.safe_load(knobs[key]) == yaml.safe_load(word), (name, key)


def test_the_table_of_losses_is_the_sections() -> None:
    """Units, aggregates and options with their defaults."""
    rows = {re.findall(r"`(\w+)`", cells[0])[0]: cells for cells in rows_of("algorithms/losses.md", "`kind`") if cells[0].strip("`") in LOSSES}
    assert set(rows) == set(LOSSES)
    for kind, (_, unit, _, aggregate, options) in rows.items():
        knobs = {knob.key.rpartition(".")[2]: knob.default for knob in FAMILIES["loss"].knobs(kind)}
        assert aggregate.partition(",")[0] == knobs["aggregate"], kind
        assert {"token": "token", "answer": "sequence"}[unit] == LOSSES[kind].unit or kind == "python", kind
        if kind != "python":
            written = {name: yaml.safe_load(value) for name, value in re.findall(r"`(\w+)` ([\w.-]+)", options)}
            assert {name: float(value) if isinstance(value, str) else value for name, value in written.items()} == LOSS_OPTIONS[kind], kind


def test_the_table_of_rules_has_every_option() -> None:
    text = (shipped_pages() / "rewards.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([^|]*) \|$", text, re.MULTILINE)
    told = {name: set(re.findall(r"`(\w+)`", options)) for name, options in rows if name in RULES}
    assert {name: set(rule.options) - {"after"} for name, rule in RULES.items()} == {name: found & set(TYPES) for name, found in told.items()}

"""Scorers of a plan on one rank: loaded once, moved when idle, judged by the hf engine, and the same for any company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rftcli.builtin import builtin_path
from rftcli.errors import UsageError
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts, ScorerFacts
from rftcli.plan.plan import Plan
from rftcli.recipe.load import load_text
from rftcli.rewards.scorers.desk import Desk
from rftcli.rewards.scorers.view import View
from rftcli.runtime import scorers as made
from rftcli.runtime.judges import NO_JUDGES
from rftcli.runtime.scorers import fill_desk
from rftcli.runtime.world import SoloWorld

QUICKSTART = str(builtin_path("quickstart"))
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random reward model with three heads over the quickstart's backbone and words."""
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(QUICKSTART)
    config.num_labels, config.initializer_range = 3, 0.3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(QUICKSTART).save_pretrained(folder)
    return str(folder)


def plan_of(scorers: dict[str, str], ranks: int = 1, **facts: Any) -> Plan:
    sets = [f"models.scorers.{name}={text}" for name, text in scorers.items()]
    parts = ", ".join(f"{{model: {name}}}" for name in scorers)
    text = f"models: {{policy: {{path: org/m}}}}\ndata: {{train: {{path: t.jsonl}}}}\nrewards: {{default: [{parts}]}}\ntrain: {{steps: 1}}"
    found = Facts(machine=MachineFacts(cores=1, memory_gib=4.0), model=ModelFacts(path="m"), ranks=ranks)
    return compile_plan(load_text(text, sets=sets, env={}).recipe, found, name="n", search_path="/", policy_path="m", scorers=facts)


def view(text: str, prompt: str = "Q: 1+2\nA:") -> View:
    return View(prompt=prompt, messages=(), completion=text, reference="3", label="default", columns={}, place="row")


Made = Callable[..., dict[str, Any]]


@pytest.fixture
def made_of(tmp_path: Path) -> Made:
    """Name -> scorer, of recipe texts."""

    def make(plan: Plan, warn: Callable[[str, str], None] = lambda code, text: None) -> dict[str, Any]:
        desk = Desk(spec.name for spec in plan.scorers)
        fill_desk(desk, plan, SoloWorld(), CPU, tmp_path / "scores", [tmp_path], AutoTokenizer.from_pretrained(QUICKSTART), warn, NO_JUDGES)
        return desk._scorers

    return make


def by_template(tokenizer: Any, *turns: str) -> dict[str, torch.Tensor]:
    """User and assistant in turn, as the checkpoint's chat template writes them."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=len(turns) == 1, return_tensors="pt", return_dict=True)


TEXTS = [" #### 3", " 1+2=3 #### 3", " 4", " #### 12345", " 3"]


def test_a_classifier_scores_as_a_plain_forward(reward_model: str, made_of: Made) -> None:
    texts = f"{{kind: classifier, path: {reward_model}, head: '0.5*h[0] - h[2]'}}"
    scorer = made_of(plan_of({"c": texts}))["c"]
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            out = model(**by_template(tokenizer, "Q: 1+2\nA:", text)).logits[0].double()
        expected.append(float(0.5 * out[0] - out[2]))
    together = scorer.score([view(text) for text in TEXTS])
    assert together == pytest.approx(expected, abs=1e-5)
    assert [scorer.score([view(text)])[0] for text in TEXTS] == pytest.approx(expected, abs=1e-5)
    assert len(set(together)) == len(TEXTS)


def test_passes_are_cut_by_tokens(reward_model: str, made_of: Made) -> None:
    many, few = (
        made_of(plan_of({"c": f"{{kind: classifier, path: {reward_model}, batch_tokens: {budget}}}"}))["c"] for budget in (16384, 40)
    )
    assert few.score([view(text) for text in TEXTS]) == pytest.approx(many.score([view(text) for text in TEXTS]), abs=1e-5)


def test_a_checkpoint_under_several_names_is_loaded_once(reward_model: str, made_of: Made) -> None:
    plan = plan_of({
        "a": f"{{kind: classifier, path: {reward_model}}}", "b": f"{{kind: classifier, path: {reward_model}, head: 1}}",
        "c": f"{{kind: classifier, path: {reward_model}, dtype: bfloat16}}",
    })  # fmt: skip
    found = made_of(plan)
    assert found["a"]._held is found["b"]._held and found["a"]._held is not found["c"]._held
    one, other = (found[name].score([view(" 3")])[0] for name in "ab")
    assert one != other and found["c"].score([view(" 3")])[0] == pytest.approx(one, abs=0.1)


def test_a_scorer_that_waits_elsewhere_is_moved_for_its_work(reward_model: str, made_of: Made) -> None:
    plan = plan_of({"c": f"{{kind: classifier, path: {reward_model}}}"})
    (spec,) = plan.scorers
    plan = replace(plan, scorers=(replace(spec, weights=replace(spec.weights, offload=True)),))
    scorer, moves = made_of(plan)["c"], []
    inner = scorer._held.module

    class Watched(torch.nn.Module):
        def to(self, device: Any) -> Any:
            moves.append(str(device))
            return inner.to(device)

        def forward(self, **inputs: Any) -> Any:
            moves.append("forward")
            return inner(**inputs)

    scorer._held.module = Watched()
    scorer.score([view(" 3")])
    assert moves == ["cpu", "forward", "cpu"]
    scorer.score([])
    assert len(moves) == 3  # nothing to do, nothing moved


def test_long_texts_are_errors_or_cut_and_counted(reward_model: str, made_of: Made) -> None:
    said: list[tuple[str, str]] = []
    refusing = made_of(plan_of({"c": f"{{kind: classifier, path: {reward_model}, max_tokens: 24}}"}))["c"]
    short, long = refusing.score([view(" 3"), view(" 3" * 30)])
    assert isinstance(short, float) and isinstance(long, ValueError) and "takes at most 24" in str(long)
    plan = plan_of({"c": f"{{kind: classifier, path: {reward_model}, max_tokens: 24, overlong: cut_left}}"})
    cutting = made_of(plan, lambda code, text: said.append((code, text)))["c"]
    assert cutting.collective
    for _ in range(3):
        assert all(isinstance(value, float) for value in cutting.score([view(" 3"), view(" 3" * 30)]))
    assert said == [
        ("scorer_cut", f"scorer `c`: {count} texts so far lost their beginning beyond 24 tokens") for count in (1, 2)
    ]  # told again when it has doubled


def test_a_head_that_is_not_there(reward_model: str, made_of: Made) -> None:
    with pytest.raises(UsageError, match=r"scorer `c`: head `h\[3\]` reads h\[3\]"):
        made_of(plan_of({"c": f"{{kind: classifier, path: {reward_model}, head: 3}}"}))


def test_arithmetic_that_fails_is_an_error_of_its_row(reward_model: str, made_of: Made) -> None:
    (value,) = made_of(plan_of({"c": f"{{kind: classifier, path: {reward_model}, head: 'h[0]/(h[1]-h[1])'}}"}))["c"].score([view(" 3")])
    assert isinstance(value, ValueError) and "division by zero" in str(value)


JUDGE = f"kind: generative, path: {QUICKSTART}, prompt: '{{{{ prompt }}}}{{{{ completion }}}}'"


def test_a_judge_replies_as_the_model_generates(made_of: Made) -> None:
    """Greedy replies are those of transformers' own generate, whatever the batch."""
    judge = made_of(plan_of({"j": f"{{{JUDGE}, score: {{regex: '(\\d+)', scale: 0.1}}, max_new_tokens: 8}}"}))["j"]
    tokenizer, model = AutoTokenizer.from_pretrained(QUICKSTART), AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32).eval()
    questions = ["", " 1", " 2+3", " ####"]
    expected: list[float | None] = []
    for text in questions:
        ids = by_template(tokenizer, "Q: 1+2\nA:" + text)
        with torch.no_grad():
            out = model.generate(**ids, max_new_tokens=8, do_sample=False)
        reply = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        numbers = "".join(letter if letter.isdigit() else " " for letter in reply).split()
        expected.append(float(numbers[-1]) * 0.1 if numbers else None)
    found = judge.score([view(text) for text in questions])
    assert [value if isinstance(value, float) else None for value in found] == pytest.approx(expected)
    assert any(value is not None for value in expected)
    alone = [judge.score([view(text)])[0] for text in questions]
    assert [str(value) for value in alone] == [str(value) for value in found]  # bit for bit


def test_a_judges_samples_follow_from_the_question(made_of: Made) -> None:
    text = f"{{{JUDGE}, score: {{regex: '(\\d)'}}, max_new_tokens: 12, temperature: 1.0, samples: 4}}"
    judge = made_of(plan_of({"j": text}))["j"]
    questions = [view(" ####"), view(" 1+2=3 ####"), view(" 2 ####")]
    found, backwards = judge.score(questions), judge.score(questions[::-1])[::-1]
    assert [str(value) for value in found] == [str(value) for value in backwards]
    assert any(isinstance(value, float) and value % 1 for value in found)  # a mean of different replies


def test_a_probability_is_the_models_softmax(made_of: Made) -> None:
    raw, against = (
        made_of(plan_of({"j": f"{{{JUDGE}, score: {{token: '3'{words}}}}}"}))["j"] for words in ("", ", against: ['4', '5']")
    )
    tokenizer, model = AutoTokenizer.from_pretrained(QUICKSTART), AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32).eval()
    questions = [" ####", " 1", ""]
    for text, one, other in zip(questions, raw.score(list(map(view, questions))), against.score(list(map(view, questions))), strict=True):
        with torch.no_grad():
            logits = model(**by_template(tokenizer, "Q: 1+2\nA:" + text)).logits[0, -1].double()
        ids = {word: [token for token in range(len(tokenizer)) if tokenizer.decode([token]).strip() == word] for word in "345"}
        mass = {word: float(logits.softmax(-1)[ids[word]].sum()) for word in ids}
        assert one == pytest.approx(mass["3"], rel=1e-4) and other == pytest.approx(mass["3"] / sum(mass.values()), rel=1e-4)


def test_a_word_that_is_no_token(made_of: Made) -> None:
    with pytest.raises(UsageError, match="`unquestionably` is not one token of the judge's vocabulary"):
        made_of(plan_of({"j": f"{{{JUDGE}, score: {{token: unquestionably}}}}"}))


def test_judge_and_policy_share_nothing(made_of: Made) -> None:
    found = made_of(plan_of({"j": f"{{{JUDGE}, score: {{token: '3'}}}}", "k": f"{{{JUDGE}, score: {{regex: '(.)'}}}}"}))
    assert found["j"]._held is found["k"]._held and isinstance(found["j"], made.JudgeScorer)


def test_facts_replace_what_the_recipe_says(made_of: Made) -> None:
    facts = ScorerFacts(model=ModelFacts(path="/real", parameters=5, revision="abc"), prompt="{{ completion }}?")
    plan = plan_of({"j": "{kind: generative, path: org/j, prompt: judge.j2, score: {json: a}}"}, j=facts)
    (spec,) = plan.scorers
    assert spec.weights is not None and spec.prompt == "{{ completion }}?"
    assert (spec.weights.path, spec.weights.given, spec.weights.revision, spec.weights.parameters) == ("/real", "org/j", "abc", 5)

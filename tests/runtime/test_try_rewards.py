"""`rft rewards try` with scorers whose models are loaded in its own process: the same numbers as the model's plain forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rftcli.builtin import builtin_path
from rftcli.errors import MachineError, RecipeError, UsageError
from rftcli.runtime import prepare
from rftcli.runtime.judges import NO_JUDGES
from rftcli.runtime.try_models import load_scorers
from rftcli.runtime.try_report import Tried
from rftcli.runtime.try_rewards import try_rewards

QUICKSTART = str(builtin_path("quickstart"))
RECIPE = """\
models:
  policy: {{path: builtin:quickstart}}
  scorers:
    helpful: {{kind: classifier, path: {path}, head: 1}}
    other: {{kind: classifier, path: {path}}}
    mine: {{kind: python, python: 'scorers_to_try:Mine'}}
data: {{train: {{path: rows.jsonl, columns: {{label: kind}}}}}}
rewards:
  default: [{{model: helpful, weight: 0.5}}, {{rule: exact}}, {{model: mine, weight: 0.0}}]
  chat: [{{model: helpful}}]
train: {{steps: 1}}
"""
MODULE = """\
class Mine:
    def __init__(self, device): pass
    def score(self, rows):
        return [float(len(row["completion"])) for row in rows]
"""


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(QUICKSTART)
    config.num_labels, config.initializer_range = 2, 0.3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(QUICKSTART).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def here(tmp_path: Path, reward_model: str) -> Path:
    (tmp_path / "r.yaml").write_text(RECIPE.format(path=reward_model))
    (tmp_path / "scorers_to_try.py").write_text(MODULE)
    turns = [{"role": "user", "content": "1+3="}]
    rows: list[dict[str, Any]] = [{"prompt": "1+2=", "answer": "3", "kind": "default"}, {"prompt": turns, "answer": "4", "kind": "chat"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def tried(folder: Path, *sets: str, completions: list[dict[str, Any]] | None = None, said: list[str] | None = None) -> Tried:
    file = None if completions is None else folder / "c.jsonl"
    if file is not None:
        file.write_text("".join(json.dumps(line) + "\n" for line in completions or []))
    say = (lambda text: None) if said is None else said.append
    return try_rewards(prepare.load(folder / "r.yaml", sets), count=None, completions=file, say=say)


def forward(path: str, prompt: str, answer: str) -> float:
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    with torch.no_grad():
        return float(model(**tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)).logits[0, 1])


def test_a_classifier_is_loaded_and_scores(here: Path, reward_model: str) -> None:
    said: list[str] = []
    found = tried(here, said=said)
    first, second = (one.sample for one in found.completions)
    by_name = {part.name: part.value for part in first.parts}
    assert by_name["helpful"] == pytest.approx(forward(reward_model, "1+2=", "3"), abs=1e-5)
    assert by_name["mine"] == 1.0
    assert first.reward == pytest.approx(0.5 * forward(reward_model, "1+2=", "3") + 1.0, abs=1e-5)
    assert second.reward == pytest.approx(forward(reward_model, "1+3=", "4"), abs=1e-5)
    timed = {part.name: part.seconds is not None for part in found.parts() if part.label == "default"}
    assert timed == {"helpful": False, "exact": True, "mine": False, None: False}
    assert not found.failed and found.left_out == ()
    assert [text.partition(" (")[0] for text in said] == ["loading scorer `helpful`", "loading scorer `mine`"]  # `other` scores nothing


def test_recorded_prompts_and_given_ones_are_the_same_question(here: Path, reward_model: str) -> None:
    front = AutoTokenizer.from_pretrained(QUICKSTART).bos_token or ""
    lines = [{"completion": "5", "prompt": f"{front}1+2=", "reference": 3}, {"completion": "5", "prompt": "1+2=", "reference": 3}]
    first, second = (one.sample.reward for one in tried(here, completions=lines).completions)
    assert first == second == pytest.approx(0.5 * forward(reward_model, "1+2=", "5"), abs=1e-5)


def test_the_turns_of_a_row_are_found_by_its_id(here: Path, reward_model: str) -> None:
    own = tried(here, completions=[{"completion": "7", "prompt_id": "train:1"}]).completions[0]
    assert own.sample.completion.prompt.messages == ({"role": "user", "content": "1+3="},)
    assert own.sample.reward == pytest.approx(forward(reward_model, "1+3=", "7"), abs=1e-5)


def test_what_is_no_reward_model_is_told(here: Path) -> None:
    with pytest.raises(UsageError, match="would score at random"):
        tried(here, "models.scorers.helpful.path=builtin:quickstart")
    with pytest.raises(RecipeError, match=r"models\.scorers\.helpful\.path"):
        tried(here, f"models.scorers.helpful.path={here}")


def test_a_gpu_that_torch_does_not_see_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match="this torch sees none") as caught:
        load_scorers([], "cuda", here, lambda text: None, NO_JUDGES)
    assert caught.value.hint is not None and "CUDA_VISIBLE_DEVICES=" in caught.value.hint

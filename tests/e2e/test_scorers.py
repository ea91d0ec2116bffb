"""Whole runs with reward models, judges and services: killed and gone on with, evaluated, and with services that fail."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_services import Asked, FakeService, Reply, chat_reply

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SMALL, Command, arguments, events, steps, weights_equal, went_back


def graded(asked: Asked, number: int) -> Any:
    """A reward service: digits of the answer, after some failures that pass."""
    if number % 5 == 1:
        return Reply(status=(500, 429, 503)[number % 3], headers={"retry-after": "0"})
    pairs = zip(asked.body["query"], asked.body["prompts"], strict=True)
    digits = [sum(letter.isdigit() for letter in text[len(prompt) :]) for text, prompt in pairs]
    return {"rewards": [count / 10 for count in digits], "extra_logs": {"digits": digits, "by": "a counter"}}


def judged(asked: Asked, number: int) -> Any:
    """A judge: how long the answer is."""
    if number % 7 == 3:
        return Reply(closes=True)
    return chat_reply(f"I think ... score: {len(asked.body['messages'][0]['content'])}")


@dataclass(frozen=True)
class Run:
    path: Path
    sets: list[str]
    service: FakeService
    judge: FakeService


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from rftcli.builtin import builtin_path

    folder, quickstart = tmp_path_factory.mktemp("model"), str(builtin_path("quickstart"))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(quickstart)
    config.num_labels, config.initializer_range = 1, 0.3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(quickstart).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("scored")
    (folder / "judge.j2").write_text("Rate {{ completion }} for {{ prompt }}{% if reference %} ({{ reference }}){% endif %}")
    with FakeService(graded) as service, FakeService(judged) as judge:
        sets = arguments({
            "models.scorers.model": f"{{kind: classifier, path: {reward_model}, shard: true}}",
            "models.scorers.own": "{kind: generative, path: 'builtin:quickstart', prompt: '{{ completion }}', "
            "score: {token: '3', against: ['4', '5']}}",
            "models.scorers.far": "{kind: generative, path: any, prompt: judge.j2, score: {regex: 'score: (.+)', scale: 0.01}, cache: true, "
            f"placement: {{server: '{judge.url}/v1'}}}}",
            "models.scorers.service": f"{{kind: http, urls: ['{service.url}/score'], headers_env: {{Authorization: RM_TOKEN}}}}",
            "rewards.default": "[{rule: exact, options: {after: '####'}}, {model: model, weight: 0.1}, {model: own}, {model: far}, "
            "{model: service, weight: 0}]",
            "train.deepspeed.zero_stage": "3", "train.optimizer.lr": "1e-3",
        })  # fmt: skip
        os.environ["RM_TOKEN"] = "Bearer very-hidden"
        try:
            result = Command(folder, "train", "quickstart", "--ranks", "2", "--run-dir", "run", *SMALL, *sets).wait()
            assert result.code == 0, result
            yield Run(folder / "run", sets, service, judge)
        finally:
            del os.environ["RM_TOKEN"]


PARTS = {"exact", "model", "own", "far", "service"}


def test_every_scorer_takes_part(straight: Run) -> None:
    found = steps(straight.path)
    assert set(found) == {1, 2, 3, 4}
    for step in found.values():
        assert set(step["reward_parts"]) == PARTS and step["reward_errors"] == 0 and step["samples_dropped"] == 0
        assert step["user"] == {"service/digits": pytest.approx(10 * step["reward_parts"]["service"]["mean"])}
    lines = [json.loads(line) for line in (straight.path / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert len(lines) == 32
    for line in lines:
        parts = {name: part["value"] for name, part in line["parts"].items()}
        assert line["reward"] == pytest.approx(parts["exact"] + 0.1 * parts["model"] + parts["own"] + parts["far"])
        assert line["extra"] == {"service/by": "a counter"}
        assert 0 <= parts["own"] <= 1 and parts["service"] == pytest.approx(sum(letter.isdigit() for letter in line["completion"]) / 10)


def test_secrets_are_sent_and_written_nowhere(straight: Run) -> None:
    assert {one.headers["authorization"] for one in straight.service.asked} == {"Bearer very-hidden"}
    assert not [path for path in straight.path.rglob("*") if path.is_file() and b"very-hidden" in path.read_bytes()]


def test_the_manifest_says_what_scored(straight: Run, reward_model: Path) -> None:
    record = json.loads((straight.path / "manifest.json").read_text())["models"]["scorers"]
    assert record["model"] == {"kind": "classifier", "path": str(reward_model), "revision": None}
    assert record["service"]["urls"] == [f"{straight.service.url}/score"] and record["far"]["model"] == "any"


def test_a_scored_run_goes_on_bit_for_bit_and_asks_nothing_twice(rft: Callable[..., Command], tmp_path: Path, straight: Run) -> None:
    run = tmp_path / "run"
    went_back(straight.path, run, 2)
    judged_before, served_before = len(straight.judge.asked), len(straight.service.asked)
    result = rft("resume", "run").wait()
    assert result.code == 0, result
    assert weights_equal(run / "final", straight.path / "final")
    assert steps(run)[4] == steps(straight.path)[4]
    assert len(straight.judge.asked) == judged_before  # every reply was kept
    assert len(straight.service.asked) > served_before


def test_a_checkpoint_is_evaluated_by_the_same_scorers(rft: Callable[..., Command], straight: Run) -> None:
    result = rft("eval", str(straight.path), "--ranks", "1", "--run-dir", "eval", "--json").wait()
    assert result.code == 0, result
    found = json.loads(result.out)["evals"]["4"]["held_out"]
    assert found["mean@1"] == pytest.approx(events(straight.path, "eval")[-1]["sets"]["held_out"]["mean@1"], abs=1e-6)


def test_rewards_of_evaluation_have_scorers_of_their_own(rft: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "lengths.py").write_text(
        "class Lengths:\n    def __init__(self, device, per): self.per = per\n"
        "    def score(self, batch): return [len(item['completion']) / self.per for item in batch]\n"
    )
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "extends: [quickstart]\nmodels: {scorers: {lengths: {kind: python, python: 'lengths:Lengths', options: {per: 100}}}}\n"
        "eval: {rewards: {default: [{model: lengths}]}}\ntrain: {steps: 1}\n"
    )
    result = rft("train", "mine.yaml", "--ranks", "2", "--run-dir", "run", *SMALL, "--set", "train.steps=1").wait()
    assert result.code == 0, result
    (_, last) = events(tmp_path / "run", "eval")
    assert 0.01 < last["sets"]["held_out"]["mean@1"]["value"] < 0.5
    assert set(steps(tmp_path / "run")[1]["reward_parts"]) == {"answer"}
    assert list((tmp_path / "run" / "checkpoints").rglob("reward_sources/lengths.py"))
    (tmp_path / "lengths.py").unlink()
    result = rft("eval", "run", "--ranks", "1", "--run-dir", "eval").wait()
    assert result.code == 0, result


def test_a_service_that_is_no_use_ends_the_run(rft: Callable[..., Command], tmp_path: Path) -> None:
    with FakeService(lambda asked, number: {"rewards": [1.0]}) as service:
        sets = {"models.scorers.s": f"{{kind: http, urls: ['{service.url}']}}", "rewards.default": "[{model: s}]", "eval.before_training": "false"}
        result = rft("train", "quickstart", "--ranks", "2", "--run-dir", "run", *SMALL, *arguments(sets)).wait()
    assert result.code == 1 and "of the last 32 samples could not be scored" in result.err and "s: ServiceError" in result.err


def test_what_is_wrong_is_told_before_anything_starts(rft: Callable[..., Command], tmp_path: Path) -> None:
    sets = {
        "models.scorers.a": "{kind: classifier, path: /nowhere}",
        "models.scorers.b": "{kind: http, urls: ['http://x'], headers_env: {Authorization: SURELY_NOT_SET}}",
        "rewards.default": "[{model: a}, {model: b}]",
    }
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", *arguments(sets)).wait()
    assert result.code == 2 and not (tmp_path / "run").exists()
    assert "models.scorers.a.path  /nowhere does not exist" in result.err and "`SURELY_NOT_SET` is not set" in result.err
    sets = {
        "models.scorers.a": "{kind: classifier, path: builtin:quickstart, head: 'h[0'}",
        "models.scorers.b": "{kind: generative, path: builtin:quickstart, prompt: '{{ answer }}', score: {json: a}}",
        "models.scorers.c": "{kind: python, python: 'nothing_there:Mine'}",
        "rewards.default": "[{model: a}, {model: b}, {model: c}]",
    }
    result = rft("validate-recipe", "quickstart", *arguments(sets)).wait()
    assert result.code == 2
    for text in ("models.scorers.a.head  `h[0` is no expression", "reads `answer`, which no completion has", "there is no module `nothing_there`"):
        assert text in result.err


def test_a_model_without_a_head_ends_the_run_before_its_first_step(rft: Callable[..., Command], tmp_path: Path) -> None:
    sets = {"models.scorers.a": "{kind: classifier, path: builtin:quickstart}", "rewards.default": "[{model: a}]"}
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", *SMALL, *arguments(sets)).wait()
    assert result.code in (1, 2) and "it would score at random" in result.err

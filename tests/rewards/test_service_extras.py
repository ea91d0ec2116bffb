"""What a service says beside its scores goes the way of what a function logs: into the step's metrics and the samples, through the cache too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_services import Asked, FakeService

from rftcli.rewards.scorers.cache import Cache
from rftcli.rewards.scorers.desk import Desk
from rftcli.rewards.scorers.http import HttpScorer
from rftcli.rewards.scorers.service import Service
from rftcli.rewards.scorers.spec import ScorerSpec, ServiceSpec
from rftcli.rewards.spec import PartSpec
from rftcli.rewards.table import RewardTable
from rftcli.stages.records import record, reward_metrics, sample_line
from rftcli.types import Completion, FinishReason, Prompt, ScoredSample, TokenTrace


def answer(asked: Asked, number: int) -> Any:
    """Scores and, beside them: a number a row, a number that one row lacks, a text a row, one number of all, too few numbers, no number."""
    texts = [text.removeprefix("2+2=") for text in asked.body["query"]]
    return {
        "rewards": [1.0] * len(texts),
        "extra_logs": {
            "length": [len(text) for text in texts], "rare": [8.0 if "bb" in text else None for text in texts],
            "verdict": [f"is {text}" for text in texts],
            "version": 7, "short": [1.0] * (len(texts) + 1), "broken": [float("nan")] * len(texts),
        },
    }  # fmt: skip


def completion(text: str, sample: int) -> Completion:
    prompt = Prompt(draw=0, row=0, row_id="r0", source="s", label="math", text="2+2=", token_ids=(1,))
    return Completion(
        prompt=prompt, sample=sample, text=text, text_with_special=text, trace=TokenTrace(ids=(5,)), finish=FinishReason.STOP, policy_version=0
    )  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[FakeService]:
    with FakeService(answer) as service:
        yield service


def scored(server: FakeService, folder: Path | None = None, **part: Any) -> list[ScoredSample]:
    service = ServiceSpec(urls=(server.url,), timeout_seconds=5.0, retries=0, concurrency=2, per_minute=None, headers_env={})
    spec = ScorerSpec(name="s", kind="http", cache=folder is not None, service=service, preset="openrlhf", batch_size=3)
    scorer = HttpScorer(Service("s", service, environ={}), preset="openrlhf", score_field="rewards", batch_size=3)
    desk = Desk(["s"])
    desk.fill({"s": scorer}, {} if folder is None else {"s": Cache(folder, spec, 0)})
    with closing(RewardTable({"math": (PartSpec(name="helpful", kind="model", target="s", **part),)}, desk=desk)) as table:
        found = table.score(completion(text, index) for index, text in enumerate(("a", "bb", "cccc")))
        return sorted(found, key=lambda sample: sample.completion.sample)


def test_numbers_are_metrics_of_the_step(server: FakeService) -> None:
    metrics = reward_metrics([record(sample) for sample in scored(server)])
    assert metrics["user"] == {"helpful/length": pytest.approx(7 / 3), "helpful/rare": 8.0, "helpful/version": 7.0}
    assert metrics["reward_mean"] == 1.0 and metrics["reward_errors"] == 0


def test_all_of_it_is_in_the_samples(server: FakeService) -> None:
    line = sample_line(scored(server)[1], step=1, advantage=None)
    assert line["metrics"] == [["helpful/length", 2.0], ["helpful/rare", 8.0], ["helpful/version", 7.0]]
    assert line["extra"] == {"helpful/verdict": "is bb", "helpful/short": "4 values came back for 3 rows", "helpful/broken": "nan"}


def test_what_was_kept_says_the_same(server: FakeService, tmp_path: Path) -> None:
    fresh = scored(server, tmp_path)
    asked = len(server.asked)
    again = scored(server, tmp_path)
    assert len(server.asked) == asked
    for one, other in zip(fresh, again, strict=True):
        assert (one.metrics, one.extra, one.reward) == (other.metrics, other.extra, other.reward) and one.metrics


def test_a_clip_of_the_part_is_of_its_score_alone(server: FakeService) -> None:
    found = scored(server, clip=(0.0, 0.5))
    assert [sample.reward for sample in found] == [0.5] * 3
    assert [dict(sample.metrics)["helpful/length"] for sample in found] == [1.0, 2.0, 4.0]

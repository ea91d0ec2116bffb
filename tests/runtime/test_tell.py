"""The step line from several updates, and files that every rank writes a part of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_threads import ThreadWorld, on_ranks

from rftcli.plan.plan import SamplesPlan
from rftcli.runtime.parts import PartFile, merge_parts
from rftcli.runtime.rundir import RunDir
from rftcli.runtime.tell import all_records, step_metrics, update_metrics, write_samples
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import Collected
from rftcli.stages.credit import Credited
from rftcli.stages.records import SampleRecord
from rftcli.types import Completion, FinishReason, Group, Prompt, ScoredSample, TokenTrace, Update


def update(tokens: int, applied: bool = True, grad_norm: float | None = 1.0, lr: float = 0.1, **metrics: float) -> Update:
    return Update(applied=applied, policy_version=1, lr=lr, grad_norm=grad_norm, metrics=metrics, tokens=tokens)


def test_means_are_weighted_with_trained_tokens() -> None:
    found = update_metrics(
        [
            update(30, loss=1.0, policy_loss=1.0, kl=0.1, ratio_mean=1.0, ratio_max=1.5, clip_low_fraction=0.0, grad_norm=2.0, lr=0.1),
            update(10, loss=5.0, policy_loss=3.0, kl=0.5, ratio_mean=1.4, ratio_max=3.0, clip_low_fraction=1.0, grad_norm=0.5, lr=0.2),
        ]
    )
    assert found == {
        "updates_skipped": 0, "loss": pytest.approx(2.0), "policy_loss": pytest.approx(1.5), "kl": pytest.approx(0.2),
        "ratio_mean": pytest.approx(1.1), "clip_low_fraction": pytest.approx(0.25), "ratio_max": 3.0, "grad_norm": 2.0, "lr": 0.2,
    }  # fmt: skip


def test_what_was_measured_weighs_what_passed() -> None:
    """Means are over the tokens that went through the model, however they lie in updates; the loss is over all that were to be trained."""
    found = update_metrics(
        [
            replace(update(100, loss=1.0, entropy=1.0, ratio_mean=1.0, sampler_gap_mean=0.1, sampler_gap_max=0.5, idle_fraction=0.0), passed=100),
            replace(update(100, loss=2.0, entropy=2.0, ratio_mean=1.2, sampler_gap_mean=0.4, sampler_gap_max=0.5, idle_fraction=0.5), passed=50),
        ]
    )
    assert (found["loss"], found["idle_fraction"]) == (1.5, 0.25)
    assert found["entropy"] == pytest.approx((100 * 1.0 + 50 * 2.0) / 150)
    assert found["ratio_mean"] == pytest.approx((100 * 1.0 + 50 * 1.2) / 150)
    assert found["sampler_logprob_gap"]["mean"] == pytest.approx((100 * 0.1 + 50 * 0.4) / 150)


def test_one_update_is_told_as_it_is() -> None:
    metrics = {"loss": 0.1, "policy_loss": 0.1, "entropy": 2.0, "kl_update": 0.0, "ratio_mean": 1.0, "ratio_std": 0.0, "clip_high_fraction": 0.0}
    found = update_metrics([update(7, **metrics)])
    assert found == {"updates_skipped": 0, **{name: pytest.approx(value) for name, value in metrics.items()}, "grad_norm": 1.0, "lr": 0.1}


def test_an_update_that_trained_nothing_has_no_weight() -> None:
    found = update_metrics([update(10, loss=2.0), update(0, applied=False, grad_norm=None)])
    assert found["loss"] == 2.0 and found["updates_skipped"] == 1 and found["grad_norm"] == 1.0


def test_a_skipped_update_is_counted_and_seen() -> None:
    found = update_metrics([update(10, loss=2.0), update(10, applied=False, grad_norm=None, loss=float("nan"))])
    assert found["updates_skipped"] == 1 and found["loss"] != found["loss"]


def test_what_does_not_apply_is_absent() -> None:
    assert update_metrics([]) == {"updates_skipped": 0}
    assert update_metrics([update(0, applied=False, grad_norm=None)]) == {"updates_skipped": 1, "lr": 0.1}


def test_the_gap_to_the_sampler_is_one_entry() -> None:
    found = update_metrics([update(30, sampler_gap_mean=0.1, sampler_gap_max=0.2), update(10, sampler_gap_mean=0.5, sampler_gap_max=0.9)])
    assert found["sampler_logprob_gap"] == {"mean": pytest.approx(0.2), "max": 0.9}
    assert not {"sampler_gap_mean", "sampler_gap_max"} & set(found)


def line(draw: int, sample: int, **more: Any) -> Mapping[str, Any]:
    return {"draw": draw, "sample": sample, **more}


def test_parts_are_merged_in_order(tmp_path: Path) -> None:
    target = tmp_path / "step_000001.jsonl"
    parts = [[line(3, 1), line(3, 0)], [line(1, 0), line(10, 0)], []]
    on_ranks(3, lambda world: merge_parts(world, target, parts[world.rank]))
    assert target.read_text() == '{"draw": 1, "sample": 0}\n{"draw": 3, "sample": 0}\n{"draw": 3, "sample": 1}\n{"draw": 10, "sample": 0}\n'
    assert list(tmp_path.iterdir()) == [target]  # no part is left


def test_sets_come_first(tmp_path: Path) -> None:
    target = tmp_path / "e.jsonl"
    merge_parts(SoloWorld(), target, [line(0, 0, set="b"), line(1, 0, set="a"), line(0, 0, set="a")])
    assert [(item["set"], item["draw"]) for item in map(json.loads, target.read_text().splitlines())] == [("a", 0), ("a", 1), ("b", 0)]


@pytest.mark.parametrize("text", ["two\nlines\r\nand\rmore", "\u2028\u2029\x85", "torn \ud83d emoji", "\x00\x1b[2J", 'quote " and \\ud800', "üß漢"])
def test_any_text_is_one_line_that_comes_back(tmp_path: Path, text: str) -> None:
    target = tmp_path / "s.jsonl"
    merge_parts(SoloWorld(), target, [line(1, 0, completion=text), line(0, 0, completion="first")])
    lines = target.read_bytes().decode("utf-8").split("\n")
    assert len(lines) == 3 and lines[2] == ""
    assert json.loads(lines[1])["completion"] == text


def test_columns_that_are_no_json_are_written_as_text(tmp_path: Path) -> None:
    target = tmp_path / "s.jsonl"
    merge_parts(SoloWorld(), target, [line(0, 0, reference={"path": Path("/x")})])
    assert json.loads(target.read_text())["reference"] == {"path": "/x"}


def test_a_file_of_an_earlier_attempt_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "s.jsonl"
    target.write_text("old\n")
    merge_parts(SoloWorld(), target, [line(0, 0)])
    assert target.read_text() == '{"draw": 0, "sample": 0}\n'


def collected_of(draws: Sequence[int]) -> Collected:
    groups = []
    for draw in draws:
        prompt = Prompt(draw=draw, row=draw, row_id=f"n:{draw}", source="n", label="default", text="?", token_ids=(1,))
        samples = []
        for sample in range(2):
            completion = Completion(
                prompt=prompt,
                sample=sample,
                text="a",
                text_with_special="a",
                trace=TokenTrace(ids=(1, 2)),
                finish=FinishReason.STOP,
                policy_version=0,
            )
            samples.append(ScoredSample(completion=completion, parts=(), reward=float(sample)))
        groups.append(Group(prompt=prompt, samples=tuple(samples)))
    return Collected(mini_batches=(tuple(groups),), rollout_seconds=0.0, score_seconds=0.0)


def test_samples_of_all_ranks_with_their_advantages(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    advantages = {(draw, sample): draw + sample / 10 for draw in range(4) for sample in range(2) if draw != 2}

    def work(world: ThreadWorld) -> Any:
        job: Any = SimpleNamespace(world=world, run=run, plan=plan_of())
        collected = collected_of([3, 1] if world.rank == 0 else [2, 0])
        write_samples(job, 7, collected, Credited(mini_batches=(), advantages=advantages))
        return all_records(job, collected)

    first, second = on_ranks(2, work)
    order = [(draw, sample) for draw in range(4) for sample in range(2)]
    assert [(item.draw, item.sample) for item in first] == order and first == second
    lines = [json.loads(text) for text in (run.samples / "step_000007.jsonl").read_text().splitlines()]
    assert [(item["draw"], item["sample"]) for item in lines] == order
    assert [item["advantage"] for item in lines] == [advantages.get(key) for key in order]
    assert {item["step"] for item in lines} == {7}


def plan_of(every: int = 1, most: int | None = None) -> Any:
    return SimpleNamespace(samples=SamplesPlan(every=every, max=most), batch=SimpleNamespace(samples_per_prompt=2))


@pytest.mark.parametrize(("most", "draws"), [(4, [0, 1]), (5, [0, 1]), (1, [0]), (100, [0, 1, 2, 3]), (None, [0, 1, 2, 3])])
def test_at_most_so_many_completions_in_whole_groups(tmp_path: Path, most: int | None, draws: list[int]) -> None:
    """The smallest draws of all ranks: the same whoever sampled them."""
    run = RunDir(tmp_path / "run")
    run.create()

    def work(world: ThreadWorld) -> None:
        job: Any = SimpleNamespace(world=world, run=run, plan=plan_of(2, most))
        for step in (1, 2, 3):
            write_samples(job, step, collected_of([3, 1] if world.rank == 0 else [2, 0]), Credited(mini_batches=(), advantages={}))

    on_ranks(2, work)
    assert sorted(path.name for path in run.samples.iterdir()) == ["step_000001.jsonl", "step_000003.jsonl"]
    lines = [json.loads(text) for text in (run.samples / "step_000003.jsonl").read_text().splitlines()]
    assert [(item["draw"], item["sample"]) for item in lines] == [(draw, sample) for draw in draws for sample in range(2)]


def test_lines_are_on_disk_before_the_last_one_is_known(tmp_path: Path) -> None:
    """An evaluation does not hold its samples: what was written is beside the target, and in order only after the merge."""
    target = tmp_path / "e.jsonl"
    part = PartFile(SoloWorld(), target)
    for draw in range(3000, 0, -1):
        part.write(line(draw, 0, completion="x" * 100))
    beside = tmp_path / ".e.jsonl.0"
    assert not target.exists() and beside.stat().st_size > 100_000
    part.merge()
    assert [json.loads(text)["draw"] for text in target.read_text().splitlines()] == list(range(1, 3001)) and not beside.exists()


def test_the_step_lines_own_numbers() -> None:
    """Of every rank alike: advantages of the whole step, tokens of the whole run, and the seconds of the one rank that the others waited for."""
    from rftcli.runtime.build import Totals

    laps = [{"rollout": 5.0, "score": 0.0, "learn": 9.0}, {"rollout": 2.0, "score": 4.0, "learn": 1.0}, {"rollout": 3.0, "score": 0.5, "learn": 2.0}]
    laps = [{**lap, "total": sum(lap.values())} for lap in laps]

    def work(world: ThreadWorld) -> tuple[dict[str, Any], int]:
        peaks = {"rollout": 1.0 + world.rank, "learn": 9.0 - world.rank}
        job: Any = SimpleNamespace(
            world=world, totals=Totals(tokens=100), kl_coefficient=0.25, info={"parameters": 10}, device=torch.device("cpu"),
            watch=SimpleNamespace(lap=lambda: laps[world.rank], peaks=lambda: peaks),
            source=SimpleNamespace(next_draw=6, passes=lambda draw: draw / 4), roles=SimpleNamespace(policy=SimpleNamespace(version=3)),
        )  # fmt: skip
        records = [SampleRecord(draw=0, sample=n, label="a", reward=n, parts=(), tokens=2, prompt_tokens=3, finish=FinishReason.STOP) for n in (0, 1)]
        credited = Credited(mini_batches=(), advantages={(0, 0): -1.0, (0, 1): 3.0}, metrics={"value_mean": 0.5})
        found = step_metrics(job, records, credited, [update(4, loss=1.0)])
        return found, job.totals.tokens

    results = on_ranks(3, work)
    for found, total in results:
        assert found == results[0][0] and total == 110
    found = results[0][0]
    assert found["seconds"] == laps[1]  # 6 s of rollout and scores, although another rank learnt longer
    assert found["memory_gib"] == {"rollout": 3.0, "learn": 9.0}
    told = ("advantage_mean", "advantage_std", "advantage_min", "advantage_max", "tokens", "tokens_total", "policy_version", "data_passes")
    assert [found[name] for name in told] == [1.0, pytest.approx(8**0.5), -1.0, 3.0, 10, 110, 3, 1.5]
    assert (found["kl_coefficient"], found["value_mean"], found["loss"], found["groups"]) == (0.25, 0.5, 1.0, 1)

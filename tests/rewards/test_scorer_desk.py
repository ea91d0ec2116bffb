"""Scorers behind the reward table: who is asked, how often, when, and what an error does; replies that are kept."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from rftcli.errors import RftError, UsageError
from rftcli.rewards.scorers.cache import Cache
from rftcli.rewards.scorers.desk import Desk
from rftcli.rewards.scorers.own import OwnScorer
from rftcli.rewards.scorers.spec import ScorerSpec, ServiceSpec
from rftcli.rewards.scorers.verdict import Verdict
from rftcli.rewards.scorers.view import View, view_of
from rftcli.rewards.spec import PartSpec
from rftcli.rewards.table import RewardTable
from rftcli.types import Completion, FinishReason, Prompt, ScoredSample, TokenTrace


def completion(text: str, draw: int = 0, sample: int = 0, label: str = "math", prefill: str = "", **prompt: Any) -> Completion:
    asked = Prompt(
        draw=draw, row=0, row_id=f"r{draw}", source="s", label=label, text=f"<s>2+2={prefill}", token_ids=(1,), prefill=prefill, reference="4",
        **prompt,
    )  # fmt: skip
    return Completion(
        prompt=asked, sample=sample, text=text, text_with_special=text + "</s>", trace=TokenTrace(ids=(5,)), finish=FinishReason.STOP,
        policy_version=0,
    )  # fmt: skip


class Lengths:
    """A local scorer: the length of the answer; `bad` answers are errors."""

    remote: Literal[False] = False

    def __init__(self, collective: bool = False) -> None:
        self.collective = collective
        self.calls: list[list[str]] = []
        self.closed = 0

    def key(self, view: View) -> str:
        if view.completion == "no key":
            raise ValueError("cannot be asked about")
        return view.completion

    def score(self, views: Sequence[View]) -> list[float | Exception]:
        self.calls.append([view.completion for view in views])
        return [ValueError("bad answer") if "bad" in view.completion else float(len(view.completion)) for view in views]

    def close(self) -> None:
        self.closed += 1


class Remote:
    """A service that answers when told to."""

    remote: Literal[True] = True

    def __init__(self) -> None:
        self.asked: list[tuple[View, Future[float]]] = []
        self.flushed = threading.Event()

    def key(self, view: View) -> str:
        return view.completion

    def submit(self, view: View) -> Future[float]:
        future: Future[float] = Future()
        self.asked.append((view, future))
        return future

    def flush(self) -> None:
        for view, future in self.asked:
            if not future.done():
                future.set_result(10.0 * len(view.completion))

    def close(self) -> None:
        """Nothing to end."""


def part(name: str, weight: float = 1.0, **changes: Any) -> PartSpec:
    return PartSpec(name=name, kind="model", target=name, weight=weight, **changes)


def desk_of(caches: dict[str, Cache] | None = None, **scorers: Any) -> Desk:
    desk = Desk(scorers)
    desk.fill(scorers, caches, front="<s>")
    return desk


def scored(table: RewardTable, completions: Iterable[Completion]) -> dict[int, ScoredSample]:
    return {sample.completion.sample: sample for sample in table.score(completions)}


EXACT = PartSpec(name="exact", kind="rule", target="exact", weight=1.0)


def test_parts_of_models_and_rules_make_one_reward() -> None:
    local = Lengths()
    with closing(RewardTable({"math": (EXACT, part("local", 0.5))}, desk=desk_of(local=local))) as table:
        found = scored(table, [completion("4", sample=0), completion("fourty", sample=1)])
    assert (found[0].reward, found[1].reward) == (1.5, 3.0)
    assert [score.name for score in found[0].parts] == ["exact", "local"]


def test_a_model_sees_only_rows_that_name_it_and_each_text_once() -> None:
    one, other = Lengths(), Lengths()
    labels = {"math": (part("one"),), "chat": (EXACT, part("other", 0.0))}
    with closing(RewardTable(labels, desk=desk_of(one=one, other=other))) as table:
        rows = [completion("a", sample=0), completion("a", sample=1), completion("bbb", sample=2), completion("c", sample=3, label="chat")]
        found = scored(table, rows)
        assert one.calls == [["a", "bbb"]] and other.calls == [["c"]]
        assert [found[index].reward for index in range(4)] == [1.0, 1.0, 3.0, 0.0]
        assert found[3].parts[1].value == 1.0  # weight 0: logged
        scored(table, [completion("a")])
        assert one.calls[1:] == [["a"]]  # another round asks again


def test_a_scorer_that_needs_every_rank_takes_part_without_rows() -> None:
    sharded, alone = Lengths(collective=True), Lengths()
    with closing(RewardTable({"math": (EXACT, part("sharded"), part("alone"))}, desk=desk_of(sharded=sharded, alone=alone))) as table:
        assert scored(table, []) == {}
        assert sharded.calls == [[]] and alone.calls == []


def test_services_are_asked_and_rules_run_while_the_engine_still_generates() -> None:
    service, seen = Remote(), []

    def engine() -> Iterator[Completion]:
        yield completion("4", sample=0)
        assert len(service.asked) == 1  # before the next one is generated
        service.asked[0][1].set_result(7.0)
        yield completion("44", sample=1)
        seen.append(len(service.asked))

    with closing(RewardTable({"math": (EXACT, part("service"))}, desk=desk_of(service=service))) as table:
        found = scored(table, engine())
    assert seen == [2] and (found[0].reward, found[1].reward) == (8.0, 20.0)


@pytest.mark.parametrize(("on_error", "reward"), [("fail_sample", None), ("abstain", 1.0)])
def test_errors_go_by_the_parts_own_policy(on_error: str, reward: float | None) -> None:
    with closing(RewardTable({"math": (EXACT, part("local", on_error=on_error))}, desk=desk_of(local=Lengths()))) as table:
        found = scored(table, [completion("4", sample=0), completion("bad", sample=1), completion("no key", sample=2)])
    assert found[0].reward == 2.0
    for index in (1, 2):
        assert found[index].reward == (reward if reward is None else 0.0) and found[index].parts[1].value is None
    assert found[1].parts[1].error == "ValueError: bad answer" and found[2].parts[1].error == "ValueError: cannot be asked about"


def test_an_error_may_stop_the_run_with_part_and_row() -> None:
    text = r"reward part `local` failed on row r3 \(draw 3, sample 0\): ValueError: bad answer"
    table = RewardTable({"math": (part("local", on_error="stop"),)}, desk=desk_of(local=Lengths()))
    with closing(table), pytest.raises(RftError, match=text):
        scored(table, [completion("bad", draw=3)])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_errors(value: float) -> None:
    class Broken(Lengths):
        def score(self, views: Sequence[View]) -> list[float | Exception]:
            return [value] * len(views)

    with closing(RewardTable({"math": (part("local"),)}, desk=desk_of(local=Broken()))) as table:
        (found,) = scored(table, [completion("a")]).values()
    assert found.reward is None and "expected a finite number" in str(found.parts[0].error)


def test_two_tables_share_a_desk() -> None:
    local = Lengths()
    desk = desk_of(local=local)
    training, evaluation = (RewardTable({"math": (part("local"),)}, desk=desk) for _ in range(2))
    scored(training, [completion("a")])
    scored(evaluation, [completion("a")])
    training.close()
    evaluation.close()
    assert local.closed == 1 and local.calls == [["a"], ["a"]]


def test_a_part_without_its_scorer() -> None:
    with pytest.raises(UsageError, match="names the scorer `local`, which is not there"):
        RewardTable({"math": (part("local"),)})


def test_what_a_scorer_is_shown() -> None:
    asked = completion("4", prefill="<think>", messages=({"role": "user", "content": "2+2="},))
    view = view_of(asked, "<think>4", front="<s>")
    assert (view.prompt, view.completion, view.reference, view.label) == ("2+2=", "<think>4", "4", "math")
    assert [turn["role"] for turn in view.turns] == ["user", "assistant"] and view.turns[1]["content"] == "<think>4"
    plain = view_of(completion("4"), "4", front="<s>")
    assert plain.turns == ({"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"})


SERVICE = ServiceSpec(urls=("http://x",), timeout_seconds=1.0, retries=0, concurrency=1, per_minute=None, headers_env={})
SPEC = ScorerSpec(name="local", kind="http", cache=True, service=SERVICE, preset="openrlhf")


def test_replies_are_kept_over_rounds_and_restarts(tmp_path: Path) -> None:
    for attempt, asked in enumerate((["a", "bb", "bad"], ["bad"])):
        local = Lengths()
        with closing(RewardTable({"math": (part("local"),)}, desk=desk_of({"local": Cache(tmp_path, SPEC, 0)}, local=local))) as table:
            for _ in range(2):
                found = scored(table, [completion(text, sample=index) for index, text in enumerate(("a", "bb", "bad"))])
                assert [found[index].reward for index in range(3)] == [1.0, 2.0, None]
        assert local.calls == [asked, ["bad"]], attempt  # what failed is asked again


def test_another_rank_finds_what_was_kept_and_another_scorer_does_not(tmp_path: Path) -> None:
    Cache(tmp_path, SPEC, 0).put("a", Verdict(value=1.5, extra={"length": 2.0}))
    assert Cache(tmp_path, SPEC, 1).get("a") == Verdict(value=1.5, extra={"length": 2.0})
    elsewhere = replace(SPEC, service=replace(SERVICE, urls=("http://y",), retries=9))
    assert Cache(tmp_path, elsewhere, 0).get("a") == Verdict(value=1.5, extra={"length": 2.0})
    assert Cache(tmp_path, replace(SPEC, score_field="scores"), 0).get("a") is None


def test_a_line_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    Cache(tmp_path, SPEC, 0).put("a", Verdict(value=1.0))
    file = tmp_path / "local.rank_0.jsonl"
    whole = file.read_text()
    file.write_text(whole + whole[:20])
    cache = Cache(tmp_path, SPEC, 0)
    cache.put("b", Verdict(value=2.0))
    again = Cache(tmp_path, SPEC, 0)
    assert (again.get("a"), again.get("b"), again.get("c")) == (Verdict(value=1.0), Verdict(value=2.0), None)
    file.write_text(whole + json.dumps(["x", None]) + "\n" + json.dumps([1, 2.0]) + "\n")
    assert Cache(tmp_path, SPEC, 0).get("a") == Verdict(value=1.0)


OWN = """
class Good:
    def __init__(self, device, scale=1.0): self.device, self.scale, self.closed = device, scale, False
    def score(self, batch): return [self.scale * len(item["completion"]) for item in batch]
class Short(Good):
    def score(self, batch): return [1.0]
class Raises(Good):
    def score(self, batch): raise RuntimeError("no memory")
class Odd(Good):
    def score(self, batch): return [None, float("nan"), "1"][:len(batch)]
class Cannot:
    def __init__(self, device): raise OSError("no weights")
    def score(self, batch): return []
class Nothing: ...
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "own_scorers_for_tests.py").write_text(OWN)
    return tmp_path


def views(count: int) -> list[View]:
    return [view_of(completion("x" * (index + 1)), "x" * (index + 1)) for index in range(count)]


def test_a_class_of_ones_own(module: Path) -> None:
    scorer = OwnScorer("own_scorers_for_tests:Good", {"scale": 2.0}, "cpu", [module])
    assert scorer.score(views(3)) == [2.0, 4.0, 6.0] and scorer.score([]) == []
    assert scorer.key(views(2)[0]) != scorer.key(views(2)[1])
    scorer.close()


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("Short", ["returned 1 values for 3 rows"] * 3),
        ("Raises", ["RuntimeError: no memory"] * 3),
        ("Odd", ["returned None", "returned nan", "must return"]),
    ],
)
def test_a_class_that_fails_is_an_error_of_its_rows(module: Path, name: str, texts: list[str]) -> None:
    found = OwnScorer(f"own_scorers_for_tests:{name}", {}, "cpu", [module]).score(views(3))
    assert all(isinstance(one, Exception) and text in str(one) for one, text in zip(found, texts, strict=True))


@pytest.mark.parametrize(
    ("name", "text"), [("Cannot", "cannot be constructed: OSError: no weights"), ("Nothing", "a method `score"), ("Absent", "no `Absent`")]
)
def test_classes_that_are_refused(module: Path, name: str, text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("(", r"\(")):
        OwnScorer(f"own_scorers_for_tests:{name}", {}, "cpu", [module])


def test_a_round_that_was_left_asks_nothing_more() -> None:
    """A part stops the run at one sample while another is just being scored: nobody would answer what that one asked anew."""

    class Slow(dict[str, Any]):
        entered, go_on = threading.Event(), threading.Event()

        def items(self) -> Any:
            self.entered.set()
            self.go_on.wait(20)
            return super().items()

    class Late(Remote):
        def flush(self) -> None:
            scoring.start()
            Slow.entered.wait(20)
            self.asked[0][1].set_exception(ValueError("down"))

    class AtOnce(Remote):
        def submit(self, view: View) -> Future[float]:
            future = super().submit(view)
            future.set_result(1.0)
            return future

    late, other = Late(), AtOnce()
    scoring = threading.Thread(target=lambda: late.asked[1][1].set_result(Verdict(value=1.0, extra=Slow())), daemon=True)  # type: ignore[arg-type]
    with closing(RewardTable({"math": (part("late", on_error="stop"), part("other"))}, desk=desk_of(late=late, other=other))) as table:
        with pytest.raises(RftError, match="reward part `late` failed on row r0"):
            list(table.score([completion("a", sample=0), completion("bb", sample=1)]))
        Slow.go_on.set()
        scoring.join(10)
        assert not scoring.is_alive() and len(other.asked) == 2

"""The reward table: closed-form sums, errors as values, labels, texts, threads."""

import dataclasses
import importlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.codec import from_data, to_data
from rftcli.errors import RftError, UsageError
from rftcli.rewards.combine import weighted_sum
from rftcli.rewards.functions import RECORD, Log
from rftcli.rewards.spec import PartSpec
from rftcli.rewards.table import RewardTable, record
from rftcli.types import Completion, FinishReason, PartScore, Prompt, ScoredSample, TokenTrace

MODULE = """
import asyncio
import signal
import sys
import threading
import time

BARRIER = threading.Barrier(4)
SCORED = threading.Event()

def length(completion): return len(completion)
def value(columns): return columns["value"]
def fails(columns):
    if columns.get("fail"): raise RuntimeError("bad row")
    return 1.0
def exits(): sys.exit(3)
def four(): return [0.5, 0.5, 0.5, 0.5]
def nan(): return float("nan")
def abstains(): return None
def tells(): SCORED.set(); return 1.0
def meets(): BARRIER.wait(10); return 1.0
def step(step): return step
def sees(prompt, completion): return float("boxed" in completion) + 10 * float("boxed" in prompt)
def alarms(): signal.signal(signal.SIGALRM, signal.SIG_DFL); return 1.0
def naps(sample): time.sleep(0.3 if sample == 0 else 0.0); return float(sample)
def spoils(columns, completion_ids): columns.clear(); completion_ids.clear(); return 0.0
async def awaited(tokens): await asyncio.sleep(0.001); return tokens
def forgotten(): return awaited(1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "table_functions_for_tests.py").write_text(MODULE)
    yield folder
    sys.path.remove(str(folder))


def completion(text: str = "4", *, sample: int = 0, draw: int = 0, label: str = "math", prefill: str = "", **columns: Any) -> Completion:
    prompt = Prompt(
        draw=draw,
        row=draw,
        row_id=f"train:{draw}",
        source="train",
        label=label,
        text="Put it in \\boxed{7}. " + prefill,
        token_ids=(1, 2),
        messages=({"role": "user", "content": "q"},),
        prefill=prefill,
        reference="4",
        columns=columns,
    )
    return Completion(
        prompt=prompt,
        sample=sample,
        text=text,
        text_with_special=text + "<|end|>",
        trace=TokenTrace(ids=(5, 6, 7)),
        finish=FinishReason.STOP,
        policy_version=0,
    )


def rule(target: str, weight: float = 1.0, **more: Any) -> PartSpec:
    return PartSpec(name=more.pop("name", target), kind="rule", target=target, weight=weight, **more)


def python(function: str, weight: float = 1.0, **more: Any) -> PartSpec:
    return PartSpec(name=more.pop("name", function), kind="python", target=f"table_functions_for_tests:{function}", weight=weight, **more)


def score_all(completions: Iterator[Completion], parts: Sequence[PartSpec], folder: Path) -> list[ScoredSample]:
    with closing(RewardTable({"math": parts}, search_path=[folder])) as scorer:
        return list(scorer.score(completions))


def score(
    parts: Sequence[PartSpec] | Mapping[str, Sequence[PartSpec]], *completions: Completion, folder: Path | None = None, **more: Any
) -> list[ScoredSample]:
    table = parts if isinstance(parts, Mapping) else {"math": parts}
    with closing(RewardTable(table, search_path=[folder] if folder else (), **more)) as scorer:
        samples = list(scorer.score(iter(completions)))
    return sorted(samples, key=lambda sample: (sample.completion.prompt.draw, sample.completion.sample))


def test_a_weighted_sum_is_not_renormalised() -> None:
    parts = [rule("math_answer", 0.9), rule("think_format", 0.2)]
    right, thought, wrong = score(parts, completion("4", draw=0), completion("<think>hm</think>4", draw=1), completion("<think>hm</think>5", draw=2))
    assert (right.reward, thought.reward, wrong.reward) == (0.9, 0.9 + 0.2, 0.2)
    assert [(part.name, part.value, part.weight, part.error) for part in thought.parts] == [
        ("math_answer", 1.0, 0.9, None),
        ("think_format", 1.0, 0.2, None),
    ]
    assert all(part.seconds >= 0 for part in thought.parts)


def test_negative_weights_and_zero_are_values() -> None:
    parts = [rule("exact", 2.0), rule("length", -0.5, options={"target": 1, "limit": 5})]
    assert [sample.reward for sample in score(parts, completion("4", draw=0), completion("5", draw=1))] == [2.0 - 0.25, -0.25]
    assert score([rule("exact")], completion("5"))[0].reward == 0.0


def test_a_part_that_abstains_is_left_out_and_all_of_them_give_none(folder: Path) -> None:
    assert score([rule("exact", 0.5), python("abstains", 3.0)], completion(), folder=folder)[0].reward == 0.5
    sample = score([python("abstains")], completion(), folder=folder)[0]
    assert sample.reward is None and sample.parts[0].value is None and sample.parts[0].error is None


def test_an_error_is_no_number(folder: Path) -> None:
    parts = [rule("exact"), python("fails")]
    good, bad = score(parts, completion(draw=0), completion(draw=1, fail=True), folder=folder)
    assert good.reward == 2.0
    assert bad.reward is None
    assert bad.parts[0].value == 1.0
    assert bad.parts[1].value is None
    assert bad.parts[1].error == "table_functions_for_tests:fails: RuntimeError: bad row (table_functions_for_tests.py:14)"


def test_on_error_abstain_leaves_the_part_out(folder: Path) -> None:
    parts = [rule("exact"), python("fails", on_error="abstain")]
    bad = score(parts, completion(fail=True), folder=folder)[0]
    assert bad.reward == 1.0 and bad.parts[1].error is not None
    assert score([python("fails", on_error="abstain")], completion(fail=True), folder=folder)[0].reward is None


def test_on_error_stop_ends_the_run_with_row_part_and_cause(folder: Path) -> None:
    with pytest.raises(RftError, match=r"reward part `fails` failed on row train:3 \(draw 3, sample 2\): .*RuntimeError: bad row") as caught:
        score([python("fails", on_error="stop")], completion(draw=3, sample=2, fail=True), folder=folder)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_part_of_weight_0_is_only_logged(folder: Path) -> None:
    sample = score([rule("exact"), python("fails", 0.0), python("length", 0.0)], completion(fail=True), folder=folder)[0]
    assert sample.reward == 1.0
    assert sample.parts[1].error is not None and sample.parts[2].value == 1.0
    assert score([python("abstains"), python("length", 0.0)], completion(), folder=folder)[0].reward is None
    with pytest.raises(RftError, match="failed on row"):
        score([rule("exact"), python("fails", 0.0, on_error="stop")], completion(fail=True), folder=folder)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("four", r"must return 1 number for 1 completion, or None; got 4 values (list)"),
        ("nan", "returned nan, expected a finite number"),
        ("exits", "SystemExit: 3"),
        ("forgotten", "got a coroutine that was not awaited"),
        ("alarms", "switch the library's own signal-based time limit off"),
    ],
)
def test_what_a_function_does_wrong_is_an_error_of_the_sample(folder: Path, function: str, error: str) -> None:
    sample = score([python(function)], completion(), folder=folder)[0]
    assert sample.reward is None
    assert sample.parts[0].error is not None and error in sample.parts[0].error
    assert f"table_functions_for_tests:{function}" in sample.parts[0].error


def test_a_rule_that_cannot_check_is_an_error() -> None:
    no_reference = dataclasses.replace(completion(), prompt=dataclasses.replace(completion().prompt, reference=None))
    sample = score([rule("math_answer")], no_reference)[0]
    assert sample.reward is None and sample.parts[0].error == "ValueError: the row has no reference answer"
    hopeless = score([rule("math_answer", options={"time_limit_seconds": 0.2})], completion(r"\boxed{9^{9^{9^{9}}}}"))[0]
    assert hopeless.reward is None and hopeless.parts[0].error == "WorkerTimeout: no verdict within 0.2 seconds"


def test_the_prompt_is_never_scored(folder: Path) -> None:
    parts = [rule("math_answer"), rule("regex", options={"pattern": r"\\boxed"}), python("sees")]
    sample = score(parts, completion("I do not know."), folder=folder)[0]
    assert [part.value for part in sample.parts] == [0.0, 0.0, 10.0]


def test_labels_and_the_default() -> None:
    table = {"math": [rule("math_answer")], "default": [rule("length", options={"target": 1, "limit": 5})]}
    assert [s.reward for s in score(table, completion("4", draw=0), completion("4", draw=1, label="chat"))] == [1.0, 0.5]
    with pytest.raises(RftError, match="row train:9 has the label `chat`, for which there are no rewards") as caught:
        score({"math": [rule("math_answer")]}, completion(draw=9, label="chat"))
    asked = "rewards.default for all rows without an entry of their own; there are rewards for math"
    assert caught.value.hint == f"add rewards.chat, or {asked}"
    with pytest.raises(RftError) as caught:
        score({"math": [rule("math_answer")]}, completion(draw=9, label="default"))
    assert caught.value.hint == f"add {asked}"


def test_an_object_is_closed_once(tmp_path: Path) -> None:
    source = "CLOSED = []\n\nclass Mine:\n    def __call__(self, completion): return 1.0\n    def close(self): CLOSED.append(self)\n"
    (tmp_path / "closed_once.py").write_text(source)
    part = PartSpec(name="mine", kind="python", target="closed_once:Mine")
    table = RewardTable({"default": [part]}, search_path=[tmp_path])
    table.close()
    table.close()
    assert len(sys.modules["closed_once"].CLOSED) == 1
    sys.path.remove(str(tmp_path))


def test_the_text_a_part_reads() -> None:
    parts = [
        rule("regex", name="clean", options={"pattern": "<.end.>"}),
        rule("regex", name="special", options={"pattern": "<.end.>"}, text="keep_special"),
    ]
    assert [part.value for part in score(parts, completion())[0].parts] == [0.0, 1.0]


def test_a_prefill_is_scored_if_the_plan_says_so(folder: Path) -> None:
    parts = [rule("think_format"), python("length")]
    answer = completion("hm</think>4", prefill="<think>")
    assert [part.value for part in score(parts, answer, folder=folder)[0].parts] == [1.0, 18.0]
    assert [part.value for part in score(parts, answer, folder=folder, score_prefill=False)[0].parts] == [0.0, 11.0]


def test_asynchronous_functions_are_awaited(folder: Path) -> None:
    samples = score([python("awaited")], *(completion(draw=draw) for draw in range(20)), folder=folder)
    assert [sample.reward for sample in samples] == [3.0] * 20


def test_completions_are_scored_side_by_side(folder: Path) -> None:
    samples = score([python("meets")], *(completion(draw=draw) for draw in range(4)), folder=folder)
    assert [sample.reward for sample in samples] == [1.0] * 4


def test_a_completion_is_scored_before_the_next_one_is_made(folder: Path) -> None:
    def produce() -> Iterator[Completion]:
        scored = importlib.import_module("table_functions_for_tests").SCORED
        for draw in range(3):
            scored.clear()
            yield completion(draw=draw)
            assert scored.wait(5)  # nobody has asked for this one's score yet

    samples = score_all(produce(), [python("tells")], folder)
    assert sorted(sample.completion.prompt.draw for sample in samples) == [0, 1, 2]


def test_a_slow_sample_does_not_hold_up_the_others(folder: Path) -> None:
    with closing(RewardTable({"math": [python("naps")]}, search_path=[folder])) as table:
        order = [sample.completion.sample for sample in table.score([completion(sample=index) for index in range(4)])]
    assert order[-1] == 0 and sorted(order) == [0, 1, 2, 3]


def test_completions_are_made_in_the_thread_that_asks_for_scores(folder: Path) -> None:
    threads: list[str] = []

    def produce() -> Iterator[Completion]:
        threads.append(threading.current_thread().name)
        yield completion(value=1)

    with closing(RewardTable({"math": [python("value")]}, search_path=[folder])) as table:
        assert [sample.reward for sample in table.score(produce())] == [1.0]
    assert threads == [threading.current_thread().name]


def test_what_is_pending_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of completions that come at once, faster than they are scored: looking through all of them at each one takes longer than scoring."""
    asked, gate, done = [0], threading.Event(), Future.done

    def counted(future: Future[Any]) -> bool:
        asked[0] += 1
        return done(future)

    def completions() -> Iterator[Completion]:
        yield from (completion(sample=number) for number in range(300))
        gate.set()

    monkeypatch.setattr(Future, "done", counted)
    monkeypatch.setattr(RewardTable, "_score_part", lambda *_: gate.wait(10) and [PartScore(name="exact", value=1.0, weight=1.0, seconds=0.0)])
    with closing(RewardTable({"math": [rule("exact")]})) as scorer:
        scored = list(scorer.score(completions()))
    assert sorted(sample.completion.sample for sample in scored) == list(range(300))
    assert asked[0] <= 3 * 300


def test_an_engine_that_fails_fails_the_caller() -> None:
    def produce() -> Iterator[Completion]:
        yield completion()
        raise RuntimeError("engine")

    with closing(RewardTable({"math": [rule("exact")]})) as table, pytest.raises(RuntimeError, match="engine"):
        list(table.score(produce()))


def test_many_completions_come_back_once_each() -> None:
    completions = [completion(str(sample % 5), draw=draw, sample=sample) for draw in range(30) for sample in range(8)]
    samples = score([rule("math_answer"), rule("exact", 0.5)], *completions)
    assert [sample.completion for sample in samples] == completions
    assert [sample.reward for sample in samples] == [1.5 if index % 8 == 4 else 0.0 for index in range(240)]


def test_the_step_reaches_functions_that_ask(folder: Path) -> None:
    with closing(RewardTable({"math": [python("step")]}, search_path=[folder])) as table:
        assert next(table.score([completion()])).reward is None  # outside of a run there is none: abstains
        table.step = 7
        assert next(table.score([completion()])).reward == 7.0


def test_a_function_may_change_what_it_was_given(folder: Path) -> None:
    sample = score([python("spoils"), python("value")], completion(value=2), folder=folder)[0]
    assert sample.reward == 2.0 and sample.completion.trace.ids == (5, 6, 7)


def test_the_record_has_the_promised_fields() -> None:
    fields = record(completion("4", sample=1, draw=5, extra="x"), "4", 3, 10, Log())
    assert set(fields) == set(RECORD)
    assert fields["columns"] == {"extra": "x"} and fields["messages"] == [{"role": "user", "content": "q"}]
    assert (fields["draw"], fields["sample"], fields["step"], fields["finish"], fields["tokens"]) == (5, 1, 3, "stop", 3)
    assert (fields["total_steps"], fields["log_extra"].__name__, fields["log_metric"].__name__) == (10, "log_extra", "log_metric")
    assert json.dumps({name: value for name, value in fields.items() if not name.startswith("log_")})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([rule("exakt")], "did you mean `exact`"),
        ([rule("exact", options={"strp": True})], r"rewards\.math: part `exact`: rule `exact` has no option `strp`, did you mean `strip`"),
        ([rule("exact", 0.0)], r"rewards\.math has no part with a weight other than 0"),
        ([], r"rewards\.math has no part with a weight other than 0"),
        ([PartSpec(name="f", kind="python", target="no_such_module_for_tests:f")], "there is no module `no_such_module_for_tests`"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_scored(parts: list[PartSpec], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RewardTable({"math": parts})


def test_part_specs_are_plain_data() -> None:
    spec = rule("math_answer", 0.9, options={"read": ["boxed"], "after": None})
    assert from_data(PartSpec, json.loads(json.dumps(to_data(spec)))) == spec


@pytest.mark.parametrize("change", [{"kind": "magic"}, {"on_error": "ignore"}, {"text": "all"}, {"weight": float("nan")}, {"weight": 1e7}])
def test_a_part_spec_refuses_unknown_words(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="reward part `a`"):
        PartSpec(**({"name": "a", "kind": "rule", "target": "exact"} | change))


VALUES = st.one_of(st.none(), st.floats(-10, 10))


@given(st.lists(st.tuples(st.floats(-5, 5), VALUES, st.booleans(), st.sampled_from(["fail_sample", "abstain", "stop"])), max_size=5))
def test_the_sum_in_closed_form(rows: list[tuple[float, float | None, bool, str]]) -> None:
    specs = [rule("exact", weight, on_error=on_error) for weight, _, _, on_error in rows]
    scores = [
        PartScore(name="exact", value=None if failed else value, weight=weight, seconds=0.0, error="e" if failed else None)
        for weight, value, failed, _ in rows
    ]
    reward = weighted_sum(specs, scores)
    fatal = any(failed and weight != 0 and on_error != "abstain" for weight, _, failed, on_error in rows)
    terms = [weight * value for weight, value, failed, _ in rows if weight != 0 and value is not None and not failed]
    assert reward == (None if fatal or not terms else sum(terms))

"""From parts to a reward: closed forms, abstentions, functions of a whole group, classes, named parts, logs and limits of time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.errors import UsageError
from rftcli.rewards.combine import COMBINES, GROUP_RECORD, combined, read_rewards
from rftcli.rewards.functions import load_function
from rftcli.rewards.spec import COMBINES as WAYS
from rftcli.rewards.spec import CombineSpec, PartSpec
from rftcli.rewards.table import RewardTable
from rftcli.types import Completion, FinishReason, PartScore, Prompt, ScoredSample, TokenTrace

MODULE = """
import asyncio
import time

def value(columns, sample): return columns["values"][sample]
def named(columns, sample): return {"a": columns["values"][sample], "b": None, "c": 0.25}
def bad_name(): return {"a": "x"}
def empty(): return {}
def logs(completion, sample, log_extra, log_metric):
    log_extra("first", completion[:1]); log_extra("kind", {1})
    log_metric("length", len(completion))
    if sample == 0: log_metric("rare", 5)
    return 1.0
def logs_nan(log_metric): log_metric("x", float("nan"))
def steps(step, total_steps): return total_steps - step
def sleeps(sample): time.sleep(8 if sample == 0 else 0); return 1.0
async def awaits(sample): await asyncio.sleep(8 if sample == 0 else 0); return 1.0
def slow(): time.sleep(0.5); return 1.0

MADE = []
CLOSED = []
class Counts:
    def __init__(self, start, scale=1.0): MADE.append(start); self.start, self.scale = start, scale
    def __call__(self, completion): return self.start + self.scale * len(completion)
    def close(self): CLOSED.append(self.start)
class Awaited:
    async def __call__(self, tokens): return tokens
class Broken:
    def __init__(self): raise RuntimeError("no weights")
    def __call__(self): return 1.0
class Wants:
    def __call__(self, nonsense): return 1.0

def best(scores, samples):
    values = [one["value"] for one in scores]
    return [float(value == max(values)) for value in values], {"spread": max(values) - min(values)}
async def best_later(scores): await asyncio.sleep(0); return [1.0] * len(scores)
def one(scores): return [0.5]
def scalar(scores): return 0.5
def texts(scores): return ["a"] * len(scores)
def generator(scores): return (0.0 for _ in scores)
def none(scores): return [None] * len(scores)
def raises(scores): raise RuntimeError("no idea")
def everything(**record): RECORDS.append(record); return [0.0] * len(record["scores"])
RECORDS = []
class Ranks:
    def __init__(self, factor): self.factor = factor
    def __call__(self, completions): return [self.factor * i for i, _ in enumerate(completions)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("combine")
    (folder / "combine_functions_for_tests.py").write_text(MODULE)
    yield folder
    sys.path.remove(str(folder))


def completion(text: str = "4", sample: int = 0, *, draw: int = 0, values: Sequence[float | None] = (), label: str = "math") -> Completion:
    prompt = Prompt(
        draw=draw, row=0, row_id=f"t:{draw}", source="t", label=label, text="2+2=", token_ids=(1,), reference="4", columns={"values": list(values)}
    )
    return Completion(
        prompt=prompt, sample=sample, text=text, text_with_special=text + "<e>", trace=TokenTrace(ids=(5, 6)), finish=FinishReason.STOP,
        policy_version=0,
    )


def group(*values: float | None, draw: int = 0) -> list[Completion]:
    return [completion(sample=index, draw=draw, values=values) for index in range(len(values))]


def part(function: str, **more: Any) -> PartSpec:
    return PartSpec(name=more.pop("name", function), kind="python", target=f"combine_functions_for_tests:{function}", **more)


def by(function: str, **options: Any) -> CombineSpec:
    return CombineSpec(how="python", target=f"combine_functions_for_tests:{function}", options=options)


def score(
    folder: Path, parts: Sequence[PartSpec], completions: Sequence[Completion], how: CombineSpec | None = None, **more: Any
) -> list[ScoredSample]:
    combine: Mapping[str, CombineSpec] = {} if how is None else {"math": how}
    with closing(RewardTable({"math": parts}, combine=combine, search_path=[folder], **more)) as table:
        table.step = 3
        return sorted(table.score(iter(completions)), key=lambda sample: (sample.completion.prompt.draw, sample.completion.sample))


def reward(how: CombineSpec, *pairs: tuple[float, float | None]) -> float | None:
    specs = [PartSpec(name=f"p{index}", kind="rule", target="exact", weight=weight) for index, (weight, _) in enumerate(pairs)]
    scores = [PartScore(name=spec.name, value=value, weight=spec.weight, seconds=0.0) for spec, (_, value) in zip(specs, pairs, strict=True)]
    return combined(how, specs, scores)


@pytest.mark.parametrize(
    ("how", "pairs", "expected"),
    [
        ("sum", [(0.9, 1.0), (0.1, None)], 0.9), ("sum", [(0.9, None), (0.1, None)], None), ("sum", [(0.9, 1.0), (0.1, 0.5), (0.0, 9.0)], 0.95),
        ("product", [(1.0, 0.5), (2.0, 0.5)], 0.5), ("product", [(1.0, 0.5), (1.0, None)], 0.5), ("product", [(1.0, 0.0), (1.0, 9.0)], 0.0),
        ("product", [(0.0, 5.0), (1.0, 2.0)], 2.0), ("min", [(1.0, 0.5), (2.0, 0.2)], 0.4), ("min", [(1.0, None), (1.0, 3.0)], 3.0),
        ("gate", [(1.0, 1.0), (0.5, 1.0), (0.25, 1.0)], 0.75), ("gate", [(1.0, 0.0), (0.5, 1.0)], 0.0), ("gate", [(2.0, -1.0), (0.5, 1.0)], -2.0),
        ("gate", [(1.0, None), (0.5, 1.0)], 0.5), ("gate", [(1.0, 1.0), (0.5, None)], None), ("gate", [(0.0, 0.0), (1.0, 1.0), (0.5, 1.0)], 0.5),
    ],
)  # fmt: skip
def test_ways_in_numbers(how: str, pairs: list[tuple[float, float | None]], expected: float | None) -> None:
    found = reward(CombineSpec(how=how), *pairs)
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_product_that_no_float32_holds_is_an_error_of_its_sample(folder: Path) -> None:
    parts = [part("value", name=f"p{index}", weight=1e6) for index in range(4)]
    large, small = score(folder, parts, group(1e12, 1e-6), CombineSpec(how="product"))
    assert large.reward is None and large.error == "the parts come to a reward of 1e+72, expected a finite number of at most 1e+18"
    assert small.reward == pytest.approx(1.0) and small.error is None


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(0.75, 1.0), (0.25, None)], 1.0), ([(0.75, 1.0), (0.25, 0.0)], 0.75), ([(0.5, None), (0.5, 0.5), (1.0, 1.0)], 1.25 * 2 / 1.5),
        ([(1.0, 1.0), (-1.0, None)], 2.0),
    ],
)  # fmt: skip
def test_a_renormalised_sum(pairs: list[tuple[float, float | None]], expected: float) -> None:
    assert reward(CombineSpec(renormalise=True), *pairs) == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(0.1, 5), st.floats(-5, 5)), min_size=1, max_size=5), st.permutations(range(5)))
def test_order_matters_only_to_a_gate(pairs: list[tuple[float, float]], order: list[int]) -> None:
    mixed = [pairs[index] for index in order if index < len(pairs)]
    for how in ("sum", "product", "min"):
        assert reward(CombineSpec(how=how), *mixed) == pytest.approx(reward(CombineSpec(how=how), *pairs), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("how", sorted(COMBINES))
@pytest.mark.parametrize("on_error", ["fail_sample", "abstain"])
def test_an_error_is_no_number_in_any_way(how: str, on_error: str) -> None:
    specs = [PartSpec(name=name, kind="rule", target="exact", on_error=on_error) for name in "ab"]
    scores = [PartScore(name="a", value=2.0, weight=1.0, seconds=0.0), PartScore(name="b", value=None, weight=1.0, seconds=0.0, error="e")]
    expected = None if on_error == "fail_sample" or how == "gate" else 2.0
    assert combined(CombineSpec(how=how), specs, scores) == expected


def test_words_of_the_plan() -> None:
    assert {*COMBINES, "python"} == set(WAYS)
    with pytest.raises(UsageError, match="combined by `mean`"):
        CombineSpec(how="mean")


def test_a_function_sees_the_whole_group(folder: Path) -> None:
    found = score(folder, [part("value")], [*group(1.0, 3.0, 2.0), *group(0.0, 0.0, draw=1)], by("best"))
    assert [sample.reward for sample in found] == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert [sample.metrics for sample in found] == [(("spread", 2.0),), (), (), (("spread", 0.0),), ()]
    assert all(sample.parts[0].value is not None for sample in found)
    assert [sample.reward for sample in score(folder, [part("value")], group(1.0, 2.0), by("best_later"))] == [1.0, 1.0]
    assert [sample.reward for sample in score(folder, [part("value")], group(1.0, 2.0), by("Ranks", factor=2.0))] == [0.0, 2.0]
    assert [sample.reward for sample in score(folder, [part("value")], group(1.0, 2.0), by("none"))] == [None, None]


def test_what_a_combining_function_is_given(folder: Path) -> None:
    score(folder, [part("value", weight=0.5), part("bad_name", weight=0.0)], group(1.0, None), by("everything"), total_steps=9)
    (record,) = sys.modules["combine_functions_for_tests"].RECORDS
    assert set(record) == set(GROUP_RECORD)
    assert record["scores"] == [{"value": 1.0, "bad_name": None}, {"value": None, "bad_name": None}]
    assert (record["weights"], record["samples"], record["completions"]) == ({"value": 0.5, "bad_name": 0.0}, [0, 1], ["4", "4"])
    assert (record["reference"], record["label"], record["step"], record["total_steps"]) == ("4", "math", 3, 9)
    assert [sorted(errors) for errors in record["errors"]] == [["bad_name"], ["bad_name"]]


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("one", "must return 2 numbers for 2 completions, got 1"),
        ("scalar", "must return a list of 2 numbers for 2 completions, got a float"),
        ("generator", "must return a list of 2 numbers for 2 completions, got a generator"),
        ("texts", "got a str"),
        ("raises", "RuntimeError: no idea (combine_functions_for_tests.py"),
    ],
)
def test_a_wrong_number_of_rewards_is_never_stretched(folder: Path, function: str, error: str) -> None:
    for sample in score(folder, [part("value")], group(1.0, 2.0), by(function)):
        assert sample.reward is None and sample.error is not None and error in sample.error
        assert f"combine_functions_for_tests:{function}" in sample.error


def test_a_failed_part_keeps_its_sample_out_of_a_functions_hands(folder: Path) -> None:
    strict = score(folder, [part("value"), part("bad_name")], group(1.0, 2.0), by("best"))
    assert [sample.reward for sample in strict] == [None, None]
    lenient = score(folder, [part("value"), part("bad_name", on_error="abstain")], group(1.0, 2.0), by("best"))
    assert [sample.reward for sample in lenient] == [0.0, 1.0]


def test_metrics_must_be_numbers() -> None:
    with pytest.raises(TypeError, match="metric `a` must be a number, got a str"):
        read_rewards("m:f", ([1.0], {"a": "x"}), 1)
    with pytest.raises(ValueError, match="metric `a` is inf"):
        read_rewards("m:f", ([1.0], {"a": float("inf")}), 1)


def test_named_parts(folder: Path) -> None:
    (sample,) = score(folder, [part("named", name="style", weight=2.0)], group(0.5))
    assert [(one.name, one.value, one.weight) for one in sample.parts] == [("style.a", 0.5, 2.0), ("style.b", None, 2.0), ("style.c", 0.25, 2.0)]
    assert sample.reward == 1.5
    (sample,) = score(folder, [part("bad_name")], group(1.0))
    assert sample.reward is None and [one.name for one in sample.parts] == ["bad_name"] and "for `a`" in str(sample.parts[0].error)
    (sample,) = score(folder, [part("empty")], group(1.0))
    assert sample.reward is None and "must return 1 number" in str(sample.parts[0].error)


def test_logs_of_a_function(folder: Path) -> None:
    first, second = score(folder, [part("logs")], [completion("hello"), completion("ab", 1)])
    assert first.extra == {"first": "h", "kind": "{1}"} and first.metrics == (("length", 5.0), ("rare", 5.0))
    assert second.metrics == (("length", 2.0),)
    (sample,) = score(folder, [part("logs_nan")], group(1.0))
    assert "metric `x` is nan" in str(sample.parts[0].error)


def test_how_far_the_run_is(folder: Path) -> None:
    assert score(folder, [part("steps")], group(1.0), total_steps=10)[0].reward == 7.0


def test_a_class_is_made_once_and_closed(folder: Path) -> None:
    found = score(folder, [part("Counts", options={"start": 10, "scale": 2.0})], [completion("ab"), completion("a", 1)])
    module = sys.modules["combine_functions_for_tests"]
    assert [sample.reward for sample in found] == [14.0, 12.0] and module.MADE == [10] == module.CLOSED
    assert score(folder, [part("Awaited")], group(1.0))[0].reward == 2.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Counts", {}, "asks for `start`, which its `options` do not have"),
        ("Counts", {"start": 1, "scales": 2}, "takes no option `scales`"),
        ("Wants", {}, "asks for `nonsense`, which no completion has"),
    ],
)
def test_a_class_that_does_not_fit_is_found_without_making_it(folder: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_function(f"combine_functions_for_tests:{name}", options, [folder])


def test_a_class_that_fails_is_told_before_anything_is_scored(folder: Path) -> None:
    load_function("combine_functions_for_tests:Broken", {}, [folder])  # validation makes no objects
    with pytest.raises(UsageError, match=r"reward class .*Broken. could not be made: RuntimeError: no weights"):
        RewardTable({"math": [part("Broken")]}, search_path=[folder])


@pytest.mark.parametrize("function", ["sleeps", "awaits"])
def test_a_part_that_takes_too_long(folder: Path, function: str) -> None:
    started = time.monotonic()
    slow, quick = score(folder, [part(function, timeout_seconds=1.0)], [completion(sample=0), completion(sample=1)])
    assert slow.reward is None and "TimeoutError: no value within 1 seconds" in str(slow.parts[0].error)
    assert quick.reward == 1.0 and time.monotonic() - started < 7
    assert score(folder, [part("slow", timeout_seconds=30.0)], group(1.0))[0].reward == 1.0


def test_values_within_their_bounds(folder: Path) -> None:
    found = score(folder, [part("value", clip=(-1.0, 2.0), weight=10.0)], group(5.0, -3.0, 0.5, None))
    assert [sample.reward for sample in found] == [20.0, -10.0, 5.0, None]
    assert [sample.parts[0].value for sample in found] == [2.0, -1.0, 0.5, None]

"""Reward services over real connections: what is sent, what comes back, who is asked and how often. What goes wrong is in `test_service_faults`."""

from __future__ import annotations

import json
import math
import threading
import time
from concurrent.futures import wait
from contextlib import closing
from typing import Any

import pytest
from fake_services import Asked, FakeService, Reply
from hypothesis import given
from hypothesis import strategies as st

from rftcli.errors import UsageError
from rftcli.rewards.scorers.http import HttpScorer, verdicts
from rftcli.rewards.scorers.service import Addresses, Pace, Service, ServiceError
from rftcli.rewards.scorers.spec import ServiceSpec
from rftcli.rewards.scorers.verdict import Verdict, extras_of_rows
from rftcli.rewards.scorers.view import View

SPEC: dict[str, Any] = {"timeout_seconds": 30.0, "retries": 3, "concurrency": 4, "per_minute": None, "headers_env": {}}


def view(text: str, reference: Any = "4", prompt: str = "2+2=") -> View:
    return View(prompt=prompt, messages=(), completion=text, reference=reference, label="math", columns={}, place="row 1")


def scorer(*urls: str, preset: str = "openrlhf", field: str = "rewards", size: int = 2, **changes: Any) -> HttpScorer:
    service = Service("s", ServiceSpec(urls=urls, **{**SPEC, **changes}), environ={"TOKEN": "Bearer hidden-secret"}, first_pause=0.001)
    return HttpScorer(service, preset=preset, score_field=field, batch_size=size)


def outcomes(made: HttpScorer, *texts: str) -> list[float | str]:
    """Scores, or what the errors say."""
    with closing(made):
        futures = [made.submit(view(text)) for text in texts]
        made.flush()
        wait(futures, timeout=60)
        return [future.result().value if future.exception() is None else str(future.exception()) for future in futures]


def lengths(asked: Asked, _: int) -> dict[str, Any]:
    queries = asked.body.get("query") or asked.body["queries"]
    return {"rewards": [len(text) for text in queries], "scores": [0.5] * len(queries), "extra_logs": {"a": [1] * len(queries)}}


@pytest.mark.parametrize(
    ("preset", "names"), [("openrlhf", {"query", "prompts", "labels"}), ("lightrft", {"queries", "prompts", "references"})]
)
def test_presets(preset: str, names: set[str]) -> None:
    with FakeService(lengths) as service:
        assert outcomes(scorer(service.url, preset=preset), "4", "five", "six") == [5.0, 8.0, 7.0]
        first, second = sorted((one.body for one in service.asked), key=lambda body: -len(body["prompts"]))
    assert set(first) == names and first["prompts"] == ["2+2=", "2+2="] and second["prompts"] == ["2+2="]
    assert first["query" if preset == "openrlhf" else "queries"] == ["2+2=4", "2+2=five"]
    assert first["labels" if preset == "openrlhf" else "references"] == ["4", "4"]


def test_another_field_and_a_bare_list() -> None:
    with FakeService(lengths) as service:
        assert outcomes(scorer(service.url, field="scores"), "a", "b") == [0.5, 0.5]
    with FakeService(lambda asked, number: [1, 2.5]) as service:
        assert outcomes(scorer(service.url), "a", "b") == [1.0, 2.5]


def test_columns_of_one_number() -> None:
    assert verdicts({"rewards": [[1.0], [2]]}, "rewards", 2) == [Verdict(value=1.0), Verdict(value=2.0)]


def test_headers_come_from_the_environment_and_are_never_shown() -> None:
    def echo(asked: Asked, _: int) -> Reply:
        return Reply(status=401, body={"you sent": asked.headers["authorization"]})

    with FakeService(echo) as service:
        (error,) = outcomes(scorer(service.url, headers_env={"Authorization": "TOKEN"}), "a")
        assert service.asked[0].headers["authorization"] == "Bearer hidden-secret"
        assert "hidden-secret" not in str(error) and "***" in str(error)
    with pytest.raises(UsageError, match="`NOT_SET` is not set"):
        scorer("http://x", headers_env={"Authorization": "NOT_SET"})


def test_a_user_in_an_address_is_not_shown() -> None:
    (error,) = outcomes(scorer("http://me:hidden@127.0.0.1:9", retries=0), "a")
    assert "hidden" not in str(error)


def test_concurrency_is_bounded_and_used() -> None:
    gate = threading.Barrier(3, timeout=60)

    def answer(asked: Asked, number: int) -> Any:
        gate.wait()  # three at a time, or never
        time.sleep(0.02)
        return [1.0]

    with FakeService(answer) as service:
        assert outcomes(scorer(service.url, size=1, concurrency=3), *"abcdef") == [1.0] * 6
        assert service.most_at_once == 3


def test_several_addresses_share_the_work_and_one_that_is_down_is_left_out() -> None:
    def fine(asked: Asked, _: int) -> list[float]:
        return [1.0]

    with FakeService(fine) as one, FakeService(lambda asked, number: Reply(status=500)) as broken, FakeService(fine) as other:
        assert outcomes(scorer(one.url, broken.url, other.url, size=1, concurrency=1), *"abcdefghij") == [1.0] * 10
        assert len(broken.asked) == 1 and {len(one.asked), len(other.asked)} == {5}


def test_the_least_busy_address_is_next() -> None:
    now = [100.0]
    addresses = Addresses(("http://a/", "http://b"), clock=lambda: now[0])
    assert [addresses.take() for _ in range(4)] == ["http://a", "http://b", "http://a", "http://b"]
    addresses.give_back("http://b", good=True)
    assert addresses.take() == "http://b"
    addresses.give_back("http://a", good=False)
    addresses.give_back("http://a", good=False)
    assert addresses.take() == "http://b"  # though it is busier
    now[0] += 11
    assert addresses.take() == "http://a"


def test_starts_a_minute() -> None:
    now = [0.0]
    pace = Pace(120.0, clock=lambda: now[0])
    assert [pace.pause() for _ in range(3)] == [0.0, 0.5, 1.0]
    now[0] = 10.0
    assert pace.pause() == 0.0 and Pace(None).pause() == 0.0
    with FakeService(lambda asked, number: [1.0]) as service:
        made, start = scorer(service.url, size=1, per_minute=1200.0), time.monotonic()
        assert outcomes(made, *"abcde") == [1.0] * 5
        assert time.monotonic() - start >= 0.2  # 4 x 0.05


def test_closing_ends_what_is_under_way() -> None:
    with FakeService(lambda asked, number: Reply(status=500)) as service:
        made = HttpScorer(Service("s", ServiceSpec(urls=(service.url,), **SPEC), first_pause=60.0), preset="lightrft", score_field="x", batch_size=1)
        future = made.submit(view("a"))
        while not service.asked:
            time.sleep(0.01)
        made.close()
        assert isinstance(future.exception(timeout=30), ServiceError)


def test_what_a_service_says_beside_its_scores() -> None:
    """One value a row, or one of all rows; numbers as floats; what cannot be given to rows says why, and no score is lost by it."""
    logs = {
        "length": [3, None], "column": [[0.5], [1]], "model": "rm-2", "version": 7, "short": [1.0],
        "odd": [math.nan, {"a": 1}], "flag": [True, 10**400],
    }  # fmt: skip
    first, second = extras_of_rows(logs, 2)
    both = {"model": "rm-2", "version": 7.0, "short": "1 values came back for 2 rows"}
    assert first == {"length": 3.0, "column": 0.5, **both, "odd": "nan", "flag": True}
    assert second == {"column": 1.0, **both, "odd": "{'a': 1}", "flag": str(10**400)}
    assert extras_of_rows(None, 2) == [{}, {}] and extras_of_rows([1], 1) == [{"extra_logs": "no mapping of names, but list"}]
    reply = {"rewards": [1.0, None], "extra_logs": {"length": [3, 4]}}
    good, bad = verdicts(reply, "rewards", 2)
    assert good == Verdict(value=1.0, extra={"length": 3.0}) and isinstance(bad, ServiceError)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3)
       | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=10), st.integers(1, 3))  # fmt: skip
def test_whatever_is_said_beside_them_the_scores_stay_and_a_number_is_finite(logs: Any, rows: int) -> None:
    found = verdicts({"rewards": [0.5] * rows, "extra_logs": logs}, "rewards", rows)
    for verdict in found:
        assert isinstance(verdict, Verdict) and verdict.value == 0.5
        json.dumps(verdict.extra, allow_nan=False)

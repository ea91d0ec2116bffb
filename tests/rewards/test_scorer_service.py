"""Reward services over real connections: what is sent, what is tried again and what is not, who is asked, and replies that are none."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from contextlib import closing
from typing import Any

import pytest
from fake_services import Asked, FakeService, Reply

from rftcli.errors import UsageError
from rftcli.rewards.scorers.http import HttpScorer, scores
from rftcli.rewards.scorers.service import Addresses, Pace, Service, ServiceError
from rftcli.rewards.scorers.spec import ServiceSpec
from rftcli.rewards.scorers.view import View

SPEC: dict[str, Any] = {"timeout_seconds": 5.0, "retries": 3, "concurrency": 4, "per_minute": None, "headers_env": {}}


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
        wait(futures, timeout=20)
        return [future.result() if future.exception() is None else str(future.exception()) for future in futures]


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


@pytest.mark.parametrize(
    "fault",
    [Reply(status=500), Reply(status=503, headers={"retry-after": "0"}), Reply(status=429), Reply(status=408), Reply(closes=True),
     Reply(body=b"<html>busy</html>"), Reply(body=b"{\"rewards\": [1,"), Reply(body=[1, 1], trickle_seconds=0.1)],
    ids=["500", "503", "429", "408", "closed", "html", "torn", "trickle"],
)  # fmt: skip
def test_what_may_pass_is_tried_again(fault: Reply) -> None:
    with FakeService(lambda asked, number: fault if number < 2 else lengths(asked, number)) as service:
        assert outcomes(scorer(service.url, timeout_seconds=0.4), "a", "b") == [5.0, 5.0]
        assert len(service.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 301])
def test_what_would_be_refused_again_is_not(status: int) -> None:
    with FakeService(lambda asked, number: Reply(status=status, body={"detail": "no such thing"})) as service:
        first, second = outcomes(scorer(service.url), "a", "b")
        assert len(service.asked) == 1 and first == second and f"status {status}" in str(first) and "no such thing" in str(first)


def test_tries_are_bounded() -> None:
    with FakeService(lambda asked, number: Reply(status=500, body="down")) as service:
        (error,) = outcomes(scorer(service.url, retries=2), "a")
        assert len(service.asked) == 3 and "replied with status 500" in str(error)


def test_a_service_that_never_answers() -> None:
    with FakeService(lambda asked, number: Reply(delay_seconds=30)) as service:
        start = time.monotonic()
        (error,) = outcomes(scorer(service.url, retries=1, timeout_seconds=0.2), "a")
        assert time.monotonic() - start < 5 and "gave no reply within 0.2 seconds" in str(error)


def test_nobody_there() -> None:
    (error,) = outcomes(scorer("http://127.0.0.1:9", retries=1), "a")
    assert "http://127.0.0.1:9 could not be asked: ConnectError" in str(error)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ({"rewards": [1.0]}, "1 scores came back for 2 rows"),
        ({"rewards": [1.0, 2.0, 3.0]}, "3 scores came back for 2 rows"),
        ({"rewards": 0.5}, "must be a list of 2 numbers, got float"),
        ({"reward": [1, 2]}, "no field `rewards`; it has: reward"),
        ("fine", "must be a list of 2 numbers, got str"),
    ],
)
def test_replies_of_another_form_are_errors_of_all_rows(reply: Any, text: str) -> None:
    with FakeService(lambda asked, number: reply) as service:
        found = outcomes(scorer(service.url), "a", "b")
        assert all(text in str(one) for one in found) and len(service.asked) == 1


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", "true", '"0.5"', "[1, 2]", "{}", "1e999"])
def test_values_that_are_no_number_are_errors_of_their_row(value: str) -> None:
    with FakeService(lambda asked, number: Reply(body=f'{{"rewards": [0.0, {value}]}}'.encode())) as service:
        good, bad = outcomes(scorer(service.url), "a", "b")
        assert good == 0.0 and "is no finite number" in str(bad)


def test_columns_of_one_number() -> None:
    assert scores({"rewards": [[1.0], [2]]}, "rewards", 2) == [1.0, 2.0]


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
    gate = threading.Barrier(3, timeout=10)

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
        assert outcomes(scorer(service.url, size=1, per_minute=1200.0), *"abcde") == [1.0] * 5
        times = sorted(one.time for one in service.asked)
        assert times[-1] - times[0] > 0.15  # 4 x 0.05


def test_closing_ends_what_is_under_way() -> None:
    with FakeService(lambda asked, number: Reply(status=500)) as service:
        made = HttpScorer(Service("s", ServiceSpec(urls=(service.url,), **SPEC), first_pause=60.0), preset="lightrft", score_field="x", batch_size=1)
        future = made.submit(view("a"))
        while not service.asked:
            time.sleep(0.01)
        made.close()
        assert isinstance(future.exception(timeout=5), ServiceError)



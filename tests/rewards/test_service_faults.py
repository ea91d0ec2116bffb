"""Every way in which a reward service fails, over real connections to a FastAPI application: how often it is asked, what becomes of each row under
each policy of a part, and that no failure is ever a number."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

import pytest
from fake_services import Asked, FakeService, Reply, closed_port

from rftcli.errors import RftError
from rftcli.rewards.scorers.desk import Desk
from rftcli.rewards.scorers.http import HttpScorer
from rftcli.rewards.scorers.service import Service
from rftcli.rewards.scorers.spec import ServiceSpec
from rftcli.rewards.spec import PartSpec
from rftcli.rewards.table import RewardTable
from rftcli.types import Completion, FinishReason, Prompt, ScoredSample, TokenTrace

ROWS = 3
RETRIES = 1
TIMEOUT = 30.0
SHORT = 0.3
"""For services that are slower."""
ENOUGH = 2.0
"""For services of which one is slower and another answers, however busy the machine is."""
MOST_BYTES = 2 << 20
GOOD = [1.0, 2.0, 3.0]
FIXED = 10.0
"""What the other part of the reward says of every row."""


def fine(asked: Asked, number: int) -> Any:
    return {"rewards": GOOD[: len(asked.body["query"])]}


def completion(sample: int) -> Completion:
    prompt = Prompt(draw=0, row=0, row_id="r0", source="s", label="math", text="2+2=", token_ids=(1,), reference="4")
    text = "four" * (sample + 1)
    trace = TokenTrace(ids=(5,))
    return Completion(
        prompt=prompt, sample=sample, text=text, text_with_special=text, trace=trace, finish=FinishReason.STOP, policy_version=0
    )  # fmt: skip


def reached(spec: ServiceSpec) -> Service:
    return Service("s", spec, environ={}, first_pause=0.01, most_bytes=MOST_BYTES)


def scored(*urls: str, on_error: str = "fail_sample", retries: int = RETRIES, timeout: float = TIMEOUT) -> list[ScoredSample]:
    """Three rows in one request: a part that always scores, and the service."""
    spec = ServiceSpec(urls=urls, timeout_seconds=timeout, retries=retries, concurrency=4, per_minute=None, headers_env={})
    desk = Desk(["s"])
    desk.fill({"s": HttpScorer(reached(spec), preset="openrlhf", score_field="rewards", batch_size=ROWS)})
    parts = (FIXED_PART, PartSpec(name="s", kind="model", target="s", on_error=on_error))
    with closing(RewardTable({"math": parts}, desk=desk)) as table:
        return sorted(table.score(completion(index) for index in range(ROWS)), key=lambda sample: sample.completion.sample)


FIXED_PART = PartSpec(name="fixed", kind="rule", target="regex", weight=FIXED, options={"pattern": "four"})


@pytest.fixture(scope="module")
def server() -> Iterator[FakeService]:
    """One server for the whole table; each case gives it another answer."""
    with FakeService(fine) as service:
        yield service


@dataclass(frozen=True, kw_only=True)
class Fault:
    reply: Reply
    tries: int
    """Requests that are made while it lasts."""
    text: str
    """In the error of every row that has one."""
    rows: tuple[float | None, ...] = (None, None, None)
    """What the service's scores are."""

    @property
    def timeout(self) -> float:
        return SHORT if self.reply.delay_seconds or self.reply.trickle_seconds else TIMEOUT


PASSES = RETRIES + 1
JSON_ROWS = b'{"rewards": [1.0, %s, 3.0]}'
# How to add one: a row; its tries are 1 where another try cannot help.
FAULTS: dict[str, Fault] = {
    "slow": Fault(reply=Reply(body={"rewards": GOOD}, delay_seconds=30), tries=PASSES, text="gave no reply within 0.3 seconds"),
    "trickles": Fault(reply=Reply(body={"rewards": GOOD}, trickle_seconds=0.1), tries=PASSES, text="gave no reply within 0.3 seconds"),
    "500": Fault(reply=Reply(status=500, body={"detail": "no memory"}), tries=PASSES, text='replied with status 500: {"detail": "no memory"}'),
    "502": Fault(reply=Reply(status=502, body=b"<html>bad gateway</html>"), tries=PASSES, text="replied with status 502: <html>"),
    "503": Fault(reply=Reply(status=503), tries=PASSES, text="replied with status 503"),
    "429": Fault(reply=Reply(status=429, headers={"retry-after": "0"}), tries=PASSES, text="replied with status 429"),
    "408": Fault(reply=Reply(status=408), tries=PASSES, text="replied with status 408"),
    "400": Fault(reply=Reply(status=400, body={"detail": "bad"}), tries=1, text='replied with status 400: {"detail": "bad"}'),
    "401": Fault(reply=Reply(status=401), tries=1, text="replied with status 401"),
    "404": Fault(reply=Reply(status=404), tries=1, text="replied with status 404"),
    "413": Fault(reply=Reply(status=413), tries=1, text="replied with status 413"),
    "422": Fault(reply=Reply(status=422, body={"detail": [{"msg": "field required"}]}), tries=1, text="field required"),
    "201": Fault(reply=Reply(status=201, body={"rewards": GOOD}), tries=1, text="replied with status 201"),
    "redirect": Fault(reply=Reply(status=307, headers={"location": "http://127.0.0.1/x"}), tries=1, text="status 307, sending us to http://127.0.0.1/x"),
    "no reply": Fault(reply=Reply(closes=True), tries=PASSES, text="could not be asked: RemoteProtocolError"),
    "cut short": Fault(reply=Reply(body={"rewards": GOOD}, cut_at=12), tries=PASSES, text="could not be asked: RemoteProtocolError"),
    "chunks cut short": Fault(reply=Reply(body={"rewards": GOOD}, cut_at=12, chunked=True), tries=PASSES, text="asked: RemoteProtocolError"),
    "whole in chunks, then cut": Fault(reply=Reply(body={"rewards": GOOD}, cut_at=99, chunked=True), tries=PASSES, text="RemoteProtocolError"),
    "empty": Fault(reply=Reply(body=b""), tries=PASSES, text="replied with what is no JSON"),
    "html": Fault(reply=Reply(body=b"<html>login</html>"), tries=PASSES, text="no JSON: <html>login</html>"),
    "torn json": Fault(reply=Reply(body=b'{"rewards": [1.0, 2.0'), tries=PASSES, text='no JSON: {"rewards": [1.0, 2.0'),
    "no utf-8": Fault(reply=Reply(body=b"\xff\xfe\x00[1,2,3]"), tries=PASSES, text="no JSON"),
    "too few": Fault(reply=Reply(body={"rewards": GOOD[:2]}), tries=1, text="2 scores came back for 3 rows"),
    "too many": Fault(reply=Reply(body={"rewards": [*GOOD, 4.0]}), tries=1, text="4 scores came back for 3 rows"),
    "none": Fault(reply=Reply(body={"rewards": []}), tries=1, text="0 scores came back for 3 rows"),
    "one number": Fault(reply=Reply(body={"rewards": 0.5}), tries=1, text="must be a list of 3 numbers, got float"),
    "null scores": Fault(reply=Reply(body={"rewards": None}), tries=1, text="must be a list of 3 numbers, got NoneType"),
    "another field": Fault(reply=Reply(body={"scores": GOOD}), tries=1, text="no field `rewards`; it has: scores"),
    "an error with status 200": Fault(reply=Reply(body={"error": "model is loading"}), tries=1, text="no field `rewards`; it has: error"),
    "text": Fault(reply=Reply(body="fine"), tries=1, text="must be a list of 3 numbers, got str"),
    "true": Fault(reply=Reply(body=True), tries=1, text="must be a list of 3 numbers, got bool"),
    "huge, told": Fault(reply=Reply(body=b"[]", headers={"content-length": str(1 << 40)}), tries=1, text="replied with more than"),
    "huge, not told": Fault(reply=Reply(body=b" " * (1 << 20), chunked=True, repeat=3), tries=1, text="replied with more than 2 MiB"),
} | {
    f"the score {value}": Fault(
        reply=Reply(body=JSON_ROWS % value.encode()), tries=1, text="is no finite number", rows=(1.0, None, 3.0)
    )
    for value in ("NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, '"0.5"', '"nan"', "null", "true", "false", "[]", "[1, 2]", "{}")
}  # fmt: skip


@pytest.mark.parametrize("on_error", ["fail_sample", "abstain", "stop"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(server: FakeService, name: str, on_error: str) -> None:
    fault = FAULTS[name]
    server.asked.clear()
    server.answer = lambda asked, number: fault.reply
    if on_error == "stop":
        with pytest.raises(RftError, match=r"reward part `s` failed on row r0 \(draw 0, sample \d\): .*Error: ") as caught:
            scored(server.url, on_error=on_error, timeout=fault.timeout)
        assert fault.text in str(caught.value)
    else:
        found = scored(server.url, on_error=on_error, timeout=fault.timeout)
        for sample, value in zip(found, fault.rows, strict=True):
            (other, part) = sample.parts
            assert other.value == 1.0 and part.value == value
            assert part.error is None if value is not None else fault.text in str(part.error)
            failed = FIXED if on_error == "abstain" else None
            assert sample.reward == (failed if value is None else FIXED + value)
    assert len(server.asked) == fault.tries


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.tries > 1])
def test_what_passes_is_scored_in_the_end(server: FakeService, name: str) -> None:
    server.asked.clear()
    server.answer = lambda asked, number: FAULTS[name].reply if number < RETRIES else fine(asked, number)
    assert [sample.reward for sample in scored(server.url, timeout=ENOUGH)] == [FIXED + value for value in GOOD]
    assert len(server.asked) == RETRIES + 1
    assert all(one.body == server.asked[0].body for one in server.asked)  # nothing is lost or doubled on the way


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}, {"content-type": "text/html; charset=latin-1"}, {"x-more": "1"}])
def test_a_reply_is_what_it_holds_and_not_what_it_is_called(server: FakeService, headers: dict[str, str]) -> None:
    server.answer = lambda asked, number: Reply(body={"rewards": GOOD}, headers=headers)
    assert [sample.reward for sample in scored(server.url)] == [11.0, 12.0, 13.0]


@pytest.mark.parametrize("when", ["0.3", "date"])
def test_a_service_that_says_when_to_come_back(server: FakeService, when: str) -> None:
    """Retry-After in seconds, and as a date of whole seconds."""
    server.asked.clear()
    header = {"retry-after": formatdate(math.ceil(time.time()) + 1, usegmt=True) if when == "date" else when}
    server.answer = lambda asked, number: Reply(status=429, headers=header) if number == 0 else fine(asked, number)
    assert [sample.reward for sample in scored(server.url)] == [11.0, 12.0, 13.0]
    first, second = (one.time for one in server.asked)
    assert 0.3 <= second - first < 10


@pytest.mark.parametrize("when", ["soon", "nan", "-5", "Thu, 01 Jan 1970 00:00:00 GMT", "Thu, 99 Jan 1970"])
def test_a_time_to_come_back_that_is_none(server: FakeService, when: str) -> None:
    server.answer = lambda asked, number: Reply(status=503, headers={"retry-after": when}) if number == 0 else fine(asked, number)
    server.asked.clear()
    start = time.monotonic()
    assert [sample.reward for sample in scored(server.url)] == [11.0, 12.0, 13.0]
    assert time.monotonic() - start < 15


def test_nobody_there() -> None:
    found = scored(f"http://127.0.0.1:{closed_port()}")
    assert all(sample.reward is None and "could not be asked: ConnectError" in str(sample.parts[1].error) for sample in found)


def test_a_name_that_nobody_has() -> None:
    (first, *_) = scored("http://no-such-host.invalid/score", retries=0)
    assert first.reward is None and "no-such-host.invalid/score could not be asked" in str(first.parts[1].error)


def test_a_server_that_comes_up_late() -> None:
    port = closed_port()
    up: list[FakeService] = []

    def begin() -> None:
        time.sleep(0.15)
        up.append(FakeService(fine, port=port).__enter__())

    thread = threading.Thread(target=begin)
    thread.start()
    try:
        assert [sample.reward for sample in scored(f"http://127.0.0.1:{port}", retries=20)] == [11.0, 12.0, 13.0]
    finally:
        thread.join()
        up[0].__exit__()


@pytest.mark.parametrize("fault", ["nobody", "500", "slow", "cut short"])
def test_one_of_several_servers_is_of_no_use(server: FakeService, fault: str) -> None:
    """Every row is scored by the other, and the broken one is asked once at most in the seconds after it failed."""
    server.answer = fine
    if fault == "nobody":
        assert [sample.reward for sample in scored(f"http://127.0.0.1:{closed_port()}", server.url)] == [11.0, 12.0, 13.0]
        return
    with FakeService(lambda asked, number: FAULTS[fault].reply) as broken:
        assert [sample.reward for sample in scored(broken.url, server.url, timeout=ENOUGH)] == [11.0, 12.0, 13.0]
        assert len(broken.asked) == 1


def test_a_fault_of_one_request_is_not_another_ones(server: FakeService) -> None:
    """A request a row: the rows beside a failed one keep their scores."""

    def one_bad(asked: Asked, number: int) -> Any:
        return Reply(status=400) if asked.body["query"][0].endswith("fourfour") else {"rewards": [1.0]}

    server.answer = one_bad
    spec = ServiceSpec(urls=(server.url,), timeout_seconds=TIMEOUT, retries=0, concurrency=4, per_minute=None, headers_env={})
    desk = Desk(["s"])
    desk.fill({"s": HttpScorer(reached(spec), preset="openrlhf", score_field="rewards", batch_size=1)})
    with closing(RewardTable({"math": (PartSpec(name="s", kind="model", target="s"),)}, desk=desk)) as table:
        found = {sample.completion.sample: sample.reward for sample in table.score(completion(index) for index in range(2))}
    assert found == {0: 1.0, 1: None}


def test_a_connection_that_was_kept_and_died_is_opened_anew() -> None:
    """The server goes away between two rounds and comes back at the same address."""
    port = closed_port()
    spec = ServiceSpec(urls=(f"http://127.0.0.1:{port}",), timeout_seconds=TIMEOUT, retries=RETRIES, concurrency=1, per_minute=None, headers_env={})
    with closing(reached(spec)) as service:
        for _ in range(2):
            with FakeService(lambda asked, number: [1.0], port=port):
                assert service.ask({"query": ["a"]}) == [1.0]


def test_a_run_that_ends_waits_for_no_service(server: FakeService) -> None:
    server.answer = lambda asked, number: Reply(delay_seconds=30)
    server.asked.clear()
    spec = ServiceSpec(urls=(server.url,), timeout_seconds=30.0, retries=3, concurrency=2, per_minute=None, headers_env={})
    service = reached(spec)
    service.submit({"query": ["a"]}, lambda reply: reply)
    while not server.asked:
        time.sleep(0.01)
    start = time.monotonic()
    service.close()
    assert time.monotonic() - start < 15

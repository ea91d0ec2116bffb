"""A teacher behind a server: three forms of request against a real HTTP server on this machine, what it may do wrong, and how often it is asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.algo.align import Row, packed, padded
from rftcli.errors import RftError, UsageError
from rftcli.models.remote_teacher import RemoteTeacher
from rftcli.models.vocabularies import check_same_ids, check_same_texts
from rftcli.plan.plan_models import ServerPlan
from rftcli.runtime.teacher import remote
from rftcli.types import Batch, Denominators

Reply = Callable[[str, Any], tuple[int, Any]]
"""(path, body or None) -> (status, what is answered: JSON, or bytes as they are)"""


class Server:
    """Answers what `reply` says, and remembers what it was asked."""

    def __init__(self, reply: Reply) -> None:
        self.asked: list[tuple[str, Any, dict[str, str]]] = []
        self.together = self.most_together = 0
        lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size)) if size else None
                with lock:
                    server.asked.append((self.path, body, dict(self.headers)))
                    server.together += 1
                    server.most_together = max(server.most_together, server.together)
                try:
                    status, found = reply(self.path, body)
                finally:
                    with lock:
                        server.together -= 1
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET = answer

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def serving() -> Iterator[Callable[..., SimpleNamespace]]:
    """A server and a teacher that asks it; `waits` are the pauses it would have made."""
    made: list[Any] = []

    def make(reply: Reply, **options: Any) -> SimpleNamespace:
        server, waits = Server(reply), []
        teacher = RemoteTeacher(server.url, **{"api": "vllm", "retries": 2, "timeout_seconds": 30.0, "pause": waits.append, **options})
        made.extend((teacher, server))
        return SimpleNamespace(server=server, teacher=teacher, waits=waits)

    yield make
    for item in made:
        item.close()


def logprob(ids: list[int], place: int) -> float:
    """What the served model says of the token at a place: it depends on the token and on the one before it."""
    return -(ids[place] + ids[place - 1] / 100)


def vllm(path: str, body: Any) -> tuple[int, Any]:
    if path == "/v1/models":
        return 200, {"data": [{"id": "served"}, {"id": "other"}]}
    ids = body["prompt"]
    rows: list[Any] = [None]
    for place in range(1, len(ids)):
        likelier = {"999": {"logprob": -0.001, "rank": 1, "decoded_token": "zz"}}
        rows.append({**likelier, str(ids[place]): {"logprob": logprob(ids, place), "rank": 7, "decoded_token": f"t{ids[place]}"}})
    return 200, {"choices": [{"text": "x", "prompt_logprobs": rows}]}


def echo(path: str, body: Any) -> tuple[int, Any]:
    ids = body["prompt"]
    values = [None, *(logprob(ids, place) for place in range(1, len(ids))), -9.0]
    return 200, {"choices": [{"logprobs": {"tokens": [*(f"t{number}" for number in ids), "sampled"], "token_logprobs": values}}]}


def sglang(path: str, body: Any) -> tuple[int, Any]:
    ids = body["input_ids"]
    rows = [[None if place == 0 else logprob(ids, place), number, f"t{number}"] for place, number in enumerate(ids)]
    return 200, {"text": "", "meta_info": {"input_token_logprobs": rows}}


SERVERS: dict[str, Reply] = {"vllm": vllm, "echo": echo, "sglang": sglang}
ROWS = [
    Row(torch.tensor([1, 2, 3, 4]), 2, torch.tensor([True, True])),
    Row(torch.tensor([5, 6, 7, 8, 9, 3]), 3, torch.tensor([True, False, True])),
    Row(torch.tensor([1, 1]), 1, torch.tensor([False])),
]
"""Token ids, prompt tokens, mask of the answer; nothing of the last one is trained."""
EXPECTED = [-(3 + 0.02), -(4 + 0.03), -(8 + 0.07), -(3 + 0.09)]


def batch(layout: str, rows: list[Row] = ROWS) -> Batch:
    inputs = padded(rows, 0) if layout == "padded" else packed(rows)
    return Batch(
        input_ids=inputs.input_ids, position_ids=inputs.position_ids, attention_mask=inputs.attention_mask, select=inputs.select,
        target_ids=inputs.target_ids, sequence=inputs.sequence, num_sequences=inputs.num_sequences, advantages=torch.zeros(inputs.select.shape),
        old_logprobs=None, reference_logprobs=None, sampler_logprobs=None, values=None, returns=None,
        denominators=Denominators(tokens=1, sequences=1),
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("api", sorted(SERVERS))
def test_log_probs_of_the_trained_tokens(serving: Callable[..., SimpleNamespace], api: str, layout: str) -> None:
    made = serving(SERVERS[api], api=api, model="mine")
    found, entropy = made.teacher.logprobs(batch(layout), 1.0)
    assert found.tolist() == pytest.approx(EXPECTED) and entropy.tolist() == [0.0] * 4 and found.dtype == torch.float32
    assert len(made.server.asked) == 2  # a sequence in which nothing is trained is not sent
    bodies = [body for _, body, _ in made.server.asked]
    sent = sorted(body["input_ids" if api == "sglang" else "prompt"] for body in bodies)
    assert sent == [[1, 2, 3, 4], [5, 6, 7, 8, 9, 3]]  # whole sequences without padding
    assert {body.get("model") for body in bodies} == {None if api == "sglang" else "mine"}


def test_the_requests_are_those_of_the_servers(serving: Callable[..., SimpleNamespace]) -> None:
    bodies = {}
    for api, reply in SERVERS.items():
        made = serving(reply, api=api, model="m")
        made.teacher.ask([4, 5])
        ((path, bodies[api], _),) = made.server.asked
        assert path == ("/generate" if api == "sglang" else "/v1/completions")
    assert bodies["vllm"] == {
        "prompt": [4, 5], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "add_special_tokens": False, "model": "m",
    }  # fmt: skip
    assert bodies["echo"] == {"prompt": [4, 5], "max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 1, "model": "m"}
    assert bodies["sglang"] == {
        "input_ids": [4, 5], "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}, "return_logprob": True, "logprob_start_len": 0,
        "return_text_in_logprobs": True,
    }  # fmt: skip


def test_a_model_without_a_name_is_the_first_one(serving: Callable[..., SimpleNamespace]) -> None:
    made = serving(vllm)
    made.teacher.ask([1, 2])
    made.teacher.ask([1, 2])
    assert [path for path, _, _ in made.server.asked] == ["/v1/models", "/v1/completions", "/v1/completions"]
    assert made.server.asked[1][1]["model"] == "served"
    nothing = serving(lambda path, body: (200, {"data": []}))
    with pytest.raises(RftError, match="lists no models") as caught:
        nothing.teacher.ask([1, 2])
    assert "served_model" in str(caught.value.hint)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_asked_again_with_growing_pauses(serving: Callable[..., SimpleNamespace], status: int) -> None:
    left = [status, status]
    made = serving(lambda path, body: (left.pop(), {"error": "busy"}) if left else vllm(path, body), model="m")
    assert made.teacher.ask([1, 2])[1] == (pytest.approx(-2.01), "t2")
    assert made.waits == [0.5, 1.0] and len(made.server.asked) == 3


def test_tries_are_bounded(serving: Callable[..., SimpleNamespace]) -> None:
    made = serving(lambda path, body: (503, {"error": "loading"}), model="m", retries=3)
    with pytest.raises(RftError, match=r"did not answer in 4 tries: status 503.*loading") as caught:
        made.teacher.ask([1, 2])
    assert made.waits == [0.5, 1.0, 2.0] and "rft resume" in str(caught.value.hint)


def test_a_refusal_is_not_repeated(serving: Callable[..., SimpleNamespace]) -> None:
    made = serving(lambda path, body: (400, {"error": "prompt_logprobs is off"}), model="m")
    with pytest.raises(RftError, match=r"refused: status 400.*prompt_logprobs is off"):
        made.teacher.ask([1, 2])
    assert len(made.server.asked) == 1 and made.waits == []


def test_a_slow_answer_is_given_up(serving: Callable[..., SimpleNamespace]) -> None:
    def slow(path: str, body: Any) -> tuple[int, Any]:
        time.sleep(0.5)
        return vllm(path, body)

    made = serving(slow, model="m", timeout_seconds=0.05, retries=1)
    with pytest.raises(RftError, match=r"did not answer in 2 tries: ReadTimeout"):
        made.teacher.ask([1, 2])
    time.sleep(0.6)  # until the server is through


def test_nobody_listens() -> None:
    server = Server(vllm)
    server.close()
    waits: list[float] = []
    teacher = RemoteTeacher(server.url, api="vllm", model="m", retries=1, pause=waits.append)
    with pytest.raises(RftError, match="did not answer in 2 tries: ConnectError"):
        teacher.ask([1, 2])
    teacher.close()
    assert waits == [0.5]


@pytest.mark.parametrize(
    ("api", "answer"),
    [
        ("vllm", {"choices": []}),
        ("vllm", {"choices": [{"prompt_logprobs": None}]}),
        ("vllm", {"choices": [{"prompt_logprobs": [None]}]}),  # fewer than were asked for
        ("vllm", {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1.0}}]}]}),  # another token
        ("vllm", []),
        ("echo", {"choices": [{"logprobs": None}]}),
        ("echo", {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [None]}}]}),
        ("sglang", {"meta_info": {}}),
        ("sglang", {"meta_info": {"input_token_logprobs": [[None, 1, None], [-1.0, 9, None]]}}),
        ("sglang", {"meta_info": {"input_token_logprobs": [[None, 1, None]]}}),
    ],
)
def test_an_answer_that_is_none(serving: Callable[..., SimpleNamespace], api: str, answer: Any) -> None:
    made = serving(lambda path, body: (200, answer), api=api, model="m")
    with pytest.raises(RftError, match="answered something else than log-probs of 2 tokens") as caught:
        made.teacher.ask([1, 2])
    assert caught.value.hint == "does `models.teacher.api` fit the server?"


def test_an_answer_that_is_no_json(serving: Callable[..., SimpleNamespace]) -> None:
    made = serving(lambda path, body: (200, b"<html>"), model="m")
    with pytest.raises(RftError, match="answered no JSON: <html>"):
        made.teacher.ask([1, 2])


@pytest.mark.parametrize("value", [None, float("-inf"), float("nan")])
def test_a_log_prob_that_is_no_number_stops(serving: Callable[..., SimpleNamespace], value: float | None) -> None:
    """A failure never becomes a number."""

    def reply(path: str, body: Any) -> tuple[int, Any]:
        status, found = sglang(path, body)
        found["meta_info"]["input_token_logprobs"][2][0] = value
        return status, found

    made = serving(reply, api="sglang")
    with pytest.raises(RftError, match="gave no log-prob for token 2 of a sequence of 4"):
        made.teacher.logprobs(batch("padded", ROWS[:1]), 1.0)


def test_requests_run_side_by_side_up_to_a_bound(serving: Callable[..., SimpleNamespace]) -> None:
    gate = threading.Barrier(3, timeout=60)

    def together(path: str, body: Any) -> tuple[int, Any]:
        gate.wait()  # three at a time, or never
        return sglang(path, body)

    made = serving(together, api="sglang", concurrency=3)
    rows = [Row(torch.tensor([number, 1]), 1, torch.tensor([True])) for number in range(2, 11)]
    found, _ = made.teacher.logprobs(batch("packed", rows), 1.0)
    assert found.tolist() == pytest.approx([-(1 + number / 100) for number in range(2, 11)])  # each answer is its own sequence's
    assert made.server.most_together == 3


def test_headers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(sglang)
    plan = ServerPlan(
        url=f"{server.url}/v1/", api="sglang", model=None, timeout_seconds=5.0, retries=0, concurrency=1, headers_env={"Authorization": "TEACHER_KEY"}
    )
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(UsageError, match="the environment variable TEACHER_KEY is not set"):
        remote(plan)
    monkeypatch.setenv("TEACHER_KEY", "Bearer abc")
    teacher = remote(plan)
    teacher.ask([1, 2])
    ((path, _, headers),) = server.asked
    assert path == "/generate" and headers["Authorization"] == "Bearer abc"
    teacher.close()
    server.close()


def test_the_same_tokens() -> None:
    policy = {"a": 0, "b": 1, "c": 2}
    check_same_ids(policy, {**policy, "d": 3})  # a larger vocabulary is fine
    with pytest.raises(
        UsageError, match="2 of the 3 tokens of the policy have another id for the teacher, or none: `b` is 1 and 2, `c` is 2 and absent"
    ):
        check_same_ids(policy, {"a": 0, "b": 2})
    check_same_texts([" the", "x", "y"], ["Ġthe", "x", None])
    with pytest.raises(UsageError, match="token 1 of a probe is `x` for the policy and `q` for the server's model"):
        check_same_texts([" the", "x"], ["Ġthe", "q"])

"""Judges at a server, and how replies, heads and templates are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing, suppress
from typing import Any

import pytest
from fake_services import Asked, FakeService, Reply, chat_reply
from hypothesis import given
from hypothesis import strategies as st

from rftcli.errors import UsageError
from rftcli.rewards.scorers.head import Head
from rftcli.rewards.scorers.judge import ServerJudge
from rftcli.rewards.scorers.reading import read_reply, share
from rftcli.rewards.scorers.service import Service
from rftcli.rewards.scorers.spec import ReadSpec, ScorerSpec, ServiceSpec
from rftcli.rewards.scorers.template import asked, judge_template
from rftcli.rewards.scorers.view import View

TURN = {"role": "user", "content": "2+2="}
VIEW = View(prompt="2+2=", messages=(TURN,), completion="4", reference="four", label="math", columns={"level": 3}, place="row 1")


def judged(url: str, read: ReadSpec, *, api: str = "chat", samples: int = 1, retries: int = 1) -> float | str:
    service = ServiceSpec(urls=(url,), timeout_seconds=30.0, retries=retries, concurrency=2, per_minute=None, headers_env={})
    spec = ScorerSpec(
        name="j", kind="generative", cache=False, service=service, prompt="Is {{ completion }} right?", read=read, max_new_tokens=8,
        temperature=0.5 if samples > 1 else 0.0, samples=samples, seed=7, model="org/judge", api=api,
    )  # fmt: skip
    with closing(ServerJudge(spec, Service("j", service, first_pause=0.001))) as judge:
        future = judge.submit(VIEW)
        wait([future], timeout=60)
        return future.result() if future.exception() is None else str(future.exception())


REGEX = ReadSpec(regex=r"score: (\S+)", scale=0.1)


def test_a_reply_is_read() -> None:
    with FakeService(lambda one, number: chat_reply("at first score: 3, then score: 7")) as server:
        assert judged(f"{server.url}/v1", REGEX) == pytest.approx(0.7)
        (request,) = server.asked
    assert request.path == "/v1/chat/completions"
    assert request.body == {
        "model": "org/judge", "max_tokens": 8, "temperature": 0.0, "seed": 7, "messages": [{"role": "user", "content": "Is 4 right?"}],
    }  # fmt: skip


def test_the_completions_endpoint() -> None:
    with FakeService(lambda one, number: {"choices": [{"text": "score: 5"}]}) as server:
        assert judged(server.url, REGEX, api="completions") == 0.5
        assert server.asked[0].path == "/completions" and server.asked[0].body["prompt"] == "Is 4 right?"


def test_an_address_that_does_not_exist_is_shown_whole() -> None:
    with FakeService(lambda one, number: Reply(status=404)) as server:
        assert f"{server.url}/chat/completions replied with status 404" in str(judged(server.url, REGEX))


def test_the_mean_of_several_replies() -> None:
    with FakeService(lambda one, number: chat_reply("score: 1", "score: 4", "score: 7")) as server:
        assert judged(server.url, REGEX, samples=3) == pytest.approx(0.4) and server.asked[0].body["n"] == 3
    with FakeService(lambda one, number: chat_reply("score: 1", "I refuse", "score: 7")) as server:
        assert "has no score" in str(judged(server.url, REGEX, samples=3))
    with FakeService(lambda one, number: chat_reply("score: 1")) as server:
        assert "replied with 1 choices, expected 3" in str(judged(server.url, REGEX, samples=3))


def cut(reply: dict[str, Any]) -> dict[str, Any]:
    """The same, ended at its longest."""
    return {"choices": [choice | {"finish_reason": "length"} for choice in reply["choices"]]}


JSON = ReadSpec(json="score")
TOKEN = ReadSpec(token="yes", against=("no",))
# How to add one: (what is read, the server's reply, requests that are made, text of the error).
FAULTS: dict[str, tuple[ReadSpec, Any, int, str]] = {
    "no choices": (REGEX, {"choices": []}, 1, "0 choices"),
    "choices missing": (REGEX, {"error": {"message": "model not found"}}, 1, "no list of choices"),
    "choices null": (REGEX, {"choices": None}, 1, "no list of choices"),
    "a list": (REGEX, [1], 1, "no list of choices"),
    "a choice that is none": (REGEX, {"choices": ["x"]}, 1, "1 choices"),
    "an empty choice": (REGEX, {"choices": [{}]}, 1, "in another form: KeyError"),
    "no content": (REGEX, {"choices": [{"message": {"role": "assistant"}}]}, 1, "in another form: KeyError"),
    "content null": (REGEX, {"choices": [{"message": {"content": None}}]}, 1, "has no text"),
    "content in pieces": (REGEX, {"choices": [{"message": {"content": [{"type": "text", "text": "score: 1"}]}}]}, 1, "has no text"),
    "a message that is none": (REGEX, {"choices": [{"message": "x"}]}, 1, "in another form"),
    "empty": (REGEX, chat_reply(""), 1, "has no score"),
    "no score": (REGEX, chat_reply("I would rather not say."), 1, "has no score"),
    "a score that is none": (REGEX, chat_reply("score: nan"), 1, "is no finite number"),
    "a score in words": (REGEX, chat_reply("score: high"), 1, "'high' is no finite number"),
    "cut in the score": (REGEX, cut(chat_reply("I think so. score: 1")), 1, "was cut at `max_new_tokens`"),
    "cut before the score": (REGEX, cut(chat_reply("Let me think: it is")), 1, "has no score"),
    "cut, thinking apart": (REGEX, cut({"choices": [{"message": {"content": None, "reasoning_content": "score: 3"}}]}), 1, "has no text"),
    "json cut": (JSON, cut(chat_reply('{"score": 1}, or {"score": 1')), 1, "was cut at `max_new_tokens`"),
    "json cut in an outer object": (JSON, cut(chat_reply('{"why": {"score": 1}, "sco')), 1, "was cut at `max_new_tokens`"),
    "json without it": (JSON, chat_reply('{"points": 1}'), 1, "no JSON object with `score`"),
    "json true": (JSON, chat_reply('{"score": true}'), 1, "True is no finite number"),
    "logprobs absent": (TOKEN, {"choices": [{"message": {"content": "yes"}}]}, 1, "gives no logprobs"),
    "logprobs null": (TOKEN, chat_reply("yes"), 1, "gives no logprobs"),
    "logprobs of no token": (TOKEN, {"choices": [{"message": {}, "logprobs": {"content": []}}]}, 1, "in another form: IndexError"),
    "logprobs without content": (TOKEN, {"choices": [{"message": {}, "logprobs": {"content": None}}]}, 1, "in another form: TypeError"),
    "logprobs of another form": (TOKEN, {"choices": [{"logprobs": {"tokens": ["yes"], "token_logprobs": [-0.1]}}]}, 1, "in another form: KeyError"),
    "logprobs in words": (TOKEN, {"choices": [{"logprobs": {"content": [{"top_logprobs": [{"token": "yes", "logprob": "x"}]}]}}]}, 1, "not convert"),
    "logprobs that are none": (TOKEN, chat_reply("yes", top={"yes": math.nan, "no": -1.0}), 1, "none of yes, no"),
    "logprobs too large": (TOKEN, chat_reply("yes", top={"yes": 1e9}), 1, "in another form: OverflowError"),
    "nothing likely": (TOKEN, chat_reply("yes", top={"maybe": -0.1}), 1, "none of yes, no is among the likeliest"),
    "overloaded": (REGEX, Reply(status=503, body={"error": "overloaded"}), 2, "replied with status 503"),
    "too long a question": (REGEX, Reply(status=400, body={"message": "maximum context length"}), 1, "maximum context length"),
    "no such model": (REGEX, Reply(status=404, body={"message": "The model `org/judge` does not exist."}), 1, "does not exist"),
    "no key": (REGEX, Reply(status=401), 1, "replied with status 401"),
    "a stream of events": (REGEX, Reply(body=b"data: {}\n\ndata: [DONE]\n\n"), 2, "what is no JSON"),
    "cut off": (REGEX, Reply(body=chat_reply("score: 1"), cut_at=30), 2, "RemoteProtocolError"),
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[FakeService]:
    with FakeService(lambda one, number: None) as service:
        yield service


@pytest.mark.parametrize("name", FAULTS)
def test_a_reply_that_is_of_no_use_is_an_error(server: FakeService, name: str) -> None:
    read, reply, tries, text = FAULTS[name]
    server.asked.clear()
    server.answer = lambda one, number: reply
    found = judged(server.url, read)
    assert isinstance(found, str) and text in found and len(server.asked) == tries


@pytest.mark.parametrize(
    ("read", "text", "score"),
    [
        (ReadSpec(regex=r"score: (\d+)"), "score: 1, because", 1.0),  # the score was whole
        (ReadSpec(regex=r"^(\d)"), "7", 7.0),  # of one digit, whatever follows
        (ReadSpec(regex=r"score: (\d)"), "score: 7", 7.0),
        (JSON, '{"score": 3} is my sco', 3.0),
    ],
)
def test_a_reply_that_was_cut_behind_its_score(server: FakeService, read: ReadSpec, text: str, score: float) -> None:
    server.answer = lambda one, number: cut(chat_reply(text))
    assert judged(server.url, read) == pytest.approx(score)


def test_a_judge_is_asked_again() -> None:
    def answer(one: Asked, number: int) -> Any:
        return [Reply(status=500), Reply(body=b"not json"), chat_reply("score: 2")][number]

    with FakeService(answer) as server:
        assert judged(server.url, REGEX, retries=2) == pytest.approx(0.2)


def test_a_probability_from_logprobs() -> None:
    top = {"yes": math.log(0.5), " yes": math.log(0.1), "no": math.log(0.2), "Yes": math.log(0.15)}
    with FakeService(lambda one, number: chat_reply("yes", top=top)) as server:
        assert judged(server.url, TOKEN) == pytest.approx(0.75)  # 0.6 / 0.8
        assert judged(server.url, ReadSpec(token="yes", scale=2.0)) == pytest.approx(1.2)
        assert server.asked[0].body["logprobs"] is True and server.asked[0].body["top_logprobs"] == 20
    reply = {"choices": [{"text": "yes", "logprobs": {"top_logprobs": [{"yes": math.log(0.3), "no": math.log(0.1)}]}}]}
    with FakeService(lambda one, number: reply) as server:
        assert judged(server.url, TOKEN, api="completions") == pytest.approx(0.75) and server.asked[0].body["logprobs"] == 5


def test_tokens_that_are_not_listed() -> None:
    assert share(TOKEN, {"yes": 0.9, "x": 0.001}, complete=False) == 1.0  # `no` is below 0.1%
    with pytest.raises(ValueError, match=r"too few tokens to tell how likely no is: .* or score on the ranks"):
        share(TOKEN, {"yes": 0.5, "x": 0.4}, complete=False)
    with pytest.raises(ValueError, match="none of yes, no"):
        share(TOKEN, {"maybe": 1.0}, complete=False)
    with pytest.raises(ValueError, match="too few tokens"):
        share(ReadSpec(token="yes"), {"no": 0.6, "x": 0.4}, complete=False)
    assert share(ReadSpec(token="yes"), {"no": 0.99, "x": 0.001}, complete=False) == 0.0


@given(st.floats(-20, 20), st.floats(-20, 20), st.floats(-5, 5))
def test_the_share_is_a_softmax_over_the_words(one: float, other: float, shift: float) -> None:
    """softmax(a, b) = 1 / (1 + exp(b - a)), whatever else the vocabulary holds."""
    weights = {"yes": math.exp(one + shift), "no": math.exp(other + shift)}
    assert share(TOKEN, weights, complete=True) == pytest.approx(1 / (1 + math.exp(other - one)))


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"score": 3}', 3.0), ('so: ```json\n{"score": 3.5}\n```', 3.5), ('{"score": 1} then {"score": 2}', 2.0), ('{"score": "4"}', 4.0),
        ('{"score": 1} and {"why": "x"}', 1.0), ('{broken {"score": 2}', 2.0),
    ],
)  # fmt: skip
def test_json_replies(reply: str, score: float) -> None:
    assert read_reply(ReadSpec(json="score"), reply) == score


@pytest.mark.parametrize("reply", ["", "7", '{"score": null}', '{"score": true}', '{"score": NaN}', '{"score": [1]}', '{"other": 1}', '{"score": '])
def test_json_replies_without_a_score(reply: str) -> None:
    with pytest.raises(ValueError, match="judge"):
        read_reply(ReadSpec(json="score"), reply)


def test_a_nested_field() -> None:
    assert read_reply(ReadSpec(json="verdict.score", scale=0.5), '{"verdict": {"score": 8}}') == 4.0


def test_a_pattern_that_explodes_is_an_error() -> None:
    with pytest.raises(ValueError, match="takes more than"):
        read_reply(ReadSpec(regex=r"((?:a|a)+)+$"), "a" * 40 + "b")


@given(st.text(max_size=200))
def test_no_reply_is_a_number_by_accident(text: str) -> None:
    for read in (ReadSpec(regex=r"score: (.*)"), ReadSpec(json="score")):
        with suppress(ValueError):
            assert math.isfinite(read_reply(read, text)) and "score" in text


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 2.0), (" 1 ", -3.0), ("h[2]", 0.5), ("0.5*h[0] - h[2]", 0.5), ("-(h[0]+h[1])/2", 0.5), ("+h[1]*2e0", -6.0), ("h[0]-h[0]", 0.0)],
)
def test_heads(text: str, value: float) -> None:
    head = Head(text)
    assert head([2.0, -3.0, 0.5]) == value
    head.fits(3)


@pytest.mark.parametrize(
    "text",
    ["", "h", "h[-1]", "h[0.5]", "h[0:1]", "x[0]", "h[0].real", "__import__('os')", "h[0]**99999", "h[True]", "1.5", "h[0] if 1 else 2", "h[0]; h[1]",
     "h[0]" + "+h[0]" * 200, "(" * 300 + "h[0]" + ")" * 300, "True*h[0]"],
)  # fmt: skip
def test_what_is_no_expression_of_heads(text: str) -> None:
    with pytest.raises(UsageError):
        Head(text)


def test_a_head_that_the_model_lacks() -> None:
    with pytest.raises(UsageError, match=r"reads h\[2\], and the model has the one head h\[0\]"):
        Head("h[0]+h[2]").fits(1)


def test_templates() -> None:
    text = "{{ messages[0].content }}|{{ prompt }}|{{ completion }}|{{ reference }}|{{ label }}|{{ columns.level }}"
    assert asked(judge_template(text), VIEW) == "2+2=|2+2=|4|four|math|3"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{{ answer }} {{ completion }}", "reads `answer`"),
        ("{{ prompt }}", "does not read `completion`"),
        ("{{ completion", "is no template"),
        ("{% if %}{{ completion }}", "is no template"),
    ],
)
def test_templates_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        judge_template(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ completion.__class__.__mro__ }}",
        "{{ completion }}{{ columns.absent }}",
        "{{ completion }}{{ messages.append(1) }}",
        "{{ completion / 2 }}",
    ],
)
def test_templates_are_kept_in_their_sandbox_and_fail_by_row(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be filled in"):
        asked(judge_template(text), VIEW)

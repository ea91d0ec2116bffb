"""A judge behind an OpenAI-compatible server: one request a completion, its replies to a number.

Leaves out a judge on the rank (`runtime.scorers`), the template (`template`) and how a reply is read (`reading`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from statistics import fmean
from typing import Any, Literal

from rftcli.rewards.scorers.reading import read_reply, share
from rftcli.rewards.scorers.service import Service, ServiceError
from rftcli.rewards.scorers.spec import ScorerSpec
from rftcli.rewards.scorers.template import asked, judge_template
from rftcli.rewards.scorers.view import View

TOP_LOGPROBS = 20
"""Likeliest tokens that are asked for; servers allow no more, completions endpoints often 5."""
TOP_LOGPROBS_COMPLETIONS = 5
PATHS = {"chat": "/chat/completions", "completions": "/completions"}


class ServerJudge:
    """UsageError for a template that is none."""

    remote: Literal[True] = True

    def __init__(self, spec: ScorerSpec, service: Service) -> None:
        assert spec.read is not None and spec.prompt is not None
        self._spec, self._read, self._service = spec, spec.read, service
        self._template = judge_template(spec.prompt)

    def key(self, view: View) -> str:
        return asked(self._template, view)

    def submit(self, view: View) -> Future[float]:
        """Sent at once."""
        return self._service.submit(self._body(asked(self._template, view)), self._score, PATHS[self._spec.api])

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        self._service.close()

    def _body(self, text: str) -> dict[str, Any]:
        spec, chat = self._spec, self._spec.api == "chat"
        body: dict[str, Any] = {"model": spec.model, "max_tokens": spec.max_new_tokens, "temperature": spec.temperature, "seed": spec.seed}
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        if spec.samples > 1:
            body["n"] = spec.samples
        if self._read.token is not None:
            body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if chat else {"logprobs": TOP_LOGPROBS_COMPLETIONS}
        return body

    def _score(self, reply: Any) -> float:
        choices = reply.get("choices") if isinstance(reply, Mapping) else None
        if not isinstance(choices, list) or len(choices) != self._spec.samples or not all(isinstance(choice, Mapping) for choice in choices):
            count = f"{len(choices)} choices" if isinstance(choices, list) else "no list of choices"
            raise ServiceError(f"the judge's server replied with {count}, expected {self._spec.samples}")
        try:
            if self._read.token is not None:
                return share(self._read, self._probabilities(choices[0]), complete=False)
            return fmean(read_reply(self._read, self._text(choice), cut=choice.get("finish_reason") == "length") for choice in choices)
        except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise ServiceError(f"the judge's server replied in another form: {type(error).__name__}: {error}") from error

    def _text(self, choice: Mapping[str, Any]) -> str:
        text = choice["message"]["content"] if self._spec.api == "chat" else choice["text"]
        if not isinstance(text, str):
            raise ServiceError(f"the judge's reply has no text (it is {type(text).__name__})")
        return text

    def _probabilities(self, choice: Mapping[str, Any]) -> dict[str, float]:
        """Token -> probability, of the first token of the reply."""
        listed = choice.get("logprobs")
        if not listed:
            raise ServiceError("the judge's server gives no logprobs, which `score.token` needs")
        if self._spec.api == "completions":
            pairs = list(listed["top_logprobs"][0].items())
        else:
            pairs = [(item["token"], item["logprob"]) for item in listed["content"][0]["top_logprobs"]]
        found: dict[str, float] = {}
        for token, logprob in pairs:
            found[str(token)] = found.get(str(token), 0.0) + math.exp(float(logprob))
        return found

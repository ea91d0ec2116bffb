"""A teacher behind a server: log-probs of what the policy sampled, over HTTP. Implements `protocols.Reference`.

Ids go out, log-probs come back; text is never sent. A request that fails in a way that may pass (no connection, time-out, 429, 5xx) is sent again a
bounded number of times with growing pauses; then, and for any other refusal, it is an RftError. What it leaves out: agreement between ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch

from rftcli.errors import RftError
from rftcli.models.teacher_apis import TEACHER_APIS, Known
from rftcli.types import Batch

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
MAY_PASS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Status codes after which the same request may succeed."""
SHOWN_CHARACTERS = 200
RESUME = "the run goes on from its last checkpoint with `rft resume`"


class RemoteTeacher:
    """`headers`: as they are sent, secrets included; they are in no error. `pause` waits, in seconds."""

    def __init__(
        self,
        url: str,
        *,
        api: str,
        model: str | None = None,
        timeout_seconds: float = 120.0,
        retries: int = 4,
        concurrency: int = 8,
        headers: Mapping[str, str] | None = None,
        pause: Callable[[float], None] = time.sleep,
        gone: Callable[[], str | None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`gone`: asked when no answer came; a text says that none will come any more, and why. `on_close`: called last."""
        self._api = TEACHER_APIS[api]
        self._model = model
        self._retries = retries
        self._pause, self._gone, self._on_close = pause, gone, on_close
        self._url = url.rstrip("/").removesuffix("/v1")
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._client = httpx.Client(base_url=self._url, timeout=timeout_seconds, limits=limits, headers=dict(headers or {}))
        self._threads = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="teacher")

    def logprobs(self, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs (N,), zeros (N,)) of the trained tokens. RftError when the server does not give them."""
        assert temperature == 1.0, "servers give log-probs at temperature 1"
        rows = _Rows(batch)
        asked = sorted({row for row, _ in rows.places})
        answers = dict(zip(asked, self._threads.map(self.ask, [rows.ids[row] for row in asked]), strict=True))
        found = []
        for row, position in rows.places:
            value = answers[row][position][0]
            if value is None or not math.isfinite(value):
                raise RftError(f"the teacher at {self._url} gave no log-prob for token {position} of a sequence of {len(rows.ids[row])}")
            found.append(value)
        logprobs = torch.tensor(found, dtype=torch.float32, device=batch.input_ids.device)
        return logprobs, torch.zeros_like(logprobs)

    def ask(self, ids: Sequence[int]) -> list[Known]:
        """(log-prob, text) of every token of a sequence; called from several threads."""
        body = dict(self._api.body(ids))
        if self._api.names_model:
            body["model"] = self.model()
        answer = self._request("POST", self._api.path, body)
        try:
            return self._api.read(answer, ids)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            shown = str(answer)[:SHOWN_CHARACTERS]
            raise RftError(
                f"the teacher at {self._url}{self._api.path} answered something else than log-probs of {len(ids)} tokens "
                f"({type(error).__name__}: {error}): {shown}",
                hint="does `models.teacher.api` fit the server?",
            ) from error

    def model(self) -> str:
        """The name that requests give: the recipe's, or the first that the server lists."""
        if self._model is None:
            answer = self._request("GET", "/v1/models", None)
            try:
                self._model = str(answer["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                hint = "name it: `models.teacher.served_model`"
                raise RftError(f"the teacher at {self._url} lists no models: {str(answer)[:SHOWN_CHARACTERS]}", hint=hint) from error
        return self._model

    def sleep(self) -> None:
        """It holds no memory here."""

    def follow(self, step: int, learner: Any) -> None:
        """A teacher stays what it is."""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()
        self._on_close()

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """The answer's JSON. RftError after the last try, or for a refusal that will not pass."""
        problem = ""
        for attempt in range(self._retries + 1):
            if attempt:
                self._pause(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (attempt - 1)))
            try:
                response = self._client.request(method, path, json=body)
            except httpx.HTTPError as error:
                words = self._gone()
                if words is not None:
                    raise RftError(words, hint=RESUME) from error
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if response.status_code in MAY_PASS:
                problem = f"status {response.status_code}: {response.text[:SHOWN_CHARACTERS]}"
                continue
            if response.status_code != 200:
                raise RftError(f"the teacher at {self._url}{path} refused: status {response.status_code}: {response.text[:SHOWN_CHARACTERS]}")
            try:
                return response.json()
            except ValueError as error:
                raise RftError(f"the teacher at {self._url}{path} answered no JSON: {response.text[:SHOWN_CHARACTERS]}") from error
        raise RftError(
            f"the teacher at {self._url}{path} did not answer in {self._retries + 1} tries: {problem}",
            hint=f"is the server up? {RESUME}",
        )


class _Rows:
    """The sequences of a micro-batch as lists of ids, and where its trained tokens are in them."""

    def __init__(self, batch: Batch) -> None:
        positions = batch.position_ids.flatten().tolist()  # of B x S places
        flat = batch.input_ids.flatten().tolist()
        real = [1] * len(flat) if batch.attention_mask is None else batch.attention_mask.flatten().tolist()
        self.ids: list[list[int]] = []
        where: list[tuple[int, int]] = []
        for token, position, there in zip(flat, positions, real, strict=True):
            if there and position == 0:
                self.ids.append([])
            where.append((len(self.ids) - 1, position))
            if there:
                self.ids[-1].append(token)
        # `select` is the place that predicts a token, so the token itself is one further
        self.places = [where[place + 1] for place in batch.select.tolist()]

"""Reward services: rows in one request, one number a row back.

    openrlhf   {"query": [prompt + answer], "prompts": [...], "labels": [reference]}    -> {"rewards": [...], "scores": ..., "extra_logs": ...}
    lightrft   {"queries": [prompt + answer], "prompts": [...], "references": [...]}    -> the same, or a list

Either way a bare list counts as the scores. null is no score: some servers write a number that is none as null. `extra_logs` go with their rows
(`verdict`), and never decide about a score. Leaves out requests themselves (`service`) and images.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal

from rftcli.rewards.scorers.service import SHOWN, Service, ServiceError
from rftcli.rewards.scorers.verdict import Verdict, extras_of_rows, is_number
from rftcli.rewards.scorers.view import View, canonical

EXTRA_FIELD = "extra_logs"
FIELDS = {"openrlhf": ("query", "prompts", "labels"), "lightrft": ("queries", "prompts", "references")}
"""Preset -> names of (prompt and answer, prompt, reference)."""


class HttpScorer:
    """Gathers rows until a request is full; `flush` sends the rest."""

    remote: Literal[True] = True

    def __init__(self, service: Service, *, preset: str, score_field: str, batch_size: int) -> None:
        self._service, self._fields, self._score_field, self._size = service, FIELDS[preset], score_field, batch_size
        self._lock = threading.Lock()
        self._waiting: list[tuple[View, Future[Verdict]]] = []

    def key(self, view: View) -> str:
        return canonical(_row(view))

    def submit(self, view: View) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        with self._lock:
            self._waiting.append((view, future))
            full = self._take() if len(self._waiting) >= self._size else []
        self._send(full)
        return future

    def flush(self) -> None:
        with self._lock:
            rest = self._take()
        self._send(rest)

    def close(self) -> None:
        self._service.close()

    def _take(self) -> list[tuple[View, Future[Verdict]]]:
        taken, self._waiting = self._waiting, []
        return taken

    def _send(self, rows: list[tuple[View, Future[Verdict]]]) -> None:
        if not rows:
            return
        views = [view for view, _ in rows]
        body = dict(zip(self._fields, map(list, zip(*map(_row, views), strict=True)), strict=True))
        reply = self._service.submit(body, lambda found: verdicts(found, self._score_field, len(views)))

        def tell(done: Future[list[Verdict | Exception]]) -> None:
            error = ServiceError("the scorer was closed") if done.cancelled() else done.exception()
            values: Sequence[Verdict | BaseException] = [error] * len(rows) if error is not None else done.result()
            for (_, future), value in zip(rows, values, strict=True):
                if isinstance(value, BaseException):
                    future.set_exception(value)
                else:
                    future.set_result(value)

        reply.add_done_callback(tell)


def _row(view: View) -> tuple[str, str, Any]:
    return view.prompt + view.completion, view.prompt, view.reference


def verdicts(reply: Any, field: str, rows: int) -> list[Verdict | Exception]:
    """One a row, or what is wrong with that row. ServiceError for a reply that has no list of as many scores."""
    logs = None
    if isinstance(reply, dict):
        if field not in reply:
            raise ServiceError(f"the reply has no field `{field}`; it has: {', '.join(map(str, list(reply)[:10])) or 'nothing'}")
        logs, reply = reply.get(EXTRA_FIELD), reply[field]
    if not isinstance(reply, list):
        raise ServiceError(f"`{field}` must be a list of {rows} numbers, got {type(reply).__name__}")
    if len(reply) != rows:
        raise ServiceError(f"{len(reply)} scores came back for {rows} rows")
    return [_verdict(value, extra) for value, extra in zip(reply, extras_of_rows(logs, rows), strict=True)]


def _verdict(value: Any, extra: dict[str, Any]) -> Verdict | Exception:
    if isinstance(value, list) and len(value) == 1:  # a column of one number a row
        value = value[0]
    if not is_number(value):
        return ServiceError(f"the service's score {short(value)} is no finite number")
    return Verdict(value=float(value), extra=extra)


def short(value: Any) -> str:
    """A value of a reply as an error shows it."""
    text = repr(value) if not isinstance(value, int) or isinstance(value, bool) else "of too many digits"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."

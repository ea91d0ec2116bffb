"""Where reward parts leave their questions: services are asked at once, models after the rollout with all rows of the rank in one go.

The same text is scored once in a round (one rollout, one evaluation set), and once in a run where replies are kept. A scorer sees only what a part
asks: rows whose label names it. Leaves out how scores become rewards (`table`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol, TypeVar

from rftcli.errors import RftError
from rftcli.rewards.scorers.cache import Cache
from rftcli.rewards.scorers.verdict import Verdict
from rftcli.rewards.scorers.view import View, view_of
from rftcli.types import Completion

T = TypeVar("T")


class ScorerGoneError(RftError):
    """A scorer that the run has started answers nobody any more: no row can be scored, whatever its part does with errors."""


class Remote(Protocol):
    """Asked while the engine generates."""

    remote: Literal[True]

    def key(self, view: View) -> str: ...

    def submit(self, view: View) -> Future[Any]:
        """A Verdict, or a bare number where nothing else is said."""

    def flush(self) -> None:
        """No more rows come in this round."""

    def close(self) -> None: ...


class Local(Protocol):
    """Asked once a round, with everything."""

    remote: Literal[False]
    collective: bool
    """Takes part on every rank, with or without rows."""

    def key(self, view: View) -> str:
        """What the score depends on, as text. ValueError for a row that cannot be asked about."""

    def score(self, views: Sequence[View]) -> list[float | Exception]: ...

    def close(self) -> None: ...


class Desk:
    """All scorers of a run by name: `names` from the start, so that tables can be checked, the scorers themselves with `fill`, before the first
    question. Any thread may `ask`."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        self._lock = threading.RLock()  # an answer that is there at once comes back while the question is put
        self._asked: dict[tuple[str, str], Future[Verdict]] = {}
        self._closed = False
        self.fill({})

    def fill(
        self, scorers: Mapping[str, Remote | Local], caches: Mapping[str, Cache] | None = None, front: str = "",
        on_close: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`front`: what the policy's tokenizer puts in front of a text. `on_close`: called behind the scorers' own `close`."""
        self._on_close = on_close
        self._scorers, self._caches, self._front = dict(scorers), dict(caches or {}), front
        self._waiting: dict[str, list[tuple[View, Future[Verdict]]]] = {name: [] for name, scorer in self._scorers.items() if not scorer.remote}

    def knows(self, name: str) -> bool:
        return name in self._names

    def ask(self, name: str, completion: Completion, text: str) -> Future[Verdict]:
        """What is said of a text, or what went wrong, some time before `flush` returns; the same question gets the same answer."""
        scorer, view = self._scorers[name], view_of(completion, text, self._front)
        try:
            key = scorer.key(view)
        except ValueError as error:
            failed: Future[Verdict] = Future()
            failed.set_exception(error)
            return failed
        with self._lock:
            known = self._asked.get((name, key))
            if known is not None:
                return known
            future = self._asked[name, key] = self._ask(name, key, view)
        return future

    def _ask(self, name: str, key: str, view: View) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        cache = self._caches.get(name)
        kept = None if cache is None else cache.get(key)
        if kept is not None:
            future.set_result(kept)
            return future
        if cache is not None:
            future.add_done_callback(lambda done: self._keep(cache, key, done))
        scorer = self._scorers[name]
        if scorer.remote:
            scorer.submit(view).add_done_callback(lambda done: _hand_on(done, future))
        else:
            self._waiting[name].append((view, future))
        return future

    def flush(self) -> None:
        """Score what waits. Every rank calls it once a round, in which sharded scorers meet."""
        for scorer in self._scorers.values():
            if scorer.remote:
                scorer.flush()
        for name, waiting in self._waiting.items():
            rows, waiting[:] = list(waiting), []
            scorer = self._scorers[name]
            if rows or scorer.collective:
                values = scorer.score([view for view, _ in rows])
                for (_, future), value in zip(rows, values, strict=True):
                    _settle(future, value)

    def end_round(self) -> None:
        """Forget what was asked; nobody waits for an answer any more."""
        with self._lock:
            self._asked.clear()
        for waiting in self._waiting.values():
            waiting.clear()

    def close(self) -> None:
        """Once, however many tables share it."""
        if not self._closed:
            self._closed = True
            for scorer in self._scorers.values():
                scorer.close()
            self._on_close()

    def _keep(self, cache: Cache, key: str, done: Future[Verdict]) -> None:
        if done.exception() is None:
            with self._lock:
                cache.put(key, done.result())


def _settle(future: Future[Verdict], said: Verdict | float | BaseException) -> None:
    if isinstance(said, BaseException):
        future.set_exception(said)
        return
    verdict = said if isinstance(said, Verdict) else Verdict(value=said)
    if not math.isfinite(verdict.value):
        future.set_exception(ValueError(f"the score is {verdict.value}, expected a finite number"))
    else:
        future.set_result(verdict)


def _hand_on(done: Future[Any], future: Future[Verdict]) -> None:
    if done.cancelled():
        future.set_exception(RuntimeError("the scorer was closed"))
    else:
        error = done.exception()
        _settle(future, error if error is not None else done.result())


def after(waited_for: Sequence[Future[Any]], then: Callable[[], T]) -> Future[T]:
    """What `then` returns or raises, once all of `waited_for` (one at least) are done, however they ended. It runs where the last one ended."""
    future: Future[T] = Future()
    lock, left = threading.Lock(), [len(waited_for)]

    def count(_: Future[Any]) -> None:
        with lock:
            left[0] -= 1
            last = left[0] == 0
        if last and future.set_running_or_notify_cancel():
            try:
                future.set_result(then())
            except BaseException as error:  # whoever waits for the future gets it
                future.set_exception(error)

    for item in waited_for:
        item.add_done_callback(count)
    return future

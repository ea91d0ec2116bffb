"""Requests to reward services: several addresses, bounded tries with growing pauses, a limit a minute, one time limit a try.

Tried again: no connection, a connection that was closed, a timeout, a reply that is no JSON, status 408, 429 and 5xx. Not: any other status, because
the same request would be refused again, and a reply that is too long. Redirects are not followed: secrets in headers go to the address of the recipe
alone. What a reply calls itself (`content-type`) does not matter. Leaves out what is asked and what a reply means (`http`, `judge`).
"""

from __future__ import annotations

import json
import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rftcli.errors import UsageError
from rftcli.redact import redacted_text
from rftcli.rewards.scorers.desk import ScorerGoneError
from rftcli.rewards.scorers.spec import ServiceSpec

AGAIN = (408, 429)
"""Status codes below 500 that may pass."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
AVOID_SECONDS = 10.0
"""How long an address that did not answer is asked only where the others are busier or worse."""
MOST_BYTES = 64 << 20
"""Of one reply."""
SHOWN = 200


class ServiceError(Exception):
    """A service gave no usable reply; the text says which, and what it said."""


class TransientError(ServiceError):
    """Another try may help. `pause_seconds`: what the service asks for."""

    def __init__(self, message: str, pause_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.pause_seconds = pause_seconds


class Service:
    """The addresses of one scorer. Any thread may call; `submit` runs up to `concurrency` requests side by side."""

    def __init__(
        self,
        name: str,
        spec: ServiceSpec,
        *,
        ranks: int = 1,
        environ: Mapping[str, str] | None = None,
        first_pause: float = FIRST_PAUSE_SECONDS,
        most_bytes: int = MOST_BYTES,
        gone: Callable[[], str | None] | None = None,
    ) -> None:
        """UsageError for a header whose variable is not set. `ranks`: how many share `per_minute`. `gone`: asked after a broken connection; a
        text says that nobody will answer any more, and why, which is a ScorerGoneError."""
        self._name, self._spec, self._gone = name, spec, gone
        headers = header_values(name, spec, os.environ if environ is None else environ)
        self._secrets = sorted(headers.values(), key=len, reverse=True)
        self._threads = ThreadPoolExecutor(max_workers=spec.concurrency, thread_name_prefix=f"scorer-{name}")
        limits = httpx.Limits(max_connections=spec.concurrency, max_keepalive_connections=spec.concurrency)
        self._client = httpx.Client(headers=headers, limits=limits, timeout=spec.timeout_seconds, follow_redirects=False, verify=_trusted())
        self._addresses = Addresses(spec.urls)
        self._pace = Pace(None if spec.per_minute is None else spec.per_minute / ranks)
        self._first_pause, self._most_bytes = first_pause, most_bytes
        self._closed = threading.Event()

    def submit(self, body: Any, read: Callable[[Any], Any], suffix: str = "") -> Future[Any]:
        """What `read` makes of the reply to `body`, JSON both ways. ServiceError where there is none. `suffix` is put behind the address."""
        return self._threads.submit(lambda: read(self.ask(body, suffix)))

    def ask(self, body: Any, suffix: str = "") -> Any:
        """The reply as plain data. ServiceError after the last try."""
        tries = Retrying(
            retry=retry_if_exception_type(TransientError),
            stop=stop_after_attempt(self._spec.retries + 1),
            wait=self._pause,
            sleep=self._sleep,
            reraise=True,
        )
        return tries(self._try, body, suffix)

    def close(self) -> None:
        """Requests under way are given up; nobody waits for them."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _pause(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        wanted = error.pause_seconds if isinstance(error, TransientError) else 0.0
        own = wait_random_exponential(multiplier=self._first_pause, max=LONGEST_PAUSE_SECONDS)(state)
        return max(own, min(wanted, LONGEST_PAUSE_SECONDS))

    def _sleep(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise ServiceError(f"scorer `{self._name}` was closed")

    def _try(self, body: Any, suffix: str) -> Any:
        self._sleep(self._pace.pause())
        address = self._addresses.take()
        shown, good = redacted_text(address + suffix), False
        try:
            status, headers, content = self._post(address + suffix, body)
            good = status < 500
        except _TooLong as error:
            raise ServiceError(f"{shown} replied with more than {self._most_bytes >> 20} MiB") from error
        except httpx.TimeoutException as error:
            raise TransientError(f"{shown} gave no reply within {self._spec.timeout_seconds:g} seconds") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            words = None if self._gone is None or self._closed.is_set() else self._gone()
            if words is not None:
                raise ScorerGoneError(words, hint="a run goes on with `rft resume`, which starts it anew") from error
            raise TransientError(f"{shown} could not be asked: {self._clean(f'{type(error).__name__}: {error}')}") from error
        except RuntimeError as error:  # httpx, of a client that was closed
            raise ServiceError(f"scorer `{self._name}` was closed") from error
        finally:
            self._addresses.give_back(address, good=good)
        if status != 200:
            target = f", sending us to {self._clean(headers['location'])}" if "location" in headers else ""
            text = f"{shown} replied with status {status}{target}: {self._clean(content.decode('utf-8', 'replace'))}"
            if status in AGAIN or status >= 500:
                raise TransientError(text, _seconds(headers.get("retry-after")))
            raise ServiceError(text)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise TransientError(f"{shown} replied with what is no JSON: {self._clean(content.decode('utf-8', 'replace'))}") from error

    def _post(self, url: str, body: Any) -> tuple[int, httpx.Headers, bytes]:
        """(status, headers, body). The library's own limits are for single reads: a reply that trickles is ended here."""
        end = time.monotonic() + self._spec.timeout_seconds
        found = bytearray()
        with self._client.stream("POST", url, json=body) as response:
            if _whole_number(response.headers.get("content-length")) > self._most_bytes:
                raise _TooLong
            for piece in response.iter_bytes():
                found += piece
                if time.monotonic() > end:
                    raise httpx.ReadTimeout("the reply trickles")
                if len(found) > self._most_bytes:
                    raise _TooLong
            return response.status_code, response.headers, bytes(found)

    def _clean(self, text: str) -> str:
        """One short line without the values of headers."""
        line = " ".join(redacted_text(text, [value for value in self._secrets if value]).split())
        return line if len(line) <= SHOWN else line[:SHOWN] + "..."


@cache
def _trusted() -> ssl.SSLContext:
    """Certificates, read once for all scorers."""
    return httpx.create_ssl_context()


class Addresses:
    """Who is asked next: the address with the fewest requests under way, one that failed a moment ago last, the longest unused first."""

    def __init__(self, urls: tuple[str, ...], clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock, self._turn = threading.Lock(), clock, 0
        self._busy = {url.rstrip("/"): 0 for url in urls}
        self._used = dict.fromkeys(self._busy, 0)
        self._failed = dict.fromkeys(self._busy, -AVOID_SECONDS)

    def take(self) -> str:
        with self._lock:
            now = self._clock()
            best = min(self._busy, key=lambda url: (now - self._failed[url] < AVOID_SECONDS, self._busy[url], self._used[url]))
            self._turn += 1
            self._busy[best] += 1
            self._used[best] = self._turn
            return best

    def give_back(self, url: str, *, good: bool) -> None:
        with self._lock:
            self._busy[url] -= 1
            self._failed[url] = -AVOID_SECONDS if good else self._clock()


class Pace:
    """At most so many starts a minute, evenly spaced; None is no limit."""

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap = 0.0 if per_minute is None else 60.0 / per_minute
        self._lock, self._clock, self._next = threading.Lock(), clock, 0.0

    def pause(self) -> float:
        """Seconds to wait before the next start."""
        if not self._gap:
            return 0.0
        with self._lock:
            start = max(self._next, self._clock())
            self._next = start + self._gap
            return start - self._clock()


def header_values(name: str, spec: ServiceSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Headers with their values. UsageError for a variable that is not set; the value is never shown."""
    missing = [variable for variable in spec.headers_env.values() if not environ.get(variable)]
    if missing:
        raise UsageError(f"scorer `{name}`: the environment variable `{missing[0]}` is not set", hint=f"export {missing[0]}=... before the run")
    return {header: environ[variable] for header, variable in spec.headers_env.items()}


class _TooLong(Exception):
    """A reply of more bytes than are read."""


def _whole_number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _seconds(text: str | None) -> float:
    """`Retry-After` in seconds from now, in both of its forms (RFC 9110, 10.2.3); 0 for what is neither."""
    try:
        seconds = float(text or 0.0)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(str(text)).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0

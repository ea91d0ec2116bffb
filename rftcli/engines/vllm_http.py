"""Requests to vLLM servers: control calls one at a time, completions many at a time, and every failure told with the server's address.

Sent again, a bounded number of times, is only what may be repeated: completions whose connection broke or that the server put off (429, 502 to 504),
and only while the server still holds the weights that the others were sampled from. Control calls are never repeated. A server that finishes nothing
for `timeout_seconds` while it is waited for has hung. Once a stop is asked for, a server that says nothing within a moment is not waited for any
longer: its step would never end. One that is only slow finishes it. Leaves out what is asked and what a reply means (`vllm_remote`). No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from rftcli.errors import HeldUpError, RftError, UsageError
from rftcli.redact import redacted_text

AGAIN = (429, 502, 503, 504)
FIRST_PAUSE_SECONDS = 0.5
CONNECT_SECONDS = 20.0
LOOK_SECONDS = 0.5
"""Between two looks at whether a server still finishes anything, and whether a stop is asked for."""
ANSWER_SECONDS = 2.0
"""That a server has to answer /health once a stop is asked for: it does so beside its work."""
WORKERS_SECONDS = 30.0
"""That its workers then have to say which weights they hold, which they do between two steps: a long prompt may take one that long."""
SHOWN = 400
OTHER_PROGRAM = "is another program at this address, or a proxy before the server?"
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(slots=True, kw_only=True)
class Server:
    """One address. `last_words` tells why a server that this run started is gone; None where it is not known."""

    url: str
    last_words: Callable[[], str | None] = lambda: None
    gpus: tuple[str, ...] = ()
    """Those that it was started on, by the names that `CUDA_VISIBLE_DEVICES` has for them; empty: not known, or a CPU."""
    progress: float = 0.0
    """When it last finished something, by the monotonic clock."""
    held: tuple[str, int] | None = None
    """(run, version) of the weights that it has been given."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of its first worker (`RftWorker.rft_state`)."""
    workers: int = 1
    name: str = ""
    """Of its model."""
    generates: bool = False
    """It has /inference/v1/generate, which takes and gives ids alone."""

    @property
    def shown(self) -> str:
        where = f" (GPU {', '.join(self.gpus)})" if self.gpus else ""
        return f"vLLM server {redacted_text(self.url)}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A completion to ask for: `key` comes back with the reply."""

    server: Server
    path: str
    body: Mapping[str, Any]
    key: Any


class Wire:
    """Connections of one rank to its servers. Threads end with `close`. `stop_asked`: whether the run has been asked to stop."""

    def __init__(
        self, *, timeout_seconds: float, retries: int = 2, headers: Mapping[str, str] | None = None, pause_seconds: float = FIRST_PAUSE_SECONDS,
        stop_asked: Callable[[], bool] = lambda: False, workers_seconds: float = WORKERS_SECONDS,
    ) -> None:  # fmt: skip
        self.timeout_seconds, self._retries, self._pause = timeout_seconds, retries, pause_seconds
        self.stop_asked, self.workers_seconds = stop_asked, workers_seconds
        self._headers = dict(headers or {})
        self._clients: dict[bool, httpx.AsyncClient] = {}
        self._probes = {local: httpx.Client(headers=self._headers, trust_env=not local) for local in (False, True)}  # a busy loop is no silence
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-requests", daemon=True)
        self._thread.start()
        self._calls = ThreadPoolExecutor(max_workers=32, thread_name_prefix="vllm-control")

    # control

    def call(self, server: Server, method: str, path: str, body: Any = None, *, seconds: float | None = None) -> httpx.Response:
        """One request, never repeated. RftError without a reply; the status is the caller's matter. HeldUpError where a stop is asked for meanwhile
        and the server says nothing."""
        limit = self.timeout_seconds if seconds is None else seconds
        if self._loop.is_closed():
            raise gone(server, RuntimeError("its connections were closed"))
        reply = asyncio.run_coroutine_threadsafe(self._request(server, method, path, body, limit), self._loop)
        try:
            while not wait([reply], timeout=LOOK_SECONDS).done and not self._loop.is_closed():
                self._leave_silent([server])
            return reply.result(timeout=0)
        except (CancelledError, TimeoutError) as error:  # by `close`
            raise gone(server, error) from error
        finally:
            reply.cancel()

    async def _request(self, server: Server, method: str, path: str, body: Any, limit: float) -> httpx.Response:
        limits = httpx.Timeout(limit, connect=min(limit, CONNECT_SECONDS))
        try:
            return await self._client(is_local(server.url)).request(method, server.url + path, json=body, timeout=limits)
        except httpx.TimeoutException as error:
            raise RftError(f"{server.shown} gave no reply to {path} within {limit:g} s{_words(server)}", hint=_hung()) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as error:  # the last: of a client that was closed
            raise gone(server, error) from error

    def rpc(self, server: Server, method: str, told: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """What every worker of the server answers to a method of `RftWorker`. RftError for an error of any."""
        body = {"method": method, "args": [] if told is None else [json.dumps(told)], "timeout": self.timeout_seconds}
        reply = self.call(server, "POST", "/collective_rpc", body, seconds=self.timeout_seconds + CONNECT_SECONDS)
        return answers(server, method, reply)

    def rpc_later(self, server: Server, method: str, told: Mapping[str, Any] | None = None) -> Future[list[dict[str, Any]]]:
        return self._calls.submit(self.rpc, server, method, told)

    def close(self) -> None:
        """Requests under way are given up."""
        self._calls.shutdown(wait=False, cancel_futures=True)
        for client in self._probes.values():
            client.close()
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()

    # completions

    def ask(self, asked: Sequence[Asked], *, at_once: int) -> Iterator[tuple[Any, Any]]:
        """(key, reply) as they come, at most `at_once` under way at each server. The first failure ends all; so does closing the iterator, and the
        servers then drop what is under way. HeldUpError where a stop is asked for and a server that owes answers, or its workers, say nothing."""
        done: queue.SimpleQueue[tuple[Asked, Any]] = queue.SimpleQueue()
        waiting: dict[str, int] = {}
        now = time.monotonic()
        for one in asked:
            one.server.progress = now
            waiting[one.server.url] = waiting.get(one.server.url, 0) + 1
        servers = {one.server.url: one.server for one in asked}
        work = asyncio.run_coroutine_threadsafe(self._ask_all(asked, at_once, done), self._loop)
        workers, look_at = Workers(self), now + LOOK_SECONDS
        try:
            while any(waiting.values()):
                if time.monotonic() >= look_at:  # also while others answer
                    owing = [servers[url] for url, left in waiting.items() if left]
                    self._refuse_hung(owing)
                    self._leave_silent(owing)
                    workers.leave_silent(owing)
                    look_at = time.monotonic() + LOOK_SECONDS
                try:
                    one, reply = done.get(timeout=max(0.0, look_at - time.monotonic()))
                except queue.Empty:
                    continue
                if isinstance(reply, BaseException):
                    raise reply
                waiting[one.server.url] -= 1
                yield one.key, reply
        finally:
            work.cancel()

    def _refuse_hung(self, servers: Sequence[Server]) -> None:
        now = time.monotonic()
        for server in servers:
            if now - server.progress > self.timeout_seconds:
                raise RftError(f"{server.shown} has finished nothing for {self.timeout_seconds:g} s{_words(server)}", hint=_hung())

    def _leave_silent(self, servers: Sequence[Server]) -> None:
        """HeldUpError where a stop is asked for and one of them says nothing. One that cannot be reached is told by the request that waits for it."""
        if not self.stop_asked():
            return
        for server in servers:
            try:
                self._probes[is_local(server.url)].get(server.url + "/health", timeout=ANSWER_SECONDS)
            except httpx.TimeoutException as error:
                raise held_up(server, ANSWER_SECONDS) from error
            except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError):
                continue

    async def _ask_all(self, asked: Sequence[Asked], at_once: int, done: queue.SimpleQueue[tuple[Asked, Any]]) -> None:
        gates = {one.server.url: asyncio.Semaphore(at_once) for one in asked}

        async def run(one: Asked) -> None:
            try:
                async with gates[one.server.url]:
                    reply = await self._completion(one)
                    one.server.progress = time.monotonic()
            except Exception as error:  # whatever it is: the caller's thread waits for an answer to this request
                done.put((one, error))
            else:
                done.put((one, reply))

        await asyncio.gather(*(run(one) for one in asked))

    async def _completion(self, one: Asked) -> Any:
        server, client = one.server, self._client(is_local(one.server.url))
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                reply = await client.post(server.url + one.path, json=one.body)
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                if last:
                    raise gone(server, error) from error
            else:
                if reply.status_code == 200:
                    return plain(server, one.path, reply)
                if reply.status_code not in AGAIN or last:
                    raise refused(server, one.path, reply)
            await asyncio.sleep(self._pause * 2**attempt)
            await self._same_weights(server, client)
        raise AssertionError("the last try returns or raises")

    async def _same_weights(self, server: Server, client: httpx.AsyncClient) -> None:
        """Before a request is repeated: RftError where the server was started anew meanwhile. No answer is left to the next try."""
        with contextlib.suppress(httpx.HTTPError, OSError):
            found = answers(server, "rft_state", await client.post(server.url + "/collective_rpc", json={"method": "rft_state"}))
            refuse_stale(server, found)

    def _client(self, local: bool) -> httpx.AsyncClient:
        """In the thread of the loop; a local server is never asked through a proxy."""
        if local not in self._clients:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # who waits for an answer looks at what the server finishes
            self._clients[local] = httpx.AsyncClient(headers=self._headers, limits=limits, timeout=timeout, trust_env=not local)
        return self._clients[local]

    async def _hang_up(self) -> None:
        mine = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()


class Workers:
    """Whether the workers of servers that answer still work, asked once a stop is asked for: a server is another process than its engine."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._asked: dict[str, tuple[float, Future[list[dict[str, Any]]]]] = {}

    def leave_silent(self, servers: Sequence[Server]) -> None:
        """HeldUpError where some have said nothing for `workers_seconds`; what they answer is looked at after the rollout."""
        if not self._wire.stop_asked():
            return
        for server in servers:
            if server.url not in self._asked:
                self._asked[server.url] = time.monotonic(), self._wire.rpc_later(server, "rft_state")
            since, state = self._asked[server.url]
            if not state.done() and time.monotonic() - since > self._wire.workers_seconds:
                raise held_up(server, self._wire.workers_seconds)


def held_up(server: Server, seconds: float) -> HeldUpError:
    message = f"asked to stop, and {server.shown} has not said anything for {seconds:g} s{_words(server)}: the step is left unfinished"
    return HeldUpError(message, hint="its log says why")


def answers(server: Server, method: str, reply: httpx.Response) -> list[dict[str, Any]]:
    """The workers' answers in a reply of /collective_rpc. RftError for an error of any."""
    if reply.status_code != 200:
        raise refused(server, f"/collective_rpc {method}", reply)
    found = plain(server, f"/collective_rpc {method}", reply).get("results")
    if not isinstance(found, list) or not found or not all(isinstance(answer, dict) for answer in found):
        raise RftError(f"{server.shown} answered something else than its workers' results to {method}", hint=OTHER_PROGRAM)
    wrong = next((answer["error"] for answer in found if "error" in answer), None)
    if wrong is not None:
        raise RftError(f"{server.shown}: {wrong}")
    return list(found)


def plain(server: Server, path: str, reply: httpx.Response) -> Mapping[str, Any]:
    """The JSON object that a reply is. RftError for anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        found = reply.json()
        if isinstance(found, dict):
            return found
    shown = redacted_text(" ".join(reply.text.split())[:SHOWN])
    raise RftError(f"{server.shown} answered something else than a JSON object to {path}: {shown or 'nothing'}", hint=OTHER_PROGRAM)


def refuse_stale(server: Server, states: Sequence[Mapping[str, Any]]) -> None:
    """RftError where a worker holds other weights than this run has given it last."""
    for state in states:
        if (state["run"], state["version"]) != server.held:
            what = "no weights of this run" if server.held is None or state["run"] != server.held[0] else f"the weights of version {state['version']}"
            wanted = "" if server.held is None else f", not of version {server.held[1]}"
            hint = "it was started anew, or another run uses it too; `rft resume` gives it the newest weights"
            raise RftError(f"{server.shown} has {what}{wanted}", hint=hint)


def refused(server: Server, path: str, reply: httpx.Response) -> RftError:
    """What a status other than 200 means."""
    text = " ".join(reply.text.split())
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        text = str(reply.json()["error"]["message"])
    text = redacted_text(text[:SHOWN])
    if reply.status_code in (401, 403):
        hint = "`rollout.vllm.server.headers_env: {Authorization: VARIABLE}` sends a key"
        return RftError(f"{server.shown} refuses {path} with status {reply.status_code}: {text}", hint=hint)
    if reply.status_code < 500 and reply.status_code not in AGAIN:
        return UsageError(f"{server.shown} cannot sample so: status {reply.status_code}, {text}", hint="its log says more")
    return RftError(f"{server.shown} failed at {path} with status {reply.status_code}: {text}{_words(server)}", hint="its log says why")


def gone(server: Server, error: BaseException) -> RftError:
    told = f"{type(error).__name__}: {error}".rstrip(": ")
    words = _words(server)
    again = "`rft resume` goes on" if words else "start it again as it was, and `rft resume` goes on"
    return RftError(f"{server.shown} cannot be reached: {redacted_text(told)}{words}", hint=f"its log says why; {again}")


def host_of(url: str) -> str:
    """Without port, path and the brackets of an IPv6 address; empty where the address is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_local(url: str) -> bool:
    return host_of(url) in LOCAL


def _words(server: Server) -> str:
    told = server.last_words()
    return "" if told is None else f"; {told}"


def _hung() -> str:
    return "its log says why; `rollout.vllm.server.timeout_seconds` where every completion takes that long"

"""Reward services and judges for tests: FastAPI applications behind uvicorn, each in a thread of its own, with scripted replies and the ways in which
a service fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import Body, FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
PIECE = 1 << 20
"""Bytes of one piece of a long body."""


@dataclass(kw_only=True)
class Reply:
    body: Any = None
    """Bytes as they are, anything else as JSON."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_seconds: float = 0.0
    closes: bool = False
    """The connection is closed without a reply."""
    cut_at: int | None = None
    """The connection is closed behind so many bytes of the body."""
    chunked: bool = False
    """The length is not told beforehand."""
    repeat: int = 1
    """How often the body is sent, one after the other."""
    trickle_seconds: float = 0.0
    """Pause after every byte."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    path: str
    headers: dict[str, str]
    body: Any
    time: float


class FakeService:
    """`answer(asked, number)` gives the reply to the number-th request (from 0); a plain value is a body. `port`: a free one by default."""

    def __init__(self, answer: Callable[[Asked, int], Any], port: int = 0) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.most_at_once = 0
        self._lock, self._busy, self._stopped = threading.Lock(), 0, threading.Event()
        self._socket = listening(port)
        self._server = Server(self._socket, self._application())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> FakeService:
        self._server.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._server.end()

    def _application(self) -> ASGIApp:
        app = FastAPI()

        @app.post("/{path:path}")
        def asked(path: str, request: Request, body: Any = Body()) -> Response:  # noqa: B008 - FastAPI's way to say it
            one = Asked(path=f"/{path}", headers=dict(request.headers), body=body, time=time.monotonic())
            with self._lock:
                number = len(self.asked)
                self.asked.append(one)
                self._busy += 1
                self.most_at_once = max(self.most_at_once, self._busy)
            try:
                found = self.answer(one, number)
                reply = found if isinstance(found, Reply) else Reply(body=found)
                self._stopped.wait(reply.delay_seconds)
            finally:
                with self._lock:
                    self._busy -= 1
            return Told(reply)

        return with_transport(app)


class Told(Response):
    """A reply sent as its faults want it."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, transport = self._reply, scope["transport"]
        if reply.closes:
            transport.close()
            return
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        names = {name.lower() for name in reply.headers}
        headers = reply.headers | ({} if "content-type" in names else {"content-type": "application/json"})
        headers |= {} if reply.chunked or "content-length" in names else {"content-length": str(len(content) * reply.repeat)}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": reply.status, "headers": raw})
        for piece in self._pieces(content):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(reply.trickle_seconds)
        if reply.cut_at is not None:
            transport.close()
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _pieces(self, content: bytes) -> Iterator[bytes]:
        reply = self._reply
        size = 1 if reply.trickle_seconds else PIECE
        whole = content[: reply.cut_at]
        for _ in range(reply.repeat):
            yield from (whole[at : at + size] for at in range(0, len(whole), size))


def with_transport(app: ASGIApp) -> ASGIApp:
    """The connection itself in the scope of a request, for replies that break it."""

    async def outermost(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "transport": send.__self__.transport}, receive, send)  # type: ignore[attr-defined]

    return outermost


class Server(uvicorn.Server):
    """uvicorn in a thread of its own, which ends at once, whatever is under way."""

    def __init__(self, bound: socket.socket, app: ASGIApp) -> None:
        super().__init__(uvicorn.Config(app, log_config=None, lifespan="off", ws="none", access_log=False))
        self._bound, self._up, self._over = bound, threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: self.run(sockets=[bound]), daemon=True)

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._up.set()
        await self._over.wait()

    def begin(self) -> None:
        self._thread.start()
        assert self._up.wait(20), "uvicorn does not start"

    def end(self) -> None:
        assert self._loop is not None
        self.force_exit = True
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)
        self._bound.close()


def listening(port: int = 0) -> socket.socket:
    """A socket of this machine that a server can be given. Connections wait until it is served."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    bound.listen(128)
    return bound


def closed_port() -> int:
    """A port where nobody listens."""
    with contextlib.closing(listening()) as bound:
        return int(bound.getsockname()[1])


def chat_reply(*texts: str, top: dict[str, float] | None = None) -> dict[str, Any]:
    """What an OpenAI-compatible server says; `top`: token -> log-probability of the first token."""
    logprobs = None if top is None else {"content": [{"top_logprobs": [{"token": token, "logprob": value} for token, value in top.items()]}]}
    return {"choices": [{"message": {"role": "assistant", "content": text}, "logprobs": logprobs} for text in texts]}

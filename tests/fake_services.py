"""Real HTTP servers for tests, in threads of their own: scripted replies, and the ways in which a service fails."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(kw_only=True)
class Reply:
    body: Any = None
    """Bytes as they are, anything else as JSON."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_seconds: float = 0.0
    closes: bool = False
    """The connection is closed without a reply."""
    trickle_seconds: float = 0.0
    """Pause after every byte."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    path: str
    headers: dict[str, str]
    body: Any
    time: float


class FakeService:
    """`answer(asked, number)` gives the reply to the number-th request (from 0); a plain value is a body."""

    def __init__(self, answer: Callable[[Asked, int], Any]) -> None:
        self.asked: list[Asked] = []
        self.most_at_once = 0
        self._lock, self._busy, self._stopped = threading.Lock(), 0, threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                one = Asked(path=self.path, headers={k.lower(): v for k, v in self.headers.items()}, body=body, time=time.monotonic())
                with service._lock:
                    number = len(service.asked)
                    service.asked.append(one)
                    service._busy += 1
                    service.most_at_once = max(service.most_at_once, service._busy)
                try:
                    self._reply(answer(one, number))
                finally:
                    with service._lock:
                        service._busy -= 1

            def _reply(self, found: Any) -> None:
                reply = found if isinstance(found, Reply) else Reply(body=found)
                service._stopped.wait(reply.delay_seconds)
                if reply.closes:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                try:
                    self.send_response(reply.status)
                    for name, value in reply.headers.items():
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    if not reply.trickle_seconds:
                        self.wfile.write(content)
                    for at in range(len(content) if reply.trickle_seconds else 0):
                        self.wfile.write(content[at : at + 1])
                        self.wfile.flush()
                        service._stopped.wait(reply.trickle_seconds)
                except OSError:  # the caller has given up
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeService:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def chat_reply(*texts: str, top: dict[str, float] | None = None) -> dict[str, Any]:
    """What an OpenAI-compatible server says; `top`: token -> log-probability of the first token."""
    logprobs = None if top is None else {"content": [{"top_logprobs": [{"token": token, "logprob": value} for token, value in top.items()]}]}
    return {"choices": [{"message": {"role": "assistant", "content": text}, "logprobs": logprobs} for text in texts]}

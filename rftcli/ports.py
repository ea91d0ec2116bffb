"""A port for an engine, that nobody else is given before it listens there. No torch."""

from __future__ import annotations

import socket


class HeldPort:
    """A free port, kept from everybody else until `close`.

    It is bound and never listened on. Afterwards its owner allows that it be bound again, which a server that is about to listen does; whoever looks
    for any free port is not given this one.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()

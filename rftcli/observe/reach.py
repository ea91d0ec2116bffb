"""Does a server answer at all? Asked before a library is that would retry for minutes. One connection, no request."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

SECONDS = 3.0


def answers(url: str, seconds: float = SECONDS) -> bool:
    """Can a connection to the server of `url`, or to the proxy in front of it, be opened within that time? Looking up its name counts in."""
    target = urlsplit(url)
    proxy = getproxies().get(target.scheme)
    if proxy and target.hostname and not proxy_bypass(target.hostname):
        target = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = target.port or (443 if target.scheme == "https" else 80)
    opened = threading.Event()

    def open_one() -> None:
        try:
            socket.create_connection((target.hostname or "", port), timeout=seconds).close()
        except OSError:
            return
        opened.set()

    asking = threading.Thread(target=open_one, name="reach", daemon=True)  # a name server that does not answer knows no time-out of ours
    asking.start()
    asking.join(seconds)
    return opened.is_set()

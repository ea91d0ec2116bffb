"""Addresses of servers in a recipe: what can be seen of one without asking anybody."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import Recipe


def wrong_with(url: str) -> str | None:
    """Why `url` is no address of a server; None: it may be one. What `${VAR}` comes to is only known when the run starts.

    >>> wrong_with("http://host:99999"), wrong_with("https://host/prefix"), wrong_with("http://${HOST}:8000")
    ('is no address: a port is a number up to 65535', None, None)
    """
    if "${" in url:
        return None
    if not re.match(r"https?://[^\s/?#]", url):
        return "must begin with `http://` or `https://` and a host"
    try:
        parts = urlsplit(url)
    except ValueError:
        return "is no address: an IPv6 host stands in a pair of brackets"
    try:
        _ = parts.port
    except ValueError:
        return "is no address: a port is a number up to 65535"
    if not parts.hostname:
        return "is no address: it has no host"
    if re.search(r"\s", url):
        return "is no address: there is a blank in it"
    if parts.query or parts.fragment:
        return "must end with host, port or path: paths of requests are put behind it"
    return None


def addresses(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """Of vLLM's servers and of a teacher's; those of scorers are looked at with them."""
    server, teacher = recipe.rollout.vllm.server, recipe.models.teacher
    urls: Sequence[str] = () if server is None else server.urls
    found: list[tuple[KeyPath, str]] = [(("rollout", "vllm", "server", "urls", place), url) for place, url in enumerate(urls)]
    if teacher is not None and teacher.server is not None:
        found.append((("models", "teacher", "server"), teacher.server))
    for path, url in found:
        why = wrong_with(url)
        if why is not None:
            yield Finding(path=path, message=why)


ROWS = {
    "server-addresses": (
        ("rollout.vllm.server.urls", "models.teacher.server"),
        "An address of a server has a scheme, a host, and a port that exists.",
        addresses,
    ),
}  # fmt: skip
"""Code -> keys it concerns, the rule in one sentence, its check. Rows of `rules.RULES`."""

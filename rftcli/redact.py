"""Secrets out of whatever is written: the one place that knows what a secret looks like. Pure, but for `known_values`, which reads the environment.

A value is a secret when its name says so (SECRET_WORDS), when it is the user part of a URL, or when an environment variable with such a name holds
it. Leaves out files that a person names to a run (recipes keep `${NAME}` unexpanded).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

BLANK = "***"
SHORTEST_VALUE = 8
"""A shorter value of the environment is not looked for in texts: it would blank ordinary words."""


def is_secret_name(name: str) -> bool:
    """Does a variable or key of this name hold a secret? `WANDB_API_KEY`, `hf_token`, `Authorization`; not `max_new_tokens`, `keys`, `tokenizer`.

    >>> [is_secret_name(name) for name in ("WANDB_API_KEY", "HF-TOKEN", "max_new_tokens", "stop_token_ids")]
    [True, True, False, False]
    """
    return _SECRET_NAME.search(name) is not None


def known_values(environ: Mapping[str, str]) -> list[str]:
    """Values of the environment that must not be written anywhere, longest first."""
    found = {value for name, value in environ.items() if is_secret_name(name) and len(value) >= SHORTEST_VALUE}
    return sorted(found, key=lambda value: (-len(value), value))


def redacted(value: Any, values: Sequence[str] = ()) -> Any:
    """The same structure without secrets. `values`: further texts to blank, as of `known_values`."""
    if isinstance(value, Mapping):
        return {str(k): BLANK if isinstance(v, str) and is_secret_name(str(k)) else redacted(v, values) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item, values) for item in value]
    return redacted_text(value, values) if isinstance(value, str) else value


def redacted_text(text: str, values: Sequence[str] = ()) -> str:
    """Text without the given values and without the user part of URLs."""
    for value in values:
        text = text.replace(value, BLANK)
    return _USER_IN_URL.sub(f"{BLANK}@", text)


def redacted_arguments(arguments: Sequence[str], values: Sequence[str] = ()) -> list[str]:
    """A command line without secrets: `--set service.api_key=...`, `--token ...`, `{password: ...}` inside a value.

    >>> redacted_arguments(["--set", "service.api_key=abc", "--set", "a={token: abc, n: 1}", "--token", "abc"])
    ['--set', 'service.api_key=***', '--set', 'a={token: ***, n: 1}', '--token', '***']
    """
    found = []
    after_a_secret = False
    for argument in arguments:
        if after_a_secret and not argument.startswith("-"):
            found.append(BLANK)
            after_a_secret = False
            continue
        name, equals, _ = argument.partition("=")
        after_a_secret = not equals and argument.startswith("--") and is_secret_name(name)
        if equals and is_secret_name(name):
            found.append(f"{name}={BLANK}")
        else:
            found.append(redacted_text(_PAIR.sub(lambda pair: f"{pair['head']}{BLANK}", argument), values))
    return found


SECRET_WORDS = ("key", "token", "secret", "password", "passwd", "passphrase", "authorization", "credential", "credentials", "cookie")
"""A name that ends in one of these, behind `_`, `-`, `.` or nothing, names a secret. To add one: a word here, in lower case."""

_ENDING = rf"(?:^|[_.\-])(?:{'|'.join(SECRET_WORDS)})"
_SECRET_NAME = re.compile(rf"(?i){_ENDING}$")
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_PAIR = re.compile(rf"(?i)(?P<head>(?:^|[\s{{,_.\-'\"])(?:{'|'.join(SECRET_WORDS)})['\"]?\s*:\s+)(?P<value>'[^']*'|\"[^\"]*\"|[^\s,}}]+)")

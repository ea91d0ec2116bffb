"""Keys and values that the language has and this version lacks: they are refused as "not yet supported", never as unknown, never ignored.

How to take one out: build it, add it to `sections`, delete its line here. How to add one: a line with what to do instead, as one short sentence.
Patterns are those of `kinds`: `*` stands for a chosen name or an index. What stands below a listed key is covered by it.
"""

from __future__ import annotations

from rftcli.recipe.kinds import show_pattern


def key_reason(pieces: tuple[str, ...]) -> str | None:
    """Why the key with this pattern is not supported yet; None if it is not listed."""
    return _KEYS.get(_as_in_training(pieces))


def value_reason(pieces: tuple[str, ...], value: str) -> str | None:
    """Why this value of a supported key is not supported yet; None if it is not listed."""
    return VALUES.get(show_pattern(_as_in_training(pieces)), {}).get(value)


def keys_under(pieces: tuple[str, ...]) -> list[str]:
    """Names of the listed keys directly in a section."""
    return [key[-1] for key in _KEYS if key[:-1] == pieces]


_SOURCE = {
    "columns.images": "only text is trained",
    "columns.videos": "only text is trained",
}
"""The same for training and evaluation sets."""

KEYS: dict[str, str] = {
    **{f"data.train[].{key}": reason for key, reason in _SOURCE.items()},
    **{f"data.eval.NAME.{key}": reason for key, reason in _SOURCE.items()},
    "data.images": "only text is trained",
    "data.videos": "only text is trained",
}
"""Pattern of a key -> what holds instead."""

VALUES: dict[str, dict[str, str]] = {
    "train.offload.optimizer": {"nvme": "use cpu: writing moments to a disk in every update is slower than any other way to save memory"},
    "train.offload.parameters": {"nvme": "use cpu: reading weights from a disk in every pass is slower than any other way to save memory"},
    "models.policy.dtype": {"float16": "float16 needs loss scaling: use bfloat16"},
    "models.policy.attention": {"flex": "use varlen: it packs without compiling a mask for every micro-batch"},
    "rollout.engine": {"diffusers": "use vllm, sglang or hf"},
    "profile.tool": {"nsys": "use torch, or start the whole command under the tool: `nsys profile rft train ...`"},
}
"""Pattern of a key -> value -> what to use instead."""


def _as_in_training(pieces: tuple[str, ...]) -> tuple[str, ...]:
    """What is not yet supported in `rewards` is not in `eval.rewards` either."""
    return pieces[1:] if pieces[:2] == ("eval", "rewards") else pieces


def _pieces(pattern: str) -> tuple[str, ...]:
    return tuple("*" if piece in ("NAME", "LABEL", "[]") else piece for piece in pattern.replace("[]", ".[]").split("."))


_KEYS = {_pieces(pattern): reason for pattern, reason in KEYS.items()}

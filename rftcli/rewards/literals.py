"""Rules that wait for a text which they can never see: a special token, while they read the answer without special tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from rftcli.rewards.rules import RULES
from rftcli.rewards.spec import PartSpec


def hidden_literals(labels: Mapping[str, Sequence[PartSpec]], special_tokens: Collection[str]) -> list[str]:
    """One sentence for each part with `text: clean` whose options name a special token.

    >>> part = PartSpec(name="m", kind="rule", target="math_answer", options={"after": "<|final|>"})
    >>> hidden_literals({"math": [part]}, ["<|final|>"])[0]
    'rewards.math: part `m` looks for `<|final|>`, which is a special token and not in the text it reads: set `text: keep_special`'
    """
    return [
        f"rewards.{label}: part `{part.name}` looks for `{token}`, which is a special token and not in the text it reads: set `text: keep_special`"
        for label, parts in labels.items()
        for part in parts
        if part.kind == "rule" and part.text == "clean"
        for token in sorted(special_tokens)
        if _names(part, token)
    ]


def _names(part: PartSpec, token: str) -> bool:
    options = {**RULES[part.target].options, **part.options}
    tags = [f"<{mark}{options[name]}>" for name in ("tag", "answer_tag") if options.get(name) for mark in ("", "/")]
    pattern = options.get("pattern")
    in_pattern = isinstance(pattern, str) and (token in pattern or re.escape(token) in pattern)
    return token in tags or token in str(options.get("after") or "") or in_pattern

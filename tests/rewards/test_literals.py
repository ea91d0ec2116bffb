"""A rule that waits for a special token while it reads the text without them."""

from __future__ import annotations

from typing import Any

import pytest

from rftcli.rewards.literals import hidden_literals
from rftcli.rewards.spec import PartSpec


@pytest.mark.parametrize(
    ("rule", "options", "text", "told"),
    [
        ("think_format", {}, "clean", True),
        ("think_format", {}, "keep_special", False),
        ("think_format", {"tag": "thought"}, "clean", False),
        ("think_format", {"tag": "thought", "answer_tag": "think"}, "clean", True),
        ("exact", {"after": "</think>"}, "clean", True),
        ("exact", {"after": "####"}, "clean", False),
        ("regex", {"pattern": r"<\|end\|>"}, "clean", True),
        ("regex", {"pattern": "</think>.*"}, "clean", True),
        ("length", {"target": 1, "limit": 2}, "clean", False),
    ],
)
def test_who_is_told(rule: str, options: dict[str, Any], text: str, told: bool) -> None:
    part = PartSpec(name="p", kind="rule", target=rule, options=options, text=text)
    found = hidden_literals({"math": [part]}, ["</think>", "<|end|>"])
    assert bool(found) is told and all("rewards.math: part `p`" in sentence for sentence in found)


def test_functions_are_not_looked_at() -> None:
    assert hidden_literals({"math": [PartSpec(name="p", kind="python", target="m:f", options={"after": "<e>"})]}, ["<e>"]) == []

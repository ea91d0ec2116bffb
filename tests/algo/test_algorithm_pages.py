"""The pages of docs/algorithms say of every row of the tables what a reader looks for: formula, source, knobs, numbers, what differs elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rftcli.algo.advantages import ADVANTAGES
from rftcli.algo.losses import CHOOSING, LOSSES

PAGES = Path(__file__).resolve().parents[2] / "docs" / "algorithms"
PAPER = re.compile(r"\d{4}\.\d{5}")
KEY_OF = {"coefficient": "distill_coefficient"}
"""Option of an estimator -> its key of `algorithm.advantage`, where the name is another."""


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "python"])
def test_the_page_of_an_estimator(name: str) -> None:
    text, row = (PAGES / f"{name}.md").read_text(encoding="utf-8"), ADVANTAGES[name]
    assert text.startswith(f"# {name}\n")
    for part in ("Source", "Numbers: ", "Differs elsewhere: "):
        assert part in text, part
    assert "\nKnobs: " in text or "| key of `algorithm.advantage` | default |" in text
    assert set(PAPER.findall(row.source)) <= set(PAPER.findall(text))
    keys = {"passk_std"} | {"min_std"} if name == "grpo_passk" else {KEY_OF.get(option, option) for option in row.options}
    assert all(key in text for key in keys), keys
    assert f"[{name}]({name}.md)" in (PAGES / "estimators.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "python"])
def test_the_section_of_a_loss(name: str) -> None:
    sections = re.split(r"^## ", (PAGES / "losses.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    (section,) = (part for part in sections if name in re.split(r" and |\n", part)[:2])
    row = LOSSES[name]
    assert "lsewhere: " in section and re.search(r"-> |loss 1| -1", section), "numbers, and what differs"
    assert set(PAPER.findall(row.source)) <= set(PAPER.findall(section))
    table = next(line for line in "".join(sections).splitlines() if line.startswith(f"| `{name}` |"))
    assert all(f"`{option}`" in table or "clip" in option for option in row.options if option not in CHOOSING or option in table)

"""`rft samples` on a terminal: nothing of a completion is cut, however narrow it is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rftcli.cli.samples import _panel

LINE = {
    "draw": 224, "sample": 3, "label": "sums", "reward": 1.0, "advantage": 0.935, "tokens": 20, "finish": "stop", "answer": "138",
    "parts": {"answer": {"value": 1.0}}, "prompt": "Q: 46+92\nA:", "completion": "6+2=8, 4+9=13 #### 138", "reference": "138",
}  # fmt: skip


def shown(columns: int) -> list[str]:
    console = Console(file=io.StringIO(), width=columns, highlight=False)
    console.print(_panel(LINE, columns))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_a_narrow_terminal() -> None:
    assert [line.rstrip("│").rstrip() for line in shown(60)] == [
        "╭─ draw 224 sample 3 | label sums | reward 1.00 ───────────╮",
        "│             advantage 0.935 | 20 tokens, stop | answer",
        "│             138",
        "│ parts       answer 1.00",
        "│ prompt      Q: 46+92",
        "│             A:",
        "│ completion  6+2=8, 4+9=13 #### 138",
        "│ reference   138",
        "╰──────────────────────────────────────────────────────────╯",
    ]


@pytest.mark.parametrize("columns", [30, 60, 100, 200])
def test_every_word_is_there(columns: int) -> None:
    lines = shown(columns)
    text = " ".join("".join(lines).replace("│", " ").split())
    assert max(map(len, lines)) == columns
    assert all(word in text for word in ("draw 224", "label sums", "reward", "0.935", "20", "stop", "138", "46+92", "13", "####"))

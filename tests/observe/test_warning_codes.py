"""Every code that a run can warn with has a page, and no page is of a code that nothing gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rftcli.errors import UsageError
from rftcli.observe.warning_codes import WARNINGS
from rftcli.recipe.explain import explain

SOURCES = Path(__file__).parents[2] / "rftcli"
GIVEN = re.compile(r'warn\(\s*"([a-z_]+)"|append\(\("([a-z]+_[a-z_]+)",|[\[ ]\("([a-z]+_[a-z_]+)", (?:text|str\(change)|\bcode="([a-z_]+)"')


def test_all_of_them_and_no_others() -> None:
    found: set[str] = set()
    for path in (*SOURCES.glob("runtime/*.py"), SOURCES / "observe/lessons.py", SOURCES / "observe/follow.py"):
        found |= {next(filter(None, match)) for match in GIVEN.findall(path.read_text(encoding="utf-8"))}
    assert len(found) > 25 and found == set(WARNINGS)


def test_a_page() -> None:
    page = explain("kl_large", warnings=WARNINGS)
    assert page.startswith("warning kl_large\n") and "<kl> nats a token away" in page and "{" not in page
    with pytest.raises(UsageError) as caught:
        explain("kl_lage", warnings=WARNINGS)
    assert "kl_large" in str(caught.value.hint)

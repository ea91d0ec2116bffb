"""Streamed sets: the same rows on any rank and after any resume, never all of them in memory."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rftcli.data.prompts import PromptBuilder
from rftcli.data.rows import Row, RowReader, read_rows
from rftcli.data.source import PromptSource
from rftcli.data.spec import ChatSpec, DataSpec, OverlongPrompt
from rftcli.errors import ResumeError, UsageError

ROWS = 23
BLOCK = 5


class Measured(PromptBuilder):
    """Notes which rows were tokenised."""

    rows: ClassVar[list[int]] = []

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        Measured.rows += [row.index for row in rows]
        return super().lengths(rows)


@pytest.fixture
def make_source(make_tokenizer: Any, tmp_path: Path) -> Callable[..., PromptSource]:
    tokenizer = make_tokenizer()

    def make(
        path: Path, *, seed: int = 0, shuffle: bool = True, block: int = BLOCK, overlong: str = "refuse", also: Any = (), **changes: Any
    ) -> PromptSource:
        spec = DataSpec(name="s", path=str(path), streaming=True, **changes)
        builder = Measured(tokenizer, ChatSpec(), 3, OverlongPrompt(overlong))
        return PromptSource([(spec, partial(RowReader, spec, ())), *also], builder, seed=seed, shuffle=shuffle, block_rows=block)

    return make


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", ROWS)


def write(path: Path, rows: int, prompt: str = "a b") -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "number": n}) + "\n" for n in range(rows)))
    return path


def numbers(source: PromptSource, first: int, count: int) -> list[int]:
    return [source.draw(draw, 1)[0].columns["number"] for draw in range(first, first + count)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("block", [1, 5, 22, 23, 24, 100])
def test_every_pass_has_every_row_once(make_source: Callable[..., PromptSource], file: Path, block: int, shuffle: bool) -> None:
    source = make_source(file, block=block, shuffle=shuffle)
    drawn = numbers(source, 0, 3 * ROWS)
    for number in range(3):
        one = drawn[number * ROWS : (number + 1) * ROWS]
        assert sorted(one) == list(range(ROWS))
        for start in range(0, ROWS, block):
            assert sorted(one[start : start + block]) == list(range(start, min(start + block, ROWS)))  # shuffled within the block
        assert shuffle or one == list(range(ROWS))
    if shuffle and block > 4:
        assert drawn[:ROWS] != drawn[ROWS : 2 * ROWS] and drawn[:5] != sorted(drawn[:5])
    source.close()


def test_any_draw_at_any_time(make_source: Callable[..., PromptSource], file: Path) -> None:
    """Another rank asks for other draws, in another order: what a draw is does not depend on it."""
    straight = numbers(make_source(file), 0, 70)
    for order in ([69, 0, 33], [22, 23, 21], [60, 5, 60, 46], list(range(69, -1, -7))):
        source = make_source(file)
        assert [numbers(source, draw, 1)[0] for draw in order] == [straight[draw] for draw in order]
        source.close()


@pytest.mark.parametrize("stop", [0, 1, 5, 10, 22, 23, 24, 46, 51])
def test_a_resumed_run_goes_on_exactly(make_source: Callable[..., PromptSource], file: Path, stop: int) -> None:
    straight = make_source(file)
    expected = numbers(straight, 0, 80)
    before = make_source(file)
    assert numbers(before, 0, stop) == expected[:stop]
    state = json.loads(json.dumps(before.state_dict()))
    after = make_source(file)
    after.load_state_dict(state)
    assert after.next_draw == stop
    assert numbers(after, stop, 80 - stop) == expected[stop:]
    assert after.passes(80) == straight.passes(80) == 80 / ROWS
    for source in (straight, before, after):
        source.close()


def test_a_resumed_run_does_not_read_from_the_start(make_source: Callable[..., PromptSource], tmp_path: Path) -> None:
    """Rows before the position are not tokenised again: only its block, and the first one, which says whether it is the same data."""
    file = write(tmp_path / "long.jsonl", 1000)
    before = make_source(file, block=100)
    numbers(before, 0, 750)
    state = before.state_dict()
    assert state["streams"] == {"s": {"rows": None, "block": 8, "before": [800, 800]}}
    after = make_source(file, block=100)
    Measured.rows = []
    after.load_state_dict(state)
    assert numbers(after, 800, 1)[0] in range(800, 900)
    assert Measured.rows == [*range(100), *range(800, 900)]
    before.close()
    after.close()


def test_little_is_kept(make_source: Callable[..., PromptSource], tmp_path: Path) -> None:
    source = make_source(write(tmp_path / "long.jsonl", 1000), block=10)
    numbers(source, 0, 990)
    (stream,) = source._sets
    assert sum(len(rows) for rows in stream._blocks.values()) <= 20  # type: ignore[union-attr]
    source.close()


def test_an_endless_source(make_tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "endless_rows.py").write_text(
        "import itertools\ndef rows():\n    for n in itertools.count():\n        yield {'prompt': 'a', 'number': n}\n"
    )
    spec = DataSpec(name="s", python="endless_rows:rows", streaming=True)
    source = PromptSource(
        [(spec, partial(RowReader, spec, (tmp_path,)))], PromptBuilder(make_tokenizer(), ChatSpec(), 3, "refuse"), seed=0, shuffle=True, block_rows=4
    )
    assert sorted(numbers(source, 0, 12)) == list(range(12))
    assert source.num_rows is None and source.passes(12) is None
    source.close()


def test_beside_a_set_in_memory(make_source: Callable[..., PromptSource], file: Path, tmp_path: Path) -> None:
    other = DataSpec(name="other", path=str(write(tmp_path / "other.jsonl", 4, "c")), weight=0.5)
    source = make_source(file, also=[(other, read_rows(other))])
    drawn = Counter(source.draw(draw, 1)[0].source for draw in range(60))
    assert drawn == {"s": 40, "other": 20}
    assert source.num_rows == ROWS + 4
    source.close()


def test_limit_and_filter(make_source: Callable[..., PromptSource], file: Path) -> None:
    source = make_source(file, where="number % 2 == 1", limit=4)
    assert sorted(numbers(source, 0, 8)) == [1, 1, 3, 3, 5, 5, 7, 7]
    source.close()


def test_long_prompts_are_dropped_or_refused(make_source: Callable[..., PromptSource], tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a b c one" if n % 3 == 0 else "a", "number": n}) + "\n" for n in range(12)))
    source = make_source(path, overlong="drop")
    assert sorted(numbers(source, 0, 8)) == [1, 2, 4, 5, 7, 8, 10, 11] and source.num_rows == 8
    again = make_source(path, overlong="drop")
    again.load_state_dict(source.state_dict())
    assert numbers(again, 8, 20) == numbers(source, 8, 20)
    with pytest.raises(UsageError, match=r"mixed\.jsonl:1: the prompt needs 4 tokens"):
        make_source(path).draw(0, 1)
    all_long = write(tmp_path / "long.jsonl", 3, "a b c one")
    with pytest.raises(UsageError, match="nothing is left to draw"):
        make_source(all_long, overlong="drop").draw(0, 1)
    source.close()
    again.close()


def test_faults_are_told_where_they_are_read(make_source: Callable[..., PromptSource], tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "number": n}) + "\n" for n in range(7)) + "{\n")
    source = make_source(path)
    assert sorted(numbers(source, 0, 5)) == list(range(5))
    with pytest.raises(UsageError, match=r"bad\.jsonl:8: not JSON"):
        source.draw(5, 1)


def test_other_data_is_refused(make_source: Callable[..., PromptSource], file: Path, tmp_path: Path) -> None:
    source = make_source(file)
    numbers(source, 0, 7)
    state = source.state_dict()
    for other, key in ((make_source(write(tmp_path / "o.jsonl", ROWS, "b")), "fingerprint"), (make_source(file, block=6), "block_rows")):
        with pytest.raises(ResumeError, match=f"data set `s` has changed: its {key} was"):
            other.load_state_dict(state)
        other.close()
    source.close()


def test_the_seed_of_the_data_decides(make_source: Callable[..., PromptSource], file: Path) -> None:
    orders = {tuple(numbers(make_source(file, seed=seed), 0, ROWS)) for seed in range(4)}
    assert len(orders) == 4 and all(sorted(order) == list(itertools.chain(range(ROWS))) for order in orders)

"""Keyed permutations and keys: fixed numbers, because they must not change between machines or versions."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.algo.keyed import key64, keyed_permutation

PARTS = st.lists(st.integers() | st.text(), max_size=4)


def test_fixed_values() -> None:
    assert key64("noise", 0, 7, 3) == 15179331183584079922
    assert keyed_permutation("rows", 0, n=8) == [6, 3, 7, 0, 4, 2, 5, 1]


@given(st.lists(st.integers() | st.text(), max_size=3), st.integers(0, 200))
def test_is_a_permutation_and_repeats(key: list, n: int) -> None:
    order = keyed_permutation(*key, n=n)
    assert sorted(order) == list(range(n))
    assert order == keyed_permutation(*key, n=n)


@given(PARTS, PARTS)
def test_different_parts_give_different_keys(left: list, right: list) -> None:
    assert (key64(*left) == key64(*right)) == (left == right)
    assert 0 <= key64(*left) < 2**64


@pytest.mark.parametrize(("left", "right"), [((1,), ("1",)), (("ab", "c"), ("a", "bc")), ((1, 23), (12, 3)), ((), ("",)), ((-1,), (1,))])
def test_parts_do_not_run_into_each_other(left: tuple, right: tuple) -> None:
    assert key64(*left) != key64(*right)
    assert keyed_permutation(*left, n=50) != keyed_permutation(*right, n=50)


def test_every_order_is_equally_likely() -> None:
    counts = Counter(tuple(keyed_permutation("uniform", draw, n=3)) for draw in range(6000))
    assert len(counts) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 20.5  # chi squared, 5 degrees of freedom, p = 0.001


def test_a_part_must_be_a_number_or_a_text() -> None:
    for part in (True, 1.0, None, b"a"):
        with pytest.raises(AssertionError):
            key64(part)  # type: ignore[arg-type]


def test_light_files_import_no_torch() -> None:
    code = "import sys, rftcli.algo.keyed, rftcli.algo.batchmath, rftcli.algo.stats; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""Randomness by key: the same key gives the same numbers on every machine, rank and Python version.

What it leaves out: generators with a state. A permutation is a pure function of its key and size, so a resumed run asks again and gets the same.
"""

from __future__ import annotations

import hashlib
import struct


def key64(*parts: int | str) -> int:
    """A stable unsigned 64-bit key of the parts, in order. `1` and `"1"` are different parts, ("ab", "c") and ("a", "bc") different keys.

    >>> key64("noise", 0, 7, 3) == key64("noise", 0, 7, 3) != key64("noise", 0, 73)
    True
    """
    return int.from_bytes(hashlib.blake2b(_encoded(parts), digest_size=8).digest(), "little")


def keyed_permutation(*key: int | str, n: int) -> list[int]:
    """A permutation of 0..n-1 that depends on the key and n alone.

    Indices are sorted by n independent 64-bit words, one stream per key: every order is equally likely up to the chance n^2 / 2^65 of a tie.

    >>> sorted(keyed_permutation("rows", 0, n=4))
    [0, 1, 2, 3]
    """
    return sorted(range(n), key=keyed_words(*key, n=n).__getitem__)


def keyed_words(*key: int | str, n: int) -> tuple[int, ...]:
    """n independent unsigned 64-bit words that depend on the key and n alone."""
    assert n >= 0, n
    return struct.unpack(f"<{n}Q", hashlib.shake_256(_encoded((*key, n))).digest(8 * n))


def _encoded(parts: tuple[int | str, ...]) -> bytes:
    """The parts as bytes, each with its type and length in front, so that different parts never meet in the same bytes."""
    encoded = []
    for part in parts:
        assert type(part) in (int, str), f"a key is made of int and str, got {part!r}"
        body = str(part).encode()
        encoded.append(f"{type(part).__name__}{len(body)}:".encode() + body)
    return b"".join(encoded)

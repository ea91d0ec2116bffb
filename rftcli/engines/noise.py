"""The noise of sampling, by key: token t of sample s of draw d reads the same uniform number on any rank, in any batch, on any machine.

A counter-based generator: the 64-bit key of a row plus the position goes through SplitMix64's finaliser (Steele, Lea and Flood, "Fast Splittable
Pseudorandom Number Generators", OOPSLA 2014). It has no state, so nothing has to be saved, advanced or skipped.

What it leaves out: turning a uniform into a token (`sampling`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rftcli.algo.keyed import key64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_11 = (np.uint64(bits) for bits in (30, 27, 31, 11))


class RowNoise:
    """The uniform numbers of one row.

    >>> RowNoise(0, 7, 3).uniform(5) == RowNoise(0, 7, 3).uniform(5) != RowNoise(0, 7, 3).uniform(6)
    True
    """

    __slots__ = ("key",)

    def __init__(self, seed: int, draw: int, sample: int) -> None:
        self.key = key64("noise", seed, draw, sample)

    def uniform(self, token: int) -> float:
        """A float64 in [0, 1) for the token at this position of the completion, counted from 0."""
        return float(uniforms(np.array([self.key], dtype=np.uint64), np.array([token]))[0])


def uniforms(keys: NDArray[np.uint64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """(R,) or (T, R) float64 in [0, 1): the number of each row's key (R,) at its own token position, of the same shape. A row's number depends on
    nothing else."""
    mixed = keys + (tokens.astype(np.uint64) + np.uint64(1)) * _GOLDEN  # arrays of unsigned numbers wrap modulo 2^64
    mixed = (mixed ^ (mixed >> _SHIFT_30)) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFT_27)) * _MIX_2
    mixed = mixed ^ (mixed >> _SHIFT_31)
    return (mixed >> _SHIFT_11).astype(np.float64) * 2.0**-53

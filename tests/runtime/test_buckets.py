"""Buckets of parameters: all of them, in order, as few as the limit allows."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rftcli.runtime.buckets import buckets


def named(sizes: list[int]) -> list[tuple[str, nn.Parameter]]:
    return [(str(number), nn.Parameter(torch.zeros(size))) for number, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 60))
def test_all_in_order_within_the_limit(sizes: list[int], most: int) -> None:
    parameters = named(sizes)
    found = list(buckets(parameters, most))
    assert [pair for bucket in found for pair in bucket] == parameters and all(found)
    assert all(len(bucket) == 1 or sum(4 * item.numel() for _, item in bucket) <= most for bucket in found)
    for bucket, following in pairwise(found):
        assert sum(4 * item.numel() for _, item in bucket) + 4 * following[0][1].numel() > most  # the next one did not fit


def test_what_is_partitioned_counts_in_full() -> None:
    parameters = named([0, 0])
    for _, parameter in parameters:
        parameter.ds_numel = 100  # type: ignore[attr-defined]
    assert [len(bucket) for bucket in buckets(parameters, 799)] == [1, 1] and [len(bucket) for bucket in buckets(parameters, 800)] == [2]

"""Parameters in their order, cut into buckets: what is gathered together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn


def buckets(parameters: Iterable[tuple[str, nn.Parameter]], most_bytes: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """As many as stay within `most_bytes` of whole tensors, one at least. A partitioned parameter counts in full."""
    kept: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in parameters:
        own = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if kept and size + own > most_bytes:
            yield kept
            kept, size = [], 0
        kept.append((name, parameter))
        size += own
    if kept:
        yield kept

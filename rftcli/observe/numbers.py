"""Metrics as flat, plain numbers: what every reader of events does first.

Leaves out what a metric means; names stay as they are in the event.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_WRITTEN_AS_TEXT = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""An event line stays JSON, so numbers that are not finite travel as these strings."""


def number(value: Any) -> float | None:
    """The value as a float, or None if it is no number. Truth values and other text are no numbers."""
    if isinstance(value, str):
        return _WRITTEN_AS_TEXT.get(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def flatten(metrics: Mapping[str, Any], separator: str) -> dict[str, float]:
    """Nested metrics with their names joined; whatever is no number is left out.

    >>> flatten({"kl": 0.5, "seconds": {"rollout": 3, "note": "warm"}}, "/")
    {'kl': 0.5, 'seconds/rollout': 3.0}
    """
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}{separator}{inner}": item for inner, item in flatten(value, separator).items()})
        elif (plain := number(value)) is not None:
            flat[str(name)] = plain
    return flat


def flatten_evals(sets: Mapping[str, Mapping[str, Any]], separator: str) -> dict[str, float]:
    """Evaluation metrics by `set<separator>metric`; an interval adds `...<separator>low` and `...<separator>high`.

    >>> flatten_evals({"gsm8k": {"mean@1": {"value": 0.5, "low": 0.4, "high": 0.6}, "prompts": 64}}, "/")
    {'gsm8k/mean@1': 0.5, 'gsm8k/mean@1/low': 0.4, 'gsm8k/mean@1/high': 0.6, 'gsm8k/prompts': 64.0}
    """
    own = f"{separator}value"
    return {name.removesuffix(own): value for name, value in flatten(sets, separator).items()}


def means_with_intervals(metrics: Mapping[str, Any]) -> dict[str, tuple[float, float | None, float | None]]:
    """The metrics of one evaluation set that have a value: name -> (value, low, high), in the order of the event."""
    found: dict[str, tuple[float, float | None, float | None]] = {}
    for name, entry in metrics.items():
        if isinstance(entry, Mapping) and (value := number(entry.get("value"))) is not None:
            found[name] = (value, number(entry.get("low")), number(entry.get("high")))
    return found

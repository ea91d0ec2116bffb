"""The metric of dynamic sampling and curriculum, where a function returns values with names of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rftcli.errors import RftError
from rftcli.stages.outcomes import metric_of
from rftcli.types import Group, PartScore


def group(made: SimpleNamespace, *names: str) -> Group:
    parts = [PartScore(name=name, value=0.5, weight=1.0, seconds=0.0) for name in names]
    failed = [PartScore(name="style", value=None, weight=1.0, seconds=0.0, error="broke")]
    return Group(prompt=made.prompt(0), samples=(made.sample(0, 0, 1.0, parts=parts), made.sample(0, 1, None, parts=failed)))


def test_a_named_value_may_be_the_metric(made: SimpleNamespace) -> None:
    assert metric_of(group(made, "style.short", "style.polite"), "style.short") == (0.5, None)
    assert metric_of(group(made, "style.polite"), "style.short") == (None, None)
    assert metric_of(group(made, "style", "style.short"), "style") == (0.5, None)


def test_a_part_that_returns_named_values_is_no_metric(made: SimpleNamespace) -> None:
    """Every group would say nothing: refilled for ever, and never measured."""
    with pytest.raises(RftError, match="the metric `style` is a part that returns named values") as caught:
        metric_of(group(made, "style.short", "style.polite"), "style")
    assert caught.value.hint == "name one of them: style.short, style.polite"

"""The name of a run from a pattern: `{date}-{model}`. The one place of preparation that looks at a clock."""

from __future__ import annotations

import datetime
import re
from pathlib import PurePath

from rftcli.recipe.sections import Recipe


def run_name(recipe: Recipe, stem: str, now: datetime.datetime | None = None) -> str:
    """`recipe.name` with its fields filled in; the recipe file's own name where there is none. Dates are UTC.

    >>> import types
    >>> model = types.SimpleNamespace(policy=types.SimpleNamespace(path="org/Qwen-0.5B"))
    >>> run_name(types.SimpleNamespace(name="{date}-{model}", models=model, seed=0), "r", datetime.datetime(2026, 1, 2))
    '20260102-Qwen-0.5B'
    """
    if recipe.name is None:
        return stem
    now = now or datetime.datetime.now(datetime.UTC)
    model = PurePath(recipe.models.policy.path.removeprefix("builtin:")).name
    fields = {
        "date": now.strftime("%Y%m%d"),
        "time": now.strftime("%H%M%S"),
        "model": re.sub(r"[^\w.+-]+", "-", model),
        "recipe": stem,
        "seed": str(recipe.seed),
    }
    return re.sub(r"\{(\w+)\}", lambda found: fields[found[1]], recipe.name)

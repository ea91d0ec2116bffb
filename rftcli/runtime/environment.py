"""From a plan as it lies on disk, with `${VAR}` in its texts, to the plan that a process runs with. The one place where that happens.

Leaves out how a plan gets its references (`recipe.written`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rftcli.builtin import builtin_path
from rftcli.codec import from_data, to_data
from rftcli.errors import UsageError
from rftcli.recipe.expand import ExpansionError
from rftcli.recipe.written import live_text

if TYPE_CHECKING:
    from rftcli.plan.plan import ModelPlan, Plan


def live_plan(plan: Plan, env: Mapping[str, str]) -> Plan:
    """`plan` with every reference replaced; names that are shown stay as they were written. It is never written to disk.

    UsageError for a variable that is not set.
    """
    from rftcli.plan.plan import Plan

    try:
        live = from_data(Plan, live_text(to_data(plan), env))
    except ExpansionError as error:
        raise UsageError(f"the plan needs it: {error}", hint=error.hint) from error
    reference = None if live.reference is None or plan.reference is None else _model(live.reference, plan.reference)
    return replace(live, name=plan.name, policy=_model(live.policy, plan.policy), reference=reference)


def launch_environment(written: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """`launch.env` as it is written, made real on the machine of a rank. What needs a variable that is not set there is left out: `live_plan` says so
    where the error reaches a person.

    >>> launch_environment({"A": "${B}/x", "C": "$${B}", "D": "${NONE}"}, {"B": "b"})
    {'A': 'b/x', 'C': '${B}'}
    """
    found = {}
    for name, text in written.items():
        with contextlib.suppress(ExpansionError):
            found[name] = str(live_text(text, env))
    return found


def resolved_model(path: str) -> str:
    """`builtin:` names become paths; everything else stays."""
    return str(builtin_path(path.removeprefix("builtin:"))) if path.startswith("builtin:") else path


def _model(live: ModelPlan, written: ModelPlan) -> ModelPlan:
    return replace(live, path=resolved_model(live.path), given=written.given)

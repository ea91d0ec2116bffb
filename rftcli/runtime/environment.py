"""From a plan as it lies on disk, with `${VAR}` in its texts, to the plan that a process runs with. The one place where that happens.

Leaves out how a plan gets its references (`recipe.written`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rftcli.builtin import builtin_path
from rftcli.codec import from_data, to_data
from rftcli.errors import UsageError
from rftcli.plan.plan import ModelPlan, Plan
from rftcli.recipe.expand import ExpansionError
from rftcli.recipe.written import live_text


def live_plan(plan: Plan, env: Mapping[str, str]) -> Plan:
    """`plan` with every reference replaced; names that are shown stay as they were written. It is never written to disk.

    UsageError for a variable that is not set.
    """
    try:
        live = from_data(Plan, live_text(to_data(plan), env))
    except ExpansionError as error:
        raise UsageError(f"the plan needs it: {error}", hint=error.hint) from error
    reference = None if live.reference is None or plan.reference is None else _model(live.reference, plan.reference)
    return replace(live, name=plan.name, policy=_model(live.policy, plan.policy), reference=reference)


def resolved_model(path: str) -> str:
    """`builtin:` names become paths; everything else stays."""
    return str(builtin_path(path.removeprefix("builtin:"))) if path.startswith("builtin:") else path


def _model(live: ModelPlan, written: ModelPlan) -> ModelPlan:
    return replace(live, path=resolved_model(live.path), given=written.given)

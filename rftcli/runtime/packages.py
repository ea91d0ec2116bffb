"""Packages that a recipe needs on the machine that runs it, beyond those that `rft` brings. Looked for without an import."""

from __future__ import annotations

from rftcli.errors import MachineError
from rftcli.plan.compile_server import needs_vllm_here
from rftcli.probe.machine import installed
from rftcli.recipe.sections import Recipe


def require_packages(recipe: Recipe) -> None:
    """MachineError, with the command that installs it, for the first one that is missing."""
    critic = recipe.models.critic
    kinds = {recipe.train.optimizer.kind, *([] if critic is None else [critic.optimizer.kind])}
    if "adamw_8bit" in kinds and not installed("bitsandbytes"):
        raise MachineError("adamw_8bit needs the package `bitsandbytes`, which is not installed", hint="pip install 'rftcli[quantise]'")
    if needs_vllm_here(recipe) and not installed("vllm"):
        raise MachineError("rollout.engine vllm needs the package `vllm`, which is not installed", hint="pip install 'rftcli[vllm]'")

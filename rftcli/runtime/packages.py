"""Packages that a recipe needs on the machine that runs it, beyond those that `rft` brings. Looked for without an import."""

from __future__ import annotations

from rftcli.errors import MachineError
from rftcli.plan.specs import needs_vllm_here, used_scorers
from rftcli.probe.machine import installed
from rftcli.recipe.scorer_rules import variant
from rftcli.recipe.sections import Recipe


def require_packages(recipe: Recipe) -> None:
    """MachineError, with the command that installs it, for the first one that is missing."""
    critic = recipe.models.critic
    kinds = {recipe.train.optimizer.kind, *([] if critic is None else [critic.optimizer.kind])}
    if "adamw_8bit" in kinds and not installed("bitsandbytes"):
        raise MachineError("adamw_8bit needs the package `bitsandbytes`, which is not installed", hint="pip install 'rftcli[quantise]'")
    if recipe.train.kernels == "liger" and not installed("liger_kernel"):
        message = "train.kernels liger needs the package `liger-kernel`, which is not installed"
        raise MachineError(message, hint="pip install 'rftcli[liger]'; its kernels run on a GPU alone")
    attention = recipe.models.policy.attention
    if attention.startswith("flash"):
        from rftcli.models.flash_packages import FLASH

        if not installed(FLASH[attention]):
            message = f"models.policy.attention: {attention} needs the package `{FLASH[attention]}`, which is not installed"
            raise MachineError(message, hint="use models.policy.attention: varlen, which needs no package")
    for engine, needed in (("vllm", needs_vllm_here(recipe)), ("sglang", recipe.rollout.engine == "sglang")):
        if needed and not installed(engine):
            message = f"rollout.engine {engine} needs the package `{engine}`, which is not installed"
            raise MachineError(message, hint=f"pip install 'rftcli[{engine}]'")
    for name in sorted(used_scorers(recipe)):
        scorer = recipe.models.scorers[name]
        place, kind = scorer.placement, variant(scorer)
        if (kind == "beside" or (place != "shared" and kind == "started" and not place.command)) and not installed("vllm"):
            message = f"models.scorers.{name}.{'engine' if kind == 'beside' else 'placement.gpus'} needs the package `vllm`, which is not installed"
            hint = "pip install 'rftcli[vllm]'; or `placement: {gpus: n, command: ...}` with a vLLM elsewhere on this machine"
            raise MachineError(message, hint=hint)
    teacher = recipe.models.teacher
    if teacher is not None and teacher.placement is not None and not teacher.placement.command and not installed("vllm"):
        hint = "pip install 'rftcli[vllm]'; or `placement.command` of a vLLM elsewhere on this machine"
        raise MachineError("models.teacher.placement needs the package `vllm`, which is not installed", hint=hint)

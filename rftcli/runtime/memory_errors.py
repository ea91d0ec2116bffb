"""Out of memory, told so that a person can act: which stage, how much was in use, which keys help. One error for CUDA, torch on a CPU, and Python.

The stage is read from the traceback: the first of our rooms on the way down. Leaves out a process that the kernel kills (`verdict` tells of it).
"""

from __future__ import annotations

import resource
import traceback

from rftcli.errors import RftError
from rftcli.plan.plan import Plan

GIB = 1024**3
TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "std::bad_alloc", "Cannot allocate memory")
"""What CUDA, cuBLAS, NCCL, torch's CPU allocator and the system say."""


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS))


def told(error: BaseException, plan: Plan) -> RftError | None:
    """The error for a person; None if it is another kind of failure."""
    if not is_out_of_memory(error):
        return None
    stage = stage_of(error)
    first_line = (str(error).strip().partition("\n")[0] or type(error).__name__)[:300]
    doing = STAGES[stage][0] if stage else "between the stages"
    knobs = _knobs(stage, plan)
    return RftError(f"out of memory {doing}; {in_use(plan)}: {first_line}", hint="; or ".join(knobs))


def stage_of(error: BaseException) -> str | None:
    """The stage that the loop was in: the first in the traceback; None if there is none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    if SCORING in names:  # inside collect or an evaluation
        return "score"
    if STARTING.intersection(names):  # inside what loads models
        return "engine"
    if any(name.startswith("rftcli.engines") and frame.f_code.co_name == "load" for name, frame in zip(names, frames, strict=True)):
        return "weights"
    for name in names:
        for stage, (_, rooms) in STAGES.items():
            if any(name == room or name.startswith(f"{room}.") for room in rooms):
                return stage
    return None


def in_use(plan: Plan) -> str:
    """Memory of this process at its highest."""
    if plan.world.device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_allocated()
        return f"this rank had up to {peak / GIB:.1f} GiB of the GPU's {total / GIB:.1f} GiB in tensors, {free / GIB:.1f} GiB are free"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
    return f"this rank had up to {peak / GIB:.2f} GiB in memory"


def _knobs(stage: str | None, plan: Plan) -> list[str]:
    """Recipe keys that help, the cheapest first, each with its value today."""
    batch, learner = plan.batch, plan.learner
    rows = [f"lower rollout.hf.batch_rows (now {plan.rollout.batch_rows})"] if plan.rollout.own_engine is None else _knobs_of_engine(plan)
    if batch.tokens_per_micro_batch is not None:
        cut = f"lower batch.tokens_per_micro_batch (now {batch.tokens_per_micro_batch})"
    else:
        cut = f"lower batch.micro_batch_size (now {batch.micro_batch_size})"
    model = [f"set train.deepspeed.zero_stage to {learner.zero_stage + 1} (now {learner.zero_stage})"] if learner.zero_stage < 3 else []
    if "offload_optimizer" not in learner.deepspeed.get("zero_optimization", {}) and plan.world.device == "cuda":
        model.append("set train.offload.optimizer: cpu")
    if plan.world.ranks == 1:
        model = [text for text in model if "zero_stage" not in text] + ["use more GPUs" if plan.world.device == "cuda" else "use a smaller model"]
    if stage == "score":
        weights = {spec.name: spec.weights for spec in plan.scorers if spec.weights is not None}
        lower = [f"lower models.scorers.{name}.batch_tokens (now {one.batch_tokens})" for name, one in weights.items()]
        waiting = [f"set models.scorers.{name}.offload: true" for name, one in weights.items() if not one.offload and not one.sharded]
        return [*lower, *(waiting if plan.world.device == "cuda" else [])] or model or [cut]
    if stage in ("rollout", "evaluation"):
        return [*rows, f"lower rollout.max_new_tokens (now {plan.rollout.max_new_tokens})"]
    if stage in ("engine", "weights") and plan.rollout.own_engine is not None:
        return [*rows, *model]
    if stage == "credit":
        return [cut, *model]
    if stage == "learn":
        checkpointing = [] if plan.policy.gradient_checkpointing else ["set models.policy.gradient_checkpointing: true"]
        return [cut, *checkpointing, *model]
    return model or [cut]


def _knobs_of_engine(plan: Plan) -> list[str]:
    """Of an engine with a model of its own; a server's memory is not this rank's."""
    engine, key = plan.rollout.own_engine, f"rollout.{plan.rollout.engine}"
    assert engine is not None
    if plan.rollout.vllm is not None and plan.rollout.vllm.server is not None:
        return []
    share = "auto" if engine.memory_share is None else f"{engine.memory_share:g}"
    sleeps = [f"set {key}.sleep: 1"] if engine.sleep == 0 and plan.world.device == "cuda" else []
    return [f"lower {key}.memory_share (now {share})", f"lower {key}.max_sequences (now {engine.max_sequences})", *sleeps]


STARTING = frozenset({"rftcli.runtime.engine_folder", "rftcli.runtime.vllm_engine", "rftcli.runtime.sglang_engine"})
"""Modules whose frames mark that an engine starts."""
SCORING = "rftcli.rewards.scorers.desk"
"""The module whose frames mark that models score."""
# How to add one: the stage, what was done in words, and the modules whose frames mark it.
STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "evaluation": ("in evaluation", ("rftcli.stages.evaluate",)),
    "rollout": ("in rollout", ("rftcli.stages.collect", "rftcli.engines")),
    "score": ("while reward models scored", (SCORING,)),
    "credit": ("while log-probs were computed before the update", ("rftcli.stages.credit",)),
    "learn": ("in learn (the update)", ("rftcli.stages.learn", "rftcli.runtime.learner")),
    "checkpoint": ("while a checkpoint was written", ("rftcli.runtime.checkpoint",)),
    "engine": ("while the engine was started", ()),
    "weights": ("while the engine took new weights", ()),
    "load": ("while models were loaded or gathered", ("rftcli.runtime.build", "rftcli.models")),
}
"""Stage -> (words, modules)."""

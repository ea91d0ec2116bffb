"""The host's memory beside GPUs, and whether it holds the copy of a checkpoint that is written behind the next steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rftcli.plan import memory, memory_ladder
from rftcli.plan.compile_memory import Asked, critic_parameters, largest_of, trained_of
from rftcli.plan.compile_models import trains_in
from rftcli.plan.compile_precision import keeping
from rftcli.plan.memory import GIB, Shape
from rftcli.plan.plan import LearnerPlan, RolloutPlan
from rftcli.plan.plan_memory import STAGES, MemoryPlan, MemoryRow

HOST_PROCESS_BYTES = 3 * GIB
"""Of a rank beside its GPU: torch, CUDA's libraries, transformers, DeepSpeed."""
HOST_SHARE = 0.8
"""Of the host's memory: the rest is for the system, the page cache of the files that are written, and what else runs there."""
COPY = "checkpoint's copy"
KEEPS = "MALLOC_MMAP_THRESHOLD_"
"""Of `launch.env`: blocks below it are kept by glibc, which ranks on a CPU set to all (`runtime.travel`)."""
GIVES_BACK = 64 * 2**20
"""A threshold at which scores of a huge vocabulary go back to the system."""


def with_host(
    table: MemoryPlan | None, asked: Asked, learner: LearnerPlan, rollout: RolloutPlan, notes: list[str]
) -> tuple[MemoryPlan | None, bool]:
    """(the table with what lies on the host, whether checkpoints are written behind the next steps)."""
    wanted, shape = asked.recipe.checkpoint.background, asked.shape
    _note_holes(table, asked, notes)
    if table is None or shape is None:
        if wanted == "auto":
            notes.append("checkpoint.background false: the size of the copy is not known before the model is loaded")
        return table, wanted is True
    each, first = checkpoint_copy(asked, learner, shape)
    copy_bytes = each + first
    copy = MemoryRow(name=COPY, gib=dict.fromkeys(STAGES, copy_bytes / GIB))
    if asked.world.device == "cpu":
        fits = table.peak[1] + copy_bytes / GIB <= table.usable_gib
        background = fits if wanted == "auto" else wanted
        text = f"{copy_bytes / GIB:.2f} GiB of copy a rank beside {table.peak[1]:.2f} GiB, of {table.usable_gib:.2f} GiB"
        found = replace(table, rows=(*table.rows, copy)) if background else table
    else:
        host = host_rows(asked, learner, rollout, shape)
        ranks = asked.world.ranks / asked.world.nodes
        held = ranks * sum(max(row.gib.values()) for row in host)
        room = HOST_SHARE * asked.facts.machine.memory_gib
        copies = (ranks * each + first) / GIB
        fits = held + copies <= room
        background = fits if wanted == "auto" else wanted
        text = f"{copies:.1f} GiB of copies beside {held:.1f} GiB in host memory, of {room:.0f} GiB"
        found = replace(table, host=(*host, copy) if background else host)
        if held > room:
            largest = ", ".join(memory_ladder.biggest({row.name: max(row.gib.values()) * GIB for row in host}))
            notes.append(f"memory: expect to run out of the host's: {held:.1f} GiB of {room:.0f} GiB for {ranks:g} ranks, each with {largest}")
    if wanted == "auto":
        notes.append(f"checkpoint.background {str(background).lower()}: {text}")
    elif background and not fits:
        notes.append(f"memory: expect to run out of it while a checkpoint is written: {text}")
    return found, bool(background)


def checkpoint_copy(asked: Asked, learner: LearnerPlan, shape: Shape) -> tuple[float, float]:
    """Bytes for policy and critic (of every rank: its part of the optimizer, and of the weights under stage 3; of rank 0 beyond that: the module's
    weights, and their Hugging Face form)."""
    section, policy = asked.recipe.checkpoint, asked.policy
    held = replace(keeping(asked.recipe), offload_optimizer=False, offload_parameters=False)
    of: dict[str, Any] = {"stage": learner.zero_stage, "ranks": asked.world.ranks, "keeping": held}
    dtype, trained = trains_in(policy), trained_of(asked, shape)
    own = shape.parameters if policy.lora is None else trained  # below an adapter nothing changes, and nothing is saved
    critic = critic_parameters(asked) or 0
    each = first = 0.0
    if section.trainer_state:
        module = memory.weights(own + critic, dtype, **of)
        each += memory.optimizer(trained + critic, dtype, **of) + (module if learner.zero_stage == 3 else 0.0)
        each += 0.0 if policy.ema is None else memory.running_mean(trained, ranks=asked.world.ranks)
        first += 0.0 if learner.zero_stage == 3 else module
    if section.save_hf:
        first += memory.frozen_copy(shape.parameters, policy.dtype) + memory.frozen_copy(critic, dtype)
    return each, first


def _note_holes(table: MemoryPlan | None, asked: Asked, notes: list[str]) -> None:
    """On a CPU blocks of scores are kept, each of another size, and leave holes: measured as much again as the scores take, beyond the plan."""
    if table is None or asked.world.device != "cpu" or not table.fits or KEEPS in asked.recipe.launch.env:
        return
    scores = max((row.gib.get("learn", 0.0) for row in table.rows if row.name == "logits"), default=0.0)
    if table.peak[1] + scores > table.usable_gib:
        notes.append(
            f"memory: blocks of scores that are kept may take {scores:.2f} GiB more than {table.peak[1]:.2f} GiB, of {table.usable_gib:.2f} GiB; "
            f"`launch.env: {{{KEEPS}: '{GIVES_BACK}'}}` gives them back, for slower updates"
        )


def host_rows(asked: Asked, learner: LearnerPlan, rollout: RolloutPlan, shape: Shape) -> tuple[MemoryRow, ...]:
    """Of one rank beside its GPU, while everything that waits is there."""
    recipe, policy, held = asked.recipe, asked.policy, keeping(asked.recipe)
    of: dict[str, Any] = {"stage": learner.zero_stage, "ranks": asked.world.ranks}
    dtype, trained = trains_in(policy), trained_of(asked, shape)
    whole = replace(held, offload_optimizer=False, offload_parameters=False)
    found = {"process": HOST_PROCESS_BYTES}
    if held.offload_optimizer:
        both = zip((trained, critic_parameters(asked) or 0), largest_of(asked, shape), strict=True)
        each = (memory.offloaded(*sizes, dtype, keeping=held, **of) for sizes in both)
        for name, size in ((name, size) for part in each for name, size in part.items()):
            found[name] = found.get(name, 0.0) + size
    if held.offload_parameters:
        found["weights"] = memory.weights(shape.parameters, dtype, keeping=whole, **of)
    if policy.ema is not None:
        found["running mean"] = memory.running_mean(trained, ranks=asked.world.ranks)
    if asked.keeps_reference and recipe.models.reference.offload is True:
        found["reference"] = memory.frozen_copy((asked.reference or asked.facts.model).parameters or 0, policy.dtype)
    teacher = recipe.models.teacher
    if asked.keeps_teacher and teacher is not None and teacher.offload is True:
        found["teacher"] = memory.frozen_copy((asked.teacher or asked.facts.model).parameters or 0, policy.dtype)
    for spec in asked.scorers:
        if spec.weights is not None and spec.weights.offload:
            found[f"reward model {spec.name}"] = memory.frozen_copy(spec.weights.parameters or 0, spec.weights.dtype)
    engine = rollout.own_engine
    if engine is not None and engine.sleep == 1:
        found["sleeping engine"] = memory.frozen_copy(shape.parameters, policy.dtype, ranks=engine.tensor_parallel)
    return tuple(MemoryRow(name=name, gib=dict.fromkeys(STAGES, size / GIB)) for name, size in found.items())


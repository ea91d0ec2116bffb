"""Whether a reference of its own is partitioned over the ranks. Leaves out the other ways to make room for it (`memory_ladder`), and how it is done
(`runtime.sharding`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan import memory
from rftcli.plan.compile_memory import Asked
from rftcli.plan.memory import GIB

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


def with_reference(asked: Asked, notes: list[str]) -> Recipe:
    """The recipe with a value for `models.reference.shard`; where it is true nothing waits on the CPU. `auto`: where no device holds it whole."""
    if asked.recipe.algorithm.kl.coefficient == 0.0:
        return asked.recipe  # nothing needs one: `reference_plans` says so
    section, ranks = asked.recipe.models.reference, asked.world.ranks
    model = asked.reference or asked.facts.model
    size = memory.frozen_copy(model.parameters or asked.facts.model.parameters or 0, asked.policy.dtype)
    if section.shard is True:
        shards = asked.keeps_reference and ranks > 1
        if not shards:
            why = "there is one rank" if ranks == 1 else "the reference is the policy's own module"
            notes.append(f"models.reference.shard has no effect: {why}")
    else:
        free = section.shard == section.offload == "auto" and section.refresh.every == 0
        shards = free and asked.keeps_reference and ranks > 1 and size > asked.usable
    if shards:
        notes.append(f"the reference is partitioned over {ranks} ranks: {size / ranks / GIB:.1f} GiB a rank, of {size / GIB:.1f} GiB")
        need = memory.while_cut(size, model.file_dtype, asked.policy.dtype, ranks=ranks // asked.world.nodes)
        room = asked.facts.machine.memory_gib * GIB
        if need > memory.USABLE_SHARE["cpu"] * room:  # it is cut there (`runtime.sharding`)
            notes.append(
                f"memory: expect to run out of the machine's while the reference is loaded: {need / GIB:.1f} GiB of {room / GIB:.1f} GiB; "
                f"files in {asked.policy.dtype} are there once for all ranks"
            )
    changed = section.model_copy(update={"shard": shards} | ({"offload": False} if shards else {}))
    return asked.recipe.model_copy(update={"models": asked.recipe.models.model_copy(update={"reference": changed})})

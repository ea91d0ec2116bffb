"""Where a vLLM engine runs, and how servers apart from the ranks are found, started and given weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from rftcli.plan import engine_memory, memory
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import Facts
from rftcli.plan.plan import WorldPlan
from rftcli.plan.plan_engine import ServerPlan, StartPlan, VllmPlan

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

SERVER_SHARE = 0.9
"""Of its GPUs' memory for a server that the run starts: it has them alone."""
CPU_CACHE_SHARE = 0.25
"""Of the machine's memory, at most, for the caches of servers on a CPU."""


def process_of(recipe: Recipe) -> str:
    """inside, beside or server."""
    section = recipe.rollout.vllm
    if section.server is not None:
        return "server"
    return "inside" if section.process == "auto" else section.process


def server_plan(recipe: Recipe) -> ServerPlan | None:
    section = recipe.rollout.vllm.server
    if section is None:
        return None
    start = section.start
    return ServerPlan(
        urls=tuple(url.rstrip("/").removesuffix("/v1") for url in section.urls),  # clients of OpenAI's interface are given it with that
        start=None if start is None else StartPlan(servers=start.servers, gpus=tuple(start.gpus), command=tuple(start.command)),
        weights=section.weights,
        folder=section.folder,
        timeout_seconds=section.timeout_seconds,
        ready_seconds=section.ready_seconds,
        retries=section.retries,
        headers_env=dict(section.headers_env),
    )


def apart(
    vllm: VllmPlan, recipe: Recipe, facts: Facts, world: WorldPlan, wanted: engine_memory.Engine | None, problems: list[PlanProblem],
    notes: list[str],
) -> VllmPlan:  # fmt: skip
    """The plan of servers that share no device with the training: it need not be divided. `wanted`: what an engine wants, where it is known."""
    server = vllm.server
    assert server is not None
    start = server.start
    if start is None:
        which, them = ("the server is", "it") if server.count == 1 else (f"{server.count} servers are", "them")
        notes.append(f"rollout.vllm.server: {which} looked at when the run starts; what cannot be done with {them} is an error then")
        return replace(vllm, memory="the servers' own")
    _check_gpus(start, recipe, facts, world, problems)
    share = None if recipe.rollout.vllm.memory_share == "auto" else float(recipe.rollout.vllm.memory_share)
    if start.gpus:
        share = SERVER_SHARE if share is None else share
        _check_room(share, wanted, recipe, facts, problems)
        return replace(vllm, memory_share=share, memory=f"{share:.0%} of GPUs of their own")
    most = (CPU_CACHE_SHARE if share is None else share) * facts.machine.memory_gib * memory.GIB / start.servers
    if wanted is not None and most < wanted.cache_least:
        problems.append(too_little_cache("rollout.vllm.memory_share", most, wanted, facts.machine.memory_gib / start.servers))
    return replace(vllm, memory_share=share, cache_bytes=int(most), memory=f"{most / memory.GIB:.2f} GiB of cache a server")


def too_little_cache(path: str, cache: float, wanted: engine_memory.Engine, room_gib: float) -> PlanProblem:
    """On a CPU, where a share is of what is left for caches."""
    has, needs = (f"{size / memory.GIB:.2g} GiB" for size in (cache, wanted.cache_least))
    message = f"{has} of cache hold no sequence of {wanted.tokens} tokens, which takes {needs}"
    least = math.ceil(1000 * wanted.cache_least / memory.GIB / room_gib) / 1000
    hint = f"at least {least:g}, or shorter completions" if least < 1 else "shorter completions"
    return PlanProblem(path=path, message=message, hint=hint)


def _check_room(share: float, wanted: engine_memory.Engine | None, recipe: Recipe, facts: Facts, problems: list[PlanProblem]) -> None:
    """What cannot fit into the GPUs of a server is told before it reads a configuration. Weights in few bits, or on the host, are left to vLLM."""
    section, size = recipe.rollout.vllm, facts.machine.gpu_memory_gib * memory.GIB
    if wanted is None or not size or {"quantization", "cpu_offload_gb"} & {name.replace("-", "_") for name in section.options}:
        return
    least = wanted.weights + wanted.working + wanted.cache_least
    if least <= share * size:
        return
    gib = [f"{part / memory.GIB:.1f} GiB" for part in (wanted.weights, wanted.working, wanted.cache_least, share * size)]
    message = "a server's {} of weights, {} to work in and {} of cache for one sequence are more than its {} of each GPU".format(*gib)
    written, enough = section.memory_share != "auto", math.ceil(100 * least / size) / 100
    more = "more GPUs for a server: `rollout.vllm.tensor_parallel`"
    hint = more if enough >= 1 else f"{more}; or `rollout.vllm.memory_share: {enough:.2f}`"
    path = "rollout.vllm.memory_share" if written else "rollout.vllm.server.start.gpus"
    problems.append(PlanProblem(path=path, message=message, hint=hint))


def _check_gpus(start: StartPlan, recipe: Recipe, facts: Facts, world: WorldPlan, problems: list[PlanProblem]) -> None:
    path, each = "rollout.vllm.server.start.gpus", world.ranks // world.nodes
    if not start.gpus:
        if world.device == "cuda":
            message, hint = "names no GPU, and the ranks train on GPUs", f"GPUs that no rank uses, such as [{each}], with `--gpus {each}`"
            problems.append(PlanProblem(path=path, message=message, hint=hint))
        return
    if world.device != "cuda":
        problems.append(PlanProblem(path=path, message="the ranks train on the CPU, and see no GPU", hint="leave it empty"))
        return
    taken, gone = [gpu for gpu in start.gpus if gpu < each], [gpu for gpu in start.gpus if gpu >= facts.machine.gpus]
    if taken:
        message = f"GPU {taken[0]} is a training rank's: ranks have the first {each} of a machine"
        problems.append(PlanProblem(path=path, message=message, hint=f"`--gpus N` with N at most {min(start.gpus)}, or higher numbers"))
    elif gone:
        message = f"there is no GPU {gone[0]}: this machine has {facts.machine.gpus}, counted from 0"
        problems.append(PlanProblem(path=path, message=message))


def process_note(recipe: Recipe) -> str | None:
    """Where the engine is, if nobody said."""
    section = recipe.rollout.vllm
    alone = section.server is None and section.process == "auto"
    return "rollout.vllm.process inside: weights are written in place" if alone else None

"""Judges that the run starts: what their servers are started with, and which GPUs of the first rank's machine they have for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rftcli.plan import memory
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import Facts, ScorerFacts
from rftcli.plan.plan import WorldPlan
from rftcli.rewards.scorers.spec import ScorerSpec, StartSpec

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe, ScorerModel

SERVER_SHARE = 0.9
"""Of its GPUs' memory for a judge: it has them alone."""
CPU_CACHE_SHARE = 0.1
"""Of the machine's memory for the caches of a judge on a CPU: questions and replies are short, and the ranks are there too."""
WEIGHTS_SHARE = 0.95
"""Of what a server may take for its weights: some cache has to be left."""


def start_of(section: ScorerModel, world: WorldPlan, known: ScorerFacts) -> StartSpec | None:
    """What a judge's servers are started with, without GPUs yet; None where the run starts none."""
    place, model = section.placement, known.model
    if place == "shared" or place.gpus is None:
        return None
    each = place.gpus if place.tensor_parallel == "auto" else place.tensor_parallel
    longest = None if section.max_tokens is None else section.max_tokens + section.max_new_tokens
    return StartSpec(
        path=str(section.path) if model is None else model.path,
        given=str(section.path),
        revision=section.revision if model is None else model.revision or section.revision,
        dtype=section.dtype if section.dtype != "auto" else ("float32" if world.device == "cpu" else "bfloat16"),
        trust_remote_code=section.trust_remote_code,
        tokenizer=section.tokenizer,
        template=known.template or section.template,
        parameters=None if model is None else model.parameters,
        max_model_tokens=longest,
        servers=place.gpus // each if place.gpus else 1,
        tensor_parallel=max(1, each),
        gpus=(),
        memory_share=None if place.memory_share == "auto" else float(place.memory_share),
        cache_bytes=None,
        ready_seconds=place.ready_seconds,
        command=tuple(place.command),
        options=dict(place.options),
    )


def with_gpus(specs: Sequence[ScorerSpec], recipe: Recipe, facts: Facts, world: WorldPlan, problems: list[PlanProblem]) -> tuple[ScorerSpec, ...]:
    """Every judge that the run starts with GPUs and memory: those behind the ranks' that no engine has, in the order of the recipe."""
    free = _Free(recipe, facts, world)
    shared: list[tuple[StartSpec, StartSpec]] = []
    found = []
    for spec in specs:
        if spec.start is None:
            found.append(spec)
            continue
        known = next((placed for asked, placed in shared if asked == spec.start), None)
        if known is None:
            known = _placed(spec, recipe.models.scorers[spec.name].placement.gpus, free, facts, world, problems)
            shared.append((spec.start, known))
        found.append(replace(spec, start=known))
    return tuple(found)


def _placed(spec: ScorerSpec, count: int, free: _Free, facts: Facts, world: WorldPlan, problems: list[PlanProblem]) -> StartSpec:
    start, key = spec.start, f"models.scorers.{spec.name}.placement.gpus"
    assert start is not None
    if start.path.endswith(".gguf"):
        message = f"{start.given} is a GGUF file, which vLLM does not read"
        hint = "a directory that save_pretrained wrote, or a hub id; `placement: shared` reads such files"
        problems.append(PlanProblem(path=f"models.scorers.{spec.name}.path", message=message, hint=hint))
    if world.device == "cpu":
        if count:
            message, hint = f"asks for {_gpus(count)}, and this run is on a CPU", "`gpus: 0` starts the judge on the CPU too"
            problems.append(PlanProblem(path=key, message=message, hint=hint))
        share = CPU_CACHE_SHARE if start.memory_share is None else start.memory_share
        return replace(start, cache_bytes=int(share * facts.machine.memory_gib * memory.GIB))
    if not count:
        hint = f"`gpus: 1` and `--gpus {max(1, facts.machine.gpus - 1)}`, so that one is left to it; `placement: shared` runs it on the ranks"
        problems.append(PlanProblem(path=key, message="names no GPU, and the ranks train on GPUs", hint=hint))
        return start
    gpus = free.take(spec.name, count)
    if gpus is None:
        problems.append(PlanProblem(path=key, message=free.told(count), hint=free.hint(count)))
        return start
    share = SERVER_SHARE if start.memory_share is None else start.memory_share
    start = replace(start, gpus=gpus, memory_share=share)
    _check_size(start, key, facts, problems)
    return start


def _check_size(start: StartSpec, key: str, facts: Facts, problems: list[PlanProblem]) -> None:
    """Weights that cannot fit are told before they are read. Those of few bits, and of a number not known, are left to vLLM."""
    if start.parameters is None or "quantization" in start.options or "cpu_offload_gb" in start.options:
        return
    weights = start.parameters * memory.DTYPE_BYTES[start.dtype] / start.tensor_parallel / memory.GIB
    room = (start.memory_share or SERVER_SHARE) * facts.machine.gpu_memory_gib
    if facts.machine.gpu_memory_gib and weights > WEIGHTS_SHARE * room:
        each = f"on each of {_gpus(start.tensor_parallel)}" if start.tensor_parallel > 1 else "on one GPU"
        message = f"the weights of {start.given} take {weights:.1f} GiB {each}, where the server may have {room:.1f} GiB"
        problems.append(PlanProblem(path=key, message=message, hint="more GPUs for one copy, or `placement.options: {quantization: ...}`"))


class _Free:
    """GPUs of the first rank's machine that nobody has."""

    def __init__(self, recipe: Recipe, facts: Facts, world: WorldPlan) -> None:
        self._machine, self._ranks = facts.machine.gpus, world.ranks // world.nodes
        server = recipe.rollout.vllm.server if recipe.rollout.engine in ("auto", "vllm") else None
        start = None if server is None else server.start
        self._engine = {gpu for gpu in (start.gpus if start is not None else ()) if self._ranks <= gpu < self._machine}
        self._judges: dict[str, int] = {}
        self._left = [gpu for gpu in range(self._ranks, self._machine) if gpu not in self._engine]

    def take(self, name: str, count: int) -> tuple[int, ...] | None:
        if count > len(self._left):
            return None
        found, self._left = tuple(self._left[:count]), self._left[count:]
        self._judges[name] = count
        return found

    def told(self, count: int) -> str:
        parts = [f"{self._ranks} train"] if self._ranks else []
        parts += [f"{len(self._engine)} of `rollout.vllm.server.start` sample"] if self._engine else []
        parts += [f"judge `{name}` has {taken}" for name, taken in self._judges.items()]
        return f"asks for {_gpus(count)}; of the machine's {self._machine}: {', '.join([*parts, f'{len(self._left)} are free'])}"

    def hint(self, count: int) -> str:
        ranks = self._ranks - (count - len(self._left))
        elsewhere = "`placement: {server: URL}` asks one on another machine"
        return f"`--gpus {ranks}` trains on fewer; {elsewhere}" if ranks > 0 else f"fewer `gpus`; {elsewhere}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count != 1 else ''}"

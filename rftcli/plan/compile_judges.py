"""Judges and a teacher that the run starts: what their servers are started with, and which GPUs of the first rank's machine they have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rftcli.plan import memory
from rftcli.plan.compile_parallel import fitting_numbers, uneven
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.compile_vllm import engine_needs
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts, ScorerFacts
from rftcli.plan.plan import TeacherPlan, WorldPlan
from rftcli.rewards.scorers.spec import ScorerSpec, StartSpec

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe, ScorerModel

SERVER_SHARE = 0.9
"""Of its GPUs' memory for a judge: it has them alone."""
CPU_CACHE_SHARE = 0.1
"""Of the machine's memory for the caches of a judge on a CPU: questions and replies are short, and the ranks are there too."""
WEIGHTS_SHARE = 0.95
"""Of what a server may take for its weights: some cache has to be left."""

TEACHER = "the teacher"
BESIDE_SECONDS = 600.0
"""For a judge beside its rank to be ready."""
MOST_SHARE = 0.98
CONTEXT_GIB = 1.25
"""Of a GPU that a judge's engine has beside weights and cache: a context of its own, and working memory of a pass."""
SPARE = 1.05
"""Times the cache that is asked for: it is cut into blocks."""
UNKNOWN_CACHE_GIB = 1.0
"""Of a judge beside its rank whose widths are not known."""


def start_of(section: ScorerModel, machine: MachineFacts, known: ScorerFacts) -> StartSpec | None:
    """What a judge's servers are started with, without GPUs and their memory yet; None where the run starts none."""
    place, model = section.placement, known.model
    own = place if place != "shared" and place.gpus is not None else None
    beside = place == "shared" and section.engine == "vllm"
    if own is None and not beside:
        return None
    longest = None if section.max_tokens is None else section.max_tokens + section.max_new_tokens
    found = StartSpec(
        path=str(section.path) if model is None else model.path,
        given=str(section.path),
        revision=section.revision if model is None else model.revision or section.revision,
        dtype=section.dtype if section.dtype != "auto" else machine.number_type,
        trust_remote_code=section.trust_remote_code,
        tokenizer=section.tokenizer,
        template=known.template or section.template,
        parameters=None if model is None else model.parameters,
        max_model_tokens=longest,
        servers=1, tensor_parallel=1, gpus=(), memory_share=None, cache_bytes=None, ready_seconds=BESIDE_SECONDS, command=(),
        options=dict(section.options),
    )  # fmt: skip
    if own is None:
        cache = int(_cache_gib(section, model, found.dtype) * memory.GIB)
        return replace(found, beside=True, max_model_tokens=_longest(section, model), cache_bytes=cache)
    each = (own.gpus or 1) if own.tensor_parallel == "auto" else own.tensor_parallel
    return replace(
        found,
        servers=(own.gpus or 1) // each,
        tensor_parallel=each,
        memory_share=None if own.memory_share == "auto" else float(own.memory_share),
        ready_seconds=own.ready_seconds,
        command=tuple(own.command),
        options=dict(own.options),
    )


def with_gpus(specs: Sequence[ScorerSpec], recipe: Recipe, facts: Facts, world: WorldPlan, problems: list[PlanProblem]) -> tuple[ScorerSpec, ...]:
    """Every judge that the run starts with GPUs and memory: those behind the ranks' that no engine has, in the order of the recipe."""
    free = _Free(recipe, facts, world)
    teacher = recipe.models.teacher
    if teacher is not None and teacher.placement is not None:
        free.take(TEACHER, teacher.placement.gpus)  # its own come first (`with_server`)
    shared: list[tuple[StartSpec, StartSpec]] = []
    found = []
    for spec in specs:
        if spec.start is not None:
            check_file(spec.start, f"models.scorers.{spec.name}.path", problems)
        if spec.start is None or spec.start.beside:
            found.append(spec if spec.start is None else replace(spec, start=_with_share(spec, facts, world, problems)))
            continue
        known = next((placed for asked, placed in shared if asked == spec.start), None)
        if known is None:
            known = _placed(spec, recipe.models.scorers[spec.name].placement.gpus, free, facts, world, problems)
            shared.append((spec.start, known))
        found.append(replace(spec, start=known))
    return tuple(found)


def _placed(spec: ScorerSpec, count: int, free: _Free, facts: Facts, world: WorldPlan, problems: list[PlanProblem]) -> StartSpec:
    assert spec.start is not None
    return _on_gpus(spec.start, f"judge `{spec.name}`", f"models.scorers.{spec.name}.placement.gpus", count, free, facts, world, problems)


def _on_gpus(
    start: StartSpec, what: str, key: str, count: int, free: _Free, facts: Facts, world: WorldPlan, problems: list[PlanProblem]
) -> StartSpec:  # fmt: skip
    """With the GPUs and the memory of its servers. `what`: whose they are, in words; `key`: of their number."""
    if world.device == "cpu":
        if count:
            message, hint = f"asks for {_gpus(count)}, and this run is on a CPU", "`gpus: 0` starts the server on the CPU too"
            problems.append(PlanProblem(path=key, message=message, hint=hint))
        share = CPU_CACHE_SHARE if start.memory_share is None else start.memory_share
        return replace(start, cache_bytes=int(share * facts.machine.memory_gib * memory.GIB))
    if not count:
        hint = f"`gpus: 1` and `--gpus {max(1, facts.machine.gpus - 1)}`, so that one is left to it"
        problems.append(PlanProblem(path=key, message="names no GPU, and the ranks train on GPUs", hint=hint))
        return start
    gpus = free.take(what, count)
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


def check_length(spec: ScorerSpec, section: ScorerModel, model: ModelFacts | None, problems: list[PlanProblem]) -> None:
    """vLLM starts with no longer sequences than the checkpoint's, unless it is told that the checkpoint takes them."""
    most = None if model is None else model.max_positions
    if section.max_tokens is None or most is None or spec.start is None or "hf_overrides" in spec.start.options:
        return
    longest = section.max_tokens + section.max_new_tokens
    if longest > most:
        message = f"max_tokens {section.max_tokens} + max_new_tokens {section.max_new_tokens} = {longest} positions, the model has {most}"
        problems.append(PlanProblem(path=f"models.scorers.{spec.name}.max_tokens", message=message, hint=f"the sum is at most {most}"))


def check_split(spec: ScorerSpec, section: ScorerModel, model: ModelFacts | None, problems: list[PlanProblem]) -> None:
    """A judge over several GPUs is cut into equal parts."""
    place, start = section.placement, spec.start
    why = None if start is None else uneven(model, start.tensor_parallel)
    if why is None or start is None or model is None or place == "shared":
        return
    gpus = place.gpus or 1
    numbers = [number for number in fitting_numbers(model, gpus) if gpus % number == 0]
    auto = place.tensor_parallel == "auto"
    hint = f"`tensor_parallel: {numbers[-1]}`, or another number of GPUs" if auto else f"one of {', '.join(map(str, numbers))}"
    path = f"models.scorers.{spec.name}.placement.{'gpus' if auto else 'tensor_parallel'}"
    problems.append(PlanProblem(path=path, message=f"{start.tensor_parallel} GPUs cannot share {start.given}", reason=why, hint=hint))


def with_server(
    plan: TeacherPlan | None, recipe: Recipe, facts: Facts, world: WorldPlan, known: ModelFacts | None, problems: list[PlanProblem]
) -> TeacherPlan | None:  # fmt: skip
    """The teacher with what its server is started with, where the run starts one. `known`: what its files say."""
    section = recipe.models.teacher
    if plan is None or plan.model is None or section is None or section.placement is None:
        return plan
    place, model = section.placement, plan.model
    longest = engine_needs(recipe) + 1  # a server samples one token behind those that it is asked about
    if known is not None and known.max_positions is not None and longest > known.max_positions:
        message = f"a server of the teacher needs {longest} positions, one behind the longest prompt and completion; it has {known.max_positions}"
        problems.append(PlanProblem(path="models.teacher.placement", message=message, hint="lower `rollout.max_prompt_tokens` by one"))
    start = StartSpec(
        path=model.path, given=model.given, revision=model.revision, dtype=model.dtype, trust_remote_code=model.trust_remote_code, tokenizer=None,
        template=None, parameters=model.parameters, max_model_tokens=longest, servers=1, tensor_parallel=max(1, place.gpus), gpus=(),
        memory_share=None if place.memory_share == "auto" else float(place.memory_share), cache_bytes=None, ready_seconds=place.ready_seconds,
        command=tuple(place.command), options=dict(place.options),
    )  # fmt: skip
    check_file(start, "models.teacher.path", problems)
    why = uneven(known, start.tensor_parallel)
    if why is not None and known is not None:
        numbers = ", ".join(map(str, fitting_numbers(known, start.tensor_parallel)))
        message = f"{start.tensor_parallel} GPUs cannot share {start.given}"
        problems.append(PlanProblem(path="models.teacher.placement.gpus", message=message, reason=why, hint=f"one of {numbers}"))
    free = _Free(recipe, facts, world)
    return replace(plan, start=_on_gpus(start, TEACHER, "models.teacher.placement.gpus", place.gpus, free, facts, world, problems))


def check_file(start: StartSpec, key: str, problems: list[PlanProblem]) -> None:
    if start.path.endswith(".gguf"):
        message = f"{start.given} is a GGUF file, which vLLM does not read"
        hint = "a directory that save_pretrained wrote, or a hub id; inside the ranks such files are read"
        problems.append(PlanProblem(path=key, message=message, hint=hint))


# beside the ranks


def beside_gib(section: ScorerModel, model: ModelFacts | None, dtype: str, world: WorldPlan) -> float:
    """What a judge's engine takes of a rank's device beside its weights."""
    return _cache_gib(section, model, dtype) + (CONTEXT_GIB if world.device == "cuda" else 0.0)


def _cache_gib(section: ScorerModel, model: ModelFacts | None, dtype: str) -> float:
    shape = None if model is None else memory.shape_of(model)
    if shape is None:
        return UNKNOWN_CACHE_GIB
    return SPARE * memory.cache_per_token(shape, dtype) * max(section.batch_tokens, _longest(section, model)) / memory.GIB


def _longest(section: ScorerModel, model: ModelFacts | None) -> int:
    """Question and reply together: as the recipe says, or as many of the model's positions as the cache holds."""
    if section.max_tokens is not None:
        return section.max_tokens + section.max_new_tokens
    positions = None if model is None else model.max_positions
    return section.batch_tokens if positions is None else min(positions, section.batch_tokens)


def _with_share(spec: ScorerSpec, facts: Facts, world: WorldPlan, problems: list[PlanProblem]) -> StartSpec:
    """A judge beside its rank, with what it takes of the device."""
    start, weights = spec.start, spec.weights
    assert start is not None and weights is not None
    start = replace(start, sleeps=weights.offload)
    if world.device == "cpu":
        return start
    if weights.parameters is None:
        message, hint = "the judge's size is not known, and with it its share of the device", "`placement: {gpus: n}`, or `engine: hf`"
        problems.append(PlanProblem(path=f"models.scorers.{spec.name}.engine", message=message, hint=hint))
        return start
    size = memory.DTYPE_BYTES[weights.dtype] * weights.parameters / memory.GIB + weights.beside_gib
    share = math.ceil(100 * size / facts.machine.gpu_memory_gib) / 100
    if share >= 1:
        message = f"the judge takes {size:.1f} GiB, a GPU has {facts.machine.gpu_memory_gib:.1f} GiB"
        hint = "`placement: {gpus: n}` gives it several; `batch_tokens` and `max_tokens` are what its cache holds"
        problems.append(PlanProblem(path=f"models.scorers.{spec.name}.engine", message=message, hint=hint))
    return replace(start, memory_share=min(share, MOST_SHARE))


class _Free:
    """GPUs of the first rank's machine that nobody has."""

    def __init__(self, recipe: Recipe, facts: Facts, world: WorldPlan) -> None:
        self._machine, self._ranks = facts.machine.gpus, world.ranks // world.nodes
        server = recipe.rollout.vllm.server if recipe.rollout.engine in ("auto", "vllm") else None
        start = None if server is None else server.start
        self._engine = {gpu for gpu in (start.gpus if start is not None else ()) if self._ranks <= gpu < self._machine}
        self._taken: dict[str, int] = {}
        self._left = [gpu for gpu in range(self._ranks, self._machine) if gpu not in self._engine]

    def take(self, what: str, count: int) -> tuple[int, ...] | None:
        if count > len(self._left):
            return None
        found, self._left = tuple(self._left[:count]), self._left[count:]
        self._taken[what] = count
        return found

    def told(self, count: int) -> str:
        parts = [f"{self._ranks} train"] if self._ranks else []
        parts += [f"{len(self._engine)} of `rollout.vllm.server.start` sample"] if self._engine else []
        parts += [f"{what} has {taken}" for what, taken in self._taken.items()]
        return f"asks for {_gpus(count)}; of the machine's {self._machine}: {', '.join([*parts, f'{len(self._left)} are free'])}"

    def hint(self, count: int) -> str:
        ranks = self._ranks - (count - len(self._left))
        elsewhere = "`placement: {server: URL}` asks one on another machine"
        return f"`--gpus {ranks}` trains on fewer; {elsewhere}" if ranks > 0 else f"fewer `gpus`; {elsewhere}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count != 1 else ''}"

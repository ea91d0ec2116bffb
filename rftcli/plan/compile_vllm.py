"""Which engine samples, and everything that an engine with a model of its own (vLLM, SGLang) is started with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rftcli.plan import engine_memory, memory
from rftcli.plan.compile_parallel import fitting_numbers, uneven
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.compile_server import apart, process_note, process_of, server_plan, too_little_cache
from rftcli.plan.facts import Facts
from rftcli.plan.plan import ModelPlan, RolloutPlan, WorldPlan
from rftcli.plan.plan_engine import EnginePlan, SglangPlan, VllmPlan

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

Held = Mapping[str, Mapping[str, float]]
"""Name -> stage -> bytes."""
MOST_SEQUENCES = 1024
"""Of one engine where the recipe leaves it to the plan: a decode step of more gains little, and their scores take memory."""
SEQUENCE_MULTIPLE = 8
"""Graphs are captured at multiples of it."""
UNKNOWN_SHARE = 0.4
"""Of a GPU for the engine where the model's size is not known before it is loaded."""
ALONE_ON_CPU = {
    "vllm": "vLLM's CPU build gives the memory that ranks share the same name in every job, and leaves it behind",
    "sglang": "one engine over several ranks is for GPUs that hold a part of the model each",
}
"""Why ranks do not share an engine there."""
RECORDS: dict[str, Any] = {"vllm": VllmPlan, "sglang": SglangPlan}
"""Engine with a model of its own, and key of `rollout` -> its record."""
CPU_CACHE_SHARE = 0.25
"""Of a rank's part of the machine's memory, at most, for the cache on a CPU."""
SECOND_CONTEXT_BYTES = 0.75 * memory.GIB
"""Of a GPU that a second process takes before it holds a number: an engine beside its rank (SGLang always) has a context of its own."""
HOST_SHARE = 0.4
"""Of the machine's memory that the weights of sleeping engines may take; above it they are given up and pushed anew."""


def with_engine(
    plan: RolloutPlan | None, recipe: Recipe, facts: Facts, world: WorldPlan, policy: ModelPlan, held: Held | None,
    problems: list[PlanProblem], notes: list[str],
) -> RolloutPlan | None:  # fmt: skip
    """The rollout with its engine chosen, and planned where it has a model of its own. `held`: what training holds, None where that is not known."""
    if plan is None:
        return plan
    engine, why = choice(recipe, facts, world)
    if engine in RECORDS:
        own, told = [], []
        found = _own_engine(engine, plan, recipe, facts, world, policy, held, own, told)
        unfit = next((problem.message for problem in own if problem.path == "rollout.engine"), None)
        if recipe.rollout.engine == "auto" and unfit is not None:
            engine, why = "hf", f"vllm is there, but {unfit}"
        else:
            problems += own
    if recipe.rollout.engine == "auto":
        notes.append(f"rollout.engine {engine}: {why}")
    for name in RECORDS:
        if name != engine and getattr(recipe.rollout, name) != type(getattr(recipe.rollout, name))():
            notes.append(f"rollout.{name} has no effect: the engine is {engine}")
    if engine not in RECORDS:
        return replace(plan, engine=engine)
    notes += told
    return found


def _own_engine(
    name: str, plan: RolloutPlan, recipe: Recipe, facts: Facts, world: WorldPlan, policy: ModelPlan, held: Held | None,
    problems: list[PlanProblem], notes: list[str],
) -> RolloutPlan:  # fmt: skip
    if recipe.rollout.hf != type(recipe.rollout.hf)():
        notes.append(f"rollout.hf has no effect: the engine is {name}")
    needs = engine_needs(recipe)
    _check(name, recipe, facts, world, needs, problems)
    section, eager = getattr(recipe.rollout, name), {"vllm": "enforce_eager", "sglang": "disable_cuda_graph"}[name]
    longest = needs if section.max_model_tokens == "auto" else section.max_model_tokens
    sequences = _sequences(name, recipe, world) if section.max_sequences == "auto" else section.max_sequences
    found = RECORDS[name](
        tensor_parallel=section.tensor_parallel,
        max_model_tokens=longest,
        max_sequences=sequences,
        memory_share=None,
        cache_bytes=None,
        sleep=0,
        graphs=world.device == "cuda" and not section.options.get(eager, False),
        seeds=section.seeds,
        check_weights=section.check_weights,
        options=dict(section.options),
        **({"lora": section.lora, "process": process_of(recipe), "server": server_plan(recipe)} if name == "vllm" else {}),
    )
    note = process_note(recipe) if name == "vllm" else None
    notes += [] if note is None else [note]
    if isinstance(found, VllmPlan) and found.server is not None:
        known = None not in (policy.parameters, facts.model.layers, facts.model.hidden)
        wanted = wanted_engine(name, recipe, facts, world, policy) if known else None
        found = replace(apart(found, recipe, facts, world, wanted, problems, notes), sleep=0)
    else:
        found = _with_memory(name, found, recipe, facts, world, policy, held, problems, notes)
    if name == "sglang" and section.seeds == "request" and world.device == "cpu":
        why = "SGLang's deterministic mode has no attention for a CPU"
        problems.append(PlanProblem(path="rollout.sglang.seeds", message="must be `engine` or `auto` on a CPU", reason=why))
    notes.append(_reproducible(name, found, world.device))
    return replace(plan, engine=name, shares_weights=False, options={}, **{name: found})


def choice(recipe: Recipe, facts: Facts, world: WorldPlan) -> tuple[str, str]:
    """(engine, why) of the recipe."""
    asked = recipe.rollout.engine
    if asked != "auto":
        return asked, "the recipe says so"
    if recipe.rollout.vllm.server is not None:
        return "vllm", "the recipe has a server"
    if world.device != "cuda":
        return "hf", "no GPU is used"
    if not facts.machine.vllm:
        return "hf", "vllm is not installed (pip install 'rftcli[vllm]')"
    if recipe.rollout.first_token_temperature is not None:
        return "hf", "rollout.first_token_temperature is of that engine alone"
    if recipe.rollout.hf.options != type(recipe.rollout.hf.options)():
        return "hf", "rollout.hf.options are of that engine alone"
    return "vllm", "there is a GPU, and the package (of another machine it is taken to be there)"


def on_the_ranks(engine: str, recipe: Recipe) -> bool:
    """Whether a model of the engine's own takes memory of the ranks' devices."""
    return engine in RECORDS and (engine != "vllm" or server_plan(recipe) is None)


def engine_needs(recipe: Recipe) -> int:
    """The longest prompt with the longest completion of rollout and evaluation."""
    new = [recipe.rollout.max_new_tokens]
    if recipe.data.eval:
        new.append(recipe.eval.max_new_tokens or 0)
        new += [source.sampling.max_new_tokens or 0 for source in recipe.data.eval.values()]
    return recipe.rollout.max_prompt_tokens + max(int(length) for length in new)


def _sequences(name: str, recipe: Recipe, world: WorldPlan) -> int:
    """One engine's share of a rollout, with the prompts that a step may drop and the greedy twins."""
    server = server_plan(recipe) if name == "vllm" else None
    share = getattr(recipe.rollout, name).tensor_parallel / world.ranks if server is None else 1 / max(1, server.count)
    over = recipe.rollout.over_sample
    spares = 0 if over is None else world.ranks * math.ceil(round((over.factor - 1) * recipe.batch.prompts_per_step / world.ranks, 6))
    prompts = (recipe.batch.prompts_per_step + spares) * share / recipe.batch.rollouts_per_update
    twins = 1 if recipe.algorithm.advantage.kind == "remax" else 0
    rows = math.ceil(round(prompts, 6)) * (recipe.rollout.samples_per_prompt + twins)
    return min(MOST_SEQUENCES, -(-rows // SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE)


def _check(name: str, recipe: Recipe, facts: Facts, world: WorldPlan, needs: int, problems: list[PlanProblem]) -> None:
    section = getattr(recipe.rollout, name)
    if section.max_model_tokens != "auto" and section.max_model_tokens < needs:
        message = f"{section.max_model_tokens} tokens are fewer than the {needs} of the longest prompt and completion"
        hint = "`auto`, or lower `rollout.max_prompt_tokens` or the lengths of completions"
        problems.append(PlanProblem(path=f"rollout.{name}.max_model_tokens", message=message, hint=hint))
    limit = facts.model.max_positions
    if section.max_model_tokens != "auto" and limit is not None and section.max_model_tokens > limit:
        message = f"{section.max_model_tokens} tokens, the model has {limit} positions"
        problems.append(PlanProblem(path=f"rollout.{name}.max_model_tokens", message=message))
    ranks, together = world.ranks // world.nodes, section.tensor_parallel
    apart = server_plan(recipe) is not None and name == "vllm"
    numbers = [number for number in fitting_numbers(facts.model, max(ranks, together)) if apart or ranks % number == 0]
    fitting = f"one of {', '.join(map(str, numbers))}" if len(numbers) > 1 else "1, which every model takes"
    why = uneven(facts.model, together)
    if why is not None and (world.device == "cuda" or apart):
        message = f"{together} GPUs cannot share the model"
        problems.append(PlanProblem(path=f"rollout.{name}.tensor_parallel", message=message, reason=why, hint=fitting))
        return
    here = not apart or recipe.rollout.vllm.server.start is not None
    if here and world.device == "cuda" and recipe.models.policy.dtype == "bfloat16" and not facts.machine.has_bfloat16:
        message = f"{name} does not run a model in bfloat16 on {facts.machine.gpu_name}"
        problems.append(PlanProblem(path="rollout.engine", message=message, hint="set `models.policy.dtype: float32`, or leave it out"))
    if apart:
        return
    if together > 1 and world.device == "cpu":
        why = ALONE_ON_CPU[name]
        problems.append(PlanProblem(path=f"rollout.{name}.tensor_parallel", message="must be 1 on a CPU", reason=why, hint="an engine in every rank"))
    elif ranks % together:
        message = f"{together} consecutive ranks do not divide the {ranks} ranks of a machine"
        problems.append(PlanProblem(path=f"rollout.{name}.tensor_parallel", message=message, hint=fitting))
    if section.sleep not in ("auto", 0) and world.device == "cpu":
        problems.append(PlanProblem(path=f"rollout.{name}.sleep", message=f"{name} does not sleep on a CPU", hint="`auto` or 0"))


def _with_memory(
    name: str, vllm: EnginePlan, recipe: Recipe, facts: Facts, world: WorldPlan, policy: ModelPlan, held: Held | None,
    problems: list[PlanProblem], notes: list[str],
) -> EnginePlan:  # fmt: skip
    section, model, machine = getattr(recipe.rollout, name), facts.model, facts.machine
    share = None if section.memory_share == "auto" else float(section.memory_share)
    parameters, hidden, layers = policy.parameters, model.hidden, model.layers
    sleeps = None if section.sleep == "auto" else section.sleep > 0
    if parameters is None or hidden is None or layers is None or held is None:
        if world.device == "cpu":
            cache = CPU_CACHE_SHARE * machine.memory_gib * memory.GIB / world.ranks
            return replace(vllm, cache_bytes=int(cache), memory_share=share, memory="the model's size is not known before it is loaded")
        notes.append(f"rollout.{name}: the model's size is not known before it is loaded; the engine gets {share or UNKNOWN_SHARE:.0%} of each GPU")
        level = 1 if section.sleep == "auto" else section.sleep
        return replace(vllm, memory_share=share or UNKNOWN_SHARE, sleep=level, memory="the model's size is not known before it is loaded")
    wanted = wanted_engine(name, recipe, facts, world, policy)
    vllm = replace(vllm, weight_bytes=int(wanted.weights))
    if world.device == "cpu":
        most = (CPU_CACHE_SHARE if share is None else share) * machine.memory_gib * memory.GIB / world.ranks
        cache = max(wanted.cache_least, min(wanted.cache_wanted, most)) if share is None else most
        if cache < wanted.cache_least:
            problems.append(too_little_cache(f"rollout.{name}.memory_share", cache, wanted, machine.memory_gib / world.ranks))
        text = f"{cache / memory.GIB:.2f} GiB of cache a rank ({wanted.cache_wanted / memory.GIB:.2f} GiB would hold all sequences)"
        return replace(vllm, cache_bytes=int(cache), cache_tokens=int(cache / wanted.cache_per_token), memory_share=share, memory=text)
    beside = {part: by for part, by in held.items() if part != "reward models"}  # `facts` are what those have left
    state = sum(by.get("rollout", 0.0) for by in beside.values())
    working = max(sum(by.get(stage, 0.0) for by in beside.values()) for stage in ("score", "credit", "learn")) - state
    second = name == "sglang" or (isinstance(vllm, VllmPlan) and vllm.process == "beside")
    whole_device = machine.gpu_memory_gib * memory.GIB - (SECOND_CONTEXT_BYTES if second else 0)
    division = engine_memory.divide(whole_device, state, working, wanted, share=share, sleeps=sleeps)
    if not division.fits:
        least, most = math.ceil(100 * division.least) / 100, math.floor(100 * division.most) / 100
        helps = f"a share from {least:.2f} to {most:.2f}, or `auto`" if share is not None and least <= most else _ways(name, recipe, world)
        trouble = "that share has no room for one sequence" if division.too_small else "the engine does not fit beside the training"
        path = f"rollout.{name}.memory_share" if share is not None else "rollout.engine"
        problems.append(PlanProblem(path=path, message=f"{trouble}: {division.text}", hint=helps))
    level = section.sleep if section.sleep != "auto" else _level(division.sleeps, wanted, world, facts)
    if section.sleep == "auto" and level:
        notes.append(f"rollout.{name}.sleep {level}: {division.text}")
    vllm = replace(vllm, cache_tokens=int(division.cache / wanted.cache_per_token))
    return replace(vllm, cache_bytes=max(1, int(division.cache)), memory_share=round(division.share, 3), sleep=level, memory=division.text)


def _ways(name: str, recipe: Recipe, world: WorldPlan) -> str:
    """The keys that make room for the engine and are not set so already."""
    section, several = getattr(recipe.rollout, name), world.ranks > 1
    ways = [
        *([f"`rollout.{name}.memory_share: auto`"] if section.memory_share != "auto" else []),
        *([f"`rollout.{name}.sleep: 1`"] if section.sleep == 0 else []),
        "more ranks" + " or a higher ZeRO stage" * several,
        *(["`train.offload.optimizer: cpu`"] if recipe.train.offload.optimizer == "none" else []),
        *(["`models.policy.lora: {}`"] if recipe.models.policy.lora is None else []),
        f"shorter completions, fewer `rollout.{name}.max_sequences`",
        *([f"`rollout.{name}.tensor_parallel`"] if several else []),
    ]
    return ", ".join(ways)


def wanted_engine(name: str, recipe: Recipe, facts: Facts, world: WorldPlan, policy: ModelPlan) -> engine_memory.Engine:
    """What the engine wants for a model whose widths are known."""
    section, model = getattr(recipe.rollout, name), facts.model
    assert model.parameters is not None and model.layers is not None and model.hidden is not None
    return engine_memory.engine(
        parameters=model.parameters,
        number_bytes=memory.DTYPE_BYTES[policy.dtype],
        layers=model.layers,
        key_width=model.key_width or model.hidden,
        vocabulary=model.vocabulary or 0,
        tensor_parallel=section.tensor_parallel,
        sequences=_sequences(name, recipe, world) if section.max_sequences == "auto" else section.max_sequences,
        tokens=engine_needs(recipe) if section.max_model_tokens == "auto" else section.max_model_tokens,
    )


def _level(sleeps: bool, wanted: engine_memory.Engine, world: WorldPlan, facts: Facts) -> int:
    if not sleeps:
        return 0
    on_host = wanted.weights * world.ranks / world.nodes
    return 1 if on_host <= HOST_SHARE * facts.machine.memory_gib * memory.GIB else 2


def _runs_already(vllm: EnginePlan) -> bool:
    """At servers that somebody else has started: how is seen when the run starts."""
    return isinstance(vllm, VllmPlan) and vllm.server is not None and vllm.server.start is None


def _reproducible(name: str, vllm: EnginePlan, device: str) -> str:
    if name == "sglang":
        seeds = "every completion has a seed of its own" if vllm.seeds == "request" else "the engine's generator is seeded when it starts"
    elif vllm.seeds == "request" or (vllm.seeds == "auto" and device == "cpu" and not _runs_already(vllm)):
        seeds = "every completion has a seed of its own"
    elif vllm.seeds == "engine":
        seeds = "the engine's generator is seeded for each rollout"
    else:
        seeds = "every completion has a seed of its own where the engine takes one for free, else its generator is seeded for each rollout"
    return f"{name}: {seeds}; the same run again need not give the same samples, because the last bits of scores depend on what is decoded together"

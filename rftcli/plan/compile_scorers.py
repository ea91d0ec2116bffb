"""The scorers of a plan: those that some part of a reward names, and where their weights lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rftcli.plan import memory
from rftcli.plan.compile_judges import beside_gib, check_length, check_split, start_of, with_gpus
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import Facts, ScorerFacts
from rftcli.plan.plan import WorldPlan
from rftcli.plan.specs import unused_text, used_scorers
from rftcli.rewards.scorers.spec import CLASSIFIER, GENERATIVE, HTTP, PYTHON, ReadSpec, ScorerSpec, ServiceSpec, WeightsSpec

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe, ScorerModel

KEPT_SHARE = 0.25
"""Share of a GPU that scorers may hold for good, all together in the order of the recipe; those beyond it wait in CPU memory."""
WHOLE_SHARE = 0.6
"""Share of a GPU above which a scorer's weights are partitioned: activations and the policy's state need the rest."""


def scorer_plans(
    recipe: Recipe, facts: Facts, world: WorldPlan, known: Mapping[str, ScorerFacts], problems: list[PlanProblem], notes: list[str]
) -> tuple[ScorerSpec, ...]:
    """One for each scorer that is used, in the order of the recipe."""
    used = used_scorers(recipe)
    unused = [name for name in recipe.models.scorers if name not in used]
    if unused:
        notes.append(unused_text(unused))
    found = [_scorer(recipe, name, facts, world, known.get(name, ScorerFacts()), notes) for name in recipe.models.scorers if name in used]
    specs = with_gpus(_kept_or_offloaded(recipe, found, facts, world, notes), recipe, facts, world, problems)
    for spec in specs:
        if spec.start is not None:
            check_length(spec, recipe.models.scorers[spec.name], known.get(spec.name, ScorerFacts()).model, problems)
            check_split(spec, recipe.models.scorers[spec.name], known.get(spec.name, ScorerFacts()).model, problems)
        elif spec.weights is not None and spec.weights.max_tokens is not None:
            model = known.get(spec.name, ScorerFacts()).model
            most = None if model is None else model.max_positions
            if most is not None and spec.weights.max_tokens > most:
                text = f"is {spec.weights.max_tokens}, the model has {most} positions"
                problems.append(PlanProblem(path=f"models.scorers.{spec.name}.max_tokens", message=text))
    return specs


def _scorer(recipe: Recipe, name: str, facts: Facts, world: WorldPlan, known: ScorerFacts, notes: list[str]) -> ScorerSpec:
    section = recipe.models.scorers[name]
    common: dict[str, Any] = {"name": name, "kind": section.kind, "cache": section.cache}
    if section.kind == CLASSIFIER:
        return ScorerSpec(**common, weights=_weights(section, facts, world, known, name, notes), head=str(section.head))
    if section.kind == GENERATIVE:
        here, server = section.placement == "shared", None if section.placement == "shared" else section.placement.server
        score = section.score
        assert score is not None, "a rule of the recipe asks for it"
        return ScorerSpec(
            **common,
            weights=_weights(section, facts, world, known, name, notes) if here else None,
            service=None if here and section.engine == "hf" else _service(section, () if server is None else (server,)),
            start=start_of(section, facts.machine, known),
            prompt=known.prompt or section.prompt,
            read=ReadSpec(regex=score.regex, json=score.json_, token=score.token, against=tuple(score.against), scale=score.scale),
            max_new_tokens=1 if score.token is not None else section.max_new_tokens,
            temperature=section.temperature,
            samples=section.samples,
            seed=recipe.seed,
            model=None if server is None else section.path,
            api=section.api,
        )
    if section.kind == HTTP:
        size = recipe.rollout.samples_per_prompt if section.batch_size == "auto" else section.batch_size
        return ScorerSpec(
            **common, service=_service(section, section.urls), preset=section.preset, score_field=section.score_field, batch_size=int(size)
        )
    assert section.kind == PYTHON
    return ScorerSpec(**common, target=section.python, options=dict(section.options), memory_gib=section.memory_gib)


def _service(section: ScorerModel, urls: Sequence[str]) -> ServiceSpec:
    return ServiceSpec(
        urls=tuple(urls),
        timeout_seconds=section.timeout_seconds,
        retries=section.retries,
        concurrency=section.concurrency,
        per_minute=section.per_minute,
        headers_env=dict(section.headers_env),
    )


def _weights(section: ScorerModel, facts: Facts, world: WorldPlan, known: ScorerFacts, name: str, notes: list[str]) -> WeightsSpec:
    dtype = section.dtype if section.dtype != "auto" else facts.machine.number_type
    model = known.model
    bits = section.quantise
    spec = WeightsSpec(
        path=str(section.path) if model is None else model.path,
        given=str(section.path),
        revision=section.revision if model is None else model.revision or section.revision,
        dtype=dtype,
        trust_remote_code=section.trust_remote_code,
        quantise=None if bits is None else {"bits": bits.bits, "kind": bits.kind, "nested": bits.nested},
        options=dict(section.options),
        parameters=None if model is None else model.parameters,
        tokenizer=section.tokenizer,
        template=known.template or section.template,
        max_tokens=section.max_tokens,
        overlong=section.overlong,
        batch_tokens=section.batch_tokens,
        offload=section.offload is True,
        sharded=section.shard is True and world.ranks > 1,
        engine=section.engine,
        beside_gib=beside_gib(section, model, dtype, world) if section.engine == "vllm" else 0.0,
    )
    if section.shard is True and world.ranks == 1:
        notes.append(f"models.scorers.{name}.shard has no effect on one rank")
    size = weights_gib(spec, 1)
    can_shard = section.shard == "auto" and bits is None and world.ranks > 1 and world.device == "cuda" and _one_pass(section)
    if can_shard and size > WHOLE_SHARE * facts.machine.gpu_memory_gib:
        notes.append(f"scorer `{name}` is partitioned over the ranks: its {size:.1f} GiB are more than {WHOLE_SHARE:.0%} of a GPU's")
        spec = replace(spec, sharded=True, offload=False)
    return spec


def _one_pass(section: ScorerModel) -> bool:
    return section.kind == CLASSIFIER or (section.engine == "hf" and section.score is not None and section.score.token is not None)


def _kept_or_offloaded(
    recipe: Recipe, found: list[ScorerSpec], facts: Facts, world: WorldPlan, notes: list[str]
) -> tuple[ScorerSpec, ...]:
    """`offload: auto`: what goes beyond a share of the GPU waits in CPU memory. Names of one checkpoint count once."""
    kept, seen, specs = 0.0, {}, []
    for spec in found:
        section = recipe.models.scorers[spec.name]
        weights = spec.weights
        if weights is None:
            kept += spec.memory_gib
        elif world.device == "cpu":
            if weights.offload:
                notes.append(f"models.scorers.{spec.name}.offload has no effect: everything is on the CPU anyway")
            spec = replace(spec, weights=replace(weights, offload=False))
        elif section.offload == "auto" and not weights.sharded and weights.quantise is None:
            key = same_checkpoint(spec)
            size = weights_gib(weights, world.ranks)
            if key not in seen:
                seen[key] = kept + size > KEPT_SHARE * facts.machine.gpu_memory_gib
                kept += 0.0 if seen[key] else size
            if seen[key]:
                text = f"its {size:.1f} GiB with what other scorers keep are more than {KEPT_SHARE:.0%} of a GPU's"
                notes.append(f"scorer `{spec.name}` waits in CPU memory between uses: {text}")
            spec = replace(spec, weights=replace(weights, offload=seen[key]))
        specs.append(spec)
    return tuple(specs)


def same_checkpoint(spec: ScorerSpec) -> tuple[Any, ...]:
    """What two scorers that share one copy of weights have in common."""
    weights = spec.weights
    assert weights is not None
    bits = None if weights.quantise is None else tuple(sorted(weights.quantise.items()))
    options = repr(sorted(weights.options.items()))
    own = () if weights.engine == "hf" else (weights.engine, weights.tokenizer, weights.template, weights.max_tokens, spec.max_new_tokens)
    return (spec.kind, weights.path, weights.revision, weights.dtype, bits, weights.trust_remote_code, options, weights.sharded, *own)


def weights_gib(weights: WeightsSpec, ranks: int) -> float:
    """GiB a rank of the weights while they are on the device, with what an engine of their own has; 0 where their number is not known."""
    size = memory.DTYPE_BYTES[weights.dtype] if weights.quantise is None else weights.quantise["bits"] / 8
    return weights.beside_gib + size * (weights.parameters or 0) / (ranks if weights.sharded else 1) / memory.GIB


def ways_of_scorers(scorers: Sequence[ScorerSpec], recipe: Recipe, world: WorldPlan) -> str:
    """Keys that help where scoring takes too much memory: of the model that takes most."""
    sizes = {spec.name: weights_gib(spec.weights, world.ranks) if spec.weights is not None else spec.memory_gib for spec in scorers}
    name = max(sizes, key=lambda one: sizes[one], default=None)
    weights = next((spec.weights for spec in scorers if spec.name == name), None)
    if weights is None:
        return "use a smaller reward model"
    section, key = recipe.models.scorers[str(name)], f"models.scorers.{name}"
    judge = section.kind == GENERATIVE
    ways = [f"{key}.placement: {{gpus: n}}"] if judge else []
    ways += [f"{key}.shard: true"] if world.ranks > 1 and not judge and not weights.sharded and weights.quantise is None else []
    ways += [f"{key}.quantise: {{bits: 4}}"] if weights.quantise is None and not weights.sharded and weights.engine == "hf" else []
    return f"try {', '.join(ways)}, or a smaller reward model" if ways else "use more ranks, or a smaller reward model"


def beside_scorers(facts: Facts, scorers: Sequence[ScorerSpec], world: WorldPlan) -> Facts:
    """The facts with what scorers hold for good taken off the device's memory: what is left is for training."""
    held: dict[Any, float] = {}
    for spec in scorers:
        if spec.weights is None:
            held[spec.name] = spec.memory_gib
        elif not spec.weights.offload:
            held[same_checkpoint(spec)] = weights_gib(spec.weights, world.ranks)
    machine, total = facts.machine, sum(held.values())
    if world.device == "cuda":
        return replace(facts, machine=replace(machine, gpu_memory_gib=max(0.0, machine.gpu_memory_gib - total)))
    here = total * world.ranks / world.nodes
    return replace(facts, machine=replace(machine, memory_gib=max(0.0, machine.memory_gib - here)))

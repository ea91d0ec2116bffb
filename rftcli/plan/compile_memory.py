"""Memory of a plan: what each part of the run holds in each stage of a step, and the settings that a recipe leaves to it.

The terms are in `memory`, the order of what is tried in `memory_ladder`. Where a model's files do not tell its widths, activations are not known:
then training state may take half of the device, and the other half is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rftcli.plan import engine_memory, memory
from rftcli.plan.compile_models import REFERENCE_SHARE, checkpoints_by_size, trained_parameters, trains_in
from rftcli.plan.compile_pass import the_pass
from rftcli.plan.compile_precision import keeping, stages_allowed
from rftcli.plan.compile_rollout import batch_rows_of, filters_of, most_rows_of
from rftcli.plan.compile_scorers import same_checkpoint, ways_of_scorers, weights_gib
from rftcli.plan.compile_vllm import choice as engine_choice
from rftcli.plan.compile_vllm import on_the_ranks, wanted_engine
from rftcli.plan.facts import Facts, ModelFacts
from rftcli.plan.memory import GIB, Shape
from rftcli.plan.memory_ladder import BESIDE_LESS, FEWEST_TOKENS, MOST_TOKENS, Choice, Free, biggest, choose, ladder, told
from rftcli.plan.plan import BatchPlan, LearnerPlan, ModelPlan, RolloutPlan, WorldPlan
from rftcli.plan.plan_memory import STAGES, MemoryPlan, MemoryRow
from rftcli.rewards.scorers.spec import ScorerSpec

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

UNKNOWN_SHARE = 0.5
"""Of a device for training state where activations are not known."""
Parts = dict[str, dict[str, float]]
"""Name -> stage -> bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What memory depends on, beside what is chosen by it. `critic`, `reference`, `teacher`: facts of models of their own; None: they are of the
    policy's shape."""

    recipe: Recipe
    facts: Facts
    world: WorldPlan
    policy: ModelPlan
    critic: ModelFacts | None = None
    reference: ModelFacts | None = None
    teacher: ModelFacts | None = None
    scorers: Sequence[ScorerSpec] = ()

    @property
    def shape(self) -> Shape | None:
        return memory.shape_of(self.facts.model)

    @property
    def device(self) -> float:
        return memory.device_bytes(self.facts.machine, self.world)

    @property
    def usable(self) -> float:
        return memory.USABLE_SHARE[self.world.device] * self.device

    @property
    def longest(self) -> int:
        rollout = self.recipe.rollout
        return int(rollout.max_prompt_tokens) + int(rollout.max_new_tokens)

    @property
    def rows(self) -> int:
        """Of one rank in one update."""
        batch = self.recipe.batch
        return max(1, batch.prompts_per_step // batch.updates_per_step // self.world.ranks) * self.recipe.rollout.samples_per_prompt

    @property
    def keeps_reference(self) -> bool:
        """Is there a reference that is a second copy of a model?"""
        section = self.recipe.models.reference
        own = self.reference is not None or self.policy.lora is None or section.refresh.every > 0
        return self.recipe.algorithm.kl.coefficient != 0.0 and own

    @property
    def keeps_teacher(self) -> bool:
        section = self.recipe.models.teacher
        return section is not None and section.path is not None and section.placement is None


def with_memory(asked: Asked, notes: list[str]) -> Recipe:
    """The recipe with a value for what it leaves to memory: ZeRO stage, tokens of a micro-batch, gradient checkpointing, where reference and teacher
    wait. The reasons go into `notes`."""
    recipe, shape = asked.recipe, asked.shape
    free = _free(asked)
    if shape is None:
        chosen, why = _without_shape(asked, free)
    else:
        found = choose(ladder(free), lambda rung: fullest(parts(asked, rung, shape, sampling_least(asked, rung, shape))), asked.usable)
        chosen, why = found.choice, told(found, asked.usable)
        if not found.fits:
            whole = parts(asked, chosen, shape, sampling_least(asked, chosen, shape))
            stage = max(STAGES, key=lambda name: of_stage(whole, name))
            largest = biggest({name: by.get(stage, 0.0) for name, by in whole.items()})
            notes.append(f"memory: expect to run out of it in {stage}. The biggest parts are {', '.join(largest)}; {_ways(asked, chosen, stage)}")
    if recipe.train.deepspeed.zero_stage == "auto":
        notes.append(f"ZeRO stage {chosen.zero_stage}: {why}")
    elif shape is not None and len(ladder(free)) > 1:
        notes.append(f"memory: {why}")
    return _written(recipe, asked, chosen, notes)


def _written(recipe: Recipe, asked: Asked, chosen: Choice, notes: list[str]) -> Recipe:
    """The recipe with the chosen values in the place of `auto`."""
    models, batch, train = recipe.models, recipe.batch, recipe.train
    if models.policy.gradient_checkpointing == "auto":
        models = models.model_copy(update={"policy": models.policy.model_copy(update={"gradient_checkpointing": chosen.checkpointing})})
    if asked.world.device == "cuda" and asked.keeps_reference and models.reference.offload == "auto":
        waits = _waits(asked, chosen, asked.reference, "the reference", notes)
        models = models.model_copy(update={"reference": models.reference.model_copy(update={"offload": waits})})
    if asked.world.device == "cuda" and asked.keeps_teacher and models.teacher is not None and models.teacher.offload == "auto":
        waits = _waits(asked, chosen, asked.teacher, "the teacher", notes)
        models = models.model_copy(update={"teacher": models.teacher.model_copy(update={"offload": waits})})
    if batch.micro_batch_size == "auto" and batch.tokens_per_micro_batch == "auto":
        batch = batch.model_copy(update={"tokens_per_micro_batch": chosen.tokens})
    if train.deepspeed.zero_stage == "auto":
        train = train.model_copy(update={"deepspeed": train.deepspeed.model_copy(update={"zero_stage": chosen.zero_stage})})
    changed: dict[str, Any] = {"models": models, "batch": batch, "train": train}
    return recipe.model_copy(update=changed)


def _waits(asked: Asked, chosen: Choice, model: ModelFacts | None, name: str, notes: list[str]) -> bool:
    """Where the policy's shape is not known, a model waits that is large beside the GPU."""
    size = memory.frozen_copy((model or asked.facts.model).parameters or 0, asked.policy.dtype)
    waits = chosen.waits if asked.shape is not None else size > REFERENCE_SHARE * asked.device
    if waits:
        why = "the GPU is needed for other parts" if asked.shape is not None else f"they are more than {REFERENCE_SHARE:.0%} of the GPU's"
        notes.append(f"{name} waits in CPU memory between uses, with its {size / GIB:.1f} GiB: {why}")
    return waits


def _free(asked: Asked) -> Free:
    recipe, world, shape = asked.recipe, asked.world, asked.shape
    stage = recipe.train.deepspeed.zero_stage
    checkpointing = recipe.models.policy.gradient_checkpointing
    auto = [models for models, there in ((recipe.models.reference, asked.keeps_reference), (recipe.models.teacher, asked.keeps_teacher)) if there]
    waits = world.device == "cuda" and any(section is not None and section.offload == "auto" for section in auto)
    return Free(
        stages=stages_allowed(recipe, world, asked.policy) if stage == "auto" else (stage,),
        tokens=_tokens(asked),
        checkpointing=(False, True) if checkpointing == "auto" and shape is not None else (_checkpoints(asked),),
        waits=(False, True) if waits else (False,),
    )


def _checkpoints(asked: Asked) -> bool:
    given = asked.recipe.models.policy.gradient_checkpointing
    return checkpoints_by_size(asked.facts.model, asked.world.device) if given == "auto" else bool(given)


def _tokens(asked: Asked) -> tuple[int, ...]:
    """Budgets worth trying, descending: one below the longest row cuts nothing, because a row is never cut."""
    batch = asked.recipe.batch
    if batch.micro_batch_size != "auto":
        return (min(batch.micro_batch_size, asked.rows) * asked.longest,)
    if batch.tokens_per_micro_batch != "auto":
        return (batch.tokens_per_micro_batch,)
    most = MOST_TOKENS[asked.world.device]
    halves = [most >> times for times in range(int(math.log2(most / FEWEST_TOKENS)) + 1)]
    return tuple([most, *(count for count in halves[1:] if count >= min(asked.longest, most))])


def _without_shape(asked: Asked, free: Free) -> tuple[Choice, str]:
    """By the training state alone."""
    first = Choice(zero_stage=free.stages[0], tokens=free.tokens[0], checkpointing=free.checkpointing[0], waits=False)
    whole, trained = _state_parameters(asked)
    if asked.recipe.train.optimizer.kind == "muon":
        return first, "muon orthogonalises whole matrices"
    if asked.recipe.train.offload.parameters != "none":
        return first, "offloaded parameters are gathered where they are used"
    if whole is None:
        stage = min(free.stages[-1], max(free.stages[0], 2 if asked.world.ranks > 1 else 0))
        return replace(first, zero_stage=stage), "the model's size is not known before it is loaded"
    need = 0.0
    room = UNKNOWN_SHARE * (asked.device - _frozen(asked, first)["reward models"]["credit"])
    for stage in free.stages:
        need = memory.training_bytes(whole, asked.policy.dtype, stage, asked.world.ranks, keeping(asked.recipe), trained=trained)
        if need <= room:
            text = f"{need / GIB:.2f} GiB a rank of weights, gradients and optimizer fit into {UNKNOWN_SHARE:.0%} of {asked.device / GIB:.0f} GiB"
            return replace(first, zero_stage=stage), text
    text = f"even so {need / GIB:.1f} GiB a rank are more than {UNKNOWN_SHARE:.0%} of {asked.device / GIB:.0f} GiB: expect to run out of memory"
    return replace(first, zero_stage=free.stages[-1]), text


def _state_parameters(asked: Asked) -> tuple[int | None, int | None]:
    """(parameters, trained ones) of policy and critic together."""
    policy = asked.facts.model.parameters
    critic = critic_parameters(asked)
    if policy is None or critic is None:
        return None, None
    trained = trained_parameters(asked.policy, asked.facts.model)
    return policy + critic, None if trained is None else trained + critic


def critic_parameters(asked: Asked) -> int | None:
    """0 without a critic; None where its size is not known."""
    if asked.recipe.models.critic is None:
        return 0
    return (asked.critic or asked.facts.model).parameters


def parts(asked: Asked, choice: Choice, shape: Shape, sampling: Mapping[str, Mapping[str, float]]) -> Parts:
    """What a rank holds: name -> stage -> bytes, with the engine's `sampling` parts."""
    recipe, policy, ranks, stage = asked.recipe, asked.policy, asked.world.ranks, choice.zero_stage
    held = keeping(recipe)
    of: dict[str, Any] = {"stage": stage, "ranks": ranks, "keeping": held}
    dtype, one = trains_in(policy), the_pass(asked, choice)
    trained = trained_of(asked, shape)
    found: Parts = {"process": _always(memory.PROCESS_BYTES[asked.world.device])}
    if policy.lora is None:
        found["weights"] = _always(memory.weights(shape.parameters, dtype, **of))
    else:
        bits = None if policy.quantise is None else policy.quantise.bits
        base = 0.0 if held.offload_parameters else memory.frozen_copy(shape.parameters, policy.dtype, bits=bits, ranks=ranks if stage == 3 else 1)
        found["weights"] = _always(base + memory.weights(trained, dtype, **of))
    found["optimizer"] = _always(memory.optimizer(trained, dtype, **of))
    found["gradients"] = _gradients(trained, dtype, of)
    bucket = memory.buckets(dtype, **of)
    found["reduction buckets"] = _always(bucket) if stage == 3 else {"learn": bucket}
    found["gradients on the way"] = _always(memory.on_the_way(sum(largest_of(asked, shape)), dtype, stage=stage, keeping=held))
    found["gathered weights"] = dict.fromkeys(("credit", "learn"), memory.gathered(shape, policy.dtype, stage=stage, ranks=ranks))
    critic = critic_parameters(asked) or 0
    if critic:
        found["critic"] = _always(memory.weights(critic, dtype, **of) + memory.optimizer(critic, dtype, **of))
        found["critic's gradients"] = _gradients(critic, dtype, of)
    if policy.ema is not None and asked.world.device == "cpu":
        found["running mean"] = _always(memory.running_mean(trained, ranks=ranks))
    found |= _frozen(asked, choice)
    found |= {name: dict(by) for name, by in sampling.items()}
    kept = memory.activations(shape, policy.dtype, one, checkpointing=choice.checkpointing) + memory.summing(shape, one)
    head = memory.head(shape, policy.dtype, positions=one.positions)
    found["activations"] = {"learn": kept, "credit": memory.passing(shape, policy.dtype, positions=one.positions)}
    found["logits"] = {"learn": head, "credit": memory.head_scores(shape, policy.dtype, positions=one.positions)} | found.pop("logits", {})
    copies = memory.update_copies(trained + critic, dtype, **of)
    found["copies in the update"] = {"learn": max(0.0, copies - kept - head)}
    return {name: by for name, by in found.items() if any(by.values())}


def _gradients(trained: int, dtype: str, of: dict[str, Any]) -> dict[str, float]:
    return _always(memory.kept_gradients(trained, dtype, **of)) | {"learn": memory.gradients(trained, dtype, **of)}


def trained_of(asked: Asked, shape: Shape) -> int:
    """Parameters that have gradients; of an adapter over a model whose files do not list its matrices, by its widths."""
    found = trained_parameters(asked.policy, asked.facts.model)
    if found is not None:
        return found
    if asked.policy.lora is None:
        return shape.parameters
    hidden, query, key, inner = shape.hidden, shape.query_width, shape.key_width, shape.inner
    return asked.policy.lora.rank * shape.layers * (2 * (hidden + query) + 2 * (hidden + key) + 3 * (hidden + inner))


def largest_of(asked: Asked, shape: Shape) -> tuple[int, int]:
    """Numbers of the largest trained parameter of policy and critic: the matrix of words; of an adapter, the one beside the MLP's width."""
    lora, whole = asked.policy.lora, shape.vocabulary * shape.hidden
    critic = None if asked.recipe.models.critic is None else asked.critic or asked.facts.model
    of_critic = 0 if critic is None else (critic.vocabulary or 0) * (critic.hidden or 0)
    return whole if lora is None else lora.rank * max(shape.inner, shape.hidden), of_critic


def _frozen(asked: Asked, choice: Choice) -> Parts:
    """Reference, teacher and reward models."""
    recipe, here = asked.recipe, asked.facts.model
    found: Parts = {}
    if asked.keeps_reference:
        model, over = asked.reference or here, asked.world.ranks if recipe.models.reference.shard is True else 1
        size = memory.frozen_copy(model.parameters or here.parameters or 0, asked.policy.dtype, ranks=over)
        found["reference"] = _held(asked, size, recipe.models.reference.offload, choice)
    if asked.keeps_teacher and recipe.models.teacher is not None:
        dtype = recipe.models.teacher.dtype
        size = memory.frozen_copy((asked.teacher or here).parameters or 0, asked.policy.dtype if dtype == "auto" else dtype)
        found["teacher"] = _held(asked, size, recipe.models.teacher.offload, choice)
    kept: dict[Any, float] = {}
    waiting = [0.0]
    for spec in asked.scorers:
        if spec.weights is None:
            kept[spec.name] = spec.memory_gib * GIB
        elif spec.weights.offload:
            waiting.append(weights_gib(spec.weights, asked.world.ranks) * GIB)
        else:
            kept[same_checkpoint(spec)] = weights_gib(spec.weights, asked.world.ranks) * GIB
    held = sum(kept.values())
    found["reward models"] = _always(held) | {"score": held + max(waiting)}
    return found


def _held(asked: Asked, size: float, offload: bool | str, choice: Choice) -> dict[str, float]:
    return {"credit": size} if asked.world.device == "cuda" and (choice.waits if offload == "auto" else bool(offload)) else _always(size)


def sampling_least(asked: Asked, choice: Choice, shape: Shape) -> Parts:
    """The engine's parts at the least that it starts with; beside a pass of more than BESIDE_LESS, with all that it wants."""
    recipe, world, policy = asked.recipe, asked.world, asked.policy
    engine, _ = engine_choice(recipe, asked.facts, world)
    if on_the_ranks(engine, recipe):
        wanted, section = wanted_engine(engine, recipe, asked.facts, world, policy), getattr(recipe.rollout, engine)
        share, roomy = section.memory_share, choice.tokens > BESIDE_LESS and len(_tokens(asked)) > 1
        wants = wanted.cache_wanted if roomy else wanted.cache_least
        cache = wants if share == "auto" else max(0.0, share * asked.device - wanted.weights - wanted.working)
        awake = world.device == "cpu" or section.sleep == 0 or (roomy and section.sleep == "auto")
        return engine_parts(wanted, cache, awake=awake)
    if engine != "hf":
        return {}
    return hf_parts(asked, shape, replica=choice.zero_stage == 3)


def engine_parts(wanted: engine_memory.Engine, cache: float, *, awake: bool) -> Parts:
    """Of an engine with a model of its own."""
    where = _always if awake else lambda size: {"rollout": size}
    return {"engine weights": where(wanted.weights), "KV cache": where(cache), "engine at work": where(wanted.working)}


def hf_parts(asked: Asked, shape: Shape, *, replica: bool) -> Parts:
    """Of the engine `hf`: a cache for the rows of a pass, the scores of one token of each, the pass over their prompts, and on a CPU in float32 a
    packed copy of the weights."""
    rollout, dtype = asked.recipe.rollout, asked.policy.dtype
    packed = asked.world.device == "cpu" and dtype == "float32"
    rows = most_rows_of(asked.recipe) if packed else batch_rows_of(asked.recipe)
    if rollout.hf.batch_tokens is not None:
        rows = max(1, min(rows, rollout.hf.batch_tokens // asked.longest))
    found: Parts = {
        "KV cache": {"rollout": memory.kv_cache(shape, dtype, sequences=rows, tokens=asked.longest)},
        "logits": {"rollout": memory.chosen_scores(rows, shape.vocabulary, dtype, filters=filters_of(rollout))},
        "prompts in the engine": {"rollout": memory.passing(shape, dtype, positions=rows * int(rollout.max_prompt_tokens))},
    }
    if packed:
        found["packed weights"] = {"rollout": memory.frozen_copy(shape.parameters, dtype)}
    if replica:
        found["engine weights"] = _always(memory.frozen_copy(shape.parameters, dtype))
    return found


def _always(size: float) -> dict[str, float]:
    return dict.fromkeys(STAGES, size)


def of_stage(found: Mapping[str, Mapping[str, float]], stage: str) -> float:
    return sum(by.get(stage, 0.0) for by in found.values())


def fullest(found: Mapping[str, Mapping[str, float]]) -> float:
    return max(of_stage(found, stage) for stage in STAGES)


def _ways(asked: Asked, chosen: Choice, stage: str) -> str:
    """Keys that help where nothing fits."""
    if stage == "rollout":
        return "lower rollout.max_new_tokens or rollout.hf.batch_rows, or use more memory"
    if stage == "score":
        return ways_of_scorers(asked.scorers, asked.recipe, asked.world)
    ways = ["lower rollout.max_new_tokens or rollout.max_prompt_tokens"] if chosen.tokens <= asked.longest else []
    ways += ["raise train.deepspeed.zero_stage"] if chosen.zero_stage < 3 and asked.world.ranks > 1 else []
    ways += ["models.policy.gradient_checkpointing: true"] if not chosen.checkpointing else []
    ways += ["train.offload.optimizer: cpu"] if asked.world.device == "cuda" and not keeping(asked.recipe).offload_optimizer else []
    ways += ["models.policy.lora: {rank: 32}"] if asked.policy.lora is None else []
    return f"try {', '.join(ways)}, more ranks, or a smaller model" if ways else "use more ranks, or a smaller model"


def chosen_of(asked: Asked, learner: LearnerPlan, batch: BatchPlan) -> Choice:
    """What the plan came to; whether a model waits stands in the recipe by now."""
    tokens = batch.tokens_per_micro_batch or batch.micro_batch_size * asked.longest
    return Choice(zero_stage=learner.zero_stage, tokens=tokens, checkpointing=asked.policy.gradient_checkpointing, waits=False)


def training_parts(asked: Asked, learner: LearnerPlan | None, batch: BatchPlan | None) -> Parts | None:
    """Everything but the engine; None where it is not known."""
    if asked.shape is None or learner is None or batch is None:
        return None
    return parts(asked, chosen_of(asked, learner, batch), asked.shape, {})


def memory_plan(asked: Asked, learner: LearnerPlan, batch: BatchPlan, rollout: RolloutPlan) -> MemoryPlan | None:
    """The table of a finished plan; None where the model's files do not tell its widths."""
    shape = asked.shape
    if shape is None:
        return None
    sampling: Parts = {}
    engine = rollout.own_engine
    if engine is not None and on_the_ranks(rollout.engine, asked.recipe):
        wanted = wanted_engine(rollout.engine, asked.recipe, asked.facts, asked.world, asked.policy)
        awake = asked.world.device == "cpu" or engine.sleep == 0
        sampling = engine_parts(wanted, float(engine.cache_bytes or 0), awake=awake)
    elif rollout.engine == "hf":
        sampling = hf_parts(asked, shape, replica=not rollout.shares_weights)
    found = parts(asked, chosen_of(asked, learner, batch), shape, sampling)
    rows = tuple(MemoryRow(name=name, gib={stage: size / GIB for stage, size in by.items() if size}) for name, by in found.items())
    return MemoryPlan(rows=rows, device_gib=asked.device / GIB, usable_gib=asked.usable / GIB)

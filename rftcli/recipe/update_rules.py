"""Rules across keys of the sections `batch` and `train` that say how an update is made; `rules` has the table.

What is left out: whatever depends on the machine, the policy's number type or the ZeRO stage that the plan chooses (`plan.compile_precision`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.sections import Optimizer, Recipe
from rftcli.recipe.sections.passing import trained_without_advantage

OPTIMIZER: KeyPath = ("train", "optimizer")
CRITIC_OPTIMIZER: KeyPath = ("models", "critic", "optimizer")
EXTRA: KeyPath = ("train", "deepspeed", "extra")


def micro_batch_twice(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    rows, tokens = recipe.batch.micro_batch_size, recipe.batch.tokens_per_micro_batch
    if rows != "auto" and tokens != "auto":
        yield Finding(
            path=("batch", "tokens_per_micro_batch"),
            message="`micro_batch_size` and `tokens_per_micro_batch` both say how micro-batches are cut",
            reason="keep one of the two",
            reads=(("batch", "micro_batch_size"),),
        )


def balance_by_rows(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if recipe.batch.balance is True and recipe.batch.micro_batch_size != "auto":
        yield Finding(
            path=("batch", "balance"),
            message="goes with micro-batches that are cut by tokens",
            reason="one of `micro_batch_size` rows costs what its longest row does",
            hint="leave `micro_batch_size` out, or set `tokens_per_micro_batch`",
            reads=(("batch", "micro_batch_size"),),
        )


def skipping(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    why = trained_without_advantage(recipe)
    if recipe.batch.skip_zero_advantage is True and why is not None:
        yield Finding(path=("batch", "skip_zero_advantage"), message="cannot be true here", reason=why, hint="use auto or false")


def rollouts_and_updates(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    batch = recipe.batch
    path: KeyPath = ("batch", "rollouts_per_update")
    if batch.rollouts_per_update > 1 and batch.updates_per_step > 1:
        yield Finding(
            path=path,
            message=f"must be 1 with several updates per step, got {batch.rollouts_per_update} with `updates_per_step` {batch.updates_per_step}",
            reason="either several rollouts make one update, or one rollout makes several",
            reads=(("batch", "updates_per_step"),),
        )
    elif batch.prompts_per_step % batch.rollouts_per_update:
        yield Finding(
            path=path,
            message=f"must divide `prompts_per_step`, got {batch.rollouts_per_update} for {batch.prompts_per_step}",
            reason="every rollout has equally many prompts",
            reads=(("batch", "prompts_per_step"),),
        )


def optimizer_options(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for place, optimizer in _optimizers(recipe):
        allowed = OPTIMIZER_OPTIONS[optimizer.kind]
        for name in optimizer.options:
            path: KeyPath = (*place, "options", name)
            reads = ((*place, "kind"),)
            if name in OPTIMIZER_KEYS:
                hint = f"set `{format_path((*place, name))}`"
                yield Finding(path=path, message=f"`{name}` has a key of its own", hint=hint, at_key=True, reads=reads)
            elif name not in allowed:
                message = f"`{optimizer.kind}` has no option `{name}`"
                yield Finding(path=path, message=message, allowed=allowed, at_key=True, reads=reads)


def _optimizers(recipe: Recipe) -> list[tuple[KeyPath, Optimizer]]:
    critic = recipe.models.critic
    return [(OPTIMIZER, recipe.train.optimizer), *([] if critic is None else [(CRITIC_OPTIMIZER, critic.optimizer)])]


def decay_nothing(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for place, optimizer in _optimizers(recipe):
        if optimizer.no_decay and optimizer.weight_decay == 0:
            yield Finding(
                path=(*place, "no_decay"),
                message="has no effect while `weight_decay` is 0",
                reason="then no parameter decays",
                reads=((*place, "weight_decay"),),
            )


def whole_matrices(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    train = recipe.train
    stage = train.deepspeed.zero_stage
    kind: KeyPath = (*OPTIMIZER, "kind")
    if train.optimizer.kind == "muon" and stage not in ("auto", 0):
        yield Finding(
            path=("train", "deepspeed", "zero_stage"),
            message=f"must be 0 for `muon`, got {stage}",
            reason="it orthogonalises whole matrices, and ZeRO gives every rank a piece of one",
            reads=(kind,),
        )
    if train.optimizer.kind != "adamw" and train.offload.optimizer != "none":
        yield Finding(
            path=("train", "offload", "optimizer"),
            message=f"must be none for `{train.optimizer.kind}`",
            reason="adamw alone has a step on the CPU",
            reads=(kind,),
        )


def offload_stage(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    train = recipe.train
    stage = train.deepspeed.zero_stage
    for name, key, lowest in (("optimizer", train.offload.optimizer, 1), ("parameters", train.offload.parameters, 3)):
        if key != "none" and stage != "auto" and stage < lowest:
            yield Finding(
                path=("train", "offload", name),
                message=f"needs ZeRO stage {lowest}{' or higher' if lowest < 3 else ''}, got `zero_stage` {stage}",
                hint="leave `train.deepspeed.zero_stage` to the plan",
                reads=(("train", "deepspeed", "zero_stage"),),
            )


def precision_pairs(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    precision = recipe.train.precision
    if precision.master == "bfloat16" and precision.gradients != "bfloat16":
        yield Finding(
            path=("train", "precision", "gradients"),
            message="must be bfloat16 while `master` is bfloat16",
            reason="an optimizer takes gradients in the number type of its weights",
            reads=(("train", "precision", "master"),),
            at_key=True,
        )
    if precision.master == "bfloat16" and recipe.train.offload.optimizer != "none":
        yield Finding(
            path=("train", "precision", "master"),
            message="must be float32 while the optimizer is offloaded",
            reason="the memory of the machine is there to hold master weights that the GPU cannot",
            reads=(("train", "offload", "optimizer"),),
        )


def compile_sharded(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    stage = recipe.train.deepspeed.zero_stage
    if recipe.train.compile and (stage == 3 or recipe.train.offload.parameters != "none"):
        yield Finding(
            path=("train", "compile"),
            message="must be false under ZeRO stage 3",
            reason="it gathers each layer's weights in hooks, at which a compiled graph would break",
            reads=(("train", "deepspeed", "zero_stage"), ("train", "offload", "parameters")),
        )


def deepspeed_extra(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for path in _leaves(recipe.train.deepspeed.extra):
        where: KeyPath = (*EXTRA, *path)
        owner = next((DERIVED[head] for head in _heads(path) if head in DERIVED), None)
        if owner is not None:
            name = ".".join(path)
            yield Finding(path=where, message=f"the plan derives `{name}`", hint=f"set `{owner}`", at_key=True)
        elif path[0] not in PASSED_ON:
            yield Finding(path=(*EXTRA, path[0]), message=f"`{path[0]}` is not passed on to DeepSpeed", allowed=PASSED_ON, at_key=True)


def _leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value and (*above, name) not in DERIVED:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name)


def _heads(path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (path[:length] for length in range(1, len(path) + 1))


OPTIMIZER_KEYS = ("lr", "betas", "eps", "weight_decay")
"""Arguments of optimizers that are keys of the recipe."""

# How to add one: an argument that the optimizer's constructor takes and that is safe under every ZeRO stage it may run in.
OPTIMIZER_OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw": ("amsgrad",),
    "adamw_8bit": ("min_8bit_size",),
    "muon": ("momentum", "nesterov", "ns_steps", "ns_coefficients", "adjust_lr_fn"),
}
"""Kind -> what `options` may hold."""

PASSED_ON = ("zero_optimization", "aio", "comms_logger", "dump_state", "flops_profiler", "memory_breakdown", "timers", "wall_clock_breakdown")
"""Top-level names of DeepSpeed that `extra` may hold: DeepSpeed itself says nothing about names that it does not know."""

DERIVED: dict[tuple[str, ...], str] = {
    ("train_batch_size",): "batch.prompts_per_step",
    ("train_micro_batch_size_per_gpu",): "batch.tokens_per_micro_batch",
    ("gradient_accumulation_steps",): "batch.tokens_per_micro_batch",
    ("gradient_clipping",): "train.max_grad_norm",
    ("optimizer",): "train.optimizer",
    ("scheduler",): "train.optimizer.schedule",
    ("bf16",): "models.policy.dtype",
    ("fp16",): "models.policy.dtype",
    ("torch_autocast",): "models.policy.dtype",
    ("data_types",): "train.precision.gradients",
    ("communication_data_type",): "train.precision.reduce",
    ("compile",): "train.compile",
    ("activation_checkpointing",): "models.policy.gradient_checkpointing",
    ("tensorboard",): "track.tensorboard",
    ("wandb",): "track.wandb",
    ("checkpoint",): "checkpoint",
    ("zero_optimization", "stage"): "train.deepspeed.zero_stage",
    ("zero_optimization", "offload_optimizer"): "train.offload.optimizer",
    ("zero_optimization", "cpu_offload"): "train.offload.optimizer",
    ("zero_optimization", "offload_param"): "train.offload.parameters",
    ("zero_optimization", "cpu_offload_params"): "train.offload.parameters",
    ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"): "checkpoint.save_hf",
}
"""What the plan derives -> the recipe key that says it."""

Row = tuple[tuple[str, ...], str, Callable[[Recipe, KnownRules | None], Iterator[Finding]]]
# How to add one: a small function above and a line here.
ROWS: dict[str, Row] = {
    "balance-by-rows": (
        ("batch.balance", "batch.micro_batch_size"), "`balance: true` goes with micro-batches that are cut by tokens.", balance_by_rows
    ),
    "skip-zero-advantage": (
        (
            "batch.skip_zero_advantage", "algorithm.loss.kind", "algorithm.kl.coefficient", "algorithm.kl.place",
            "algorithm.loss.entropy_coefficient", "algorithm.loss.entropy_controller", "models.policy.router_loss",
        ),
        "Completions without advantage are left out only where the loss has no other term for them.",
        skipping,
    ),
}
"""Code -> keys it concerns, the rule in one sentence, its check."""

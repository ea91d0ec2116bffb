"""What the ranks of `ranks.on_ranks` do: every function takes the world first and returns something picklable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def tiny_model(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def experiences(count: int = 12) -> list[Any]:
    """Fixed completions of very different lengths; one without a reward, one without a token, one truncated to nothing trained."""
    from rftcli.types import Experience

    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(count):
        prompt, length = 3 + index % 4, [1, 9, 4, 0, 17, 6][index % 6]
        mask = torch.ones(length, dtype=torch.bool)
        if index == 2:
            mask[:] = False
        found.append(
            Experience(
                sample=None,  # type: ignore[arg-type]
                token_ids=torch.randint(0, 97, (prompt + length,), generator=generator),
                prompt_tokens=prompt,
                mask=mask,
                advantages=torch.full((length,), float(torch.randn((), generator=generator))),
                old_logprobs=-4.5 + 0.2 * torch.randn(length, generator=generator),
                reference_logprobs=-4.5 + 0.2 * torch.randn(length, generator=generator),
            )
        )
    return found


def learner_of(
    world: Any, *, zero: int, dtype: str = "float32", lr: float = 1e-3, max_grad_norm: float | None = 1.0,
    kind: str = "adamw", weight_decay: float = 0.0, no_decay: tuple[str, ...] = (), compiled: bool = False, from_host: bool = False, **config: Any,
) -> Any:  # fmt: skip
    """`from_host`: the model is cut before DeepSpeed wraps it. `config`: number types, offloading and extra of the DeepSpeed configuration."""
    from rftcli.models.policy import CausalPolicy
    from rftcli.plan import deepspeed_config
    from rftcli.plan.plan import LearnerPlan
    from rftcli.runtime.learner import DeepSpeedLearner

    plan = LearnerPlan(
        kind=kind, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay, schedule="constant", warmup_updates=0, min_lr=0.0,
        schedule_updates=100, max_grad_norm=max_grad_norm, skip_at_most=3, zero_stage=zero, no_decay=tuple(no_decay), compile=compiled,
        from_host=from_host,
        deepspeed=deepspeed_config.build(stage=zero, dtype=dtype, ranks=world.size, max_grad_norm=max_grad_norm, **config),
    )  # fmt: skip
    model = tiny_model().to(getattr(torch, dtype))
    return DeepSpeedLearner(CausalPolicy(model, compiled=compiled), plan, world, torch.device("cpu"), temperature=0.8)


def plan_of(layout: str, micro: int, aggregate: str, kl: float, tokens: int | None = None) -> Any:
    from types import SimpleNamespace

    from rftcli.plan.plan import BatchPlan, LossPlan

    batch = BatchPlan(
        prompts_per_step=12,
        samples_per_prompt=1,
        updates_per_step=1,
        epochs=1,
        micro_batch_size=micro,
        layout=layout,
        equation="",
        needs_prepass=None,
        tokens_per_micro_batch=tokens,
    )
    loss = LossPlan(
        kind="ppo_clip", options={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}, aggregate=aggregate, kl_coefficient=kl, kl_estimator="k3"
    )
    advantage = SimpleNamespace(bootstrap_truncated=False)
    return SimpleNamespace(batch=batch, loss=loss, rollout=SimpleNamespace(max_new_tokens=20), advantage=advantage)


def share(world: Any, everything: list[Any], uneven: bool) -> list[Any]:
    """This rank's part: evenly in turns, or nearly all of it on rank 0."""
    if not uneven or world.size == 1:
        return everything[world.rank :: world.size]
    return everything[:9] if world.rank == 0 else everything[9:]


def gradient(
    world: Any, *, layout: str, zero: int, micro: int = 1, aggregate: str = "token_mean", uneven: bool = False, chunk_tokens: int = 0,
    tokens: int | None = None, entropy: float = 0.0, **how: Any,
) -> Any:  # fmt: skip
    """The reduced gradient of one update, whole, and the weights after it. `entropy`: coefficient of the entropy bonus."""
    from deepspeed.utils import safe_get_full_grad

    import rftcli.models.policy as policy_module
    from rftcli.stages.learn import one_update, policy_loss

    usual = policy_module.HEAD_BYTES
    policy_module.HEAD_BYTES = chunk_tokens * 97 * 4 if chunk_tokens else usual
    learner = learner_of(world, zero=zero, **how)
    learner.module.entropy_gradient = entropy > 0
    plan = plan_of(layout, micro, aggregate, kl=0.1, tokens=tokens)
    found: dict[str, torch.Tensor] = {}
    step = learner.step

    def look_then_step() -> Any:
        for name, parameter in learner.module.model.named_parameters():
            found[name] = safe_get_full_grad(parameter).clone()
        return step()

    learner.step = look_then_step
    loss = policy_loss(plan.loss, 20, entropy_coefficient=entropy)
    update = one_update(share(world, experiences(), uneven), learner, loss, plan, world, pad_id=0, device=torch.device("cpu"))
    weights = {name: tensor.clone() for name, tensor in learner.weights()}
    policy_module.HEAD_BYTES = usual
    return {"gradient": found, "weights": weights, "metrics": dict(update.metrics), "norm": update.grad_norm, "tokens": update.tokens}


def several_updates(world: Any, *, zero: int, updates: int, **how: Any) -> Any:
    from rftcli.stages.learn import one_update, policy_loss

    learner = learner_of(world, zero=zero, **how)
    plan = plan_of("padded", 3, "token_mean", kl=0.1)
    mine = share(world, experiences(), uneven=False)
    norms = []
    for _ in range(updates):
        update = one_update(mine, learner, policy_loss(plan.loss, 20), plan, world, pad_id=0, device=torch.device("cpu"))
        norms.append(update.grad_norm)
    return {"weights": {name: tensor.clone() for name, tensor in learner.weights()}, "norms": norms}


def not_finite(world: Any, *, zero: int, **how: Any) -> Any:
    """The second of three updates has an advantage that is not a number, on rank 1 only."""
    from rftcli.stages.learn import one_update, policy_loss

    learner = learner_of(world, zero=zero, **how)
    plan = plan_of("padded", 3, "token_mean", kl=0.0)
    log = []
    for number in range(3):
        mine = share(world, experiences(), uneven=False)
        if number == 1 and world.rank == 1:
            mine[-1].advantages = torch.full_like(mine[-1].advantages, float("inf"))
        update = one_update(mine, learner, policy_loss(plan.loss, 20), plan, world, pad_id=0, device=torch.device("cpu"))
        total = {name: float(tensor.double().sum()) for name, tensor in learner.weights()}
        log.append({"applied": update.applied, "version": update.policy_version, "weights": total})
    return log


def never_finite(world: Any, *, zero: int) -> Any:
    """Updates that have no finite gradient on rank 1: how many are skipped before the run stops, and with which words."""
    from dataclasses import replace

    from rftcli.errors import RftError
    from rftcli.stages.learn import one_update, policy_loss

    learner = learner_of(world, zero=zero)
    learner.plan = replace(learner.plan, skip_at_most=2)
    plan = plan_of("padded", 3, "token_mean", kl=0.0)
    mine = share(world, experiences(), uneven=False)
    if world.rank == 1:
        mine[-1].advantages = torch.full_like(mine[-1].advantages, float("inf"))
    skipped = 0
    try:
        for _ in range(9):
            skipped += not one_update(mine, learner, policy_loss(plan.loss, 20), plan, world, pad_id=0, device=torch.device("cpu")).applied
    except RftError as error:
        return skipped, error.message
    return skipped, None


def save_and_load(world: Any, *, zero: int, folder: str, **how: Any) -> Any:
    """Two updates, save, one more; then a fresh learner loads and does the last one again: the same bits. `later`: so are the files that are written
    from a copy after the update that follows."""
    from rftcli.runtime.writes import Later
    from rftcli.stages.learn import one_update, policy_loss

    plan = plan_of("padded", 3, "token_mean", kl=0.1)
    mine = share(world, experiences(), uneven=False)

    def update(learner: Any) -> None:
        one_update(mine, learner, policy_loss(plan.loss, 20), plan, world, pad_id=0, device=torch.device("cpu"))

    first = learner_of(world, zero=zero, **how)
    update(first)
    update(first)
    first.save(Path(folder))
    state = dict(first.state_dict())
    kept, behind = Later(), Path(folder) / "behind"
    first.save(behind, kept)
    update(first)
    straight = {name: tensor.clone() for name, tensor in first.weights()}
    for action in kept.actions:
        action()
    world.barrier("written")
    files = sorted(path.relative_to(behind) for path in behind.rglob("*") if path.is_file())
    later = bool(files) and all((Path(folder) / file).read_bytes() == (behind / file).read_bytes() for file in files)
    second = learner_of(world, zero=zero, **how)
    second.load(Path(folder))
    second.load_state_dict(state)
    update(second)
    resumed = {name: tensor.clone() for name, tensor in second.weights()}
    equal = all(torch.equal(straight[name], resumed[name]) for name in straight)
    return {"equal": equal, "later": later, "versions": (first.version, second.version)}


def tiny_experts() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def tiny_critic(world: Any, *, zero: int) -> Any:
    """A critic with a head that is not 0, so that every weight has a gradient."""
    from transformers import LlamaForTokenClassification

    from rftcli.models.value import ValueModel
    from rftcli.runtime.critic import CriticLearner

    config = tiny_model().config
    config.num_labels, config.classifier_dropout = 1, 0.0
    torch.manual_seed(1)
    model = LlamaForTokenClassification(config)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    plan = learner_of(world, zero=zero).plan
    return CriticLearner(ValueModel(model.eval()), plan, world, torch.device("cpu"), temperature=1.0)


def with_values(count: int = 12) -> list[Any]:
    generator = torch.Generator().manual_seed(9)
    found = experiences(count)
    for item in found:
        item.values = 0.3 * torch.randn(item.mask.shape, generator=generator)
        item.returns = torch.randn(item.mask.shape, generator=generator)
    return found


def full_gradients(learner: Any, work: Any) -> dict[str, torch.Tensor]:
    """The reduced gradient of the one update that `work` makes, whole."""
    from deepspeed.utils import safe_get_full_grad

    found: dict[str, torch.Tensor] = {}
    step = learner.step

    def look_then_step() -> Any:
        for name, parameter in learner.module.model.named_parameters():
            found[name] = safe_get_full_grad(parameter).clone()
        return step()

    learner.step = look_then_step
    work()
    return found


def critic_gradient(world: Any, *, layout: str, micro: int, zero: int, uneven: bool = False) -> Any:
    from types import SimpleNamespace

    from rftcli.stages.values import critic_update, fill_values

    learner = tiny_critic(world, zero=zero)
    plan = plan_of(layout, micro, "token_mean", kl=0.0)
    plan.critic = SimpleNamespace(value_clip=0.2)
    mine = share(world, with_values(), uneven)
    fresh = share(world, experiences(), uneven)
    fill_values(fresh, learner, plan, world, pad_id=0, device=torch.device("cpu"))
    updates: list[Any] = []
    gradient = full_gradients(
        learner, lambda: updates.append(critic_update(mine, learner, plan, world, pad_id=0, device=torch.device("cpu")))
    )
    (update,) = updates
    values = [(item.token_ids.tolist(), item.values.tolist()) for item in fresh]
    return {"gradient": gradient, "metrics": dict(update.metrics), "norm": update.grad_norm, "tokens": update.tokens, "values": values}


def policy_gradient(world: Any, *, layout: str, micro: int, zero: int, uneven: bool = False, router: float = 0.0, rows: int = 0) -> Any:
    """A policy update with known answers beside it (`rows` of them), or the balance of experts."""
    from dataclasses import replace

    from rftcli.data.spec import DataSpec
    from rftcli.models.policy import CausalPolicy
    from rftcli.plan.plan import SupervisedPlan
    from rftcli.runtime.learner import DeepSpeedLearner
    from rftcli.stages.learn import one_update, policy_loss
    from rftcli.stages.supervised import SupervisedStream

    plan = plan_of(layout, micro, "token_mean", kl=0.1)
    plan.loss = replace(plan.loss, router_coefficient=router)
    learner = learner_of(world, zero=zero)
    if router:
        policy = CausalPolicy(tiny_experts(), balance=True)
        learner = DeepSpeedLearner(policy, learner.plan, world, torch.device("cpu"), temperature=0.8)
    known = None
    if rows:
        answers = [(tuple(item.token_ids.tolist()), item.prompt_tokens) for item in experiences(7) if item.mask.numel()]
        known = SupervisedStream(
            answers, SupervisedPlan(data=DataSpec(name="s", path="p"), coefficient=0.7, rows_per_update=rows, max_answer_tokens=99), seed=3
        )
    mine = share(world, experiences(), uneven)
    updates: list[Any] = []
    loss = policy_loss(plan.loss, 20)
    gradient = full_gradients(
        learner,
        lambda: updates.append(one_update(mine, learner, loss, plan, world, pad_id=0, device=torch.device("cpu"), supervised=known)),
    )
    (update,) = updates
    return {"gradient": gradient, "metrics": dict(update.metrics), "norm": update.grad_norm, "tokens": update.tokens}


def save_and_load_both(world: Any, *, zero: int, folder: str) -> Any:
    """Policy and critic, each two updates, saved as one; fresh ones load and do the third again: the same bits."""
    from types import SimpleNamespace

    from rftcli.runtime.critic import Trained
    from rftcli.stages.learn import one_update, policy_loss
    from rftcli.stages.values import critic_update

    plan = plan_of("padded", 3, "token_mean", kl=0.1)
    plan.critic = SimpleNamespace(value_clip=0.2)
    mine = share(world, with_values(), uneven=False)

    def update(both: Any) -> None:
        one_update(mine, both.policy, policy_loss(plan.loss, 20), plan, world, pad_id=0, device=torch.device("cpu"))
        critic_update(mine, both.critic, plan, world, pad_id=0, device=torch.device("cpu"))

    def fresh() -> Any:
        return Trained(learner_of(world, zero=zero), tiny_critic(world, zero=zero))

    def bits(both: Any) -> list[torch.Tensor]:
        return [tensor.clone() for learner in (both.policy, both.critic) for _, tensor in learner.weights()]

    straight = fresh()
    update(straight)
    update(straight)
    straight.save(Path(folder))
    states = dict(straight.policy.state_dict()), dict(straight.critic.state_dict())
    update(straight)
    resumed = fresh()
    resumed.load(Path(folder))
    resumed.policy.load_state_dict(states[0])
    resumed.critic.load_state_dict(states[1])
    update(resumed)
    equal = all(torch.equal(one, other) for one, other in zip(bits(straight), bits(resumed), strict=True))
    moved = not torch.equal(bits(straight)[0], bits(fresh())[0])
    return {"equal": equal, "moved": moved, "versions": (resumed.policy.version, resumed.critic.version)}


def _whole_state(learner: Any) -> dict[str, Any]:
    """Parameter -> (float32 weights, first moment, second moment), whole; and the optimizer's step count."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, Any] = {}
    for name, parameter in learner.module.model.named_parameters():
        if learner.plan.zero_stage == 0:
            moments = learner._optimizer.state[parameter]
            parts = (parameter.data, moments["exp_avg"], moments["exp_avg_sq"])
        else:
            moments = [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
            parts = (safe_get_full_fp32_param(parameter), *moments)
        found[name] = tuple(part.detach().float().reshape(-1).clone() for part in parts)
    found["steps"] = {float(state["step"]) for state in learner._optimizer.state.values()}
    return found


def save_state(world: Any, *, zero: int, folder: str, dtype: str = "float32") -> Any:
    """Two updates, save, one more: the whole state at the save, and the weights after it."""
    from rftcli.stages.learn import one_update, policy_loss

    plan = plan_of("padded", 3, "token_mean", kl=0.1)
    learner = learner_of(world, zero=zero, dtype=dtype)
    mine = share(world, experiences(), uneven=False)
    for number in range(3):
        if number == 2:
            learner.save(Path(folder))
            saved = _whole_state(learner)
        one_update(mine, learner, policy_loss(plan.loss, 20), plan, world, pad_id=0, device=torch.device("cpu"))
    return {"saved": saved, "after": _whole_state(learner), "state": dict(learner.state_dict())}


def load_state(world: Any, *, zero: int, folder: str, written_by: int, dtype: str = "float32") -> Any:
    """A fresh learner loads what another number of ranks has saved, and does the next update."""
    from rftcli.runtime.reshape import load_trainer
    from rftcli.stages.learn import one_update, policy_loss

    plan = plan_of("padded", 3, "token_mean", kl=0.1)
    learner = learner_of(world, zero=zero, dtype=dtype)
    load_trainer(Path(folder), learner, world, written_by=written_by)
    loaded = _whole_state(learner)
    live = {name: tensor.clone() for name, tensor in learner.weights()}
    one_update(share(world, experiences(), uneven=False), learner, policy_loss(plan.loss, 20), plan, world, pad_id=0, device=torch.device("cpu"))
    again = Path(folder).with_name("again")
    world.barrier("before saving")
    again.mkdir(exist_ok=True)
    learner.save(again)  # what was loaded so is saved in the ordinary form
    return {"loaded": loaded, "live": live, "after": _whole_state(learner), "files": sorted(p.name for p in again.rglob("*.pt"))}


def collectives(world: Any) -> Any:
    values = world.sum([0.1 * (world.rank + 1), 1.0])
    return {"sum": values, "max": world.max([world.rank, -world.rank]), "gather": world.gather({"rank": world.rank})}

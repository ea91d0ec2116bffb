"""What ranks do with adapters, running means and refreshed references. As `work.py`, whose helpers it uses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import work

CPU = torch.device("cpu")


def adapted(
    world: Any, *, zero: int, dtype: str = "float32", lora: bool = True, checkpointing: bool = False, start_from: str | None = None,
    compiled: bool = False, from_host: bool = False,
) -> Any:  # fmt: skip
    """A learner over the tiny model, with an adapter that already does something."""
    from rftcli.models import lora as adapters
    from rftcli.models.policy import CausalPolicy
    from rftcli.plan import deepspeed_config
    from rftcli.plan.plan import LearnerPlan
    from rftcli.runtime.learner import DeepSpeedLearner

    model = work.tiny_model().to(getattr(torch, dtype)).eval()
    adapter = None
    if lora:
        torch.manual_seed(1)
        adapter = adapters.attach(
            model, rank=4, alpha=8.0, dropout=0.0, targets="all-linear", save_also=(), options={}, start_from=start_from, base_name="tiny",
            copy_for_reference=start_from is not None,
        )  # fmt: skip
        if start_from is None:
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.data.normal_(0.0, 0.05)
    kept = "float32" if lora else dtype
    plan = LearnerPlan(
        kind="adamw", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, schedule="constant", warmup_updates=0, min_lr=0.0,
        schedule_updates=100, max_grad_norm=1.0, skip_at_most=3, zero_stage=zero, from_host=from_host,
        deepspeed=deepspeed_config.build(stage=zero, dtype=kept, ranks=world.size, max_grad_norm=1.0),
    )  # fmt: skip
    policy = CausalPolicy(model, gradient_checkpointing=checkpointing, compiled=compiled)
    return DeepSpeedLearner(policy, plan, world, CPU, temperature=0.8, adapter=adapter)


def first_batch(world: Any) -> Any:
    from rftcli.stages import batches

    plan = work.plan_of("padded", 3, "token_mean", kl=0.1)
    parts = batches.micro_batches(work.share(world, work.experiences(), False), plan.batch, batches.NO_DENOMINATORS, world, pad_id=0, device=CPU)
    return next(iter(parts))


def update(learner: Any, world: Any) -> Any:
    from rftcli.stages.learn import one_update, policy_loss

    plan = work.plan_of("padded", 3, "token_mean", kl=0.1)
    mine = work.share(world, work.experiences(), False)
    return one_update(mine, learner, policy_loss(plan.loss, 20), plan, world, pad_id=0, device=CPU)


def copied(weights: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for name, tensor in weights}


def lora_gradient(
    world: Any, *, zero: int, dtype: str, checkpointing: bool = False, compiled: bool = False, from_host: bool = False
) -> Any:
    """A pass without the adapter, then one update: gradients of the adapter, whole; what the passes and the merge say."""
    from deepspeed.utils import safe_get_full_grad

    from rftcli.models.policy import CausalPolicy
    from rftcli.runtime.learner import policy_inputs
    from rftcli.runtime.reference import AdapterReference

    learner = adapted(world, zero=zero, dtype=dtype, checkpointing=checkpointing, compiled=compiled, from_host=from_host)
    batch = first_batch(world)
    base = CausalPolicy(work.tiny_model().to(getattr(torch, dtype)).eval())
    with torch.no_grad():
        expected, _ = base(**policy_inputs(batch), temperature=0.8)
        without, _ = AdapterReference(learner, learner.adapter).logprobs(batch, 0.8)
        adapted_logprobs, _ = learner.logprobs(batch, 0.8)
        base.model.load_state_dict(dict(copied(learner.weights())), strict=False)
        merged, _ = base(**policy_inputs(batch), temperature=0.8)
    found: dict[str, torch.Tensor] = {}
    step = learner.step

    def look_then_step() -> Any:
        for name, parameter in learner.trained().items():
            found[name] = safe_get_full_grad(parameter).clone()
        return step()

    learner.step = look_then_step
    done = update(learner, world)
    return {
        "gradient": found,
        "norm": done.grad_norm,
        "dtypes": sorted({str(parameter.dtype) for parameter in learner.trained().values()}),
        "base is the reference": float((without - expected).abs().max()) if expected.numel() else 0.0,
        "adapter matters": float((adapted_logprobs - expected).abs().max()) if expected.numel() else 1.0,
        "merged is the policy": float((merged - adapted_logprobs).abs().max()) if expected.numel() else 0.0,
        "weights": copied(learner.weights()),
    }


def with_companions(world: Any, *, zero: int, lora: bool, start_from: str | None = None) -> Any:
    from rftcli.models.policy import CausalPolicy
    from rftcli.runtime.ema import RunningMean
    from rftcli.runtime.reference import ModelReference

    learner = adapted(world, zero=zero, lora=lora, start_from=start_from)
    learner.companions["ema"] = RunningMean(learner, decay=0.75, rank=world.rank)
    reference = ModelReference(CausalPolicy(work.tiny_model()), CPU, offload=True, refresh_every=2, mix=0.6, writes=world.rank == 0)
    reference.take(learner.weights())
    learner.companions["reference"] = reference
    return learner


def follow(world: Any, *, zero: int, lora: bool, folder: str) -> Any:
    """Two updates, save, two more; a fresh learner loads and does the last two again. The mean and the reference by their definitions."""

    def go_on(learner: Any, first: int) -> dict[str, Any]:
        for step in (first, first + 1):
            update(learner, world)
            learner.companions["reference"].follow(step, learner)
        live = copied(learner.weights())
        mean = copied(learner.weights("ema"))
        assert all(torch.equal(live[name], tensor) for name, tensor in copied(learner.weights()).items())  # the live weights came back
        return {"live": live, "ema": mean, "reference": copied(learner.companions["reference"]._module.model.named_parameters())}

    first = with_companions(world, zero=zero, lora=lora)
    start = copied(first.weights())
    trained = [copied((name, whole(first, parameter)) for name, parameter in first.trained().items())]
    update(first, world)
    trained.append(copied((name, whole(first, parameter)) for name, parameter in first.trained().items()))
    first.companions["reference"].follow(1, first)
    untouched = copied(first.companions["reference"]._module.model.named_parameters())
    update(first, world)
    trained.append(copied((name, whole(first, parameter)) for name, parameter in first.trained().items()))
    first.companions["reference"].follow(2, first)
    after_two = copied(first.weights())
    mixed = copied(first.companions["reference"]._module.model.named_parameters())
    parts = first.companions["ema"]._parts
    mean = {name: first.joined(parts[name], parameter).clone() for name, parameter in first.trained().items()}
    first.save(Path(folder))
    state = dict(first.state_dict())
    straight = go_on(first, 3)
    second = with_companions(world, zero=zero, lora=lora)
    second.load(Path(folder))
    second.load_state_dict(state)
    resumed = go_on(second, 3)
    expected = trained[0]
    for weights in trained[1:]:
        expected = {name: 0.75 * tensor + 0.25 * weights[name] for name, tensor in expected.items()}
    return {
        "equal": {what: all(torch.equal(straight[what][name], resumed[what][name]) for name in straight[what]) for what in straight},
        "mean": max(float((mean[name] - tensor).abs().max()) for name, tensor in expected.items()),
        "mean moved": any(not torch.equal(mean[name], trained[-1][name]) for name in mean),
        "untouched": all(torch.equal(untouched[name], start[name]) for name in untouched),
        "mixed": max(float((mixed[name] - (0.6 * after_two[name] + 0.4 * start[name])).abs().max()) for name in mixed),
        "weights": straight["live"],
        "ema": straight["ema"],
    }


def whole(learner: Any, parameter: Any) -> torch.Tensor:
    with learner.present([parameter]):
        return parameter.data.clone()


def go_on_from(world: Any, *, zero: int, folder: str) -> Any:
    """Train an adapter, save it apart, go on from it: the reference is a frozen copy of it."""
    from rftcli.runtime.reference import AdapterReference

    first = adapted(world, zero=zero)
    update(first, world)
    weights = {name: whole(first, parameter) for name, parameter in first.trained().items()}
    if world.rank == 0:
        first.adapter.save(Path(folder), weights)
    world.barrier("adapter")
    second = adapted(world, zero=zero, start_from=folder)
    batch = first_batch(world)
    with torch.no_grad():
        before, _ = second.logprobs(batch, 0.8)
        reference = AdapterReference(second, second.adapter)
        at_start, _ = reference.logprobs(batch, 0.8)
    names = sorted(second.trained())
    update(second, world)
    with torch.no_grad():
        after, _ = second.logprobs(batch, 0.8)
        at_end, _ = reference.logprobs(batch, 0.8)
    return {
        "starts as the reference": torch.equal(before, at_start),
        "reference stays": torch.equal(at_start, at_end),
        "policy moves": not torch.equal(before, after) or before.numel() == 0,
        "only the adapter is trained": names == sorted(weights) == sorted(second.trained()),
    }


def freeze_and_update(world: Any, *, zero: int) -> Any:
    """One update of a model with a frozen part: which weights moved."""
    from rftcli.models.freeze import freeze
    from rftcli.models.policy import CausalPolicy
    from rftcli.plan import deepspeed_config
    from rftcli.plan.plan import LearnerPlan
    from rftcli.runtime.learner import DeepSpeedLearner

    model = work.tiny_model()
    counts = freeze(model, ["model.embed_tokens.*", "model.layers.0.*"])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plan = LearnerPlan(
        kind="adamw", lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, schedule="constant", warmup_updates=0, min_lr=0.0,
        schedule_updates=100, max_grad_norm=1.0, skip_at_most=3, zero_stage=zero,
        deepspeed=deepspeed_config.build(stage=zero, dtype="float32", ranks=world.size, max_grad_norm=1.0),
    )  # fmt: skip
    learner = DeepSpeedLearner(CausalPolicy(model), plan, world, CPU, temperature=0.8)
    update(learner, world)
    after = copied(learner.weights())
    return {"counts": counts, "moved": sorted(name for name in before if not torch.equal(before[name], after[name])), "names": sorted(before)}

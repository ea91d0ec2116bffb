"""Every loss and every device around it gives the same gradient for any ranks, micro-batches and layout, on a real model; ranks are threads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rftcli.algo.own_loss import own_loss
from rftcli.models.policy import CausalPolicy
from rftcli.protocols import StepOutcome
from rftcli.runtime.own_loss import load_loss
from rftcli.runtime.world import SoloWorld
from rftcli.stages.correction import correct
from rftcli.stages.learn import one_update, policy_loss
from rftcli.stages.spread import spread
from rftcli.types import Batch, Experience

TOLERANCE = 1e-5
LENGTHS = [1, 9, 4, 0, 17, 6, 3, 12, 8, 0, 5, 7]
UNTRAINED = 2
"""This one has no trained token; two others have no token at all."""
WITHOUT = (4, 10)
"""These have an advantage of 0."""

L = "algorithm.loss"
KL = ("algorithm.kl={coefficient: 0.3, estimator: k3}",)
# name -> settings on top of the plan below
CASES: dict[str, tuple[str, ...]] = {
    "ppo_clip": (f"{L}.dual_clip=1.2",),
    "rloo_sequence": (f"{L}.kind=rloo_sequence",),
    "gspo": (f"{L}={{kind: gspo, clip_low: 0.05, clip_high: 0.05}}",),
    "luspo": (f"{L}={{kind: gspo, clip_low: 0.05, clip_high: 0.05, aggregate: sequence_sum}}",),
    "gmpo": (f"{L}={{kind: gmpo, clip_low: 0.1, clip_high: 0.1}}",),
    "cispo": (f"{L}={{kind: cispo, clip_high: 0.05}}",),
    "sapo": (f"{L}.kind=sapo",),
    "cpg": (f"{L}={{kind: cpg, options: {{drift: 0.5, drift_bound: 0.05}}}}",),
    "clip_cov": (f"{L}={{kind: clip_cov, options: {{share: 0.2, low: -5, high: 0.05}}}}",),
    "kl_cov": (f"{L}={{kind: kl_cov, options: {{share: 0.2}}}}",),
    "reinforce": (f"{L}={{kind: reinforce, options: {{importance_weight: true}}}}",),
    "dro": (f"{L}.kind=dro",),
    "python": (f"{L}={{kind: python, python: 'own_losses:squares', options: {{power: 2}}}}",),
    "top entropy": (f"{L}.top_entropy_share=0.3",),
    "entropy bonus": (f"{L}.entropy_coefficient=0.5",),
    "truncate": (f"{L}.correction={{cap: 1.1}}",),
    "mask": (f"{L}.correction={{kind: mask, band: [0.9, 1.2]}}",),
    "truncate sequences": (f"{L}.correction={{level: sequence, cap: 1.1, batch_normalise: true}}",),
    "mask geometric": (f"{L}.correction={{kind: mask, level: geometric, band: [0.9, 1.2]}}", f"{L}.kind=rloo_sequence"),
    "normalised": (f"{L}.correction={{batch_normalise: true, cap: 1.3}}",),
    "gate": (f"{L}.correction={{kind: mask, gate: tv, bound: 0.002}}",),
    "reject": (f"{L}.correction={{kind: reject, reject: {{band: [0.95, 1.1]}}}}", *KL),
    "reject by max": (f"{L}.correction={{reject: {{by: max, bound: 0.1}}}}", f"{L}.aggregate=sequence_mean"),
    "off-policy mask": (f"{L}.off_policy_mask=0.01", "batch.epochs=2"),
    "off-policy mask of the sampler": (f"{L}.off_policy_mask=0.01", f"{L}.correction={{}}"),
    "sampler": (f"{L}.old=sampler", *KL),
    "kl": KL,
    "kl unbiased": (*KL, "algorithm.kl.unbiased_gradient=true"),
    "kl weighted": (*KL, "algorithm.kl.ratio_weighted=true"),
}
MORE_TERMS = {"cpg", "kl_cov", "dro", "python", "entropy bonus", "reject", "sampler", "kl", "kl unbiased", "kl weighted"}
"""Cases in which a completion without advantage is trained on all the same."""
# layout, ranks, rows of a micro-batch (0: a budget of 40 positions)
SHARDED = [("packed", 1, 5), ("padded", 2, 3), ("packed", 2, 0), ("padded", 3, 0)]
OWN_LOSS = """
def squares(new, old, advantages, *, sequence, num_sequences, power):
    assert num_sequences > int(sequence.max()) if len(sequence) else True
    return -advantages * new + (new - old) ** power
"""


@cache
def policy() -> CausalPolicy:
    """Made once: threads share the generator that weights are drawn from."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, tie_word_embeddings=True, attn_implementation="sdpa", initializer_range=0.4,
    )  # fmt: skip
    return CausalPolicy(LlamaForCausalLM(config), entropy_gradient=True)


class Gradients:
    """A learner that only remembers the summed gradient of its one update."""

    version, lr = 3, 0.1

    def __init__(self, world: Any) -> None:
        self.module = deepcopy(policy())
        self.found: dict[str, torch.Tensor] = {}
        self._world = world

    def backward(self, batch: Batch, loss: Any, last: bool, temperature: float | None = None) -> Mapping[str, torch.Tensor]:
        new, entropy = self.module.logprobs(batch, 0.8)
        value, measured = loss(new, entropy, batch)
        (value + 0.0 * new.sum()).backward()
        return measured

    def step(self) -> StepOutcome:
        for name, parameter in self.module.named_parameters():
            self.found[name] = torch.tensor(self._world.sum(parameter.grad.flatten().double().tolist()))
        return StepOutcome(applied=True, grad_norm=1.0, lr=0.1)


@pytest.fixture(scope="module")
def base(made: SimpleNamespace) -> list[dict[str, torch.Tensor]]:
    """Log-probs near the policy's own, so that some tokens are clipped and some are not."""
    generator = torch.Generator().manual_seed(7)
    module, rows = policy(), []
    for index, length in enumerate(LENGTHS):
        prompt = 3 + index % 4
        ids = torch.randint(0, 61, (prompt + length,), generator=generator)
        mask = torch.ones(length, dtype=torch.bool)
        if index == UNTRAINED:
            mask[:] = False
        if length > 8:
            mask[3] = False  # a tool's answer
        rows.append({"token_ids": ids, "mask": mask})
        with torch.no_grad():
            scores = module.model(ids[None]).logits[0, prompt - 1 : -1] / 0.8 if length else torch.zeros(0, 61)
            current = torch.log_softmax(scores, -1).gather(-1, ids[prompt:, None])[:, 0]
        for name, wide in (("old_logprobs", 0.2), ("reference_logprobs", 0.3)):
            rows[-1][name] = current + wide * torch.randn(length, generator=generator)
        rows[-1]["sampler_logprobs"] = rows[-1]["old_logprobs"] + 0.15 * torch.randn(length, generator=generator)
        if length > 5:
            rows[-1]["sampler_logprobs"][1] = math.nan  # not reported
        rows[-1]["entropies"] = torch.rand(length, generator=generator)
        rows[-1]["advantages"] = torch.full((length,), 0.0 if index in WITHOUT else float(torch.randn((), generator=generator)))
    return rows


def experiences(made: SimpleNamespace, base: list[dict[str, torch.Tensor]]) -> list[Experience]:
    return [
        Experience(
            sample=made.sample(draw=index // 3, sample=index % 3),
            prompt_tokens=len(row["token_ids"]) - len(row["mask"]),
            **{name: tensor.clone() for name, tensor in row.items()},
        )
        for index, row in enumerate(base)
    ]


def result(made: SimpleNamespace, base: Any, sets: tuple[str, ...], layout: str, ranks: int, rows: int, folder: Any, *more: str) -> dict[str, Any]:
    cut = f"batch.micro_batch_size={rows}" if rows else "batch.tokens_per_micro_batch=40"
    plan = made.plan(*sets, f"batch.layout={layout}", cut, "rollout.max_new_tokens=20", *more)
    own = None
    if plan.loss.python is not None:
        found = load_loss(plan.loss.python, plan.loss.options, [folder])
        own = partial(own_loss, function=found.function, asks=found.asks, own_options=plan.loss.options)

    def work(world: Any) -> dict[str, Any]:
        everything = experiences(made, base)
        mine = everything if world.size == 1 else everything[:9] if world.rank == 0 else everything[9:][world.rank - 1 :: world.size - 1]
        metrics = correct(mine, plan.loss, world)
        (mine,), load = spread((tuple(mine),), plan, world, only_with_effect=True)
        learner = Gradients(world)
        loss = policy_loss(plan.loss, 20, own=own)
        update = one_update(mine, learner, loss, plan, world, pad_id=0, device=made.cpu)
        return {"gradient": learner.found, "metrics": {**update.metrics, **metrics.get("correction", {})}, "tokens": update.tokens, "load": load}

    results = [work(SoloWorld())] if ranks == 1 else made.on_ranks(ranks, work)
    for other in results[1:]:
        assert other["metrics"] == results[0]["metrics"]
    return results[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = tmp_path_factory.mktemp("own")
    (found / "own_losses.py").write_text(OWN_LOSS)
    return found


@pytest.fixture(scope="module")
def whole(made: SimpleNamespace, base: Any, folder: Any) -> dict[str, dict[str, Any]]:
    """One rank, one micro-batch, padded."""
    return {name: result(made, base, sets, "padded", 1, 12, folder) for name, sets in {**CASES, "plain": ()}.items()}


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize(("layout", "ranks", "rows"), SHARDED)
def test_the_same_gradient(
    made: SimpleNamespace, base: Any, folder: Any, whole: dict[str, dict[str, Any]], name: str, layout: str, ranks: int, rows: int
) -> None:
    found, expected = result(made, base, CASES[name], layout, ranks, rows, folder), whole[name]
    assert found["tokens"] == expected["tokens"]
    same_gradient(found, expected)
    assert bool(found["load"]) == (ranks > 1 and rows == 0)
    assert set(found["metrics"]) == set(expected["metrics"])
    for key, value in expected["metrics"].items():
        assert found["metrics"][key] == pytest.approx(value, rel=1e-5, abs=5e-6), key


def same_gradient(found: dict[str, Any], expected: dict[str, Any]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in expected["gradient"].values())
    for key, gradient in expected["gradient"].items():
        assert torch.isfinite(gradient).all()
        scale = max(float(gradient.abs().max()), 1e-2 * largest)
        assert float((found["gradient"][key] - gradient).abs().max()) / scale < TOLERANCE, key


@pytest.mark.parametrize("name", sorted(CASES))
def test_completions_without_advantage_change_no_gradient(
    made: SimpleNamespace, base: Any, folder: Any, whole: dict[str, dict[str, Any]], name: str
) -> None:
    """They are left out where the loss has nothing else for them, and pass where it has."""
    passed = result(made, base, CASES[name], "padded", 1, 12, folder, "batch.skip_zero_advantage=false")
    same_gradient(whole[name], passed)
    assert whole[name]["tokens"] == passed["tokens"] and "idle_fraction" not in passed["metrics"]
    assert whole[name]["metrics"]["loss"] == pytest.approx(passed["metrics"]["loss"], rel=1e-5, abs=2e-6)
    left_out = whole[name]["metrics"].get("idle_fraction")
    assert (left_out is None) == (name in MORE_TERMS)
    if left_out is not None:
        lengths = [3 + index % 4 + length for index, length in enumerate(LENGTHS)]
        idle = [index for index, length in enumerate(LENGTHS) if index in (*WITHOUT, UNTRAINED) or length == 0]
        least = sum(lengths[index] for index in idle) / sum(lengths)
        assert left_out > least - 1e-9 and least > 0.2  # a rejected one is left out too
        assert whole[name]["metrics"]["entropy"] != passed["metrics"]["entropy"]


@pytest.mark.parametrize("name", sorted(CASES))
def test_each_case_is_felt(whole: dict[str, dict[str, Any]], name: str) -> None:
    """The test above would pass if all of them were ppo_clip."""
    found, plain = whole[name], whole["plain"]
    moved = max(float((found["gradient"][key] - gradient).abs().max()) for key, gradient in plain["gradient"].items())
    assert moved > 1e-3 * max(float(gradient.abs().max()) for gradient in plain["gradient"].values())
    assert all(math.isfinite(value) for value in found["metrics"].values())


def test_what_is_measured(whole: dict[str, dict[str, Any]]) -> None:
    """Clip fractions where a loss has bounds, and nothing in their place where it has none."""
    for name in ("sapo", "kl_cov", "reinforce", "dro", "python"):
        assert not {"clip_low_fraction", "clip_high_fraction"} & set(whole[name]["metrics"])
    for name in ("ppo_clip", "rloo_sequence", "gspo", "gmpo", "cispo", "cpg", "clip_cov"):
        assert whole[name]["metrics"]["clip_low_fraction"] + whole[name]["metrics"]["clip_high_fraction"] > 0, name
    assert 0 < whole["off-policy mask"]["metrics"]["off_policy_fraction"] < 1
    assert whole["sampler"]["metrics"]["missing"] == 6 and whole["truncate"]["metrics"]["missing"] == 6
    assert whole["reject"]["tokens"] < whole["plain"]["tokens"] == whole["mask"]["tokens"]
    assert 0 < whole["reject"]["metrics"]["rejected_fraction"] < 1 and 0 < whole["mask"]["metrics"]["masked_fraction"] < 1

"""ZeRO 3 on a GPU from a model in the machine's memory: one tensor at a time is whole on the device, and the learner is that of a model that was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rftcli.models.policy import CausalPolicy
from rftcli.models.probe import agreement
from rftcli.plan import deepspeed_config
from rftcli.plan.plan import LearnerPlan
from rftcli.runtime.learner import DeepSpeedLearner
from rftcli.runtime.world import join, leave
from rftcli.types import Batch, Denominators

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK"):
            patch.setenv(name, "0")
        for name in ("WORLD_SIZE", "LOCAL_SIZE"):
            patch.setenv(name, "1")
        yield join("nccl", Path(tmp_path_factory.mktemp("meeting")) / "file")
        leave()


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=256, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


def learner(world: Any, *, from_host: bool) -> DeepSpeedLearner:
    config = deepspeed_config.build(
        stage=3, dtype="bfloat16", ranks=1, max_grad_norm=1.0, extra={"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    )
    plan = LearnerPlan(
        kind="adamw", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, schedule="constant", warmup_updates=0, min_lr=0.0,
        schedule_updates=10, max_grad_norm=1.0, skip_at_most=3, zero_stage=3, deepspeed=config, from_host=from_host,
    )  # fmt: skip
    whole = model() if from_host else model().to(GPU)
    return DeepSpeedLearner(CausalPolicy(whole), plan, world, GPU, temperature=1.0)


def updated(world: Any, *, from_host: bool) -> tuple[dict[str, torch.Tensor], float]:
    """Weights after two updates, and the worst difference that the proof found."""
    trained = learner(world, from_host=from_host)
    worst = agreement(trained.module, temperature=1.0).worst
    ids = torch.arange(1, 65, device=GPU)[None]
    for _ in range(2):
        batch = Batch(
            input_ids=ids, position_ids=torch.arange(64, device=GPU)[None], attention_mask=torch.ones_like(ids), select=torch.arange(63, device=GPU),
            target_ids=ids[0, 1:], sequence=torch.zeros(63, dtype=torch.int64, device=GPU), num_sequences=1, advantages=torch.ones(63, device=GPU),
            old_logprobs=None, reference_logprobs=None, sampler_logprobs=None, values=None, returns=None,
            denominators=Denominators(tokens=63, sequences=1),
        )  # fmt: skip
        trained.backward(batch, lambda new, entropy, _: (-new.mean(), {}), last=True)
        assert trained.step().applied
    return {name: tensor.float().cpu() for name, tensor in trained.weights()}, worst


def test_the_same_learner(world: Any) -> None:
    (found, worst), (expected, other) = updated(world, from_host=True), updated(world, from_host=False)
    assert worst == other < 0.12
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_one_tensor_at_a_time_is_whole(world: Any) -> None:
    """With one rank its part is everything: never much more than that is on the device while it is cut."""
    from rftcli.runtime.learner import cut

    config = dict(learner(world, from_host=True).plan.deepspeed)
    policy = CausalPolicy(model())
    size = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    largest = max(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cut(policy, config, GPU)
    assert all(parameter.numel() == 0 for parameter in policy.parameters())
    assert all(buffer.device == GPU for buffer in policy.buffers())
    assert torch.cuda.max_memory_allocated() - before < size + 4 * largest

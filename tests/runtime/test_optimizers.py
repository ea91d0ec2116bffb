"""Optimizers by kind: who decays, whose updates Muon makes, and that a guarded one does nothing while it is told to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rftcli.errors import RftError
from rftcli.models.policy import CausalPolicy
from rftcli.plan.plan import LearnerPlan
from rftcli.runtime.optimizers import decay_groups, guarded, hidden_matrices, make_optimizer


def module(tied: bool = False) -> CausalPolicy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return CausalPolicy(LlamaForCausalLM(config))


def plan(**changed: Any) -> LearnerPlan:
    fields: dict[str, Any] = {
        "kind": "adamw", "lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "schedule": "constant", "warmup_updates": 0,
        "min_lr": 0.0, "schedule_updates": 1, "max_grad_norm": None, "skip_at_most": 0, "zero_stage": 0, "deepspeed": {},
    }  # fmt: skip
    return LearnerPlan(**(fields | changed))


def one_step(policy: CausalPolicy, optimizer: Any, gradient: float = 0.0) -> dict[str, float]:
    """Name -> how far a parameter moved, relative to its size."""
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    return {name: float((parameter.detach() - before[name]).norm() / before[name].norm()) for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_patterns_say_what_does_not_decay(kind: str) -> None:
    """Without a gradient only the decay moves: each weight by lr x decay, the spared ones by nothing."""
    policy = module()
    moved = one_step(policy, make_optimizer(policy, plan(kind=kind, weight_decay=0.2, no_decay=("*norm*", "*embed_tokens*"))))
    for name, share in moved.items():
        assert share == pytest.approx(0.0 if "norm" in name or "embed" in name else 0.1 * 0.2, abs=1e-6), name


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(RftError) as caught:
        decay_groups(module().named_parameters(), 0.1, ("*norm*", "*bias"))
    assert "`*bias` matches no trained parameter" in caught.value.message
    assert caught.value.hint is not None and "model.model.embed_tokens.weight" in caught.value.hint


@pytest.mark.parametrize("tied", [False, True])
def test_muon_is_for_matrices_inside(tied: bool) -> None:
    names = hidden_matrices(module(tied))
    layer = "model.model.layers.0"
    blocks = [*(f"self_attn.{name}" for name in "qkvo"), *(f"mlp.{name}" for name in ("gate", "up", "down"))]
    assert names == {f"{layer}.{block}_proj.weight" for block in blocks}


def test_muon_orthogonalises_and_adamw_does_the_rest() -> None:
    """Muon's update has singular values near 1 (times its scale); AdamW's first step is lr x sign."""
    policy = module()
    optimizer = make_optimizer(policy, plan(kind="muon"))
    matrix = policy.model.model.layers[0].self_attn.q_proj.weight
    embedding = policy.model.get_input_embeddings().weight
    before, before_embedding = matrix.detach().clone(), embedding.detach().clone()
    for parameter in policy.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    update = (before - matrix.detach()) / (0.1 * 0.2 * 8**0.5)  # match_rms_adamw: 0.2 x sqrt(larger side)
    singular = torch.linalg.svdvals(update)
    assert float(singular.min()) > 0.6 and float(singular.max()) < 1.3
    moved = (before_embedding - embedding.detach()) / 0.1
    assert torch.allclose(moved.abs(), torch.ones_like(moved), atol=1e-3)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_one_learning_rate_reaches_every_group(kind: str) -> None:
    policy = module()
    optimizer = make_optimizer(policy, plan(kind=kind, weight_decay=0.1, no_decay=("*norm*",)))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    assert set(one_step(policy, optimizer, gradient=1.0).values()) == {0.0}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_guarded_optimizer_does_nothing_while_it_is_told_to(kind: str) -> None:
    policy = module()
    optimizer = make_optimizer(policy, plan(kind=kind, weight_decay=0.1))
    optimizer.skip = True
    assert set(one_step(policy, optimizer, gradient=float("nan")).values()) == {0.0} and not optimizer.state
    optimizer.skip = False
    assert min(one_step(policy, optimizer, gradient=1.0).values()) > 0.0


def test_a_guard_is_still_of_its_kind() -> None:
    kind = guarded(torch.optim.AdamW)
    assert issubclass(kind, torch.optim.AdamW) and kind is guarded(torch.optim.AdamW) and kind.__name__ == "GuardedAdamW"


def test_muon_goes_on_from_its_state() -> None:
    def run(resume_after: int | None) -> torch.Tensor:
        policy = module()
        optimizer = make_optimizer(policy, plan(kind="muon", lr=0.01))
        for step in range(4):
            if step == resume_after:
                state = optimizer.state_dict()
                optimizer = make_optimizer(policy, plan(kind="muon", lr=0.01))
                optimizer.load_state_dict(state)
            for number, parameter in enumerate(policy.parameters()):
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + number))
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])

    assert torch.equal(run(None), run(2))

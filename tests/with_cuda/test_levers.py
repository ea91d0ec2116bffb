"""Every way to make an update faster or smaller gives the loss and gradient of the plain one, in bfloat16 on a GPU.

The measure is the same model in float64: a lever may be no further away from it than the plain update, but for a factor that two orders of rounding
differ by. `tests/distributed` has the same in float32 on CPUs, to 1e-5.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rftcli.models import kernels
from rftcli.models.attention import implementation
from rftcli.models.lora_products import multiply_in
from rftcli.models.policy import CausalPolicy
from rftcli.plan.plan import BatchPlan, LossPlan
from rftcli.runtime.world import SoloWorld
from rftcli.stages import batches
from rftcli.stages.learn import policy_loss
from rftcli.types import Denominators, Experience

GROUPS = [(33, [40, 7, 65]), (5, [2, 90]), (64, [33, 34, 1]), (17, [80])]
"""Tokens of each prompt and of its answers."""
VOCABULARY = 1021
FACTOR, ROUNDING = 2.0, 2e-3
ONE_NUMBER = 8e-3
"""Of the loss, a single number: two units of bfloat16's last place. The plain update may happen to be nearer."""
PLAIN: dict[str, Any] = {"attention": "sdpa", "layout": "padded", "tokens": 100_000}
LEVERS: dict[str, dict[str, Any]] = {
    "micro-batches": {"tokens": 300},
    "packed, a mask": {"layout": "packed"},
    "varlen": {"attention": "varlen", "layout": "packed", "tokens": 400},
    "shared prompts": {"attention": "varlen", "layout": "packed", "shares": True},
    "shared prompts, a mask": {"layout": "packed", "shares": True, "tokens": 300},
    "scores read by kernels": {"policy": {"fused": True}},
    "layers computed again": {"policy": {"gradient_checkpointing": True}},
    "compiled": {"policy": {"compiled": True}},
    "liger": {"liger": True},
    "all of them": {"attention": "varlen", "layout": "packed", "shares": True, "tokens": 400, "liger": True,
                    "policy": {"fused": True, "gradient_checkpointing": True}},
}  # fmt: skip
"""What differs from the plain update."""
Found = tuple[float, dict[str, torch.Tensor]]


def model(attention: str, dtype: torch.dtype, device: str) -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, initializer_range=0.05, attn_implementation=implementation(attention),
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).to(device, dtype).train()  # every type has the weights that bfloat16 holds


def experiences() -> list[Experience]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for draw, (prompt, answers) in enumerate(GROUPS):
        question = torch.randint(0, VOCABULARY, (prompt,), generator=generator)
        for length in answers:
            found.append(
                Experience(
                    sample=SimpleNamespace(completion=SimpleNamespace(prompt=SimpleNamespace(draw=draw))),  # type: ignore[arg-type]
                    token_ids=torch.cat([question, torch.randint(0, VOCABULARY, (length,), generator=generator)]),
                    prompt_tokens=prompt,
                    mask=torch.ones(length, dtype=torch.bool),
                    advantages=torch.full((length,), float(torch.randn((), generator=generator))),
                    old_logprobs=-7.0 + 0.1 * torch.randn(length, generator=generator),
                    reference_logprobs=-7.0 + 0.1 * torch.randn(length, generator=generator),
                )
            )
    return found


def update(
    dtype: torch.dtype, device: str, *, attention: str, layout: str, tokens: int, shares: bool = False, liger: bool = False,
    policy: dict[str, Any] | None = None, made: Any = None,
) -> Found:  # fmt: skip
    """(loss, gradient by name in float64 on the CPU) of one update, summed over its micro-batches. `made`: another model than the usual one."""
    made = model(attention, dtype, device) if made is None else made
    if liger:
        kernels.apply(made)
    plan = BatchPlan(
        prompts_per_step=len(GROUPS), samples_per_prompt=1, updates_per_step=1, epochs=1, micro_batch_size=1, layout=layout, equation="",
        needs_prepass=None, tokens_per_micro_batch=tokens, share_prompts=shares,
    )  # fmt: skip
    options = {"clip_low": 0.9, "clip_high": 9.0, "dual_clip": 30.0}  # far away: rounding decides nowhere who is clipped
    loss = policy_loss(LossPlan(kind="ppo_clip", options=options, aggregate="token_mean", kl_coefficient=0.1, kl_estimator="k3"), 100)
    rows = batches.by_length(experiences(), plan)
    counts = Denominators(tokens=sum(len(row.mask) for row in rows), sequences=len(rows))
    parts = batches.micro_batches(rows, plan, counts, SoloWorld(), pad_id=0, device=torch.device(device))
    assert (len(parts) > 1) == (tokens < 1000)
    learned, total = CausalPolicy(made, **(policy or {})), 0.0
    for part in parts:
        value, _ = loss(*learned.logprobs(part, 0.9), part)
        value.backward()
        total += float(value.detach())
    gradients = {name: parameter.grad.double().cpu() for name, parameter in made.named_parameters() if parameter.grad is not None}
    return total, gradients


def distance(found: torch.Tensor, true: torch.Tensor) -> float:
    """Root mean square of the difference over that of the true values."""
    return float((found - true).norm() / true.norm().clamp(min=1e-12))


def differences(found: Found, exact: Found) -> dict[str, float]:
    return {"loss": abs(found[0] - exact[0]) / abs(exact[0]), **{name: distance(found[1][name], exact[1][name]) for name in exact[1]}}


@pytest.fixture(scope="module")
def exact() -> Found:
    return update(torch.float64, "cpu", **{**PLAIN, "layout": "packed"})  # padding that sees nothing is NaN in float64


@pytest.fixture(scope="module")
def usual(exact: Found) -> dict[str, float]:
    return differences(update(torch.bfloat16, "cuda", **PLAIN), exact)


@pytest.mark.parametrize("lever", list(LEVERS))
def test_on_and_off_the_update_is_the_same(lever: str, exact: Found, usual: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    how = {**PLAIN, **LEVERS[lever]}
    if how.get("liger"):
        pytest.importorskip("liger_kernel", reason="pip install 'rftcli[liger]'")
        modeling = __import__("transformers.models.llama.modeling_llama", fromlist=["apply_rotary_pos_emb"])
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)  # its own again afterwards
    found = update(torch.bfloat16, "cuda", **how)
    assert list(found[1]) == list(exact[1])
    away = differences(found, exact)
    print(f"{lever}: loss {found[0]:.6f} ({exact[0]:.6f}), at most {max(away.values()):.1e} (plain {max(usual.values()):.1e})")
    assert away["loss"] < FACTOR * usual["loss"] + ONE_NUMBER
    assert not {name: (away[name], usual[name]) for name in away if name != "loss" and away[name] > FACTOR * usual[name] + ROUNDING}


def test_a_chunked_head_changes_nothing(exact: Found, usual: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    from rftcli.models import policy

    monkeypatch.setattr(policy, "HEAD_BYTES", 4 * VOCABULARY * 50)  # fifty positions at a time
    away = differences(update(torch.bfloat16, "cuda", **PLAIN), exact)
    assert away["loss"] < FACTOR * usual["loss"] + ONE_NUMBER
    assert not {name: (away[name], usual[name]) for name in away if name != "loss" and away[name] > FACTOR * usual[name] + ROUNDING}


def adapted(attention: str, dtype: torch.dtype, device: str, *, fast: bool) -> Any:
    """The model with an adapter that does something. `fast`: its products are of the model's type, else of float32."""
    wrapped: Any = peft.get_peft_model(
        model(attention, dtype, device), peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"])
    )
    generator = torch.Generator().manual_seed(7)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            weights = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.data = weights.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    if fast:
        assert multiply_in(wrapped, dtype) == 3 * 4
    return wrapped


@pytest.mark.parametrize("lever", [{}, LEVERS["varlen"]])
def test_an_adapter_multiplied_in_bfloat16_is_as_near(lever: dict[str, Any]) -> None:
    how = {**PLAIN, **lever}
    truth = update(torch.float64, "cpu", **{**PLAIN, "layout": "packed"}, made=adapted("sdpa", torch.float64, "cpu", fast=False))
    usual = differences(update(torch.bfloat16, "cuda", **PLAIN, made=adapted("sdpa", torch.bfloat16, "cuda", fast=False)), truth)
    found = differences(update(torch.bfloat16, "cuda", **how, made=adapted(how["attention"], torch.bfloat16, "cuda", fast=True)), truth)
    print(f"adapter: at most {max(found.values()):.1e} (in float32 {max(usual.values()):.1e})")
    assert sum("lora_" in name for name in found) == 2 * 3 * 4
    assert found["loss"] < FACTOR * usual["loss"] + ONE_NUMBER
    assert not {name: (found[name], usual[name]) for name in found if name != "loss" and found[name] > FACTOR * usual[name] + ROUNDING}

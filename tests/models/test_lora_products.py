"""An adapter's products in the model's own type: as near to the exact result as peft's float32 ones, and with float32 gradients."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

from rftcli.models.lora_products import Down, Up, multiply_in

INPUTS, OUTPUTS = 48, 40


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, OUTPUTS), nn.Linear(OUTPUTS, INPUTS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)))


def adapted(dtype: torch.dtype, **options: Any) -> Any:
    """Two layers in `dtype` whose weights bfloat16 holds, with an adapter that does something."""
    torch.manual_seed(0)
    model = Two().to(torch.bfloat16).to(dtype)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=12, target_modules=["first", "second"], **options))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = (0.2 * torch.randn(parameter.shape, generator=generator)).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return wrapped


def passed(model: Any, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    inputs = torch.randn(2, 5, INPUTS, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(dtype)
    out = model(inputs)
    out.double().pow(2).sum().backward()
    return out.detach().double(), {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def off(found: tuple[torch.Tensor, dict[str, torch.Tensor]], exact: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> float:
    pairs = [(found[0], exact[0]), *((found[1][name].double(), exact[1][name]) for name in exact[1])]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def test_as_near_to_the_exact_result_as_products_in_float32() -> None:
    exact, theirs, ours = adapted(torch.float64), adapted(torch.bfloat16), adapted(torch.bfloat16)
    assert multiply_in(ours, torch.bfloat16) == 2
    truth, plain, fast = passed(exact, torch.float64), passed(theirs, torch.bfloat16), passed(ours, torch.bfloat16)
    assert set(truth[1]) == set(fast[1]) and all(gradient.dtype == torch.float32 for gradient in fast[1].values())
    assert 0 < off(fast, truth) < 2 * off(plain, truth) + 4e-3
    layer = ours.base_model.model.first
    assert isinstance(layer.lora_A["default"], Down) and isinstance(layer.lora_B["default"], Up) and isinstance(layer, peft.tuners.lora.Linear)


def test_off_and_merged_as_before() -> None:
    model = adapted(torch.bfloat16)
    inputs = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    with model.disable_adapter():
        before = model(inputs)
    multiply_in(model, torch.bfloat16)
    with model.disable_adapter():
        assert torch.equal(model(inputs), before)
    with_it = model(inputs)
    assert not torch.equal(with_it, before)
    model.merge_adapter()
    assert torch.allclose(model(inputs).float(), with_it.float(), atol=0.05)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_other_forms_stay_as_they_are(options: dict[str, Any]) -> None:
    model = adapted(torch.bfloat16, **options)
    assert multiply_in(model, torch.bfloat16) == 0
    model(torch.ones(1, INPUTS, dtype=torch.bfloat16))


def test_a_model_in_float32_stays_as_it_is() -> None:
    assert multiply_in(adapted(torch.float32), torch.float32) == 0

"""An adapter's two small products in the number type of the model that they are in.

peft multiplies in the type of the adapter's weights. Over a model in bfloat16 float32 weights, which small steps need, then cost a float32 copy of
what goes into each layer, products beside the tensor cores, and four passes over a float32 form of what comes out. Here the weights stay float32 and
are rounded where they are used, as a whole policy's are, and the second product adds onto what the layer gave.

What it leaves out: layers with a variant of their own (DoRA), embeddings, convolutions and experts. They stay as peft computes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Down(nn.Linear):
    """(..., inputs) -> (..., rank), in the type of what comes in."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight.to(inputs.dtype))


class Up(nn.Linear):
    """onto (..., outputs) + scale x product of (..., rank), in the type of `onto`."""

    def forward(self, inside: Tensor, onto: Tensor, scale: float) -> Tensor:
        weight = self.weight.to(inside.dtype)
        rows = onto.reshape(-1, self.out_features), inside.reshape(-1, self.in_features)
        return torch.addmm(*rows, weight.t(), alpha=scale).view(onto.shape)


class Adapted:
    """`forward` of peft's linear layers, whole or in few bits, over these products. Mixed into their classes."""

    def forward(self: Any, inputs: Tensor) -> Tensor:
        if self.disable_adapters or self.merged:
            return self.base_layer(inputs)  # type: ignore[no-any-return]
        result = self.base_layer(inputs)
        for name in self.active_adapters:
            if name in self.lora_A:
                inside = self.lora_A[name](self.lora_dropout[name](inputs))
                result = self.lora_B[name](inside, result, self.scaling[name])
        return result  # type: ignore[no-any-return]


def multiply_in(model: nn.Module, dtype: torch.dtype) -> int:
    """Give the linear layers of an adapted model this way of computing, where its number type is not the adapter's own. Returns how many have it."""
    if dtype == torch.float32:
        return 0
    layers = [module for module in model.modules() if _plain(module)]
    for layer in layers:
        kind: Any = type(layer)
        layer.__class__ = type(kind.__name__, (Adapted, kind), {"__module__": kind.__module__})
        for products, fast in ((layer.lora_A, Down), (layer.lora_B, Up)):
            for product in products.values():
                product.__class__ = fast
    return len(layers)


def _plain(module: nn.Module) -> bool:
    from peft.tuners import lora

    kinds = [lora.Linear, *(kind for name in ("Linear8bitLt", "Linear4bit") if (kind := getattr(lora, name, None)) is not None)]
    if type(module) not in kinds:
        return False
    layer: Any = module
    products = [*layer.lora_A.values(), *layer.lora_B.values()]
    return not layer.lora_variant and bool(products) and all(type(product) is nn.Linear and product.bias is None for product in products)

"""Matrix products whose rows do not know of each other, for the passes of the hf engine on a CPU in float32.

MKL, which torch takes for float32, gives a row other last bits when the matrix has another number of rows, and is slow where there are few rows and
the weights lie outside the caches. Here a small matrix is multiplied with eight rows at a time, always in the same shape; a large one goes through
oneDNN, which adds up each number of the result in one order whatever the number of rows or threads is, and packed or not.

What it leaves out: other layers with matrices of their own (`alike` says whether there are any), other number types, training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

BLOCK_ROWS = 8
"""Rows of a product of a small matrix. To oneDNN a single row is a vector, with other last bits, so that it gets no fewer either."""
SMALL_NUMBERS = 2**15
"""Weights of so many numbers stay in a core's cache, and what oneDNN does before it computes takes longer than the product."""
WORTH_PACKING_PASSES = 16
"""Packing costs as much as a few passes."""

FOURS = 4
"""Widths whose multiples, in eight rows, are whole vectors of 32 numbers (two of AVX-512's)."""
OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")
"""Torch's doors to oneDNN, which are not among what it promises to keep."""

Product = Callable[[Tensor], Tensor]


class Linears:
    """The linear layers of a module that can compute in this way. Found once; the weights are looked at anew in every `taken`."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        usable = device.type == "cpu" and torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in OPERATORS)
        layers = [layer for layer in module.modules() if usable and type(layer) is nn.Linear and "forward" not in vars(layer)]
        self._layers = [layer for layer in layers if layer.weight.dtype == torch.float32]
        tables = [layer.weight for layer in module.modules() if isinstance(layer, nn.Embedding)]
        known = {id(weight) for weight in [*tables, *(layer.weight for layer in self._layers)]}
        whole = all(layer.in_features % FOURS == 0 for layer in self._layers)
        self.alike = bool(self._layers) and whole and all(weight.ndim < 2 or id(weight) in known for weight in module.parameters())
        """Every matrix of the module is one of these layers', or a table that rows are looked up in, and eight rows of what goes into them fill
        vectors of 32 numbers: what is left over would get other last bits from activations."""

    def taken(self, *, passes: int) -> Products:
        """With the weights as they are now, for so many passes; None are packed where that would not pay."""
        return Products(self._layers, pack=passes >= WORTH_PACKING_PASSES)


class Products:
    """The layers' products with the weights of one moment."""

    def __init__(self, layers: Sequence[nn.Linear], *, pack: bool) -> None:
        self._products = [(layer, _product(layer.weight.detach(), layer.bias, pack=pack)) for layer in layers]
        self._known = {id(layer): product for layer, product in self._products}

    def joined(self, *layers: nn.Linear) -> Product:
        """The layers' results side by side, (..., N of all). Where all their weights are small that is one product; a large one would not gain by it.
        A layer that does not compute in this way is asked as it is."""
        if len(layers) > 1 and all(id(layer) in self._known for layer in layers) and sum(layer.weight.numel() for layer in layers) <= SMALL_NUMBERS:
            biases = [layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers]
            bias = None if all(layer.bias is None for layer in layers) else torch.cat(biases).detach()
            return _product(torch.cat([layer.weight for layer in layers]).detach(), bias, pack=False)
        products = [self._known.get(id(layer), layer.forward) for layer in layers]
        return products[0] if len(products) == 1 else partial(_side_by_side, products)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """For one pass without gradients."""
        for layer, product in self._products:
            layer.forward = product  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer, _ in self._products:
                del layer.forward


def _side_by_side(products: Sequence[Product], rows: Tensor) -> Tensor:
    return torch.cat([product(rows) for product in products], -1)


def _product(weight: Tensor, bias: Tensor | None, *, pack: bool) -> Product:
    if weight.numel() <= SMALL_NUMBERS:
        return partial(_in_blocks, weight.t().contiguous(), bias)
    return partial(_one_dnn, torch.ops.mkldnn._reorder_linear_weight(weight, None) if pack else weight, bias)


def _in_blocks(transposed: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """(..., N) of rows (..., K) with the weight, transposed (K, N)."""
    width, words = transposed.shape
    count = rows.numel() // width
    missing = -count % BLOCK_ROWS
    flat = pad(rows.reshape(-1, width), (0, 0, 0, missing)) if missing else rows
    made = torch.bmm(flat.reshape(-1, BLOCK_ROWS, width), transposed.expand((count + missing) // BLOCK_ROWS, width, words)).view(-1, words)
    if missing:
        made = made[:count]
    if rows.dim() != 2:
        made = made.view(*rows.shape[:-1], words)
    return made if bias is None else made.add_(bias)


def _one_dnn(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """(..., N) of rows (..., K) with the weight (N, K), packed or not."""
    count = rows.numel() // rows.shape[-1]
    if count >= BLOCK_ROWS:
        return torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    made = _one_dnn(weight, bias, pad(rows.reshape(count, -1), (0, 0, 0, BLOCK_ROWS - count)))
    return made[:count].view(*rows.shape[:-1], -1)

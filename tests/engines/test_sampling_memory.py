"""What the choice of a token takes of memory, counted: the plan's formula for it is met."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rftcli.engines.sampling import draw, log_weights
from rftcli.engines.shaping import FILTERS
from rftcli.plan.memory import chosen_scores

ROWS, WORDS = 16, 4000
CPU = torch.device("cpu")


class Counted(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still there; `peak` is the most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        made = function(*arguments, **(named or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@pytest.mark.parametrize(
    ("filters", "options", "own"),
    [
        ([], {}, {}),
        (["top_k"], {"top_k": 50}, {}),
        (["min_p"], {"min_p": 0.1}, {}),
        (["top_p"], {"top_p": 0.9}, {}),
        (["top_k", "top_p", "min_p"], {"top_k": 50, "top_p": 0.9, "min_p": 0.1}, {}),
        *((["options"], {}, {name: value}) for name, value in (("typical_p", 0.9), ("epsilon_cutoff", 0.01), ("eta_cutoff", 0.01))),
        (["top_p", "options"], {"top_p": 0.9}, {"typical_p": 0.9}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_choice_of_a_token_takes_what_the_plan_says(filters: list[str], options: dict[str, Any], own: dict[str, float], dtype: str) -> None:
    uniforms = torch.rand(ROWS, dtype=torch.float64)
    with Counted() as counted:
        model = torch.randn(ROWS, WORDS, dtype=getattr(torch, dtype))  # as the model left them
        scores = model.float()
        weights = log_weights(scores, temperature=0.7, filters=[FILTERS[name](value, CPU) for name, value in own.items()], **options)
        draw(weights, uniforms)
    formula = chosen_scores(ROWS, WORDS, dtype, filters=filters)
    assert counted.peak <= 1.02 * formula
    assert own or counted.peak >= 0.9 * formula  # one number is for all filters of `hf.options`, the largest

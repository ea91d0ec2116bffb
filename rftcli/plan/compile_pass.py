"""The largest micro-batch of an update, as the memory's formulas ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan.compile_models import PACKING
from rftcli.plan.compile_sharing import saved_positions
from rftcli.plan.memory import DTYPE_BYTES, Pass

if TYPE_CHECKING:
    from rftcli.plan.compile_memory import Asked
    from rftcli.plan.memory_ladder import Choice

WIDENING = ("use_dora", "lora_bias")
"""peft's options of adapters whose products stay in float32 (`models.lora_products`)."""


def the_pass(asked: Asked, choice: Choice) -> Pass:
    """The largest micro-batch: rows as long as they can be."""
    recipe, policy = asked.recipe, asked.policy
    positions = min(max(choice.tokens, asked.longest), asked.rows * asked.longest - saved_positions(recipe, asked.rows))
    layout = recipe.batch.layout
    packed = layout == "packed" or (layout == "auto" and policy.attention in PACKING)
    eager = policy.attention == "eager"
    mask = 0 if policy.attention in PACKING else positions if packed else asked.longest if eager else 0
    lora, number = policy.lora, 1 if asked.world.device == "cuda" else DTYPE_BYTES[policy.dtype]
    return Pass(
        positions=positions,
        mask_width=mask,
        eager=eager,
        adapters=lora is not None,
        widened=lora is not None and any(lora.options.get(name) for name in WIDENING),
        scaled=lora is not None and bool(lora.options.get("use_dora")),
        dropout=number if lora is not None and lora.dropout > 0 else 0,
        fused=recipe.train.kernels == "liger",
    )

"""What autograd keeps in a pass of the policy, counted, against the plan's formula: within 15%, for real shapes, with and without recomputing."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rftcli.algo.align import Inputs, Row, packed, shared
from rftcli.models.lora import attach
from rftcli.models.policy import CausalPolicy
from rftcli.plan.memory import Pass, Shape, activations, layer_activations

WITHIN = 0.15
SHAPES = {
    "tiny": Shape(parameters=0, layers=2, hidden=64, inner=172, query_width=64, key_width=32, vocabulary=512, heads=4),
    "mid": Shape(parameters=0, layers=3, hidden=576, inner=1536, query_width=576, key_width=192, vocabulary=512, heads=9),
    "smollm2": Shape(parameters=0, layers=30, hidden=576, inner=1536, query_width=576, key_width=192, vocabulary=49152, heads=9),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Kept:
    """A tensor that a graph holds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def kept_bytes(
    shape: Shape, dtype: str, *, checkpointing: bool = False, padded: bool = True, attention: str = "sdpa", adapters: bool = False,
    dropout: float = 0.0, dora: bool = False, inputs: Inputs | None = None,
) -> tuple[float, Pass]:  # fmt: skip
    """Storages that a forward pass keeps for its backward pass, without weights and the scores of the few tokens that are trained. `inputs`: a packed
    row instead of two rows."""
    width = shape.query_width // shape.heads
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.inner, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_width // width, vocab_size=shape.vocabulary, tie_word_embeddings=not adapters,
    )  # fmt: skip
    with torch.device("meta"):  # what weights say changes no size
        model = LlamaForCausalLM._from_config(config, dtype=DTYPES[dtype], attn_implementation=attention)
    model = model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    if adapters:
        options = {"use_dora": dora}
        attach(model, rank=4, alpha=8, dropout=dropout, targets="all-linear", save_also=(), options=options, start_from=None, base_name="m")
    policy = CausalPolicy(model, gradient_checkpointing=checkpointing).train()
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    rows, length = 2, 64
    ids = torch.randint(shape.vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(rows, length, dtype=torch.long)
    if padded:
        mask[0, -length // 3 :] = 0
    graph: weakref.WeakSet[Kept] = weakref.WeakSet()

    def keep(tensor: torch.Tensor) -> Kept:
        kept = Kept(tensor)
        graph.add(kept)
        return kept

    def found() -> float:
        """Of what the graph holds when the pass is over."""
        storages = [kept.tensor.untyped_storage() for kept in graph]
        return float(sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in own}.values()))

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        if inputs is not None:
            results = policy(inputs.input_ids, inputs.position_ids, None, torch.arange(4), inputs.input_ids.flatten()[:4], 1.0)
            return found(), Pass(positions=inputs.input_ids.numel())
        results = policy(ids, torch.arange(length).expand(rows, length), mask, torch.arange(4), ids.flatten()[:4], 1.0)
    mask_width = length if attention == "eager" else 0  # padding behind the tokens needs none
    kinds = {"adapters": adapters, "dropout": 0 if dropout == 0 else DTYPES[dtype].itemsize, "widened": dora, "scaled": dora}
    assert results[0].requires_grad
    return found(), Pass(positions=rows * length, mask_width=mask_width, eager=attention == "eager", **kinds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "checkpointing", "padded", "attention"),
    [("tiny", False, False, "sdpa"), ("tiny", False, True, "sdpa"), ("tiny", False, True, "eager"), ("smollm2", False, True, "sdpa"),
     ("smollm2", False, False, "sdpa")],
)  # fmt: skip
def test_activations_of_a_pass(name: str, dtype: str, checkpointing: bool, padded: bool, attention: str) -> None:
    shape = SHAPES[name]
    measured, one = kept_bytes(shape, dtype, checkpointing=checkpointing, padded=padded, attention=attention)
    assert activations(shape, dtype, one, checkpointing=checkpointing) == pytest.approx(measured, rel=WITHIN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_activations_where_layers_are_computed_again(name: str, dtype: str) -> None:
    """The forward pass keeps what the formula says beside the one layer that is there again in the backward pass."""
    shape = SHAPES[name]
    measured, one = kept_bytes(shape, dtype, checkpointing=True, padded=True, attention="sdpa")
    again = layer_activations(shape, dtype, one)
    assert activations(shape, dtype, one, checkpointing=True) == pytest.approx(measured + again, rel=WITHIN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dropout", "dora"), [(0.0, False), (0.1, False), (0.0, True), (0.1, True)])
def test_activations_below_an_adapter(dtype: str, dropout: float, dora: bool) -> None:
    measured, one = kept_bytes(SHAPES["mid"], dtype, adapters=True, dropout=dropout, dora=dora)
    assert activations(SHAPES["mid"], dtype, one, checkpointing=False) == pytest.approx(measured, rel=WITHIN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "attention"), [("shared", "rft_varlen"), ("packed", "rft_varlen"), ("shared", "sdpa")])
def test_activations_of_packed_rows(layout: str, attention: str, dtype: str) -> None:
    """Two groups of eight: no copy of a prompt's keys for its completions; a mask over the whole row where there is one."""
    prompt, completion, samples = 96, 16, 8
    rows = [
        Row(torch.cat([torch.arange(prompt), torch.full((completion,), number)]), prompt, torch.ones(completion, dtype=torch.bool), group)
        for group in range(2)
        for number in range(samples)
    ]
    inputs = shared(rows) if layout == "shared" else packed(rows)
    measured, one = kept_bytes(SHAPES["mid"], dtype, attention=attention, inputs=inputs)
    one = replace(one, mask_width=one.positions) if attention == "sdpa" else one
    assert activations(SHAPES["mid"], dtype, one, checkpointing=False) == pytest.approx(measured, rel=WITHIN / 3)

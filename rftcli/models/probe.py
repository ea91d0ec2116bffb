"""Proof that the fast path computes what the model computes: run at start-up, before a number is trusted.

A few short sequences go through the model one by one, as anyone would call it, and through the policy's padded and packed layouts; where the run
shares prompts, completions of common prompts as well.

What it leaves out: the engine's log-probs (another room), and deciding what to do about a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rftcli.algo.align import Inputs, Row, packed, padded, shared
from rftcli.algo.keyed import key64
from rftcli.algo.logprobs import plain_logprobs
from rftcli.models.policy import CausalPolicy, Head

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.12, torch.float16: 0.02}
"""Largest accepted mean difference of a log-prob, in nats. Half precision rounds every score to 8 (bfloat16) or 11 (float16) bits: two right
computations of unlikely tokens, with scores of 16 and more, differ by 0.06 on average in bfloat16 and by 0.3 at worst, so the worst says little.
Positions that are off by one change the mean by 0.13 and more, a wrong mask by 1."""

TOLERANCE_8_BITS = TOLERANCE[torch.float16]
"""With weights of 8 bits activations are rounded too, to a scale that depends on the other rows, and products are float16."""

LENGTHS = (24, 1, 17, 22)
"""Scored positions of the default sequences, 64 in all; each has one token more. Unequal, so that padding and borders are exercised."""


GROUPS = ((9, (5, 1, 12)), (1, (3, 7)), (14, (2, 2, 6)))
"""Tokens of the prompt and of each completion of the default groups, 38 scored positions in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What the probe measured. `padded`, `packed` and `shared` are the mean absolute differences of a log-prob, in nats, with `head` in use."""

    head: Head
    padded: float
    packed: float
    positions: int
    tolerance: float
    shared: float | None = None
    """None: not measured."""
    training: float | None = None
    """Of the padded layout in training mode; None: not measured."""

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts of a micro-batch that agree with the model's plain forward. A difference that is not a number agrees with nothing."""
        found = (("padded", self.padded), ("packed", self.packed), ("shared", self.shared))
        return tuple(name for name, difference in found if difference is not None and difference <= self.tolerance)

    @property
    def worst(self) -> float:
        return max(self.padded, self.packed, self.shared or 0.0)


@torch.no_grad()
def agreement(
    policy: CausalPolicy,
    *,
    temperature: float,
    sequences: Sequence[Sequence[int]] | None = None,
    tolerance: float | None = None,
    shares_prompts: bool = False,
    in_training: bool = False,
) -> Agreement:
    """Compare the policy with plain forward passes over `sequences` (each of two or more ids; keyed ones of `LENGTHS` if None).

    The head is "chunked" if the bare head on the backbone's output gives the model's own scores, else "model". The policy itself is left as it was.
    `tolerance`: instead of that of the number type. `shares_prompts`: rows in which completions share a prompt are compared too. `in_training`: a
    pass in training mode as well, where a model without dropout has to compute the same.
    Collective where weights are sharded: every rank has to call it with the same sequences.
    """
    model = policy.model
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    sequences = _keyed_sequences(model.config.get_text_config().vocab_size) if sequences is None else sequences
    modes = [(part, part.training) for part in policy.modules()]
    head_before = policy.head
    policy.eval()
    try:
        bare, plain = True, []
        for sequence in sequences:
            ids = torch.tensor([sequence], device=device)
            scores = model(input_ids=ids, use_cache=False).logits[0]  # (S, V)
            bare = bare and _same(model.get_output_embeddings()(model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]), scores)
            plain.append(plain_logprobs(scores[:-1], ids[0, 1:], temperature)[0])
        expected = torch.cat(plain)
        policy.head = "chunked" if bare else "model"
        rows = [Row(torch.tensor(sequence), 1, torch.ones(len(sequence) - 1, dtype=torch.bool)) for sequence in sequences]
        common = None
        if shares_prompts:
            grouped = _keyed_groups(model.config.get_text_config().vocab_size)
            own = [_plain(model, row, temperature) for row in grouped]
            common = _difference(policy, shared(grouped), torch.cat(own), temperature)
        return Agreement(
            head=policy.head,
            padded=_difference(policy, padded(rows, pad_id=0), expected, temperature),
            packed=_difference(policy, packed(rows), expected, temperature),
            positions=expected.numel(),
            shared=common,
            training=_difference(policy.train(), padded(rows, pad_id=0), expected, temperature) if in_training else None,
            tolerance=TOLERANCE[dtype] if tolerance is None else tolerance,
        )
    finally:
        policy.head = head_before
        for part, training in modes:
            part.training = training


def _plain(model: PreTrainedModel, row: Row, temperature: float) -> Tensor:
    """(T,) log-probs of a row's completion in a pass of its own."""
    ids = row.token_ids[None].to(next(model.parameters()).device)
    scores = model(input_ids=ids, use_cache=False).logits[0, row.prompt_tokens - 1 : -1]
    return plain_logprobs(scores, ids[0, row.prompt_tokens :], temperature)[0]


def _same(bare: Tensor, scores: Tensor) -> bool:
    """Whether two score tensors (S, V) are equal up to one unit in the last place of the largest. Same inputs and shapes: a bare head is exact."""
    step = torch.finfo(scores.dtype).eps * float(scores.abs().max())
    return float((bare.float() - scores.float()).abs().max()) <= step


def _difference(policy: CausalPolicy, inputs: Inputs, expected: Tensor, temperature: float) -> float:
    device = expected.device
    logprobs, _ = policy(
        input_ids=inputs.input_ids.to(device),
        position_ids=inputs.position_ids.to(device),
        attention_mask=None if inputs.attention_mask is None else inputs.attention_mask.to(device),
        select=inputs.select.to(device),
        target_ids=inputs.target_ids.to(device),
        temperature=temperature,
    )
    return float((logprobs - expected).abs().mean())


def _keyed_sequences(vocab_size: int) -> list[list[int]]:
    return [[key64("probe", row, position) % vocab_size for position in range(length + 1)] for row, length in enumerate(LENGTHS)]


def _keyed_groups(vocab_size: int) -> list[Row]:
    rows = []
    for group, (prompt, lengths) in enumerate(GROUPS):
        ids = [key64("probe", "prompt", group, place) % vocab_size for place in range(prompt)]
        for number, length in enumerate(lengths):
            answer = [key64("probe", "answer", group, number, place) % vocab_size for place in range(length)]
            rows.append(Row(torch.tensor(ids + answer), prompt, torch.ones(length, dtype=torch.bool), group))
    return rows

"""Experiences to micro-batches: index arithmetic of `algo.align`, filled with what the losses read. No model, no loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rftcli.algo import align, batchmath
from rftcli.algo.reduce import count_trained
from rftcli.plan.plan import BatchPlan
from rftcli.protocols import World
from rftcli.types import Batch, Denominators, Experience

NO_DENOMINATORS = Denominators(tokens=1, sequences=1)
"""For passes without a loss."""


def count(experiences: Sequence[Experience]) -> Denominators:
    """Trained tokens and sequences with at least one of them, of this rank."""
    tokens, sequences = count_trained([experience.mask for experience in experiences])
    return Denominators(tokens=tokens, sequences=sequences)


def make_batch(experiences: Sequence[Experience], plan: BatchPlan, denominators: Denominators, *, pad_id: int, device: torch.device) -> Batch:
    """One micro-batch in the plan's layout, on `device`."""
    masks = [experience.mask for experience in experiences]
    rows = _rows(experiences)
    inputs = align.padded(rows, pad_id) if plan.layout == "padded" else align.shared(rows) if plan.share_prompts else align.packed(rows)

    def flat(name: str) -> torch.Tensor | None:
        vectors = [getattr(experience, name) for experience in experiences]
        if any(vector is None for vector in vectors):
            return None
        return align.flatten(vectors, masks).to(device)

    advantages = flat("advantages")
    assert advantages is not None
    return Batch(
        input_ids=inputs.input_ids.to(device),
        position_ids=inputs.position_ids if inputs.attention_mask is None else inputs.position_ids.to(device),
        attention_mask=None if inputs.attention_mask is None else inputs.attention_mask.to(device),
        select=inputs.select.to(device),
        target_ids=inputs.target_ids.to(device),
        sequence=inputs.sequence.to(device),
        num_sequences=inputs.num_sequences,
        advantages=advantages,
        old_logprobs=flat("old_logprobs"),
        reference_logprobs=flat("reference_logprobs"),
        sampler_logprobs=flat("sampler_logprobs"),
        values=flat("values"),
        returns=flat("returns"),
        temperatures=flat("temperatures"),
        stale=flat("stale"),
        correction=flat("correction"),
        kept=flat("kept"),
        chosen=flat("chosen"),
        denominators=denominators,
        ends=inputs.ends.to(device),
    )


def _rows(experiences: Sequence[Experience]) -> list[align.Row]:
    return [align.Row(item.token_ids, item.prompt_tokens, item.mask, group_of(item)) for item in experiences]


def group_of(experience: Experience) -> int | None:
    """The draw that a completion's prompt is; None for a row that nobody sampled."""
    return None if experience.sample is None else experience.sample.completion.prompt.draw


def by_length(experiences: Sequence[Experience], plan: BatchPlan) -> Sequence[Experience]:
    """The order in which micro-batches waste least: the longest first, so that rows are padded to others of their length, equals as they come, and
    whole groups where prompts are shared."""
    ordered = sorted(experiences, key=lambda experience: -len(experience.token_ids))
    if not plan.share_prompts:
        return ordered
    groups: dict[object, list[Experience]] = {}
    for number, experience in enumerate(ordered):
        draw = group_of(experience)
        groups.setdefault(("alone", number) if draw is None else draw, []).append(experience)
    return [experience for members in sorted(groups.values(), key=_shared_tokens, reverse=True) for experience in members]


def _shared_tokens(members: Sequence[Experience]) -> int:
    """Of a group whose prompt stands once."""
    return members[0].prompt_tokens + sum(len(item.mask) for item in members)


def _cuts(experiences: Sequence[Experience], plan: BatchPlan, *, at_least: int) -> list[range]:
    if plan.tokens_per_micro_batch is None:
        return batchmath.micro_batches(len(experiences), plan.micro_batch_size)
    lengths = [len(experience.token_ids) for experience in experiences]
    if plan.share_prompts:
        rows = _rows(experiences)
        saved = [row.prompt_tokens if place and align.same_prompt(rows[place - 1], row) else 0 for place, row in enumerate(rows)]
        return batchmath.group_micro_batches(lengths, saved, plan.tokens_per_micro_batch, at_least=at_least, pass_cost=plan.pass_cost)
    if plan.pass_cost:
        return batchmath.cheapest_micro_batches(lengths, plan.tokens_per_micro_batch, plan.pass_cost, at_least=at_least)
    return batchmath.token_micro_batches(lengths, plan.tokens_per_micro_batch, padded=plan.layout == "padded", at_least=at_least)


def filler(experiences: Sequence[Experience]) -> Experience:
    """The shortest row, in which nothing is trained: it takes part in every collective and changes nothing."""
    shortest = min(experiences, key=lambda experience: len(experience.token_ids))
    return replace(shortest, mask=torch.zeros_like(shortest.mask))


def micro_batches(
    experiences: Sequence[Experience], plan: BatchPlan, denominators: Denominators, world: World, *, pad_id: int, device: torch.device
) -> list[Batch]:
    """This rank's share of one update, in the order given, cut by rows or by tokens; every rank gets the same number. Collective.

    A rank with fewer ends with fillers.
    """
    cuts = _cuts(experiences, plan, at_least=1)
    (steps,) = (int(value) for value in world.max([len(cuts)]))
    if len(cuts) < steps:
        cuts = _cuts(experiences, plan, at_least=steps)  # smaller micro-batches, before fillers
    parts = [make_batch([experiences[row] for row in rows], plan, denominators, pad_id=pad_id, device=device) for rows in cuts]
    while len(parts) < steps:
        parts.append(make_batch([filler(experiences)], plan, denominators, pad_id=pad_id, device=device))
    for part, most in zip(parts, world.max([part.target_ids.numel() for part in parts]), strict=True):
        part.most_tokens = int(most)
    return parts

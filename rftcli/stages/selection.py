"""Tokens that are picked over a whole update before its first micro-batch: the same ones for any number of ranks and micro-batches.

Leaves out what a loss does with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rftcli.algo import align
from rftcli.algo.cov_losses import covariances, how_many
from rftcli.algo.entropy import count_kept, largest
from rftcli.algo.keyed import keyed_words
from rftcli.plan.plan import Plan
from rftcli.protocols import World
from rftcli.stages.token_credit import key_of
from rftcli.types import Experience


def pick(experiences: Sequence[Experience], plan: Plan, world: World, *, tokens: int, update: int) -> None:
    """Set `kept` and `chosen` of this rank's share of an update of `tokens` trained tokens, all ranks. `update` counts the policy's updates, so
    that another one draws others. Collective."""
    if plan.loss.top_entropy_share < 1.0:
        _keep_top_entropy(experiences, count_kept(plan.loss.top_entropy_share, tokens), world)
    if plan.loss.kind in CHOOSERS:
        _choose(experiences, plan, world, tokens=tokens, update=update)


def _keep_top_entropy(experiences: Sequence[Experience], count: int, world: World) -> None:
    masks = [item.mask for item in experiences]
    entropies = align.flatten([item.entropies for item in experiences if item.entropies is not None], masks)
    kept = largest(entropies.float(), count, world.sum)
    for item, part in zip(experiences, align.unflatten(kept, masks), strict=True):
        item.kept = part


def _choose(experiences: Sequence[Experience], plan: Plan, world: World, *, tokens: int, update: int) -> None:
    masks = [item.mask for item in experiences]
    advantages = align.flatten([item.advantages for item in experiences], masks)
    old = align.flatten([item.old_logprobs for item in experiences if item.old_logprobs is not None], masks)
    totals = world.sum([float(advantages.double().sum()), float(old.double().sum())])
    cov = covariances(advantages, old, mean_advantage=totals[0] / tokens, mean_old=totals[1] / tokens)
    count = how_many(plan.loss.options["share"], tokens)
    # (N,) where each trained token stands
    place = torch.cat([mask.nonzero().flatten() for mask in masks]).numpy()
    sequence = np.repeat(np.arange(len(masks)), [int(mask.sum()) for mask in masks])
    draws, samples = (np.array(column, dtype=np.int64)[sequence] for column in zip(*map(key_of, experiences), strict=True))
    rows = [(*key_of(item), len(item.mask)) for item in experiences]
    rank_by = CHOOSERS[plan.loss.kind](cov.numpy(), plan.loss.options, rows, masks, plan.seed, update)
    found = np.flatnonzero(~np.isnan(rank_by))
    mine = found[np.lexsort((place[found], samples[found], draws[found], rank_by[found]))][:count]
    entries = [(float(rank_by[i]), int(draws[i]), int(samples[i]), int(place[i])) for i in mine]
    winners = sorted(entry for part in world.gather(entries) for entry in part)[:count]
    chosen: dict[tuple[int, int], list[int]] = {}
    for _, draw, sample, token in winners:
        chosen.setdefault((draw, sample), []).append(token)
    for item in experiences:
        item.chosen = torch.zeros_like(item.mask)
        item.chosen[chosen.get(key_of(item), [])] = True


Row = tuple[int, int, int]
"""(draw, sample, sampled tokens) of a completion."""


def _random_within(
    cov: np.ndarray[Any, Any], options: Any, rows: Sequence[Row], masks: Sequence[torch.Tensor], seed: int, update: int
) -> np.ndarray[Any, Any]:
    """A keyed random number for each token whose covariance lies between `low` and `high`; NaN for the others."""
    words = [np.array(keyed_words("clip_cov", seed, update, draw, sample, n=length), dtype=np.uint64) for draw, sample, length in rows]
    numbers = np.concatenate([part[mask.numpy()] for part, mask in zip(words, masks, strict=True)]).astype(np.float64)
    return np.where((cov > options["low"]) & (cov < options["high"]), numbers, np.nan)


def _highest(
    cov: np.ndarray[Any, Any], options: Any, rows: Sequence[Row], masks: Sequence[torch.Tensor], seed: int, update: int
) -> np.ndarray[Any, Any]:
    """The highest covariance first; of equal ones that of the first draw, sample and token."""
    return -cov


CHOOSERS: dict[str, Callable[..., np.ndarray[Any, Any]]] = {"clip_cov": _random_within, "kl_cov": _highest}
"""Loss -> a number for each trained token (N,): those with the smallest are chosen, those with NaN never. To add one: a function as above."""

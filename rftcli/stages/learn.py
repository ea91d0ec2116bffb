"""Experiences to optimizer updates: the loss as a sum of named terms, micro-batches with global denominators, metrics reduced once.

Leaves out how gradients are reduced and applied (the learner's) and what an advantage is (credit's).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rftcli.algo.kl import KLS, log_ratio
from rftcli.algo.losses import LOSSES
from rftcli.algo.reduce import token_weights
from rftcli.plan.plan import LossPlan, Plan
from rftcli.protocols import Learner, LossFunction, World
from rftcli.stages import batches
from rftcli.stages.beside import ALONE, Beside
from rftcli.stages.collect import Tick
from rftcli.stages.supervised import TEMPERATURE, SupervisedStream, supervised_batches, supervised_loss
from rftcli.stages.values import critic_update
from rftcli.types import Batch, Denominators, Experience, Update

SUMS = ("loss", "policy_loss", "entropy", "kl", "kl_update", "ratio", "ratio_squared", "clipped_low", "clipped_high", "sampler_gap",
        "ptx_loss", "router_loss")  # fmt: skip
"""Summed over micro-batches and ranks, in this order. `loss` and `policy_loss` are shares already; the others are sums over trained tokens."""
MAXIMA = ("ratio_max", "sampler_gap_max")


def policy_loss(plan: LossPlan, max_new_tokens: int, kl_coefficient: float | None = None) -> LossFunction:
    """The policy term plus the KL term, each aggregated with the update's global denominators. `kl_coefficient`: of the KL term in the loss; None:
    the plan's. With a reference the KL is measured, wherever its term goes."""
    term = LOSSES[plan.kind].function
    kl_value = KLS[plan.kl_estimator].function
    coefficient = plan.kl_coefficient if kl_coefficient is None else kl_coefficient

    def loss(new: torch.Tensor, entropy: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        old = new.detach() if batch.old_logprobs is None else batch.old_logprobs
        terms = term(new, old, batch.advantages, **plan.options)
        weights = token_weights(
            plan.aggregate,
            batch.sequence,
            batch.num_sequences,
            tokens=batch.denominators.tokens,
            sequences=batch.denominators.sequences,
            max_new_tokens=max_new_tokens,
        )
        policy = (weights * terms.loss).sum()
        total = policy
        difference = log_ratio(new.detach(), old)
        sums = {
            "policy_loss": policy.detach(),
            "entropy": entropy.sum(),
            "kl_update": (torch.expm1(difference) - difference).sum(),  # KL(rollout policy || new): k3 with samples of the former, never below 0
            "ratio": terms.ratio.sum(),
            "ratio_squared": terms.ratio.square().sum(),
            "ratio_max": terms.ratio.max() if terms.ratio.numel() else new.new_zeros(()),
            "clipped_low": terms.clipped_low.sum(),
            "clipped_high": terms.clipped_high.sum(),
        }
        assert batch.reference_logprobs is not None or not coefficient, "a KL term without a reference"
        if batch.reference_logprobs is not None:
            sums["kl"] = kl_value(old, batch.reference_logprobs).sum()
            if coefficient:
                total = total + coefficient * (weights * kl_value(new, batch.reference_logprobs)).sum()
        if batch.router_losses is not None:
            share = torch.bincount(batch.sequence, minlength=batch.num_sequences) / batch.denominators.tokens
            balance = (share * batch.router_losses).sum()
            total = total + plan.router_coefficient * balance
            sums["router_loss"] = balance.detach()
        if batch.sampler_logprobs is not None:
            gap = (old - batch.sampler_logprobs).abs()
            sums["sampler_gap"] = gap.sum()
            sums["sampler_gap_max"] = gap.max() if gap.numel() else new.new_zeros(())
        sums["loss"] = total.detach()
        return total, sums

    return loss


def learn(
    mini_batches: Sequence[Sequence[Experience]],
    learner: Learner,
    plan: Plan,
    world: World,
    *,
    pad_id: int,
    device: torch.device,
    tick: Tick,
    beside: Beside = ALONE,
) -> list[Update]:
    """Every update of one step, in order; with a critic, its update after the policy's."""
    coefficient = beside.kl_coefficient if plan.loss.kl_coefficient else None  # in the reward it has been counted already
    loss = policy_loss(plan.loss, plan.rollout.max_new_tokens, coefficient)
    updates = []
    total = plan.batch.optimizer_updates_per_step
    done = 0
    for _ in range(plan.batch.epochs):
        for experiences in mini_batches:
            if beside.policy_learns:
                stream = beside.supervised
                updates.append(one_update(experiences, learner, loss, plan, world, pad_id=pad_id, device=device, supervised=stream))
            if beside.critic is not None:
                updates.append(critic_update(experiences, beside.critic, plan, world, pad_id=pad_id, device=device))
            done += 1
            tick("learn", done, total)
    return updates


def one_update(
    experiences: Sequence[Experience],
    learner: Learner,
    loss: LossFunction,
    plan: Plan,
    world: World,
    *,
    pad_id: int,
    device: torch.device,
    supervised: SupervisedStream | None = None,
) -> Update:
    """One optimizer update from this rank's share of a mini-batch, and the supervised stream's next rows. Every rank makes the same number of
    micro-steps."""
    local = batches.count(experiences)
    tokens, sequences = (int(value) for value in world.sum([local.tokens, local.sequences]))
    if tokens == 0:
        return Update(applied=False, policy_version=learner.version, lr=learner.lr, grad_norm=None, metrics={}, tokens=0)
    denominators = Denominators(tokens=tokens, sequences=sequences)
    experiences = batches.by_length(experiences, plan.batch)
    parts = batches.micro_batches(experiences, plan.batch, denominators, world, pad_id=pad_id, device=device)
    known = [] if supervised is None else supervised_batches(supervised, plan, world, pad_id=pad_id, device=device)
    measured: dict[str, list[torch.Tensor]] = {}

    def note(values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            measured.setdefault(name, []).append(value.detach().double())

    for index, batch in enumerate(parts):
        note(learner.backward(batch, loss, last=index == len(parts) - 1 and not known))
    for index, batch in enumerate(known):
        assert supervised is not None
        answers = supervised_loss(supervised.plan.coefficient)
        note(learner.backward(batch, answers, last=index == len(known) - 1, temperature=TEMPERATURE))
    outcome = learner.step()
    local_sums = [float(torch.stack(measured[name]).sum()) if name in measured else 0.0 for name in SUMS]
    local_peaks = [float(torch.stack(measured[name]).max()) if name in measured else 0.0 for name in MAXIMA]
    totals = dict(zip(SUMS, world.sum(local_sums), strict=True))
    peaks = dict(zip(MAXIMA, world.max(local_peaks), strict=True))
    return Update(
        applied=outcome.applied,
        policy_version=learner.version,
        lr=outcome.lr,
        grad_norm=outcome.grad_norm,
        metrics=_metrics(totals, peaks, set(measured), tokens),
        tokens=tokens,
    )


def _metrics(totals: Mapping[str, float], peaks: Mapping[str, float], seen: set[str], tokens: int) -> dict[str, float]:
    """Token means under the names of the step event. What no micro-batch measured is absent."""
    names = {"entropy": "entropy", "kl": "kl", "kl_update": "kl_update", "ratio": "ratio_mean", "clipped_low": "clip_low_fraction"}
    names |= {"clipped_high": "clip_high_fraction", "sampler_gap": "sampler_gap_mean"}
    metrics = {name: totals[name] for name in ("loss", "policy_loss")}
    metrics |= {name: totals[name] for name in ("ptx_loss", "router_loss") if name in seen}
    metrics |= {public: totals[name] / tokens for name, public in names.items() if name in seen}
    metrics |= {name: peaks[name] for name in MAXIMA if name in seen}
    if "ratio" in seen:
        mean = totals["ratio"] / tokens
        variance = totals["ratio_squared"] / tokens - mean * mean
        metrics["ratio_std"] = max(variance, 0.0) ** 0.5  # in this order: what is not a number stays so
    return metrics

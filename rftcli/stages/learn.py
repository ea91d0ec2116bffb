"""Experiences to optimizer updates: the loss as a sum of named terms, micro-batches with global denominators, metrics reduced once.

Leaves out how gradients are reduced and applied (the learner's) and what an advantage is (credit's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from rftcli.algo.kl import KLS, log_ratio, loss_term
from rftcli.algo.loss_terms import LossTerms, sequence_means
from rftcli.algo.losses import CHOOSING, LOSSES
from rftcli.algo.reduce import token_weights
from rftcli.plan.plan import LossPlan, Plan
from rftcli.protocols import Learner, LossFunction, World
from rftcli.stages import batches
from rftcli.stages.beside import ALONE, Beside
from rftcli.stages.collect import Tick
from rftcli.stages.selection import pick
from rftcli.stages.spread import has_effect
from rftcli.stages.supervised import TEMPERATURE, SupervisedStream, supervised_batches, supervised_loss
from rftcli.stages.values import critic_update
from rftcli.types import Batch, Denominators, Experience, Update

SUMS = ("loss", "policy_loss", "entropy", "kl", "kl_update", "ratio", "ratio_squared", "clipped_low", "clipped_high", "sampler_gap",
        "sampler_known", "off_policy", "ptx_loss", "router_loss")  # fmt: skip
"""Summed over micro-batches and ranks, in this order. `loss` and `policy_loss` are shares already; the others are sums over trained tokens."""
MAXIMA = ("ratio_max", "sampler_gap_max")


def policy_loss(
    plan: LossPlan,
    max_new_tokens: int,
    kl_coefficient: float | None = None,
    *,
    entropy_coefficient: float | None = None,
    own: Callable[..., LossTerms] | None = None,
    moved: bool = False,
) -> LossFunction:
    """The policy term, the KL term and the entropy bonus, each with the update's global denominators.

    `kl_coefficient`, `entropy_coefficient`: in force now; None: the plan's. With a reference the KL is measured, wherever its term goes. `own`: the
    loss of the kind `python`. `moved`: the policy has been updated since the rollout, so its distance from the sampler is no fault of either.
    """
    row = LOSSES[plan.kind]
    term = row.function if own is None else own
    options = {} if own is not None else {name: value for name, value in plan.options.items() if name not in CHOOSING}
    kl_value = KLS[plan.kl_estimator].function
    kl_options = {"unbiased_gradient": plan.kl_gradient == "unbiased", "ratio_weighted": plan.kl_gradient == "ratio_weighted"}
    coefficient = plan.kl_coefficient if kl_coefficient is None else kl_coefficient
    bonus = plan.entropy_coefficient if entropy_coefficient is None else entropy_coefficient

    def loss(new: torch.Tensor, entropy: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        old = _old(new, batch, plan)
        terms = term(new, old, batch.advantages, **options, **{name: getattr(batch, name) for name in row.reads})
        weights = token_weights(
            plan.aggregate,
            batch.sequence,
            batch.num_sequences,
            tokens=batch.denominators.tokens,
            sequences=batch.denominators.sequences,
            max_new_tokens=max_new_tokens,
        )
        sums: dict[str, torch.Tensor] = {}
        policy = (weights * _counted(terms.loss, new, old, batch, plan, sums)).sum()
        total = policy
        sums |= {"policy_loss": policy.detach(), "entropy": entropy.detach().sum(), **_of_the_ratio(terms, new, old)}
        if bonus:
            total = total - bonus * entropy.sum() / batch.denominators.tokens
        assert batch.reference_logprobs is not None or not coefficient, "a KL term without a reference"
        if batch.reference_logprobs is not None:
            sums["kl"] = kl_value(old, batch.reference_logprobs).sum()
            if coefficient:
                total = total + coefficient * (weights * loss_term(plan.kl_estimator, new, batch.reference_logprobs, old, **kl_options)).sum()
        if batch.router_losses is not None:
            share = torch.bincount(batch.sequence, minlength=batch.num_sequences) / batch.denominators.tokens
            balance = (share * batch.router_losses).sum()
            total = total + plan.router_coefficient * balance
            sums["router_loss"] = balance.detach()
        if batch.sampler_logprobs is not None and not (moved and plan.old == "sampler"):
            sums |= _sampler_gap(new if plan.old == "sampler" else old, batch.sampler_logprobs, batch.stale)
        sums["loss"] = total.detach()
        return total, sums

    return loss


def _of_the_ratio(terms: LossTerms, new: torch.Tensor, old: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far the policy has moved, and where a bound held it."""
    difference = log_ratio(new.detach(), old)
    flags = {"clipped_low": terms.clipped_low, "clipped_high": terms.clipped_high}
    return {
        "kl_update": (torch.expm1(difference) - difference).sum(),  # KL(rollout policy || new): k3 with samples of the former, never below 0
        "ratio": terms.ratio.sum(),
        "ratio_squared": terms.ratio.square().sum(),
        "ratio_max": terms.ratio.max() if terms.ratio.numel() else new.new_zeros(()),
        **{name: found.sum() for name, found in flags.items() if found is not None},
    }


def _old(new: torch.Tensor, batch: Batch, plan: LossPlan) -> torch.Tensor:
    """(N,) what the ratio starts from. What a sampler did not report is replaced by the current policy: a ratio of 1."""
    if batch.old_logprobs is None:
        return new.detach()
    if plan.old == "sampler":
        return torch.where(batch.old_logprobs.isnan(), new.detach(), batch.old_logprobs)
    return batch.old_logprobs


def _counted(
    loss: torch.Tensor, new: torch.Tensor, old: torch.Tensor, batch: Batch, plan: LossPlan, sums: dict[str, torch.Tensor]
) -> torch.Tensor:
    """(N,) the policy term with its weights: of the correction, and 0 where a mask takes it out. Denominators stay as they are."""
    if batch.correction is not None:
        loss = torch.where(batch.correction == 0, 0.0, batch.correction * loss)
    if batch.kept is not None:
        loss = torch.where(batch.kept, loss, 0.0)
    if plan.off_policy_mask is not None:
        sampler = batch.sampler_logprobs
        start = old if sampler is None or not plan.reads_sampler else torch.where(torch.isfinite(sampler), sampler, old)
        drift = sequence_means(start - new.detach(), batch.sequence, batch.num_sequences)
        off = (drift > plan.off_policy_mask)[batch.sequence] & (batch.advantages < 0)
        loss = torch.where(off, 0.0, loss)
        sums["off_policy"] = off.sum()
    return loss


def _sampler_gap(trainer: torch.Tensor, sampler: torch.Tensor, stale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """How far the engine's log-probs are from the trainer's, where it reported any; of older weights they have to be others."""
    known = torch.isfinite(sampler) if stale is None else torch.isfinite(sampler) & ~stale
    gap = (trainer.detach() - sampler).abs()[known]
    return {"sampler_gap": gap.sum(), "sampler_known": known.sum(), "sampler_gap_max": gap.max() if gap.numel() else sampler.new_zeros(())}


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
    updates: list[Update] = []
    total = plan.batch.optimizer_updates_per_step
    done = 0
    for _ in range(plan.batch.epochs):
        for experiences in mini_batches:
            if beside.policy_learns:
                bonus = None if beside.entropy is None else beside.entropy.coefficient
                loss = policy_loss(
                    plan.loss, plan.rollout.max_new_tokens, coefficient, entropy_coefficient=bonus, own=beside.own_loss, moved=bool(updates)
                )
                stream = beside.supervised
                update = one_update(experiences, learner, loss, plan, world, pad_id=pad_id, device=device, supervised=stream)
                updates.append(update if bonus is None or not update.tokens else with_bonus(update, bonus))
                if beside.entropy is not None and update.applied:
                    beside.entropy.after(update.metrics["entropy"])
            if beside.critic is not None:
                updates.append(critic_update(experiences, beside.critic, plan, world, pad_id=pad_id, device=device))
            done += 1
            tick("learn", done, total)
    return updates


def with_bonus(update: Update, coefficient: float) -> Update:
    """The update with the coefficient of the entropy bonus that it was made with."""
    return replace(update, metrics={**update.metrics, "entropy_coefficient": coefficient})


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
    pick(experiences, plan, world, tokens=tokens, update=learner.version)
    passing, passed, idle = passing_of(experiences, plan, world)
    experiences = batches.by_length(passing, plan.batch)
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
        metrics=_metrics(totals, peaks, set(measured), passed) | ({"idle_fraction": idle} if plan.batch.skip_zero_advantage else {}),
        tokens=tokens,
        passed=passed,
    )


def passing_of(experiences: Sequence[Experience], plan: Plan, world: World) -> tuple[Sequence[Experience], int, float]:
    """This rank's completions that have to pass through the model, a filler where it has none; of all ranks the trained tokens in them, and the share
    of all positions that is left out. Where no completion of the update has an effect all of them pass, so that they are measured. Collective."""
    passing = [item for item in experiences if has_effect(item, plan.batch)]
    positions = [sum(len(item.token_ids) for item in rows) for rows in (passing, experiences)]
    tokens = [batches.count(rows).tokens for rows in (passing, experiences)]
    some, every, passed, trained = (int(value) for value in world.sum([*positions, *tokens]))
    if some == 0:
        return experiences, trained, 0.0
    if experiences and not passing:
        passing = [batches.filler(experiences)]
    return passing, passed, 1 - some / every


def _metrics(totals: Mapping[str, float], peaks: Mapping[str, float], seen: set[str], tokens: int) -> dict[str, float]:
    """Means over the `tokens` that passed, under the names of the step event. What no micro-batch measured is absent."""
    names = {"entropy": "entropy", "kl": "kl", "kl_update": "kl_update", "ratio": "ratio_mean", "clipped_low": "clip_low_fraction"}
    names |= {"clipped_high": "clip_high_fraction", "off_policy": "off_policy_fraction"}
    metrics = {name: totals[name] for name in ("loss", "policy_loss")}
    metrics |= {name: totals[name] for name in ("ptx_loss", "router_loss") if name in seen}
    metrics |= {public: totals[name] / tokens for name, public in names.items() if name in seen}
    metrics |= {name: peaks[name] for name in MAXIMA if name in seen}
    if totals["sampler_known"]:
        metrics["sampler_gap_mean"] = totals["sampler_gap"] / totals["sampler_known"]
    else:
        metrics.pop("sampler_gap_max", None)
    if "ratio" in seen:
        mean = totals["ratio"] / tokens
        variance = totals["ratio_squared"] / tokens - mean * mean
        metrics["ratio_std"] = max(variance, 0.0) ** 0.5  # in this order: what is not a number stays so
    return metrics

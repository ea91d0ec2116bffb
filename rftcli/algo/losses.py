"""The table of policy losses, over the trained tokens of a micro-batch.

What it leaves out: the functions (`token_losses`, `sequence_losses`, `cov_losses`), aggregation (`reduce`), the KL term (`kl`), and masks (tokens
that are not trained on are not in the vectors).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rftcli.algo.cov_losses import clip_cov, kl_cov
from rftcli.algo.loss_terms import LossTerms
from rftcli.algo.own_loss import own_loss
from rftcli.algo.sequence_losses import gmpo, gspo, rloo_sequence
from rftcli.algo.token_losses import cispo, cpg, dro, ppo_clip, reinforce, sapo

__all__ = ["LOSSES", "Loss", "LossTerms", "ppo_clip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One row of LOSSES."""

    function: Callable[..., LossTerms]
    """(new (N,), old (N,), advantages (N,), *, options and what `reads` names) -> LossTerms."""
    unit: str
    """What one term belongs to: "token" or "sequence". A term a sequence has one advantage, and is aggregated as a mean over sequences."""
    options: tuple[str, ...]
    """Keyword arguments that a recipe may set."""
    source: str
    summary: str
    only_advantages: bool = True
    """Where the advantage is 0, so is the term and its gradient. False: there are other parts, or may be."""
    reads: tuple[str, ...] = ()
    """Further arguments: `sequence` (N,) with `num_sequences`; `chosen` (N,) bool, tokens that were chosen over the whole update."""


_CLIPS = ("clip_low", "clip_high")
_SEQUENCE = ("sequence", "num_sequences")

# How to add one: write a function with the signature in `Loss.function` whose ratios go through `log_ratio`, add a row under the name a recipe
# uses, and add the name and its options to the recipe (`sections/loss.py`).
LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(
        function=ppo_clip,
        unit="token",
        options=(*_CLIPS, "dual_clip"),
        source="PPO, arXiv:1707.06347; two bounds DAPO, arXiv:2503.14476; dual clip arXiv:1912.09729; cap arXiv:2505.07291",
        summary="the probability ratio times the advantage, clipped where it would go too far",
    ),
    "rloo_sequence": Loss(
        function=rloo_sequence,
        unit="sequence",
        options=(*_CLIPS, "dual_clip"),
        reads=_SEQUENCE,
        source="RLOO, arXiv:2402.14740, as TRL has it",
        summary="ppo_clip of the ratio of the whole answer: the product over its tokens",
    ),
    "gspo": Loss(
        function=gspo,
        unit="token",
        options=(*_CLIPS, "dual_clip"),
        reads=_SEQUENCE,
        source="GSPO, arXiv:2507.18071",
        summary="ppo_clip of the geometric mean of an answer's ratios, in the token form",
    ),
    "gmpo": Loss(
        function=gmpo,
        unit="sequence",
        options=_CLIPS,
        reads=_SEQUENCE,
        source="GMPO, arXiv:2507.20673",
        summary="the geometric mean of an answer's ratios, each clipped in log space",
    ),
    "cispo": Loss(
        function=cispo,
        unit="token",
        options=_CLIPS,
        source="CISPO, MiniMax-M1, arXiv:2506.13585",
        summary="the log-prob times the advantage, weighted with the clipped ratio: no token loses its gradient",
    ),
    "sapo": Loss(
        function=sapo,
        unit="token",
        options=("tau_positive", "tau_negative"),
        source="SAPO, arXiv:2511.20347",
        summary="a sigmoid of the ratio in the place of a clip",
    ),
    "cpg": Loss(
        function=cpg,
        only_advantages=False,
        unit="token",
        options=(*_CLIPS, "drift", "drift_bound"),
        source="CPGD, arXiv:2505.12504",
        summary="the log-prob times the advantage, clipped, with a drift term",
    ),
    "clip_cov": Loss(
        function=clip_cov,
        unit="token",
        options=(*_CLIPS, "dual_clip", "share", "low", "high"),
        reads=("chosen",),
        source="Clip-Cov, arXiv:2505.22617",
        summary="ppo_clip; a few tokens of high covariance, chosen at random, lose their policy term",
    ),
    "kl_cov": Loss(
        function=kl_cov,
        only_advantages=False,
        unit="token",
        options=("share", "beta"),
        reads=("chosen",),
        source="KL-Cov, arXiv:2505.22617",
        summary="the ratio times the advantage, unclipped; the tokens of highest covariance pay for leaving the old policy",
    ),
    "reinforce": Loss(
        function=reinforce,
        unit="token",
        options=("importance_weight",),
        source="Williams 1992, https://doi.org/10.1007/BF00992696",
        summary="the log-prob times the advantage",
    ),
    "dro": Loss(
        function=dro,
        only_advantages=False,
        unit="token",
        options=("beta",),
        source="DRO, arXiv:2405.19107",
        summary="the log-prob times the advantage, less a parabola around the old log-prob",
    ),
    "python": Loss(
        function=own_loss,
        only_advantages=False,
        unit="token",
        options=(),
        reads=_SEQUENCE,
        source="a function of the recipe's author",
        summary="an own function of log-probs and advantages",
    ),
}

CHOOSING = ("share", "low", "high")
"""Options that say which tokens are `chosen`; the loss itself does not read them."""

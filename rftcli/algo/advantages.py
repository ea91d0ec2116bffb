"""The table of estimators, from rewards to advantages: what each reads, which options it has, and over what it is whitened.

The functions are in `group_advantages` (compared within a group), `answer_advantages` (not compared) and `returns` (per token). Completions that
could not be scored are absent from the vectors. What it leaves out: rewards, and laying an advantage over the tokens of its completion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rftcli.algo.answer_advantages import distill, own, reinforce, remax
from rftcli.algo.group_advantages import centred, gdpo, gpg, grpo, grpo_passk, opo, rloo
from rftcli.algo.returns import gae, returns_to_go


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """One row of ADVANTAGES."""

    function: Callable[..., Tensor]
    level: str = "completion"
    """What one value belongs to. "completion": the function returns (C,). "token": (N,), over the trained tokens of completions (`returns`)."""
    inputs: tuple[str, ...] = ("rewards", "group")
    """Positional arguments, by name. By completion: rewards (C,), group (C,), lengths (C,), greedy_rewards (C,), own (C,), and by part of the reward
    scores, present, weights (C, P). By token: token_rewards, values, old, teacher (N,), sequence (N,), bootstrap (C,)."""
    options: tuple[str, ...] = ()
    """Keyword arguments that a recipe may set."""
    min_samples: int = 1
    """Fewest samples per prompt that make sense."""
    baseline: bool = False
    """Whether a group is compared with itself, so that groups without spread teach nothing."""
    source: str
    summary: str
    whiten: str | None = None
    """What the estimator's own formula is whitened over: "tokens" or "completions"; None: it is not, unless a recipe asks for it."""
    whiten_if_asked: str = "completions"
    """What it is whitened over where only a recipe asks for it. Advantages that differ from token to token are always whitened over tokens."""
    per_token: Callable[..., Tensor] | None = None
    """The same estimator for rewards per token: (token_rewards (N,), sequence (N,), *, gamma) -> (N,). Used where rewards are discounted, or hold
    a KL term for each token."""
    loss: str | None = None
    """The policy loss that its formula is meant for, where it needs a certain one."""


# How to add one: write a function (inputs..., *, options...) -> (C,) float32 without gradient, whose inputs are names the credit stage knows and
# whose options are numbers, add a row under the name a recipe uses, and add the name to the recipe's Literal. With a baseline, end in
# `groups.without_flat`, so that groups without spread stay exactly 0.
ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(
        function=grpo,
        options=("normalise_std", "std", "min_std"),
        min_samples=2,
        baseline=True,
        source="GRPO, arXiv:2402.03300; without the deviation Dr. GRPO, arXiv:2503.20783",
        summary="reward minus the group's mean, over the standard deviation",
    ),
    "rloo": Advantage(
        function=rloo,
        min_samples=2,
        baseline=True,
        source="RLOO, arXiv:2402.14740",
        summary="reward minus the mean of the group's other rewards",
    ),
    "reinforce": Advantage(
        function=reinforce,
        inputs=("rewards",),
        options=("baseline",),
        source="Williams 1992, https://doi.org/10.1007/BF00992696",
        summary="the reward itself, or minus the mean of the step",
        whiten_if_asked="tokens",
        per_token=returns_to_go,
    ),
    "reinforce_pp": Advantage(
        function=returns_to_go,
        level="token",
        inputs=("token_rewards", "sequence"),
        source="REINFORCE++, arXiv:2501.03262",
        summary="return to go of the KL term of each token and the reward, whitened over the tokens of the step",
        whiten="tokens",
    ),
    "reinforce_pp_baseline": Advantage(
        function=centred,
        min_samples=2,
        baseline=True,
        source="REINFORCE++-baseline, arXiv:2501.03262",
        summary="reward minus the group's mean, whitened over the tokens of the step",
        whiten="tokens",
    ),
    "remax": Advantage(
        function=remax,
        inputs=("rewards", "greedy_rewards"),
        source="ReMax, arXiv:2310.10505",
        summary="reward minus that of a greedy completion of the same prompt",
    ),
    "opo": Advantage(
        function=opo,
        inputs=("rewards", "group", "lengths"),
        min_samples=2,
        baseline=True,
        source="OPO, arXiv:2505.23585",
        summary="reward minus the group's mean, weighted by length",
    ),
    "gpg": Advantage(
        function=gpg,
        min_samples=2,
        baseline=True,
        source="GPG, arXiv:2504.02546",
        summary="reward minus the group's mean, times groups over groups with spread",
        loss="reinforce",
    ),
    "grpo_passk": Advantage(
        function=grpo_passk,
        options=("normalise_std", "min_std"),
        min_samples=2,
        baseline=True,
        source="pass@k, arXiv:2503.19595",
        summary="the lead of a group's best completion over its second; 0 for the others",
    ),
    "gdpo": Advantage(
        function=gdpo,
        inputs=("scores", "present", "weights", "group"),
        options=("min_std",),
        min_samples=2,
        baseline=True,
        source="GDPO, arXiv:2601.05242",
        summary="every part of the reward normalised within the group, their weighted sum whitened over the completions of the step",
        whiten="completions",
    ),
    "cpgd": Advantage(
        function=centred,
        min_samples=2,
        baseline=True,
        source="CPGD, arXiv:2505.12504",
        summary="reward minus the group's mean",
        loss="cpg",
    ),
    "gae": Advantage(
        function=gae,
        level="token",
        inputs=("token_rewards", "values", "sequence", "bootstrap"),
        options=("gamma", "lam"),
        source="GAE, arXiv:1506.02438; PPO, arXiv:1707.06347",
        summary="discounted sums of the critic's errors, whitened over the tokens of the step",
        whiten="tokens",
    ),
    "distill": Advantage(
        function=distill,
        level="token",
        inputs=("old", "teacher"),
        options=("coefficient",),
        source="on-policy distillation, arXiv:2306.13649",
        summary="how much likelier a teacher finds each sampled token; rewards are only logged",
    ),
    "python": Advantage(
        function=own,
        inputs=("own",),
        source="a function of your own",
        summary="what `algorithm.advantage.python` returns",
    ),
}

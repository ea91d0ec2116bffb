"""Which panel a metric belongs to: trackers group curves by what stands in front of the first slash. Names stay those of the event behind it.

>>> [panel(name) for name in ("reward_mean", "reward_parts/math/mean", "kl", "seconds/rollout", "memory_gib/learn", "user/words")]
['reward/reward_mean', 'reward/reward_parts/math/mean', 'policy/kl', 'time/rollout', 'memory/learn', 'user/words']
"""

from __future__ import annotations

from collections.abc import Mapping

OTHER = "other"
"""Of a metric that no row knows: one that a newer version adds."""
NAMES = ("reward", "policy", "rollout", "data", "time", "memory", "user", "eval", "warning", OTHER)


def panel(name: str) -> str:
    """The name of a metric (nested names joined by `/`) behind the name of its panel."""
    first, _, rest = name.partition("/")
    if rest and first in RENAMED:
        return f"{RENAMED[first]}/{rest}"
    return f"{PANELS.get(first, OTHER)}/{name}"


def in_panels(flat: Mapping[str, float]) -> dict[str, float]:
    return {panel(name): value for name, value in flat.items()}


RENAMED = {"seconds": "time", "memory_gib": "memory", "user": "user"}
"""Groups whose own name says what the panel's does. Panels of what stands in them alone."""

PANELS = {
    **dict.fromkeys(
        ("reward_mean", "reward_std", "reward_min", "reward_max", "group_reward_std", "reward_parts", "labels", "reward_errors", "samples_dropped",
         "samples_masked", "shaped_reward_mean", "shaped_reward_std", "reward_clip_fraction", "overlong_penalty_mean", "greedy_reward_mean",
         "greedy_dropped", "zero_signal_fraction", "advantage_mean", "advantage_std", "advantage_min", "advantage_max", "advantage_clip_fraction",
         "return_mean", "groups", "group_size"),
        "reward",
    ),
    **dict.fromkeys(
        ("kl", "kl_update", "kl_coefficient", "teacher_kl", "entropy", "loss", "policy_loss", "value_loss", "ptx_loss", "router_loss", "value_mean",
         "grad_norm", "critic_grad_norm", "lr", "critic_lr", "clip_low_fraction", "clip_high_fraction", "ratio_mean", "ratio_std", "ratio_max",
         "policy_version", "updates_skipped", "entropy_coefficient", "off_policy_fraction", "correction"),
        "policy",
    ),
    "tokens_per_second_per_gpu": "time",
    **dict.fromkeys(
        ("response_tokens", "prompt_tokens_mean", "truncated_fraction", "sampler_logprob_gap", "tokens", "tokens_total"),
        "rollout",
    ),
    **dict.fromkeys(("dynamic", "keep", "over_sample", "partial", "version_lag"), "rollout"),
    **dict.fromkeys(("data_passes", "replay", "curriculum"), "data"),
    "mfu": "time", "idle_fraction": "policy", "rank_load": "time",
}  # fmt: skip
"""First part of a metric's name -> panel. To add a metric: its name in a row. Every metric of a step has one (tests/observe/test_metrics.py)."""

"""Warnings that teach: what a step's metrics say about a run that is going wrong, and which key of the recipe to look at.

`lessons(metrics, state)` looks at one step after the other. A code is raised once; everything it remembers is in the state it is given, which is
plain data and survives a resume. Leaves out errors that stop a run (those are raised where they happen) and everything that is not in the step
metrics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rftcli.observe.numbers import flatten

NO_SIGNAL = 0.8
TRUNCATED = 0.5
CLIPPED = 0.5
COLLAPSED = 0.1
"""Share of the first step's entropy below which the policy has all but stopped exploring."""
LARGE_KL = 1.0
"""Nats a token against the reference. Runs that stay close lie well below 0.1; at 1 the policy has little in common with its first weights."""
RATIO_TOLERANCE = 0.01
"""Rounding between two forward passes stays below this; a wrong mask, temperature or shift does not."""
WIDE_GAP = 0.08
"""Nats a token between engine and trainer on average. In bfloat16 rounding gives 0.01 to 0.06; at 0.1 a run in bfloat16 stops."""
GAP_GROWTH = 5.0
"""The same against the first time it was measured; rounding stays where it was."""
GAP_NOISE = 1e-4
"""Below this a gap that grows is rounding all the same."""
COEFFICIENT_GROWTH = 10.0
"""The KL coefficient against that of the first step."""
LOST_CRITIC = 1.0
"""Distance of the mean value from the mean return, in standard deviations of the reward. A critic that says 0 for rewards of 0 and 1 is this far."""
ERROR_STEPS = 3
SILENT_PART_STEPS = 3
FAILING_PART_STEPS = 3


@dataclass(slots=True, kw_only=True)
class LessonState:
    """What is remembered between steps.

    on_policy: old log-probs belong to the weights being trained (one update a step over one epoch), so the ratio has to be 1. compares: answers are
    compared within their group and with nothing else, so a group without spread teaches nothing. rewarded: rewards teach at all (distill alone only
    logs them).
    taught: codes that were raised; streaks: code -> steps in a row that it held; first: metric -> its first value; errors: reward errors of the
    newest steps; scored: reward parts that gave a value or failed at least once.
    """

    on_policy: bool
    compares: bool = True
    rewarded: bool = True
    taught: set[str] = field(default_factory=set)
    streaks: Counter[str] = field(default_factory=Counter)
    first: dict[str, float] = field(default_factory=dict)
    errors: list[float] = field(default_factory=list)
    always_zero: bool = True
    scored: set[str] = field(default_factory=set)

    def state_dict(self) -> dict[str, Any]:
        return {
            "taught": sorted(self.taught),
            "streaks": dict(self.streaks),
            "first": dict(self.first),
            "errors": list(self.errors),
            "always_zero": self.always_zero,
            "scored": sorted(self.scored),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.taught = set(state["taught"])
        self.streaks = Counter(state["streaks"])
        self.first = dict(state["first"])
        self.errors = list(state["errors"])
        self.always_zero = state["always_zero"]
        self.scored = set(state.get("scored", ()))  # an older checkpoint has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One thing to notice. `holds(metrics by dotted name, state)`; it is taught when it held for `steps` steps in a row.

    `text` may name metrics of the step that its condition needs, as in {kl:.3g}, dots written as _, and {steps}, {first_entropy},
    {first_kl_coefficient} and {first_sampler_gap}.
    """

    code: str
    holds: Callable[[Mapping[str, float], LessonState], bool]
    text: str
    steps: int = 1


def lessons(metrics: Mapping[str, Any], state: LessonState) -> list[tuple[str, str]]:
    """(code, text) of everything this step teaches for the first time. `metrics` as in a step event; `state` is brought up to date.

    A metric that is absent teaches nothing.
    """
    flat = flatten(metrics, ".")
    _remember(flat, state)
    found = []
    for lesson in LESSONS:
        state.streaks[lesson.code] = state.streaks[lesson.code] + 1 if lesson.holds(flat, state) else 0
        if state.streaks[lesson.code] >= lesson.steps and lesson.code not in state.taught:
            state.taught.add(lesson.code)
            named = {name.replace(".", "_"): value for name, value in flat.items()}
            values = {**named, "steps": lesson.steps, **{f"first_{name}": value for name, value in state.first.items()}}
            found.append((lesson.code, lesson.text.format_map(values)))
    return [*found, *_silent_parts(metrics, state), *_failing_parts(metrics, state), *_uneven_parts(metrics, state)]


def _silent_parts(metrics: Mapping[str, Any], state: LessonState) -> list[tuple[str, str]]:
    """`part_abstained` for each reward part that has neither scored nor failed in its first steps; each part once.

    No row of the table, because it looks at parts by name. A step in which a part was not asked says nothing about it.
    """
    found = []
    parts = metrics.get("reward_parts")
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        if not isinstance(part, Mapping) or "mean" in part or part.get("errors") != 0:
            state.scored.add(name)
        key = f"part_abstained:{name}"
        if name in state.scored or key in state.taught:
            continue
        state.streaks[key] += 1
        if state.streaks[key] >= SILENT_PART_STEPS:
            state.taught.add(key)
            text = f"part `{name}` returned None for every completion so far: a forgotten return? Look at `rewards`."
            found.append(("part_abstained", text))
    return found


def _failing_parts(metrics: Mapping[str, Any], state: LessonState) -> list[tuple[str, str]]:
    """`part_failed` for each reward part that failed and scored nothing, so many steps in a row; each part once.

    With `on_error: abstain` nothing else tells: the other parts go on, and the run does not stop.
    """
    found = []
    parts = metrics.get("reward_parts")
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        key = f"part_failed:{name}"
        errors = part.get("errors", 0) if isinstance(part, Mapping) else 0
        if "mean" in part or key in state.taught:
            state.streaks[key] = 0
        elif errors:
            state.streaks[key] += 1
            if state.streaks[key] >= FAILING_PART_STEPS:
                state.taught.add(key)
                text = f"part `{name}` failed on every completion that it was asked for, {FAILING_PART_STEPS} steps in a row ({errors:.0f} errors in "
                text += "this step): it takes no part in the reward. The errors stand in `samples/`; look at `rewards` and its `on_error`."
                found.append(("part_failed", text))
    return found


def _uneven_parts(metrics: Mapping[str, Any], state: LessonState) -> list[tuple[str, str]]:
    """`part_uneven` for each reward part that abstained on some answers of a group and scored others; each part once."""
    found = []
    parts = metrics.get("reward_parts")
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        groups = part.get("uneven_groups", 0) if isinstance(part, Mapping) else 0
        key = f"part_uneven:{name}"
        if groups and key not in state.taught:
            state.taught.add(key)
            text = f"part `{name}` scored some answers and abstained on others of the same prompt, in {groups} groups: rewards that are sums of "
            text += "different parts are compared with each other. Let it return 0, or abstain on all; or set `rewards.LABEL.renormalise`."
            found.append(("part_uneven", text))
    return found


def _remember(flat: Mapping[str, float], state: LessonState) -> None:
    if "entropy" in flat and math.isfinite(flat["entropy"]):
        state.first.setdefault("entropy", flat["entropy"])
    if "kl_coefficient" in flat:
        state.first.setdefault("kl_coefficient", flat["kl_coefficient"])
    if math.isfinite(flat.get("sampler_logprob_gap.mean", math.nan)):
        state.first.setdefault("sampler_gap", flat["sampler_logprob_gap.mean"])
    if flat.get("reward_mean", 0.0) != 0.0 or flat.get("reward_std", 0.0) != 0.0:
        state.always_zero = False
    state.errors = [*state.errors, flat.get("reward_errors", 0.0)][-ERROR_STEPS:]


def _above(name: str, bound: float) -> Callable[[Mapping[str, float], LessonState], bool]:
    return lambda flat, state: flat.get(name, -math.inf) > bound


def _no_signal(flat: Mapping[str, float], state: LessonState) -> bool:
    return state.compares and flat.get("zero_signal_fraction", 0.0) > NO_SIGNAL


def _rewards_all_zero(flat: Mapping[str, float], state: LessonState) -> bool:
    return state.rewarded and "reward_std" in flat and state.always_zero


def _rewards_all_equal(flat: Mapping[str, float], state: LessonState) -> bool:
    return state.rewarded and flat.get("reward_std") == 0.0 and not state.always_zero


def _entropy_collapsed(flat: Mapping[str, float], state: LessonState) -> bool:
    first = state.first.get("entropy", 0.0)
    return first > 0 and flat.get("entropy", math.inf) < COLLAPSED * first


def _no_gradient(flat: Mapping[str, float], state: LessonState) -> bool:
    failing = flat.get("reward_errors", 0.0) > 0 or flat.get("samples_dropped", 0.0) > 0  # then nothing was there to learn from
    return flat.get("grad_norm") == 0.0 and not failing


def _unscored(flat: Mapping[str, float]) -> bool:
    """Was no completion of the step scored? Then there is no mean, and nothing to train on."""
    return "reward_mean" not in flat and flat.get("reward_errors", 0.0) > 0


def _skipped(flat: Mapping[str, float], state: LessonState) -> bool:
    return flat.get("updates_skipped", 0.0) > 0 and not _unscored(flat)


def _nothing_scored(flat: Mapping[str, float], state: LessonState) -> bool:
    return _unscored(flat)


def _errors_grow(flat: Mapping[str, float], state: LessonState) -> bool:
    return len(state.errors) == ERROR_STEPS and min(state.errors) > 0 and state.errors[-1] > state.errors[0]


def _ratio_off(flat: Mapping[str, float], state: LessonState) -> bool:
    return state.on_policy and abs(flat.get("ratio_mean", 1.0) - 1.0) > RATIO_TOLERANCE


def _engine_drifts(flat: Mapping[str, float], state: LessonState) -> bool:
    gap = flat.get("sampler_logprob_gap.mean", 0.0)
    return gap > WIDE_GAP or gap > max(GAP_NOISE, GAP_GROWTH * state.first.get("sampler_gap", math.inf))


def _coefficient_runs(flat: Mapping[str, float], state: LessonState) -> bool:
    first = state.first.get("kl_coefficient", 0.0)
    return first > 0 and flat.get("kl_coefficient", 0.0) > COEFFICIENT_GROWTH * first


def _critic_lost(flat: Mapping[str, float], state: LessonState) -> bool:
    if not {"value_mean", "return_mean", "reward_std"} <= set(flat):
        return False
    return flat["reward_std"] > 0 and abs(flat["value_mean"] - flat["return_mean"]) > LOST_CRITIC * flat["reward_std"]


def _mostly_clipped(flat: Mapping[str, float], state: LessonState) -> bool:
    return flat.get("clip_low_fraction", 0.0) + flat.get("clip_high_fraction", 0.0) > CLIPPED


# How to add one: a row here with a code of its own, a condition over the step's metrics (absent ones must not hold), and a text that says what is
# seen, what it means, and which recipe key to look at, in backticks. Then a row in the test of this table with numbers that do and do not hold.
LESSONS: tuple[Lesson, ...] = (
    Lesson(
        code="zero_signal",
        steps=5,
        holds=_no_signal,
        text="In {zero_signal_fraction:.0%} of the groups all answers got the same reward, and so for {steps} steps: such a group teaches "
        "nothing. The task is too easy or too hard for this model. Look at `data.train` (other rows), `rewards` (partial credit), "
        "`rollout.samples_per_prompt` and `rollout.temperature` (more variety).",
    ),
    Lesson(
        code="reward_always_zero",
        steps=5,
        holds=_rewards_all_zero,
        text="Every reward of the first {steps} steps was exactly 0: no answer was better than another. Usually the rule does not find the answer in "
        "the text, or the reference is not in the form it expects. Read a few answers and their rewards in `samples/`, and look at "
        "`rewards`, `data.train.extract_reference` and `models.policy.chat`.",
    ),
    Lesson(
        code="reward_constant",
        steps=5,
        holds=_rewards_all_equal,
        text="All rewards of a step were the same ({reward_mean:.3g}), {steps} steps in a row: no answer is told from another. Either "
        "the task is solved, or the reward gives the same mark to everything. Look at `rewards` and `data.train`.",
    ),
    Lesson(
        code="truncated",
        holds=_above("truncated_fraction", TRUNCATED),
        text="{truncated_fraction:.0%} of the answers were cut at the token limit before they ended; most rewards then judge half an answer. "
        "Look at `rollout.max_new_tokens`, at `rollout.stop`, and at `models.policy.chat` (does the model see its end-of-turn token?).",
    ),
    Lesson(
        code="entropy_collapse",
        holds=_entropy_collapsed,
        text="Entropy fell to {entropy:.3g} nats a token from {first_entropy:.3g} at the start: the policy hardly explores any more. Look at "
        "`train.optimizer.lr` (lower), `algorithm.kl.coefficient`, `algorithm.loss.clip_high` (a little larger) and "
        "`rollout.temperature`.",
    ),
    Lesson(
        code="kl_large",
        holds=_above("kl", LARGE_KL),
        text="The policy is {kl:.3g} nats a token away from its reference: far enough to lose what the model knew, and often a sign that a "
        "reward is being exploited. Read the newest `samples/`; look at `algorithm.kl.coefficient`, `train.optimizer.lr` and `rewards`.",
    ),
    Lesson(
        code="no_gradient",
        holds=_no_gradient,
        text="The gradient norm of this step was exactly 0: the weights did not move. Either every group was without signal, or the trained "
        "part of the answers is masked. Look at `rewards`, `algorithm.advantage` and `rollout.samples_per_prompt`.",
    ),
    Lesson(
        code="reward_errors",
        holds=_errors_grow,
        text="Rewards fail more and more often ({reward_errors:.0f} in this step). Those samples are left out of training, and the run stops "
        "above `reward_shaping.max_error_rate`. The errors stand in `samples/`; look at `rewards` and its `on_error`.",
    ),
    Lesson(
        code="nothing_scored",
        holds=_nothing_scored,
        text="No completion of this step could be scored ({reward_errors:.0f} reward errors): nothing was learned from it. The errors stand in "
        "`samples/`; look at `rewards`.",
    ),
    Lesson(
        code="ratio_off",
        holds=_ratio_off,
        text="The mean ratio of new to old probability is {ratio_mean:.4f} in an update that starts at the sampled policy, where it has to be "
        "1: old and new log-probabilities are computed differently. Look at `models.policy.dropout`, `models.policy.attention`, "
        "`models.policy.dtype` and `batch.layout`.",
    ),
    Lesson(
        code="sampler_gap",
        holds=_engine_drifts,
        text="Engine and trainer give the tokens that were sampled log-probabilities {sampler_logprob_gap_mean:.3g} nats apart on average "
        "({sampler_logprob_gap_max:.3g} at most, {first_sampler_gap:.3g} on average when first measured): training takes samples of one policy "
        "for those of another. Far apart on average, the run stops. Look at `algorithm.loss.correction` (weighs the difference out), at "
        "`models.policy.dtype` (float32 tells whether it is rounding) and at the engine's own number types, as in `rollout.vllm.options`.",
    ),
    Lesson(
        code="mostly_clipped",
        holds=_mostly_clipped,
        text="More than half of the tokens are clipped: the updates of a step move the policy further than the loss lets count. Look at "
        "`train.optimizer.lr`, `batch.updates_per_step`, `batch.epochs` and `algorithm.loss.clip_low`, `algorithm.loss.clip_high`.",
    ),
    Lesson(
        code="kl_coefficient_runs",
        holds=_coefficient_runs,
        text="The coefficient of the KL term is {kl_coefficient:.3g}, from {first_kl_coefficient:.3g} at the start: the controller cannot bring "
        "the KL down to its target, and the reward counts less and less. Look at `algorithm.kl.controller`, `train.optimizer.lr` (lower) and "
        "`rewards`.",
    ),
    Lesson(
        code="critic_lost",
        steps=10,
        holds=_critic_lost,
        text="The critic's mean value is {value_mean:.3g} where answers were worth {return_mean:.3g}, more than the spread of the rewards apart, "
        "{steps} steps in a row: advantages then judge the critic, not the answers. Look at `models.critic.optimizer.lr` (higher), "
        "`models.critic.value_clip` (wider), `train.freeze_policy_steps` (a head start) and `algorithm.advantage.lam` (nearer to 1).",
    ),
    Lesson(
        code="updates_skipped",
        holds=_skipped,
        text="{updates_skipped:.0f} update of this step was skipped, because a gradient was not finite or no token was trained; the weights "
        "did not move. The run stops after `train.nonfinite.skip_at_most` in a row. Look at `train.optimizer.lr`, `train.max_grad_norm` "
        "and `models.policy.dtype`.",
    ),
    Lesson(
        code="refill_exhausted",
        holds=_above("dynamic.groups_without_signal", 0.0),
        text="After the last extra rollout of this step some groups were still without signal; they are trained on as they are, so the number of "
        "groups does not shrink. Look at `rollout.dynamic.max_extra_rollouts` (more rollouts), `data.curriculum` and "
        "`data.train` (other rows), and `rollout.samples_per_prompt`.",
    ),
)

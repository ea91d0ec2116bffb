"""Every metric of the step and eval events: its unit, what it is, and what to do when it grows or falls. No torch.

`rft explain mfu` shows a row, and docs/metrics.md is made of them: `page`. A metric that does not apply to a run is absent from its events, never 0.
Leaves out numbers: from which one a run warns stands in `lessons`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """`parts`: names inside it -> what they are; words in capitals stand for names of the recipe."""

    unit: str
    text: str
    grows: str | None = None
    """What a rise means, and what to look at."""
    falls: str | None = None
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> list[tuple[str, str]]:
        found = [("unit", self.unit), ("grows", self.grows), ("falls", self.falls), *((f".{name}", text) for name, text in self.parts.items())]
        return [(name, text) for name, text in found if text]


def pages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Name, as in the event -> (what it is, rows of what else there is to say). The same name in both events is one page."""
    both = [name for name in STEP if name in EVAL]
    found = {name: (f"Of a step. {metric.text}", metric.rows) for name, metric in STEP.items()}
    found |= {name: (f"Of an evaluation. {metric.text}", metric.rows) for name, metric in EVAL.items() if name not in STEP}
    return found | {name: (f"Of a step. {STEP[name].text} Of an evaluation. {EVAL[name].text}", STEP[name].rows) for name in both}


def described(name: str, event: Mapping[str, Metric]) -> bool:
    """Whether a metric of an event has a row, and what is inside it a part.

    >>> described("seconds.rollout", STEP), described("reward_parts.answer.mean", STEP), described("pass@8", EVAL), described("seconds.lunch", STEP)
    (True, True, True, False)
    """
    first, _, inner = name.partition(".")
    metric = event.get(first) or event.get(_any_number(first))
    if metric is None:
        return False
    return not inner or any(_fits(inner, part) for part in metric.parts)


def page() -> str:
    """docs/metrics.md, whole."""
    lines = [HEAD, "", "## Of a step", "", *_table(STEP), "", "## Of an evaluation", "", INTERVALS, "", *_table(EVAL)]
    return "\n".join(lines) + "\n"


def _table(metrics: Mapping[str, Metric]) -> list[str]:
    rows = ["| metric | unit | what it is | when it grows | when it falls |", "|---|---|---|---|---|"]
    for name, metric in metrics.items():
        parts = "".join(f"<br>`.{part}`: {text}" for part, text in metric.parts.items())
        rows.append(f"| `{name}` | {metric.unit} | {metric.text}{parts} | {metric.grows or ''} | {metric.falls or ''} |")
    return rows


def _fits(name: str, part: str) -> bool:
    """Piece by piece; the last word in capitals takes the dots of a name too."""
    if part.isupper():
        return True
    head, _, rest = part.partition(".")
    if head.isupper():
        return name.endswith(f".{rest}")
    return name == part


def _any_number(name: str) -> str:
    """`pass@8` as `pass@k`, `mean@4` as `mean@n`: k answers of those that there are, or all n."""
    word, at, _ = name.partition("@")
    return f"{word}@{'k' if word in ('pass', 'maj') else 'n'}" if at else name


HEAD = """\
# Metrics

Made from `rftcli/observe/metrics.py`; `rft explain NAME` shows one row. A metric that does not apply to a run is absent from its events, never 0.
Statistics of completions are over all ranks at once. Warnings name the numbers from which a run tells of one (`rft explain CODE`). Panels of trackers
are in [tracking.md](tracking.md), where a step's seconds go in [speed.md](speed.md), definitions of evaluation in [evaluation.md](evaluation.md)."""
INTERVALS = "`value` with `low` and `high`, its 95% interval; names of sets stand in front: `eval.gsm8k.mean@1`."

_LR = "`train.optimizer.lr`"
_INTERVAL = {"value": "the mean", "low": "lower end of its 95% interval", "high": "upper end"}

# How to add one: the name that the event has, its unit, what it is; what is inside it as `parts`. Then
# `python -c "from rftcli.observe.metrics import page; open('docs/metrics.md', 'w').write(page())"`.
STEP: dict[str, Metric] = {
    "reward_mean": Metric(
        unit="reward", text="Mean reward of the parts, before shaping, over all scored completions.",
        grows="The run learns, or exploits the reward: read the newest `samples/`, compare with an evaluation.",
        falls=f"Lower {_LR}; look at `kl`, at `truncated_fraction`, and at `reward_parts` for the part that fell.",
    ),
    "reward_std": Metric(
        unit="reward", text="Sample deviation (n - 1) of those rewards.", falls="Towards 0 answers become alike: see `zero_signal_fraction`.",
    ),
    "reward_min": Metric(unit="reward", text="The smallest of them."),
    "reward_max": Metric(unit="reward", text="The largest of them.", falls="No answer is good any more, or a rule no longer finds it."),
    "group_reward_std": Metric(
        unit="reward", text="Mean over groups of the deviation inside a group: what a group's answers are compared by.",
        falls="Less to learn from: other rows, partial credit in `rewards`, a higher `rollout.temperature`.",
    ),
    "reward_parts": Metric(
        unit="reward", text="For each part of the rewards, before weights.",
        parts={
            "NAME.mean": "mean over the completions that it scored", "NAME.std": "sample deviation", "NAME.errors": "completions on which it failed",
            "NAME.uneven_groups": "groups in which it scored some answers and abstained on others",
        },
    ),
    "labels": Metric(unit="reward", text="Mean reward for each label of the data.", parts={"LABEL": "of the rows with that label"}),
    "user": Metric(unit="yours", text="What reward functions and services measured beside the reward.", parts={"NAME": "mean of what was logged"}),
    "shaped_reward_mean": Metric(unit="reward", text="Mean reward after `reward_shaping`: what is trained on."),
    "shaped_reward_std": Metric(unit="reward", text="Sample deviation of the rewards after shaping."),
    "reward_clip_fraction": Metric(
        unit="0 to 1", text="Share of completions whose reward `reward_shaping.clip` changed.", grows="The bounds cut the signal: widen them.",
    ),
    "overlong_penalty_mean": Metric(
        unit="reward", text="Mean penalty for length.", falls="Answers run into `reward_shaping.overlong`: they get longer.",
    ),
    "samples_masked": Metric(
        unit="completions", text="Left out of training because they were cut at the limit (`reward_shaping.truncated: mask`).",
        grows="A larger `rollout.max_new_tokens`.",
    ),
    "greedy_reward_mean": Metric(unit="reward", text="Mean reward of the greedy twins that ReMax compares with."),
    "greedy_dropped": Metric(unit="groups", text="Whose greedy twin could not be scored: they are not trained on.", grows="See `reward_errors`."),
    "groups": Metric(unit="groups", text="Prompts of the step, over all ranks."),
    "group_size": Metric(
        unit="completions", text="Scored completions of a group.", parts={"mean": "over groups", "min": "of the smallest", "max": "of the largest"},
        falls="Rewards fail: a baseline is made of fewer answers.",
    ),
    "zero_signal_fraction": Metric(
        unit="0 to 1", text="Share of groups whose rewards are all alike: they have no advantage. Absent with one answer a prompt.",
        grows="The task is too easy or too hard: other rows (`data.curriculum`, `data.train`), partial credit in `rewards`, more "
        "`rollout.samples_per_prompt`, `rollout.dynamic`.",
    ),
    "reward_errors": Metric(
        unit="completions", text="On which a part of the reward, or its combination, failed. They never become a number.",
        grows="The errors stand in `samples/`; the run stops above `reward_shaping.max_error_rate`.",
    ),
    "samples_dropped": Metric(
        unit="completions", text="Without a reward, so that nothing is learned from them.", grows="See `reward_errors` and a part's `on_error`.",
    ),
    "advantage_mean": Metric(unit="advantage", text="Mean advantage of the completions."),
    "advantage_std": Metric(
        unit="advantage", text="Sample deviation of the advantages.", falls="At 0 nothing is learned: see `zero_signal_fraction`.",
    ),
    "advantage_min": Metric(unit="advantage", text="The smallest advantage."),
    "advantage_max": Metric(
        unit="advantage", text="The largest advantage.", grows="A group with hardly any spread was scaled up: `algorithm.advantage.min_std`, `clip`.",
    ),
    "advantage_clip_fraction": Metric(unit="0 to 1", text="Share of tokens whose advantage `algorithm.advantage.clip` changed."),
    "return_mean": Metric(unit="reward", text="Mean return of the tokens: what the critic should say."),
    "value_mean": Metric(
        unit="reward", text="Mean value that the critic gave the tokens.",
        grows="Far from `return_mean` advantages judge the critic: a higher `models.critic.optimizer.lr`, `train.freeze_policy_steps`.",
        falls="The same in the other direction.",
    ),
    "loss": Metric(
        unit="loss", text="All terms together, as they are differentiated. It says little about progress: see `reward_mean`.",
    ),
    "policy_loss": Metric(unit="loss", text="The policy's term alone."),
    "value_loss": Metric(
        unit="loss", text="The critic's.", grows=f"Returns change faster than it learns: {_LR} lower, or the critic's higher.",
    ),
    "ptx_loss": Metric(
        unit="nats a token", text="Mean negative log-prob of the known answers of `train.supervised`.",
        grows="What they teach is unlearned: a larger `train.supervised.coefficient`.",
    ),
    "router_loss": Metric(
        unit="loss", text="Balance of the experts, 1 where all are used alike.",
        grows="Experts are used unevenly: a larger `models.policy.router_loss`.",
    ),
    "kl": Metric(
        unit="nats a token", text="Rollout policy against the reference.",
        grows=f"Far from what the model knew, and often an exploited reward: `algorithm.kl.coefficient` higher, {_LR} lower, read `samples/`.",
    ),
    "kl_update": Metric(
        unit="nats a token", text="Rollout policy against the policy after the updates of the step (k3): how far one step went.",
        grows=f"{_LR} lower, fewer `batch.updates_per_step` or `batch.epochs`.",
        falls=f"At 0 nothing is learned; small for long: {_LR} may be higher.",
    ),
    "kl_coefficient": Metric(
        unit="", text="Of the KL term in this step.",
        grows="The controller cannot bring the KL down to its target: `algorithm.kl.controller`, a lower rate.",
    ),
    "teacher_kl": Metric(
        unit="nats a token", text="Mean of log-prob of the policy minus that of the teacher on sampled tokens: the reverse KL.",
        falls="The policy comes nearer to the teacher.", grows=f"It leaves it: a larger `algorithm.advantage.distill_coefficient`, a lower {_LR}.",
    ),
    "entropy": Metric(
        unit="nats a token", text="Of the policy's next token, mean over trained tokens.",
        falls=f"It explores less: {_LR} lower, `algorithm.loss.clip_high` a little larger, `algorithm.loss.entropy_coefficient`.",
        grows="It becomes random: a smaller `entropy_coefficient`, a KL term.",
    ),
    "entropy_coefficient": Metric(unit="", text="Of the entropy bonus in this step, where `algorithm.loss.entropy_controller` moves it."),
    "grad_norm": Metric(
        unit="", text="Of the gradient before it is cut to `train.max_grad_norm`; the largest of the step's updates.",
        grows=f"Above `train.max_grad_norm` steps are cut: {_LR} lower, `reward_shaping` for rare large rewards.",
        falls="Exactly 0: every group without signal, or everything masked.",
    ),
    "critic_grad_norm": Metric(unit="", text="The same of the critic."),
    "lr": Metric(unit="", text="Learning rate of the last update."),
    "critic_lr": Metric(unit="", text="The critic's."),
    "updates_skipped": Metric(
        unit="updates", text="That did nothing: a gradient was not finite, or no token was trained.",
        grows=f"{_LR} lower, `models.policy.dtype: float32`; the run stops after `train.nonfinite.skip_at_most` in a row.",
    ),
    "clip_low_fraction": Metric(
        unit="0 to 1", text="Share of tokens that the loss clipped from below (negative advantage, ratio too small).",
        grows=f"The updates of a step go too far: {_LR} lower, fewer `batch.updates_per_step` or `batch.epochs`.",
    ),
    "clip_high_fraction": Metric(
        unit="0 to 1", text="Share of tokens clipped from above (positive advantage, ratio too large).", grows="The same; or a larger `clip_high`.",
    ),
    "ratio_mean": Metric(
        unit="ratio", text="Mean of new over old probability. 1 exactly in an update that starts at the sampled policy.",
        grows="Away from 1 in such a run: dropout, or old and new log-probs are computed differently (`models.policy.attention`, `batch.layout`).",
    ),
    "ratio_std": Metric(unit="ratio", text="Deviation of the ratios.", grows=f"Updates go further: {_LR}, `batch.updates_per_step`."),
    "ratio_max": Metric(
        unit="ratio", text="The largest ratio of a token.", grows="Single tokens move far: `algorithm.loss.dual_clip`, a lower rate.",
    ),
    "off_policy_fraction": Metric(
        unit="0 to 1", text="Share of tokens that `algorithm.loss.off_policy_mask` left out.",
        grows="Samples are too old for the policy: fewer `batch.updates_per_step`.",
    ),
    "correction": Metric(
        unit="ratio", text="Weights of trainer over engine (`algorithm.loss.correction`), before they are bounded.",
        parts={
            "mean": "over tokens; 1 where both agree", "max": "the largest", "masked_fraction": "share of tokens that count nothing",
            "effective": "effective sample size, 0 to 1", "k3": "KL from engine to trainer, nats a token",
            "missing": "tokens without a log-prob of the engine", "rejected_fraction": "share of sequences that were left out whole",
        },
        falls="`effective` towards 0: few tokens carry the step. See `sampler_logprob_gap`.",
    ),
    "sampler_logprob_gap": Metric(
        unit="nats a token", text="Distance between the log-probs that the engine and the trainer give the sampled tokens.",
        parts={"mean": "over trained tokens: some 1e-6 in float32, 0.01 in bfloat16", "max": "the largest of a token"},
        grows="Two distributions: `algorithm.loss.correction`, `models.policy.dtype: float32` (tells whether it is rounding), number types of the "
        "engine in `rollout.vllm.options`. Far apart on average, the run stops.",
    ),
    "policy_version": Metric(unit="updates", text="Applied updates of the policy so far."),
    "version_lag": Metric(
        unit="updates", text="How much older than the policy the oldest token of a trained answer is (`rollout.partial`).",
        parts={"mean": "over answers", "max": "of the oldest"}, grows="A smaller `rollout.max_version_lag`.",
    ),
    "response_tokens": Metric(
        unit="tokens", text="Length of a completion.",
        parts={
            "mean": "of all", "min": "the shortest", "max": "the longest", "terminated_mean": "of those that ended by themselves",
            "terminated_min": "the shortest of them", "terminated_max": "the longest of them",
        },
        grows="Steps take longer; with `truncated_fraction`: `rollout.max_new_tokens`, `reward_shaping.overlong`.",
        falls="Answers collapse to a few words: read `samples/`; is shortness rewarded?",
    ),
    "prompt_tokens_mean": Metric(unit="tokens", text="Mean length of a prompt."),
    "truncated_fraction": Metric(
        unit="0 to 1", text="Share of completions that were cut at the limit.",
        grows="Rewards judge half an answer: `rollout.max_new_tokens`, `rollout.stop`, the model's end token (`models.policy.chat`).",
    ),
    "tokens": Metric(unit="tokens", text="Prompts and completions of the step, over all ranks, without groups that `rollout.dynamic` replaced."),
    "tokens_total": Metric(unit="tokens", text="The same over the run, all attempts; `train.max_tokens` ends it there."),
    "data_passes": Metric(unit="passes", text="Over the training rows, so far."),
    "dynamic": Metric(
        unit="", text="Refill of groups without signal (`rollout.dynamic`).",
        parts={
            "extra_rollouts": "further rollouts of the step", "groups_rejected": "groups that lost their place",
            "groups_accepted": "groups with signal", "groups_without_signal": "trained on without signal, because no rollout was left",
            "groups_unscored": "groups with fewer than two rewards",
            "tokens_rejected": "sampled and not trained on", "reward_mean_sampled": "mean reward of everything that was sampled, the rejected too",
        },
        grows="`extra_rollouts` and `tokens_rejected` are what a step pays for signal: `data.curriculum`, other rows.",
    ),
    "over_sample": Metric(
        unit="", text="Prompts asked for beyond those needed (`rollout.over_sample`).",
        parts={
            "prompts_sampled": "prompts that were begun", "groups_stopped": "stopped in the middle", "groups_unused": "finished and not needed",
            "tokens_unused": "sampled for nothing",
        },
        grows="`tokens_unused` against `tokens`: a smaller factor, or `rollout.partial`, which keeps them.",
    ),
    "partial": Metric(
        unit="", text="Answers that go on in the next step (`rollout.partial`).",
        parts={
            "groups_continued": "groups that went on from an earlier step", "answers_continued": "their answers",
            "groups_kept": "left for the next step",
            "answers_kept": "unfinished answers among them", "tokens_kept": "what they have so far", "groups_dropped": "given up",
            "tokens_dropped": "what they had", "stale_token_fraction": "share of trained tokens from older weights",
        },
        grows="`stale_token_fraction`: see `version_lag`, `rollout.max_version_lag`.",
    ),
    "keep": Metric(
        unit="completions", text="Of `rollout.keep`.", parts={"samples_trained": "trained on", "samples_left_out": "sampled and left out"},
    ),
    "replay": Metric(
        unit="prompts", text="That come back (`rollout.replay`).",
        parts={
            "came_back": "in this step", "waiting": "wait now", "given_up": "over the run: without signal once too often, or no room to wait",
        },
        grows="`given_up`: rows beyond this model; `data.curriculum` or other data.",
    ),
    "curriculum": Metric(
        unit="", text="Choice of rows by how hard they are (`data.curriculum`).",
        parts={
            "passed_over": "rows that were not taken in this step", "rows_measured": "rows with a pass rate", "pass_rate": "mean over them, 0 to 1",
            "inside_fraction": "share of them within `low` and `high`",
        },
        falls="`inside_fraction`: few rows are left at this level; wider bounds or other data.",
    ),
    "seconds": Metric(
        unit="s", text="Where the time since the last step line went, on the rank whose rollout took longest.",
        parts={
            "rollout": "the engine; rewards that run beside it are in it", "score": "rewards that came after the last answer",
            "credit": "reference, old log-probs, values, teacher, advantages", "learn": "forward, backward, optimizer",
            "sync": "new weights to the engine", "eval": "evaluations since the last step line", "checkpoint": "what the loop waited for",
            "other": "what no stage claims: data, events, waiting for other ranks", "total": "all of it",
        },
        grows="docs/speed.md has the keys for each.",
    ),
    "memory_gib": Metric(
        unit="GiB", text="Peak of torch's memory on the fullest GPU, by the end of the stage; on GPUs.",
        parts={
            "rollout": "the engine, and scoring beside it", "score": "counted with rollout", "credit": "reference, critic, teacher",
            "learn": "most of all",
            "sync": "weights on their way", "eval": "as rollout", "checkpoint": "the copy",
        },
        grows="Near the GPU's size: `batch.tokens_per_micro_batch` smaller, see `rft plan`.",
    ),
    "tokens_per_second_per_gpu": Metric(
        unit="tokens/s", text="`tokens` over `seconds.total` and the number of GPUs.", falls="See `seconds` for the stage that took longer.",
    ),
    "idle_fraction": Metric(
        unit="0 to 1",
        text="Share of the update's tokens, prompts too, in completions whose advantage is 0: they change nothing and did not pass through the model "
        "(`batch.skip_zero_advantage`). Entropy, KL, ratios, clipped fractions and `sampler_logprob_gap` are means over the others, but a KL in the "
        "reward is one over all. 0 where no completion of an update had an advantage: then all passed.",
        grows="Ever fewer answers teach anything: see `zero_signal_fraction`; `rollout.dynamic` draws other prompts instead.",
    ),
    "rank_load": Metric(
        unit="1 = even", text="Work of the rank with most, by the mean of all ranks, in tokens with attention weighed (`batch.balance`).",
        grows="Few or very unlike completions a rank, or groups whose prompt is shared: more prompts a step, or fewer ranks.",
        parts={
            "sampled": "with every completion on the rank that sampled it; all of them where a pass comes before the update",
            "trained": "as they were in the update, without those that did not pass: few that are left may be less even than all",
        },
    ),
    "mfu": Metric(
        unit="0 to 1",
        text="Share of the GPU's data-sheet arithmetic (dense bfloat16) over the whole step: 6 x parameters x tokens that passed through the update, "
        "generation counted as free. "
        "On known GPUs.",
        falls="See `seconds`: a step that mostly samples has a low one by nature; docs/speed.md.",
    ),
}  # fmt: skip
"""By name in the step event."""

EVAL: dict[str, Metric] = {
    "prompts": Metric(unit="prompts", text="Rows of the set."),
    "prompts_scored": Metric(unit="prompts", text="With one scored completion at least.", falls="Rewards fail: see `reward_errors`."),
    "samples_per_prompt": Metric(unit="completions", text="n of the metrics below."),
    "mean@n": Metric(
        unit="reward", text="Mean reward of a prompt's scored completions.", parts=_INTERVAL,
        falls="While `reward_mean` grows: the training set is learned by heart, or the reward exploited. `train.early_stop`, `checkpoint.keep_best`.",
    ),
    "best@n": Metric(unit="reward", text="Largest reward of a prompt, all n scored.", parts=_INTERVAL),
    "worst@n": Metric(unit="reward", text="Smallest reward of a prompt, all n scored.", parts=_INTERVAL),
    "std@n": Metric(unit="reward", text="Deviation of a prompt's rewards, all n scored.", parts=_INTERVAL, falls="Answers become alike."),
    "pass@k": Metric(
        unit="0 to 1", text="Chance that one of k completions reaches the full mark.", parts=_INTERVAL,
        falls="While `mean@n` grows: the policy answers more surely and knows less ways; see `entropy`.",
    ),
    "maj@k": Metric(unit="reward", text="Expected score of the majority answer of k completions.", parts=_INTERVAL),
    "labels": Metric(
        unit="", text="The metrics above and `prompts_scored` for the prompts of one label, where a set has several.",
        parts={"LABEL": "of that label"},
    ),
    "parts": Metric(
        unit="reward", text="For each part of the rewards, over all completions.",
        parts={"NAME.mean": "mean", "NAME.std": "sample deviation", "NAME.errors": "failures", "NAME.uneven_groups": "prompts it scored in part"},
    ),
    "reward_errors": Metric(unit="completions", text="Completions that could not be scored: they take part in nothing."),
    "response_tokens": Metric(unit="tokens", text="Mean length of a completion."),
    "truncated_fraction": Metric(unit="0 to 1", text="Share of completions that were cut at the limit."),
}  # fmt: skip
"""By name in a set of the eval event."""

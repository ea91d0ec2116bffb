"""`rewards` and `reward_shaping`: how completions are scored."""

from typing import Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, Options, Section, Target, Text


class RewardPart(Section):
    """One part of a reward: a rule by name, a scorer by name, or a python function."""

    rule: Text | None = Field(None, description="Name of a built-in rule.")
    model: Text | None = Field(None, description="Instead of a rule: name of an entry of `models.scorers`.")
    python: Target | None = Field(
        None,
        description="Instead of a rule: `module.path:function` that scores a completion. Its arguments may be any of prompt, completion, "
        "completion_ids, reference, label, columns, messages, finish, tokens, sample, draw, step, total_steps, log_extra, log_metric, and its "
        "`options`; it returns a number, None to abstain, or a mapping of named numbers. A class is made once with the options and then called.",
    )
    name: Text | None = Field(None, description="Name of the part in logs and samples; null: the rule's, the scorer's or the function's own name.")
    weight: float = Field(
        1.0, ge=-1e6, le=1e6, description="What the part's value is multiplied with before the parts are combined; 0 is only logged."
    )
    options: Options = Field({}, description="Arguments of the rule or function.")
    on_error: Literal["fail_sample", "abstain", "stop"] = Field(
        "fail_sample", description="When the part fails: the sample has no reward, the part is left out of the sum, or the run stops."
    )
    text: Literal["clean", "keep_special"] = Field("clean", description="Whether the part sees the completion without or with special tokens.")
    clip: tuple[float, float] | None = Field(None, description="Lowest and highest value of the part, before its weight; null: as it comes.")
    timeout_seconds: float | None = Field(
        None, gt=0, le=86400, description="A part that takes longer for one completion has failed, as `on_error` says; null: it is waited for."
    )

    @property
    def shown_name(self) -> str:
        """The name in logs: the given one, else that of the rule, scorer or function."""
        return self.name or self.rule or self.model or (self.python or "").rpartition(":")[2]


class CombineFunction(Section):
    """A function that makes rewards of parts, a whole group at a time."""

    python: Target = Field(
        description="`module.path:function` that gets the scores of a whole group and returns one reward or None for each of its completions, or "
        "(rewards, metrics). Its arguments may be any of scores, errors, weights, prompt, completions, completion_ids, reference, label, columns, "
        "finishes, tokens, samples, draw, step, total_steps, and its `options`."
    )
    options: Options = Field({}, description="Arguments of the function.")


class Reward(Section):
    """How completions of one label are scored."""

    combine: Literal["sum", "product", "min", "gate"] | CombineFunction = Field(
        "sum",
        description="How the weighted values of the parts become one reward: their sum, product or least; or the sum behind a gate, the first part, "
        "where it is above 0; or `{python: module:function}`.",
    )
    renormalise: bool = Field(False, description="Of a sum: a part that abstains gives its weight to those that do not.")
    parts: tuple[RewardPart, ...] = Field(description="The weighted parts; a bare list of parts in the place of the entry means the same.")


class Overlong(Section):
    """A soft penalty for length (DAPO)."""

    buffer: Literal["auto"] | Count = Field(
        description="Tokens before `rollout.max_new_tokens` over which the penalty grows from 0 to -1; `auto` is a fifth of the shortest one of all "
        "labels."
    )
    factor: float = Field(1.0, gt=0, le=1e6, description="What the penalty is multiplied with.")


class RewardShaping(Section):
    """What happens to rewards between the parts and the advantage, in the order of the keys; never in evaluation."""

    truncated: Literal["keep", "mask", "penalise"] = Field(
        "keep",
        description="Answers that were cut at `max_new_tokens`: keep their reward, leave them out of baseline, loss and denominators, or multiply "
        "rewards above 0 with `truncated_factor`.",
    )
    truncated_factor: float = Field(0.0, ge=0, lt=1, description="Share of a reward above 0 that a truncated answer keeps under `penalise`.")
    missing_eos_penalty: float = Field(0.0, ge=0, le=1e6, description="Subtracted from the reward of an answer that did not end by itself.")
    overlong: Overlong | None = Field(None, description="A penalty that grows over the last tokens before `max_new_tokens`; null is off.")
    running_norm: Literal["off", "scale", "full"] = Field(
        "off",
        description="Divide by the running deviation of all training rewards so far (scale), after subtracting their running mean (full).",
    )
    clip: tuple[float, float] | None = Field(None, description="Lowest and highest reward; null: no bounds.")
    max_error_rate: float = Field(0.05, ge=0, le=1, description="Share of a step's completions that may fail to be scored before the run stops.")

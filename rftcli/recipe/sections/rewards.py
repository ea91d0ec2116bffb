"""`rewards` and `reward_shaping`: how completions are scored."""

from typing import Literal

from pydantic import Field

from rftcli.recipe.sections.base import Options, Section, Target, Text


class RewardPart(Section):
    """One part of a reward: a rule by name, a scorer by name, or a python function."""

    rule: Text | None = Field(None, description="Name of a built-in rule.")
    model: Text | None = Field(None, description="Instead of a rule: name of an entry of `models.scorers`.")
    python: Target | None = Field(
        None,
        description="Instead of a rule: `module.path:function` that scores a completion. Its arguments may be any of prompt, completion, "
        "completion_ids, reference, label, columns, messages, finish, tokens, sample, draw, step, and its `options`; it returns a number, or None "
        "to abstain.",
    )
    name: Text | None = Field(None, description="Name of the part in logs and samples; null: the rule's, the scorer's or the function's own name.")
    weight: float = Field(1.0, description="What the part's value is multiplied with before the parts are summed; weights are not renormalised.")
    options: Options = Field({}, description="Arguments of the rule or function.")
    on_error: Literal["fail_sample", "abstain", "stop"] = Field(
        "fail_sample", description="When the part fails: the sample has no reward, the part is left out of the sum, or the run stops."
    )
    text: Literal["clean", "keep_special"] = Field("clean", description="Whether the part sees the completion without or with special tokens.")

    @property
    def shown_name(self) -> str:
        """The name in logs: the given one, else that of the rule, scorer or function."""
        return self.name or self.rule or self.model or (self.python or "").rpartition(":")[2]


class Reward(Section):
    """How completions of one label are scored."""

    combine: Literal["sum"] = Field("sum", description="How the values of the parts become one reward.")
    parts: tuple[RewardPart, ...] = Field(description="The weighted parts; a bare list of parts in the place of the entry means the same.")


class RewardShaping(Section):
    """What happens to rewards between the parts and the advantage."""

    max_error_rate: float = Field(0.05, ge=0, le=1, description="Share of a step's completions that may fail to be scored before the run stops.")

"""`rollout` and `data`, the part about which completions are asked for: refill, replay, filtering, labels of their own, curriculum."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, NonNegative, Options, Section, Share, Target, Text


class LabelSampling(Section):
    """How training completions of one label are sampled; what is null is as in `rollout`."""

    temperature: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Sampling temperature of this label; its log-probs in training are taken at the same one."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Probability mass that tokens of this label are sampled from.")
    top_k: NonNegative | None = Field(None, description="Number of likeliest tokens that are sampled from for this label; 0 is all.")
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Least probability of a token of this label, relative to the likeliest one."
    )
    max_new_tokens: Count | None = Field(None, description="Longest completion of this label, in tokens; at most that of `rollout`.")
    min_new_tokens: NonNegative | None = Field(None, description="Shortest completion of this label, in tokens.")
    stop: tuple[Text, ...] | None = Field(None, description="Strings that end a completion of this label, instead of those of `rollout`.")
    stop_token_ids: tuple[NonNegative, ...] | None = Field(
        None, description="Token ids that end a completion of this label, instead of those of `rollout`."
    )


class Dynamic(Section):
    """Dynamic sampling: groups without signal give their place to fresh prompts (DAPO)."""

    max_extra_rollouts: Count = Field(
        3, description="Extra rollouts of a step, at most; groups that are without signal then are trained on as they are."
    )
    range: tuple[float, float] | None = Field(
        None, description="Groups whose mean lies outside these bounds are replaced too, as in `[0.1, 0.9]`; null asks for a spread alone."
    )
    metric: Text = Field("reward", description="What spread and mean are taken of: the reward, or the name of a part that every label has.")


class OverSample(Section):
    """Over-sampling: more prompts than a step needs, without those whose answers take longest."""

    factor: Annotated[float, Field(gt=1, le=8)] = Field(1.25, description="Prompts that are sampled, over prompts that are trained on.")
    slice_tokens: Count = Field(256, description="Tokens that all answers grow by before whole groups are counted; more is stopped later.")


class Partial(Section):
    """Partial rollouts: what a step does not finish goes on in the next one, under newer weights."""

    budget_tokens: Count | None = Field(
        None,
        description="Tokens that an answer grows by in a step before its place goes to another one; null: only `over_sample` ends a step early.",
    )


class Keep(Section):
    """Best-of-n filtering: of the sampled completions of a prompt, which ones are trained on."""

    best: NonNegative = Field(1, description="So many of the highest reward.")
    worst: NonNegative = Field(1, description="So many of the lowest reward.")


class Replay(Section):
    """Prompts whose completions all had the same reward come back later."""

    after_steps: Count = Field(10, description="Steps until a prompt without signal may come back.")
    times: Count = Field(1, description="How often one prompt may come back.")
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.25, description="Largest share of prompts that come back, of those that a step asks for; what is no whole prompt counts for the next step."
    )
    max_waiting: Count = Field(4096, description="Prompts that wait, at most; more are not remembered.")
    below: float | None = Field(None, description="Only prompts whose mean reward was below this come back; null: all without signal.")


class Curriculum(Section):
    """Which rows are passed over when their turn comes, by what was measured in training."""

    kind: Literal["pass_rate", "python"] = Field(
        "pass_rate", description="Passes over rows whose measured pass rate is outside `range`, or asks a class of yours."
    )
    range: tuple[float, float] = Field((0.1, 0.9), description="pass_rate: rows that were measured within these bounds are always drawn.")
    share: Share = Field(0.1, description="pass_rate: share of the other rows that is drawn all the same, so that their pass rate stays known.")
    metric: Text = Field("reward", description="pass_rate: what is measured, the reward or the name of a part that every label has.")
    pass_mark: float = Field(1.0, description="pass_rate: a completion passes when its metric is at least this.")
    memory: Share = Field(0.5, description="pass_rate: weight of what was measured before, beside the newest measurement.")
    python: Target | None = Field(
        None, description="python: `module.path:class`, made with `options`, with the methods takes, after_step, state_dict and load_state_dict."
    )
    options: Options = Field({}, description="python: arguments of the class.")

"""`data`: what the run trains on and is evaluated on."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, DataPath, Name, NonNegative, Options, Section, Target, Text
from rftcli.recipe.sections.sampling import Curriculum


class Columns(Section):
    """Which column of a row is what; a dotted name goes into nested objects."""

    prompt: Text = Field("prompt", description="Column of the prompt: text, or a list of messages.")
    reference: Text | None = Field(
        None, description="Column of the reference answer, needed in every row; null takes `answer` or `reference` where a row has one."
    )
    label: Text | None = Field(None, description="Column that names the reward entry of a row; null gives every row the label of its set.")
    id: Text | None = Field(None, description="Column of the row's own id; null numbers the rows.")


class DataSource(Section):
    """Where rows come from and how they are read; shared by training and evaluation sets."""

    path: DataPath | None = Field(
        None,
        description="File of rows (JSON Lines, JSON, Parquet, CSV, TSV; text also with .gz) or folder that `datasets` reads, relative to the recipe "
        "that names it; or a data set of the hub as `org/name`.",
    )
    split: Text | None = Field(None, description="Split of a folder or a hub data set that has several.")
    python: Target | None = Field(None, description="Instead of a path: `module.path:function`, called with `options`, yields one mapping a row.")
    options: Options = Field(
        {}, description="Arguments of the `python` function; of a folder or hub data set: name, data_dir, data_files, revision, token."
    )
    where: Text | None = Field(None, description="Only rows for which this is true, as in `level >= 3 and subject == 'algebra'`.")
    limit: Count | None = Field(None, description="Only the first so many rows, of those that `where` lets pass; null takes all.")
    label: Text | None = Field(None, description="Reward entry that scores the rows of this set; null is `default`.")
    system: str | None = Field(None, description="System turn for the message lists of this set that have none.")
    template: Text | None = Field(
        None, description="Text of the prompt with slots: `{column}`, or `{}` for the prompt column; null takes that column as it is."
    )
    as_chat: bool = Field(False, description="Whether a text prompt becomes one user message, so that the chat template applies to it.")
    columns: Columns = Field(default_factory=Columns, description="Which column of a row is what.")
    extract_reference: Text | None = Field(
        None, description="Regular expression with one group: the reference is what the group finds first in the column."
    )


class TrainSource(DataSource):
    """One training set."""

    name: Name | None = Field(None, description="Name of the set in logs and row ids; null: `train`, `train1`, ...")
    weight: float = Field(1.0, gt=0, description="Share of the draws, relative to the other training sets.")
    streaming: bool = Field(
        False, description="Whether rows are read while the run goes on, shuffled within blocks, never all in memory; needs `train.steps`."
    )


class SetSampling(Section):
    """How the completions of one evaluation set are sampled; what is null is as in `eval`, else as in `rollout`."""

    temperature: Annotated[float, Field(ge=0)] | None = Field(None, description="Sampling temperature of this set; 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Probability mass that tokens of this set are sampled from.")
    top_k: NonNegative | None = Field(None, description="Number of likeliest tokens that are sampled from in this set; 0 is all.")
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Least probability of a token of this set, relative to the likeliest one."
    )
    max_new_tokens: Count | None = Field(None, description="Longest completion of this set, in tokens.")
    min_new_tokens: NonNegative | None = Field(None, description="Shortest completion of this set, in tokens.")


class EvalSource(DataSource):
    """One evaluation set."""

    samples_per_prompt: Count = Field(1, description="Completions of each prompt in evaluation.")
    sampling: SetSampling = Field(default_factory=SetSampling, description="How this set is sampled where it differs from the others.")


class Data(Section):
    """What the run trains on and is evaluated on."""

    train: tuple[TrainSource, ...] = Field(description="The training set, or a list of sets with weights.")
    eval: dict[Name, EvalSource] = Field({}, description="Evaluation sets by name.")
    seed: NonNegative | None = Field(None, description="Key of the order of the data alone; null takes the run's `seed`.")
    shuffle: bool = Field(True, description="Whether every pass over the data has a new order, keyed by the seed.")
    curriculum: Curriculum | None = Field(None, description="Passes over rows by what was measured in training; null draws every row in turn.")
    overlong_prompt: Literal["refuse", "drop", "cut_left", "cut_right"] = Field(
        "refuse", description="What happens to a prompt of more than `rollout.max_prompt_tokens`; drops and cuts are counted."
    )
    check_reference: Literal["off", "warn", "refuse"] = Field(
        "warn", description="What happens if the data's own reference answers do not get full marks from their rules, found before the run."
    )

"""`train.supervised`: a stream of known answers that is learned beside the rewarded ones (PTX)."""

from typing import Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, FilePath, Options, Section, Target, Text


class SupervisedColumns(Section):
    """Which column of a row is what; a dotted name goes into nested objects."""

    prompt: Text = Field("prompt", description="Column of the prompt: text, or messages, of which a last one of the assistant is the answer.")
    reference: Text | None = Field(
        None, description="Column of the answer; null takes `completion`, `answer` or `reference` where a row has one, or the assistant's last turn."
    )


class SupervisedSource(Section):
    """Where the rows come from and how they are read."""

    path: FilePath | None = Field(None, description="File of rows, relative to the recipe that names it.")
    python: Target | None = Field(None, description="Instead of a path: `module.path:function`, called with `options`, yields one mapping a row.")
    options: Options = Field({}, description="Arguments of the `python` function.")
    limit: Count | None = Field(None, description="Only the first so many rows; null takes all.")
    system: str | None = Field(None, description="System turn for the message lists that have none.")
    as_chat: bool = Field(False, description="Whether a text prompt becomes one user message, so that the chat template applies to it.")
    columns: SupervisedColumns = Field(default_factory=SupervisedColumns, description="Which column of a row is what.")


class Supervised(Section):
    """The next-token loss of known answers, added to every update of the policy."""

    data: SupervisedSource = Field(description="The rows.")
    coefficient: float = Field(0.1, gt=0, description="What the loss, a mean over the answers' tokens, is multiplied with.")
    rows_per_update: Literal["auto"] | Count = Field("auto", description="Rows of one update, over all ranks; auto: as many as it has prompts.")

"""What the recipe says about data and prompts, as plain records. A plan holds these; they go through JSON both ways (`codec`).

They leave out how anything is read (`files`, `rows`), rendered (`prompts`) or ordered (`source`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rftcli.errors import UsageError

DEFAULT_LABEL = "default"
"""The label of a row that has none, and the reward entry that serves such rows."""


class OverlongPrompt(StrEnum):
    """What happens to a prompt of more than `max_prompt_tokens`. REFUSE: an error before the run; DROP: the row is never drawn; CUT_LEFT: its
    oldest tokens go (a leading beginning-of-sequence stays); CUT_RIGHT: its newest tokens go (the opening of the answer stays)."""

    REFUSE = "refuse"
    DROP = "drop"
    CUT_LEFT = "cut_left"
    CUT_RIGHT = "cut_right"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where a row keeps what. A dotted name goes into nested objects: `reward_model.ground_truth`.

    >>> Columns(prompt="question", reference="answer").label is None
    True
    """

    prompt: str | None = None
    """None: `prompt`."""
    reference: str | None = None
    """A named reference must be there in every row. None: whichever of `answer` and `reference` the set has, for the rows that have it; a set
    with both is refused."""
    label: str | None = None
    """None: every row has the label of the set. A null in a named column means the same."""
    id: str | None = None
    """None: `<set>:<index of the row>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """One data set: a file, a folder, a set of the hub or a python function, and how its rows become prompts.

    >>> DataSpec(name="gsm8k", path="data/train.jsonl", columns=Columns(prompt="question"), label="math").weight
    1.0
    """

    name: str
    path: str | None = None
    """A file (`files.FORMATS`), a folder, or a data set of the hub; `origin` says which."""
    python: str | None = None
    """Instead of a path: `package.module:function`, called with `options`, yields one mapping a row. Has to yield the same rows every time."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function, or of the library that reads a folder or the hub (`hub.OPTIONS`)."""
    split: str | None = None
    """Of a folder or a data set of the hub that has several."""
    where: str | None = None
    """Only rows for which this expression is true (`where`)."""
    template: str | None = None
    """Text of the prompt with slots for columns (`template`); None: the prompt column as it is."""
    streaming: bool = False
    """Rows are read while the run goes on, and shuffled within blocks (`stream`); never all of them in memory."""
    weight: float = 1.0
    """Share of the draws, relative to the other sets."""
    limit: int | None = None
    """Only the first so many rows, of those that `where` lets pass."""
    label: str | None = None
    system: str | None = None
    """System turn for the message lists that have none; goes before the policy's own."""
    as_chat: bool = False
    """A text prompt becomes one user message, so that the chat template applies to it."""
    columns: Columns = field(default_factory=Columns)
    extract_reference: str | None = None
    """Regular expression with one group: the reference is what the group finds first, without surrounding blanks."""
    samples_per_prompt: int = 1
    """Completions of each prompt in evaluation; training has `rollout.samples_per_prompt`."""
    answers: bool = False
    """Every row carries the answer that is to be learned: it is the row's reference (`answers`)."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.python is None):
            raise UsageError(f"data set `{self.name}` needs exactly one of `path` and `python`")
        if self.split is not None and self.python is not None:
            raise UsageError(f"data set `{self.name}` has a `split`, which a `python` source does not take")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise UsageError(f"data set `{self.name}`: `weight` must be above 0, got {self.weight}", hint="leave the set out instead")
        if (self.limit is not None and self.limit < 1) or self.samples_per_prompt < 1:
            raise UsageError(f"data set `{self.name}`: `limit` and `samples_per_prompt` must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSpec:
    """How message lists become text, and how the answer begins (`models.policy.chat`).

    >>> ChatSpec(prefill="<think>").score_prefill
    True
    """

    template: str | None = None
    """Jinja text, or the path of a file that holds it. None: the tokenizer's own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Names that the template reads, such as `enable_thinking`."""
    system: str | None = None
    """System turn for message lists that have none."""
    prefill: str | None = None
    """The beginning of every answer, written for the model: the end of the prompt."""
    score_prefill: bool = True
    """The reward sees prefill + completion. Read by whoever scores, not here."""

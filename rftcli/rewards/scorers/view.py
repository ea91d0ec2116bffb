"""What a scorer is shown of one completion: the prompt as it was before the policy's own marks, the turns, the answer.

Leaves out how each kind writes it (`http`, `judge`, `models.classifier`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rftcli.types import Completion, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One completion to be scored."""

    prompt: str
    """The prompt's text without a prefill, and without what the policy's tokenizer puts in front of any text."""
    messages: tuple[Message, ...]
    """Empty for a plain prompt."""
    completion: str
    """The answer as the part reads it, a scored prefill in front."""
    reference: Any
    label: str
    columns: Mapping[str, Any]
    place: str
    """For errors: row, draw and sample."""

    @property
    def turns(self) -> tuple[Message, ...]:
        """The conversation with the answer in it; a plain prompt is the user's turn."""
        asked = self.messages or ({"role": "user", "content": self.prompt},)
        return (*asked, {"role": "assistant", "content": self.completion})


def view_of(completion: Completion, text: str, front: str = "") -> View:
    """`text`: what the part reads. `front`: what the policy's tokenizer puts in front of a text, as text."""
    prompt = completion.prompt
    return View(
        prompt=prompt.text.removesuffix(prompt.prefill).removeprefix(front),
        messages=prompt.messages,
        completion=text,
        reference=prompt.reference,
        label=prompt.label,
        columns=prompt.columns,
        place=f"row {prompt.row_id} (draw {prompt.draw}, sample {completion.sample})",
    )


def canonical(value: Any) -> str:
    """The same text for equal plain data; what is no JSON is shown as text."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)

"""`template`: the text of a prompt with slots for the row's columns: `Question: {question}\nAnswer:`.

`{}` is the prompt column, `{name}` any column, dotted for nested objects; `{{` and `}}` are braces. Values are text or numbers. It leaves out chat
templates, which are the model's (`prompts`).
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from rftcli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Template:
    """A checked template: text and column names in turn. An empty name is the prompt column.

    >>> Template.parse("{{Q}} {question}:").parts
    (('{Q} ', 'question'), (':', None))
    """

    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """UsageError for a template that cannot be filled, or that has no slot: it would make all prompts the same."""
        hint = "slots are `{column}`, or `{}` for the prompt column; braces themselves are `{{` and `}}`"
        try:
            pieces = list(string.Formatter().parse(text))
        except ValueError as error:
            raise UsageError(f"the template cannot be read: {error}", hint=hint) from error
        for _, name, spec, conversion in pieces:
            if name is not None and (spec or conversion or "[" in name or name != name.strip() or name.isdigit()):
                shown = f"{{{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}"
                raise UsageError(f"the template has the slot `{shown}`, which is not the name of a column", hint=hint)
        merged: list[tuple[str, str | None]] = []
        for literal, name, _, _ in pieces:  # an escaped brace ends a piece of its own
            if merged and merged[-1][1] is None:
                merged[-1] = (merged[-1][0] + literal, name)
            else:
                merged.append((literal, name))
        if all(name is None for _, name in merged):
            raise UsageError("the template has no slot: every prompt would be the same text", hint=hint)
        return cls(tuple(merged))

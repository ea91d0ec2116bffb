"""Jinja templates of judges, in jinja2's sandbox: no attributes of Python, no files, no imports.

A template may use prompt (text), messages (turns), completion, reference, label and columns. One that asks for anything else is refused before a
run, because an undefined name would silently be empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rftcli.errors import UsageError
from rftcli.rewards.scorers.view import View

if TYPE_CHECKING:
    from jinja2 import Template

VARIABLES = ("prompt", "messages", "completion", "reference", "label", "columns")


def judge_template(text: str) -> Template:
    """UsageError for what is no template, reads a name that no completion has, or does not read the completion."""
    from jinja2 import StrictUndefined, TemplateError, meta  # recipes without a judge need not wait for it
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, autoescape=False)
    try:
        read = meta.find_undeclared_variables(environment.parse(text))
        template = environment.from_string(text)
    except TemplateError as error:
        hint = "Jinja: `{{ completion }}`, `{% if reference %}...{% endif %}`"
        raise UsageError(f"the judge's prompt is no template: {error}", hint=hint) from error
    unknown = sorted(read - set(VARIABLES))
    if unknown:
        raise UsageError(f"the judge's prompt reads `{unknown[0]}`, which no completion has", hint=f"it may read {', '.join(VARIABLES)}")
    if "completion" not in read:
        raise UsageError("the judge's prompt does not read `completion`: every answer would have the same score")
    return template


def asked(template: Template, view: View) -> str:
    """The question about one completion. ValueError with what is wrong with this row."""
    values: dict[str, Any] = {name: getattr(view, name) for name in VARIABLES}
    values["messages"] = [dict(message) for message in view.messages]
    values["columns"] = dict(view.columns)
    try:
        return template.render(**values)
    except Exception as error:  # a template is a program, and raises what it likes
        raise ValueError(f"the judge's prompt cannot be filled in: {type(error).__name__}: {error}") from error

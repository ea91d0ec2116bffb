"""The rule `json_schema`: is the answer JSON, and does it fit a schema? Needs the package jsonschema.

Strict JSON: no comments, no trailing commas, no NaN. Nothing is fetched: a `$ref` leads inside the schema or is an error of the recipe.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Mapping
from typing import Any

from rftcli.rewards.inputs import RuleInput, cut_after

_FENCE = re.compile(r"\A```[A-Za-z]*[ \t]*\r?\n(.*?)\r?\n?[ \t]*```\Z", re.DOTALL)
MISSING = object()


def json_schema(item: RuleInput, *, schema: Mapping[str, Any] | None = None, fence: bool = True, after: str | None = None) -> float:
    """1 if the text, white space at its ends aside, is JSON that fits `schema`; None: the row's reference is the schema, as a mapping or as text.
    `fence`: the JSON may stand in a Markdown fence. ValueError for a reference that is no schema."""
    check = _validator(schema_text(item.reference) if schema is None else json.dumps(schema, sort_keys=True))
    text = cut_after(item.text, after)
    value = MISSING if text is None else read_json(text, fence)
    return float(value is not MISSING and check.is_valid(value))


def read_json(text: str, fence: bool = False) -> Any:
    """The value, or MISSING where `text` is not JSON (or nested too deeply to be read)."""
    text = text.strip()
    if fence and (fenced := _FENCE.match(text)):
        text = fenced[1]
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return MISSING


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def schema_text(reference: Any) -> str:
    """A schema of a row in one form. ValueError if there is none."""
    value = read_json(reference) if isinstance(reference, str) else reference
    if not isinstance(value, (Mapping, bool)):
        raise ValueError("the row's reference is no JSON schema")
    problem = schema_problem(value)
    if problem is not None:
        raise ValueError(f"the row's reference is no JSON schema: {problem}")
    return json.dumps(value, sort_keys=True)


def schema_problem(schema: Any) -> str | None:
    """What is wrong with a schema; None if nothing, or if the package that could tell is not installed."""
    if importlib.util.find_spec("jsonschema") is None:
        return None
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        return f"{error.message} at {error.json_path}"
    return None


@functools.lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    schema = json.loads(text)
    return validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())


def check_schema(options: Mapping[str, Any]) -> list[str]:
    problem = None if options["schema"] is None else schema_problem(options["schema"])
    return [] if problem is None else [f"option `schema` is no JSON schema: {problem}"]

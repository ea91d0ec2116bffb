"""Rules of `rollout` across keys: which sampling options do not go together. What needs the tokenizer is in the engine."""

from __future__ import annotations

from collections.abc import Iterator

from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.sections import Recipe
from rftcli.recipe.sections.rollout import HfOptions, Penalties, Structured


def structured_form(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    form = recipe.rollout.structured
    if form is None:
        return
    path = ("rollout", "structured")
    both = ((*path, "regex"), (*path, "json_schema"))
    if form.regex is None and form.json_schema is None:
        yield Finding(path=path, message="needs `regex` or `json_schema`", reads=both, at_key=True)
    if form.regex is not None and form.json_schema is not None:
        yield Finding(path=both[1], message="`regex` and `json_schema` exclude each other", reason="keep one of the two", reads=both, at_key=True)


def structured_alone(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    rollout = recipe.rollout
    if rollout.structured is None:
        return
    reads = (("rollout", "structured"),)
    why = "the form decides where a completion ends"
    if rollout.min_new_tokens > 0:
        message, hint = "must be 0 with `structured`", "put the shortest length into the form"
        yield Finding(path=("rollout", "min_new_tokens"), message=message, reason=why, hint=hint, reads=reads)
    if rollout.ignore_eos:
        yield Finding(path=("rollout", "ignore_eos"), message="must be false with `structured`", reason=why, reads=reads)
    for key, banned in (("bad_words", rollout.bad_words), ("suppress_tokens", rollout.hf.options.suppress_tokens)):
        if banned:
            path = ("rollout", key) if key == "bad_words" else ("rollout", "hf", "options", key)
            message = f"`{key}` and `structured` exclude each other"
            why, hint = "no token might be left to sample", "put it into the form"
            yield Finding(path=path, message=message, reason=why, hint=hint, reads=reads, at_key=True)
    if rollout.hf.options.no_repeat_ngram_size:
        path = ("rollout", "hf", "options", "no_repeat_ngram_size")
        yield Finding(path=path, message="must be 0 with `structured`", reason="no token might be left to sample", reads=reads)


def bias_keys(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for key in recipe.rollout.logit_bias:
        if not key or (key.removeprefix("-").isdecimal() and not (key.isascii() and key.isdecimal())):
            yield Finding(
                path=("rollout", "logit_bias", key),
                message=f"`{key}` is no token id",
                reason="ids are counted from 0; any other text has to be one token",
                at_key=True,
            )


def batch_limits(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    hf = recipe.rollout.hf
    if hf.batch_rows != "auto" and hf.batch_tokens is not None:
        yield Finding(
            path=("rollout", "hf", "batch_tokens"),
            message="`batch_rows` and `batch_tokens` exclude each other",
            reason="keep one of the two",
            reads=(("rollout", "hf", "batch_rows"),),
        )


def fake_sampling(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    rollout = recipe.rollout
    if rollout.engine != "fake":
        return
    asked = {
        ("penalties",): rollout.penalties != Penalties(),
        ("logit_bias",): bool(rollout.logit_bias),
        ("bad_words",): bool(rollout.bad_words),
        ("structured",): rollout.structured is not None and rollout.structured != Structured(),
        ("hf", "options"): rollout.hf.options != HfOptions(),
    }
    for keys, given in asked.items():
        if given:
            yield Finding(
                path=("rollout", *keys),
                message="has no effect on the engine `fake`",
                reason="its answers come from a key and not from scores",
                reads=(("rollout", "engine"),),
                at_key=True,
            )

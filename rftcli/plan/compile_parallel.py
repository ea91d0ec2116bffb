"""Whether a model can be cut over several GPUs of one engine, as vLLM and SGLang cut it: by heads, by heads of keys, and by the width of an MLP."""

from __future__ import annotations

from rftcli.plan.facts import ModelFacts

MOST_PARTS = 1024


def uneven(model: ModelFacts | None, parts: int) -> str | None:
    """Why `parts` GPUs cannot share the model; None where they can, or its files do not say. Fewer heads of keys than GPUs are repeated.

    >>> uneven(ModelFacts(path="m", heads=14, query_width=896, key_width=128), 4)
    '14 heads cannot be cut into 4 equal parts'
    """
    if model is None or parts == 1:
        return None
    heads, keys = model.heads, key_heads(model)
    inner = None if model.experts else model.inner
    if heads and heads % parts:
        return f"{heads} heads cannot be cut into {parts} equal parts"
    if keys and (keys % parts if keys >= parts else parts % keys):
        return f"{keys} heads of keys can neither be cut into {parts} equal parts nor repeated for them"
    if inner and inner % parts:
        return f"the {inner} numbers of its MLP cannot be cut into {parts} equal parts"
    return None


def key_heads(model: ModelFacts) -> int | None:
    if not model.heads or not model.query_width or not model.key_width:
        return None
    return model.key_width * model.heads // model.query_width


def fitting_numbers(model: ModelFacts, most: int = MOST_PARTS) -> list[int]:
    """The numbers of GPUs up to `most` that can share it."""
    return [parts for parts in range(1, most + 1) if uneven(model, parts) is None]

"""What a recipe's sampling means to SGLang: settings -> its sampling parameters. No torch, no SGLang.

SGLang ends a completion at the model's own end tokens; the trainer's, and the stop ids, are given beside them. What it leaves out: the parameters
that belong to one row (its seed, and what an earlier rollout has sampled already), which `of_row` adds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rftcli.algo.keyed import key64
from rftcli.engines.words import bias_ids
from rftcli.errors import UsageError
from rftcli.types import SamplingSettings

SEED_BITS = 63
"""SGLang's seeds are signed 64-bit numbers."""
OTHER_ENGINES = "rollout.engine: vllm and hf can"


def needs_tokenizer(*, stop: bool, structured: Mapping[str, Any] | None, least: Sequence[int]) -> bool:
    """Whether the engine itself has to read or write text; else ids go in and out. `stop`: are there stop strings? `least`: all shortest lengths,
    which SGLang keeps by the tokenizer's end token."""
    return stop or bool(structured) or any(least)


def arguments(settings: SamplingSettings, eos_ids: Sequence[int], tokenizer: Any) -> dict[str, Any]:
    """Parameters that all rows of a call share. Raises UsageError for what SGLang does not do, or does in another way than the other engines."""
    _refuse(settings)
    stops = sorted({*settings.stop_token_ids, *(() if settings.ignore_eos else eos_ids)})
    structured = settings.structured or {}
    schema = structured.get("json_schema")
    return {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k or -1,
        "min_p": settings.min_p,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
        "repetition_penalty": 1.0,
        "logit_bias": {str(token): bias for token, bias in bias_ids(settings.logit_bias, tokenizer).items()} or None,
        "stop": [text for text in settings.stop if text] or None,
        "stop_token_ids": stops or None,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "ignore_eos": settings.ignore_eos,
        "max_new_tokens": settings.max_new_tokens,
        "min_new_tokens": settings.min_new_tokens,
        "regex": structured.get("regex"),
        "json_schema": None if schema is None else json.dumps(schema),
    }


def of_row(
    shared: Mapping[str, Any], settings: SamplingSettings, *, draw: int, sample: int, done: int, limit: int, seeded: bool, greedy: bool
) -> dict[str, Any]:
    """The parameters of one row, of which `done` tokens are sampled already and which is cut at `limit`."""
    own: dict[str, Any] = {"max_new_tokens": limit - done, "min_new_tokens": max(0, min(settings.min_new_tokens, limit) - done)}
    if seeded:
        own["sampling_seed"] = key64("sglang", settings.seed, draw, sample, done) >> (64 - SEED_BITS)
    if greedy:
        own["temperature"] = 0.0
    return {**shared, **own}


def _refuse(settings: SamplingSettings) -> None:
    """What the recipe's rules refuse before anything is loaded, and what only a call can show."""
    for name in settings.options:
        raise UsageError(f"the engine sglang has no sampling option `{name}`", hint="rollout.hf.options are of the engine hf")
    refused = {
        "has no `bad_words`": bool(settings.bad_words),
        "has one temperature for a whole completion": settings.first_token_temperature is not None,
        "counts a repetition penalty over the completion alone, the other engines over the prompt too": settings.repetition_penalty != 1.0,
        "ignores `stop_token_ids` together with `ignore_eos`": settings.ignore_eos and bool(settings.stop_token_ids),
        "ends at a stop string before `min_new_tokens`": settings.min_new_tokens > 0 and any(settings.stop),
        "reports log-probs from before top-p, top-k and min-p": settings.logprobs
        and (settings.top_p, settings.top_k, settings.min_p) != (1.0, 0, 0.0),
    }
    for why, found in refused.items():
        if found:
            raise UsageError(f"SGLang cannot sample so: it {why}", hint=OTHER_ENGINES)

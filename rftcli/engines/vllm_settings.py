"""What a recipe's sampling means to vLLM: settings -> arguments of its `SamplingParams`. No torch, no vLLM.

End tokens are given as stop ids and vLLM's own notion of an end token is off, so a completion ends where it does in the other engines. What it leaves
out: the arguments that belong to one row (`seed`, and what an earlier rollout has sampled already), which `of_row` adds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rftcli.algo.keyed import key64
from rftcli.engines.words import banned_sequences, bias_ids
from rftcli.errors import UsageError
from rftcli.types import FinishReason, SamplingSettings

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
"""vLLM's word for why a completion ended."""
FREE_SEEDS = ("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu")
"""Model runners that draw with a seed a row at no cost: the second generation on GPUs, and the one on CPUs."""
SEED_BITS = 63
"""vLLM's seeds are signed 64-bit numbers."""


def needs_tokenizer(*, stop: Sequence[str], bad_words: Sequence[str], structured: Mapping[str, Any] | None) -> bool:
    """Whether the engine itself has to read or write text; else ids go in and out."""
    return bool(stop or bad_words or structured)


def arguments(settings: SamplingSettings, eos_ids: Sequence[int], tokenizer: Any, fields: Collection[str] | None) -> dict[str, Any]:
    """Arguments that all rows of a call share. `fields`: the names that this vLLM's `SamplingParams` has; None: it
    runs in another process, which refuses what it does not know.

    Raises UsageError for what it cannot do, and for words that the tokenizer cannot spell.
    """
    for name in settings.options:
        raise UsageError(f"the engine vllm has no sampling option `{name}`", hint="rollout.hf.options are of the engine hf")
    if settings.first_token_temperature is not None:
        raise UsageError("the engine vllm has one temperature for a whole completion", hint="rollout.first_token_temperature is of the engine hf")
    stops = sorted({*settings.stop_token_ids, *(() if settings.ignore_eos else eos_ids)})
    banned_sequences(settings.bad_words, tokenizer)  # refuses what cannot be spelt, as in the other engines
    found: dict[str, Any] = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p,
        "repetition_penalty": settings.repetition_penalty,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
        "logit_bias": bias_ids(settings.logit_bias, tokenizer) or None,
        "bad_words": list(settings.bad_words) or None,
        "stop": [text for text in settings.stop if text] or None,
        "include_stop_str_in_output": True,
        "stop_token_ids": stops or None,
        "ignore_eos": True,
        "detokenize": bool(settings.stop),
        "skip_special_tokens": False,
        "max_tokens": settings.max_new_tokens,
        "min_tokens": settings.min_new_tokens,
        "logprobs": 0 if settings.logprobs else None,
    }
    optional = {"flat_logprobs": settings.logprobs, "skip_clone": True}
    if fields is None:
        return found
    found |= {name: value for name, value in optional.items() if name in fields}
    unknown = sorted(set(found) - set(fields))
    if unknown:
        raise UsageError(f"this version of vLLM has no sampling argument `{unknown[0]}`", hint="vLLM 0.22 and later have")
    return found


def of_row(
    shared: Mapping[str, Any], settings: SamplingSettings, *, draw: int, sample: int, done: int, limit: int, seeded: bool, greedy: bool
) -> dict[str, Any]:
    """The arguments of one row, of which `done` tokens are sampled already and which is cut at `limit`."""
    own: dict[str, Any] = {
        "max_tokens": limit - done,
        "min_tokens": max(0, min(settings.min_new_tokens, limit) - done),
        "seed": row_seed(settings.seed, draw, sample, done) if seeded and not greedy else None,
    }
    if greedy:
        own["temperature"] = 0.0
    return {**shared, **own}


def row_seed(seed: int, draw: int, sample: int, done: int = 0) -> int:
    """A completion that goes on reads another stream than its beginning did."""
    return key64("vllm", seed, draw, sample, done) >> (64 - SEED_BITS)


def rollout_seed(seed: int, sampled: Sequence[int]) -> int:
    """For an engine's own generator: a function of what is sampled (draws, and tokens that are there already), so that neither a resumed run nor an
    answer that goes on repeats its first noise."""
    return key64("vllm rollout", seed, *sampled) >> (64 - SEED_BITS)


def graphs(most: int, *, one_number: bool) -> dict[str, Any]:
    """Graphs for every number of rows up to `most`, which is rounded up to a number that vLLM captures: it cuts others down to the one below, and the
    largest batches would run without. By default it stops at 512. `one_number`: this vLLM takes the largest and makes the others itself."""
    multiple = 1 if most <= 2 else 4 if most <= 4 else 8 if most <= 256 else 16
    largest = -(-most // multiple) * multiple
    if one_number:
        return {"max_cudagraph_capture_size": largest}
    every = (1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16))
    return {"cudagraph_capture_sizes": [size for size in every if size <= largest]}


def compilation(most: int, own: Mapping[str, Any] | int, *, one_number: bool) -> dict[str, Any]:
    """`compilation_config` with these graphs, beside what a person has written there; sizes of theirs count alone, since vLLM refuses two answers.
    A bare number is its mode, as vLLM takes it."""
    own = {"mode": own} if isinstance(own, int) else own
    if {"max_cudagraph_capture_size", "cudagraph_capture_sizes"} & set(own):
        return dict(own)
    return graphs(most, one_number=one_number) | dict(own)

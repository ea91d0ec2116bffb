"""How servers are asked for the log-probs of tokens that are given: one row for each form of request and answer. Pure; no network.

A form is a path, the body of a request for a list of ids, and how its answer is read: for each id (log-prob or None, text or None), in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Known = tuple[float | None, str | None]
"""(log-prob, text) of one token; the first token of a text has no log-prob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherApi:
    path: str
    names_model: bool
    """Whether a request says which model; its name is the first of /v1/models where a recipe gives none."""
    body: Callable[[Sequence[int]], Mapping[str, Any]]
    read: Callable[[Mapping[str, Any], Sequence[int]], list[Known]]
    """Raises KeyError, IndexError, TypeError or ValueError for an answer that is no such thing."""


def _vllm_body(ids: Sequence[int]) -> Mapping[str, Any]:
    return {"prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "add_special_tokens": False}


def _read_vllm(answer: Mapping[str, Any], ids: Sequence[int]) -> list[Known]:
    """`prompt_logprobs`: null for the first token, then {id: {logprob, decoded_token}} of the given token, and perhaps of likelier ones."""
    rows = answer["choices"][0]["prompt_logprobs"]
    found: list[Known] = []
    for row, number in zip(rows, ids, strict=True):
        entry = None if row is None else row[str(number)]
        found.append((None, None) if entry is None else (float(entry["logprob"]), entry.get("decoded_token")))
    return found


def _echo_body(ids: Sequence[int]) -> Mapping[str, Any]:
    return {"prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 1}


def _read_echo(answer: Mapping[str, Any], ids: Sequence[int]) -> list[Known]:
    """`logprobs`: {tokens, token_logprobs}, of the given tokens and then of the sampled ones."""
    found = answer["choices"][0]["logprobs"]
    logprobs, texts = found["token_logprobs"], found["tokens"]
    if len(logprobs) < len(ids) or len(logprobs) != len(texts):
        raise ValueError(f"{len(logprobs)} log-probs and {len(texts)} texts for {len(ids)} tokens")
    return [(None if value is None else float(value), text) for value, text in zip(logprobs[: len(ids)], texts[: len(ids)], strict=True)]


def _sglang_body(ids: Sequence[int]) -> Mapping[str, Any]:
    return {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
    }


def _read_sglang(answer: Mapping[str, Any], ids: Sequence[int]) -> list[Known]:
    """`meta_info.input_token_logprobs`: [log-prob or null, id, text or null] of each given token."""
    rows = answer["meta_info"]["input_token_logprobs"]
    found: list[Known] = []
    for (value, number, *text), expected in zip(rows, ids, strict=True):
        if number != expected:
            raise ValueError(f"the answer is about token {number}, {expected} was asked for")
        found.append((None if value is None else float(value), text[0] if text else None))
    return found


# How to add one: a row with the path, the body for a list of ids and the reader of its answer, and the name in the recipe's `models.teacher.api`.
TEACHER_APIS: dict[str, TeacherApi] = {
    "vllm": TeacherApi(path="/v1/completions", names_model=True, body=_vllm_body, read=_read_vllm),
    "echo": TeacherApi(path="/v1/completions", names_model=True, body=_echo_body, read=_read_echo),
    "sglang": TeacherApi(path="/generate", names_model=False, body=_sglang_body, read=_read_sglang),
}

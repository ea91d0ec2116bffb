"""Structured output: which tokens may come next so that a completion keeps to a regular expression or a JSON schema. The library llguidance decides.

Light: libraries are imported where they are used. What it leaves out: applying the masks (`shaping`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rftcli.errors import MachineError, RftError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def problem(structured: Mapping[str, Any]) -> str | None:
    """What is wrong with {"regex": ..} or {"json_schema": ..}, before any model is loaded; None if nothing is. MachineError without llguidance."""
    text: str = _llguidance().LLMatcher.validate_grammar(_source(structured), None)
    return _first_lines(text) if text.strip() else None


class Grammar:
    """A form compiled for one tokenizer. `end_ids`: ids that may come where the form allows an end."""

    def __init__(self, structured: Mapping[str, Any], tokenizer: Any, end_ids: Sequence[int]) -> None:
        library = _llguidance()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UsageError(
                f"rollout.structured cannot read a tokenizer of the kind {type(tokenizer).__name__}",
                hint="it takes fast tokenizers (a `tokenizer.json`); check the form in a reward part instead",
            )
        import llguidance.hf

        try:
            self._tokens = llguidance.hf.from_tokenizer(tokenizer, eos_token=sorted(end_ids) or None)
            self._start = library.LLMatcher(self._tokens, _source(structured))
        except (ValueError, RuntimeError, TypeError) as error:
            raise UsageError(f"rollout.structured cannot be used with this tokenizer: {_first_lines(str(error))}") from error
        if self._start.is_error():
            raise UsageError(f"rollout.structured is not a form: {_first_lines(self._start.get_error())}")
        self.matcher().allowed(len(tokenizer))  # can it begin at all?

    def matcher(self, ids: Sequence[int] = ()) -> Matcher:
        """A row's own state after `ids`."""
        row = Matcher(self._start.deep_copy())
        for token in ids:
            row.push(token)
        return row


class Matcher:
    """Where one row stands in the form."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def push(self, token: int) -> None:
        """Take a sampled token. RftError if the form does not allow it."""
        if not self._inner.consume_token(token):
            raise RftError(f"token {token} does not fit rollout.structured: {_first_lines(self._inner.get_error())}")

    @property
    def complete(self) -> bool:
        """Nothing but an end token could follow."""
        return bool(self._inner.is_stopped())

    def allowed(self, vocabulary: int) -> NDArray[Any]:
        """(V,) tokens that may come next; ids that the tokenizer does not have may not."""
        import numpy as np

        bits = np.unpackbits(np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint8), bitorder="little")[:vocabulary].astype(bool)
        if self._inner.is_error():
            text = _first_lines(self._inner.get_error())
            if "NoExtension" in text:
                raise RftError(f"no token of this tokenizer goes on with rollout.structured ({text})", hint="allow other characters in the form")
            raise RftError(f"rollout.structured: {text}", hint="a simpler form may be within the library's limits")
        return np.concatenate([bits, np.zeros(vocabulary - len(bits), dtype=bool)]) if len(bits) < vocabulary else bits


def _source(structured: Mapping[str, Any]) -> str:
    matcher = _llguidance().LLMatcher
    if "regex" in structured:
        return matcher.grammar_from_regex(structured["regex"])
    return matcher.grammar_from_json_schema(json.dumps(structured["json_schema"]))


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MachineError("rollout.structured needs the package llguidance", hint="pip install 'rftcli[structured]'") from error
    return llguidance


def _first_lines(text: str) -> str:
    """The beginning of the library's message; what follows is its own grammar, which nobody wrote."""
    text = re.sub(r"^at \d+\(\d+\): ", "", text.strip())
    lines = [line.strip() for line in text.splitlines() if line.strip(" ^")]
    kept = [line for line in lines if not line[:1].isdigit()]
    return " ".join(kept[:3])

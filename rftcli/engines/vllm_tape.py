"""What several decode steps of vLLM gave its sequences, put together as its scheduler takes it: one step with several tokens a sequence.

How long each sequence takes part is decided here (`Tape.alive`): to its last allowed token, or until it drew a token that may end it.
What it leaves out: sending steps, and what the scheduler makes of them (`vllm_decode`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rftcli.errors import RftError


class Row(NamedTuple):
    """A sequence, after how many tokens it ends at the latest, and its new blocks."""

    request: Any
    end: int
    blocks: Any


class Tape:
    """What the steps of one turn, at `most` so many, gave R sequences. `counts`: (R,) their tokens; `step`: the number of the next."""

    def __init__(self, rows: Sequence[Row], most: int) -> None:
        self.names, self.step = [row.request.request_id for row in rows], 0
        self.counts = np.zeros(len(rows), dtype=np.int64)
        self._ends = np.array([row.end for row in rows])
        self._limits = np.minimum(self._ends, most)
        self._stops = np.array(sorted(_stops(rows)), dtype=np.int64)
        self._ids = np.zeros((len(rows), int(self._limits.max())), dtype=np.int64)
        self._hit = np.zeros(len(rows), dtype=bool)
        self._made: list[tuple[Any, Any]] = []

    def alive(self) -> Any:
        """(A,) places of the sequences that take the next step, as far as steps were read."""
        return np.flatnonzero((self._limits > self.step) & ~self._hit)

    def read(self, step: int, alive: Any, names: list[str], wait: Callable[[], Any]) -> None:
        """One step's tokens, in whatever order they come. RftError where there is not one for each."""
        made = wait()
        if list(made.req_ids) != names:
            places = dict(zip(names, alive.tolist(), strict=True))
            alive = np.array([places[name] for name in made.req_ids])
        ids = [token for one in made.sampled_token_ids for token in one]
        if len(ids) != len(alive):
            raise RftError(f"vLLM made {len(ids)} tokens in a step of {len(alive)} sequences")
        self._ids[alive, step] = ids
        self.counts[alive] += 1
        self._hit[alive] |= np.isin(self._ids[alive, step], self._stops)
        self._made.append((alive, made))

    def may_have_ended(self) -> Any:
        """(R,) bool: there is a token that ends some sequence, or no more is allowed."""
        return self._hit | (self.counts >= self._ends)

    def as_one_step(self) -> Any:
        """A step that gave every sequence several tokens, as vLLM's scheduler knows them from drafts."""
        ids = [row[:count] for row, count in zip(self._ids.tolist(), self.counts.tolist(), strict=True)]
        index = {name: place for place, name in enumerate(self.names)}
        _, last = self._made[-1]
        return replace(last, req_ids=self.names, req_id_to_index=index, sampled_token_ids=ids, logprobs=self._logprobs())

    def _logprobs(self) -> Any:
        """Flat, sequence by sequence. A step has columns for what its sequences asked for: the first has the most, later ones fewer or none."""
        steps = [(step, alive, made.logprobs) for step, (alive, made) in enumerate(self._made) if made.logprobs is not None]
        if not steps:
            return None
        _, _, one = steps[0]
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        found: dict[str, Any] = {"cu_num_generated_tokens": starts.tolist()}
        for name in set(one._fields) - set(found):
            parts = [np.asarray(getattr(logprobs, name)) for *_, logprobs in steps]
            found[name] = np.zeros((int(starts[-1]), *parts[0].shape[1:]), dtype=parts[0].dtype)
            for (step, alive, _), part in zip(steps, parts, strict=True):
                found[name][(starts[alive] + step, *map(slice, part.shape[1:]))] = part
        return one._replace(**found)


def _stops(rows: Sequence[Row]) -> set[int]:
    """Tokens that may end one of them."""
    found: set[int] = set()
    for row in rows:
        params = row.request.sampling_params
        found.update(params.stop_token_ids or ())
        found.update(() if params.eos_token_id is None else (params.eos_token_id,))  # vLLM sets none where it is ignored
    return found

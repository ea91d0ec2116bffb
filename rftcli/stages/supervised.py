"""The supervised stream beside the policy's updates (PTX): known answers in keyed order, and their next-token loss with a denominator of its own.

Leaves out reading and tokenising (`data.supervised`). The stream remembers its position.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rftcli.algo.keyed import keyed_permutation
from rftcli.errors import ResumeError
from rftcli.plan.plan import Plan, SupervisedPlan
from rftcli.protocols import LossFunction, World
from rftcli.stages import batches
from rftcli.types import Batch, Denominators, Experience

TEMPERATURE = 1.0
"""Of the log-probs of known answers: nobody sampled them."""


class SupervisedStream:
    """Rows as (ids of prompt and answer, how many are the prompt's), drawn in one keyed permutation after the other; nothing is dropped."""

    def __init__(self, rows: Sequence[tuple[Sequence[int], int]], plan: SupervisedPlan, seed: int) -> None:
        assert rows, "a stream without rows"
        self.next_row = 0
        self.plan = plan
        self._rows = rows
        self._seed = seed
        self._orders: dict[int, list[int]] = {}
        self._fingerprint = hashlib.sha256(json.dumps([[list(ids), prompt] for ids, prompt in rows]).encode()).hexdigest()

    def take(self, world: World) -> list[Experience]:
        """This rank's rows of the next update; moves the stream alike on every rank. A rank beyond the rows gets one in which nothing is trained."""
        first, self.next_row = self.next_row, self.next_row + self.plan.rows_per_update
        mine = [self._experience(number) for number in range(first + world.rank, self.next_row, world.size)]
        if mine:
            return mine
        nothing = self._experience(first)
        nothing.mask = torch.zeros_like(nothing.mask)
        return [nothing]

    def row(self, number: int) -> int:
        """Index of the row that is drawn as number 0, 1, ..."""
        number_of_pass, place = divmod(number, len(self._rows))
        if number_of_pass not in self._orders:
            self._orders = {number_of_pass: keyed_permutation("supervised", self._seed, number_of_pass, n=len(self._rows))}
        return self._orders[number_of_pass][place]

    def _experience(self, number: int) -> Experience:
        ids, prompt = self._rows[self.row(number)]
        length = len(ids) - prompt
        return Experience(
            sample=None,
            token_ids=torch.tensor(ids, dtype=torch.int64),
            prompt_tokens=prompt,
            mask=torch.ones(length, dtype=torch.bool),
            advantages=torch.zeros(length),
        )

    def state_dict(self) -> Mapping[str, Any]:
        return {"next_row": self.next_row, "seed": self._seed, "rows": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ResumeError if the position was counted in other rows."""
        if (state["rows"], state["seed"]) != (self._fingerprint, self._seed):
            raise ResumeError("the rows of train.supervised.data have changed", hint="bring the data back as it was, or start a new run")
        self.next_row = int(state["next_row"])


def supervised_loss(coefficient: float) -> LossFunction:
    """coefficient x the mean negative log-prob of the answers' tokens over the update."""

    def loss(new: torch.Tensor, _: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        total = -new.sum() / batch.denominators.tokens
        return coefficient * total, {"ptx_loss": total.detach(), "loss": coefficient * total.detach()}

    return loss


def supervised_batches(stream: SupervisedStream, plan: Plan, world: World, *, pad_id: int, device: torch.device) -> list[Batch]:
    """The stream's micro-batches of the next update, equally many on every rank. Collective."""
    rows = stream.take(world)
    tokens, sequences = (int(value) for value in world.sum([batches.count(rows).tokens, batches.count(rows).sequences]))
    return batches.micro_batches(rows, plan.batch, Denominators(tokens=tokens, sequences=sequences), world, pad_id=pad_id, device=device)

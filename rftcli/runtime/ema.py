"""A running mean of the trained weights: float32, one part a rank, in CPU memory. It follows the learner and is part of its checkpoints.

The mean is over the weights that are live, in their own number type; frozen weights need none. Leaves out how parts are cut and joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rftcli.runtime.learner import DeepSpeedLearner
from rftcli.runtime.writes import NOW, Writer


class RunningMean:
    """mean <- decay x mean + (1 - decay) x weights, after every applied update; it begins as the weights."""

    def __init__(self, learner: DeepSpeedLearner, *, decay: float, rank: int) -> None:
        self._learner = learner
        self._decay = decay
        self._rank = rank
        self._trained = learner.trained()
        self._names = {id(parameter): name for name, parameter in self._trained.items()}
        self._parts = {name: self._part(parameter).clone() for name, parameter in self._trained.items()}

    @torch.no_grad()
    def updated(self) -> None:
        for name, parameter in self._trained.items():
            self._parts[name].lerp_(self._part(parameter), 1.0 - self._decay)

    def put_in(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Give parameters the mean as their `data`, whole and in their own number type; frozen ones stay. Collective."""
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is not None:
                parameter.data = self._learner.joined(self._parts[name], parameter).to(parameter.dtype)

    def save(self, directory: Path, to: Writer = NOW) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        to.tensors(self._parts, directory / f"rank_{self._rank}.pt")

    def load(self, directory: Path) -> None:
        self._parts = torch.load(directory / f"rank_{self._rank}.pt", weights_only=True)

    def _part(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self._learner.part(parameter).detach().to(device="cpu", dtype=torch.float32)

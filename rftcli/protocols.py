"""The architecture on one page: the protocols, and the record that ties the trained roles together.

Everything heavy (an engine, a model, a process group, a tracker) sits behind one of these. Stages see nothing else, so a stage is tested with
the fakes that ship: `engines.fake.FakeSampler`, `runtime.world.SoloWorld`. Scenarios the cut was checked against, each a short test in
`tests/test_scenarios.py`: refill of groups without signal, partial rollouts, PPO with a critic, ReMax's greedy twin, a supervised stream beside
the update, offline pairs, rollout from an older adapter, a judge on other GPUs, resume in the middle of a collect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from rftcli.events import Event
    from rftcli.types import Batch, Completion, Prompt, Request, SamplingSettings, ScoredSample

Weights = Iterable[tuple[str, "torch.Tensor"]]
"""(name as in the model's own state dict, full tensor), one at a time; the consumer copies what it keeps."""


@runtime_checkable
class AdaptedWeights(Protocol):
    """Weights of a model with an adapter: with it merged in where they are gone through, or apart for an engine that has a place for it."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def base(self) -> Weights:
        """Those below the adapter. Collective as all weights."""

    def save_adapter(self, directory: Path) -> None:
        """The adapter alone as peft's files, by every rank for itself. Collective."""


class Sampler(Protocol):
    """An engine that generates. It never sees rewards."""

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
        """Yield completions as they finish, in any order. Every requested sample is yielded exactly once."""

    def load(self, weights: Weights, version: int) -> None:
        """Take over new policy weights; later completions carry `version`."""

    def sleep(self) -> None:
        """Give back device memory until the next `load` or `generate`."""

    def close(self) -> None: ...


class Policy(Protocol):
    """A model that recomputes log-probabilities. Gradients on or off is the caller's choice."""

    def logprobs(self, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs (N,), entropy (N,)) of the trained tokens, float32, at the sampling temperature. The entropy has a gradient only where the plan
        has an entropy bonus."""

    def values(self, batch: Batch) -> torch.Tensor:
        """(N,) the value before each trained token; only critics have one."""


class Reference(Protocol):
    """A frozen model: the one that the KL term compares with, or the teacher."""

    def logprobs(self, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """As a Policy's, without gradients."""

    def sleep(self) -> None:
        """Give back device memory until the next use."""

    def follow(self, step: int, learner: Any) -> None:
        """After the updates of `step`: take over from the policy what the plan says. Collective where weights are sharded."""


LossFunction = Callable[["torch.Tensor", "torch.Tensor", "Batch"], "tuple[torch.Tensor, Mapping[str, torch.Tensor]]"]
"""(new log-probs (N,), entropy (N,), batch) -> (scalar loss, sums of metrics): the scalar is this micro-batch's share of the update's loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """`grad_norm` before clipping over all ranks; None: no gradient. `applied` False: skipped by every rank alike."""

    applied: bool
    grad_norm: float | None
    lr: float


class Learner(Protocol):
    """One trained role: weights, gradients, optimizer, schedule. Also a Policy."""

    version: int
    """Applied updates so far: the version of the weights."""
    lr: float
    """Learning rate of the next update."""

    def backward(self, batch: Batch, loss: LossFunction, last: bool, temperature: float | None = None) -> Mapping[str, torch.Tensor]:
        """One micro-step; adds to the update's gradient. `last` marks the update's last micro-step on every rank alike. `temperature` of the
        log-probs; None: the sampling temperature."""

    def step(self) -> StepOutcome:
        """Clip, check that all ranks are finite, apply, clear the gradient, advance the schedule."""

    def weights(self, of: str = "live") -> Weights:
        """Full weights, gathered if they are sharded. Collective: every rank iterates to the end."""

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...


class Scorer(Protocol):
    """The label table: completions in, scored samples out, started as soon as a completion is finished."""

    step: int | None
    """The step in progress, for rewards that ask for it; set by the loop."""

    def score(self, completions: Iterable[Completion]) -> Iterator[ScoredSample]:
        """Any order; every completion comes back exactly once. Failures are values."""

    def close(self) -> None: ...


class Source(Protocol):
    """Where prompts come from. It remembers its position."""

    next_draw: int
    """The first draw of the next step; a rank that draws only its part sets it past the others'."""

    def draw(self, first: int, count: int) -> Sequence[Prompt]:
        """The prompts of draws first..first+count-1: a pure function of (data, seed, draw), wrapping into the next keyed permutation."""

    def row(self, draw: int) -> Any:
        """The row of a draw (`data.rows.Row`), not rendered; only a curriculum asks."""

    @property
    def num_rows(self) -> int | None:
        """Rows of one pass; None where the end is not known."""


class World(Protocol):
    """The other ranks. The only door to a process group."""

    rank: int
    size: int

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise float64 sum over ranks, the same bits on every rank."""

    def max(self, values: Sequence[float]) -> list[float]: ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on every rank."""

    def exchange(self, parcels: Sequence[Any]) -> list[Any]:
        """`parcels[r]`, picklable, goes to rank r; what every rank sent to this one, in rank order. Its own comes back as it is."""

    def barrier(self, name: str) -> None: ...


class Observer(Protocol):
    """Reads events. Nothing it does reaches back into the run."""

    def see(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Stateful(Protocol):
    """Something that remembers. The checkpoint holds one registry of these, so nothing is forgotten."""

    def state_dict(self) -> Mapping[str, Any]:
        """The same on every rank, and called on all of them: what is spread over ranks is gathered here."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The models of a run. None where the plan needs none."""

    policy: Any
    """Learner and Policy at once."""
    reference: Reference | None = None
    critic: Any | None = None
    teacher: Reference | None = None

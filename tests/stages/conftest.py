"""Records made by hand, ranks as threads of one process, and a learner of a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_threads import on_ranks

from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import Plan
from rftcli.protocols import StepOutcome, Weights
from rftcli.recipe.load import load_text
from rftcli.types import Batch, Completion, FinishReason, Group, PartScore, Prompt, ScoredSample, TokenTrace

MINIMAL = """\
models: {policy: {path: org/model}}
data: {train: {path: train.jsonl}}
rewards: {default: [{rule: exact}]}
train: {steps: 10}
rollout: {samples_per_prompt: 2, max_prompt_tokens: 4, max_new_tokens: 4}
batch: {prompts_per_step: 4}
"""


def make_plan(*sets: str, ranks: int = 1) -> Plan:
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=1.0), model=ModelFacts(path="m"), ranks=ranks, train_rows=100)
    return compile_plan(load_text(MINIMAL, sets=list(sets), env={}).recipe, facts, name="n", search_path="/", policy_path="m")


def make_prompt(draw: int = 0, label: str = "default", ids: tuple[int, ...] = (1, 2)) -> Prompt:
    return Prompt(draw=draw, row=draw, row_id=f"n:{draw}", source="n", label=label, text=f"{draw}?", token_ids=ids, reference=str(draw))


def make_sample(
    draw: int = 0,
    sample: int = 0,
    reward: float | None = 1.0,
    *,
    label: str = "default",
    ids: tuple[int, ...] = (3, 4),
    prompt_ids: tuple[int, ...] = (1, 2),
    parts: Sequence[PartScore] | None = None,
    finish: FinishReason = FinishReason.STOP,
    mask: tuple[bool, ...] | None = None,
    logprobs: tuple[float, ...] | None = None,
) -> ScoredSample:
    """A scored completion; without `parts`, one part that says the reward (or failed)."""
    completion = Completion(
        prompt=make_prompt(draw, label, prompt_ids), sample=sample, text=f"a{sample}", text_with_special=f"a{sample}<e>",
        trace=TokenTrace(ids=ids, mask=mask, logprobs=logprobs), finish=finish, policy_version=0,
    )  # fmt: skip
    if parts is None:
        parts = [PartScore(name="p", value=reward, weight=1.0, seconds=0.0, error="broke" if reward is None else None)]
    return ScoredSample(completion=completion, parts=tuple(parts), reward=reward)


def make_groups(rewards: Mapping[int, Sequence[float | None]], **fields: Any) -> list[Group]:
    """Draw -> rewards of its samples."""
    return [
        Group(prompt=make_prompt(draw), samples=tuple(make_sample(draw, index, reward, **fields) for index, reward in enumerate(values)))
        for draw, values in rewards.items()
    ]


class Table:
    """A policy that is a table: the log-prob of a token is a number of its own, whatever came before it. Learner, Policy and Reference at once.

    `new` sets what the next updates see; without it the table's own numbers.
    """

    def __init__(self, world: Any, values: Sequence[float]) -> None:
        self.version = 0
        self.lr = 0.5
        self.table = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        self.seen: list[Batch] = []
        self.lasts: list[bool] = []
        self.steps = 0
        self.naps = 0
        self._world = world

    def logprobs(self, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(batch)
        new = self.table[batch.target_ids] / temperature
        return new, torch.full_like(new, 0.25).detach()

    def values(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError("no critic")

    def sleep(self) -> None:
        self.naps += 1

    def follow(self, step: int, learner: Any) -> None:
        return None

    def backward(self, batch: Batch, loss: Any, last: bool) -> Mapping[str, torch.Tensor]:
        self.lasts.append(last)
        value, measured = loss(*self.logprobs(batch, 1.0), batch)
        (value + 0.0 * self.table.sum()).backward()
        return measured

    def step(self) -> StepOutcome:
        self.steps += 1
        assert self.table.grad is not None
        total = torch.tensor(self._world.sum(self.table.grad.tolist()), dtype=torch.float64)
        norm, lr = float(total.norm()), self.lr
        with torch.no_grad():
            self.table -= lr * total
        self.table.grad = None
        self.version += 1
        return StepOutcome(applied=True, grad_norm=norm, lr=lr)

    def weights(self, of: str = "live") -> Weights:
        yield "table", self.table.detach()

    def save(self, directory: Path) -> None:
        torch.save(self.table, directory / "table")

    def load(self, directory: Path) -> None:
        self.table = torch.load(directory / "table")


class Scores:
    """A scorer that applies a function, and gives the samples back in reverse."""

    def __init__(self, value: Callable[[Completion], float | None]) -> None:
        self._value = value

    def score(self, completions: Iterable[Completion]) -> Iterator[ScoredSample]:
        found = []
        for completion in completions:
            reward = self._value(completion)
            part = PartScore(name="p", value=reward, weight=1.0, seconds=0.0, error="broke" if reward is None else None)
            found.append(ScoredSample(completion=completion, parts=(part,), reward=reward))
        yield from reversed(found)

    def close(self) -> None: ...


@pytest.fixture(scope="session")
def made() -> SimpleNamespace:
    """Everything above, by short names."""
    return SimpleNamespace(
        plan=make_plan,
        prompt=make_prompt,
        sample=make_sample,
        groups=make_groups,
        on_ranks=on_ranks,
        Table=Table,
        Scores=Scores,
        cpu=torch.device("cpu"),
    )

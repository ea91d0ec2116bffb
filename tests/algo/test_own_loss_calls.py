"""Calling a policy loss of the user's own: what it raises is told by name, and what it writes into stays its own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from rftcli.algo.own_loss import own_loss
from rftcli.errors import RftError

KNOWN: dict[str, Any] = {"sequence": torch.zeros(3, dtype=torch.int64), "num_sequences": 1}


def raises(new: Any, old: Any, advantages: Any) -> Any:
    raise KeyError("beta")


def exits(new: Any, old: Any, advantages: Any) -> Any:
    sys.exit(3)


def misfits(new: Any, old: Any, advantages: Any) -> Any:
    return new * torch.ones(2)


@pytest.mark.parametrize(("function", "cause"), [(raises, "KeyError: 'beta'"), (exits, "SystemExit: 3"), (misfits, "RuntimeError: The size")])
def test_what_it_raises_is_told_by_name(function: Any, cause: str) -> None:
    new = torch.zeros(3, requires_grad=True)
    with pytest.raises(RftError, match=f"the loss of algorithm.loss.python failed: {cause}"):
        own_loss(new, new, torch.ones(3), function=function, **KNOWN)


def test_memory_that_runs_out_is_no_fault_of_the_loss() -> None:
    def large(new: Any, old: Any, advantages: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate")

    with pytest.raises(RuntimeError, match=r"^CUDA out of memory"):
        own_loss(torch.zeros(3), torch.zeros(3), torch.ones(3), function=large, **KNOWN)


def test_what_it_writes_into_is_its_own() -> None:
    def writes(new: Any, old: Any, advantages: Any) -> Any:
        new.mul_(2)
        old.zero_()
        advantages.fill_(3)
        return -advantages * new

    new, old, advantages = torch.ones(3, requires_grad=True), torch.full((3,), 0.5), torch.ones(3)
    terms = own_loss(new, old, advantages, function=writes, **KNOWN)
    terms.loss.sum().backward()
    assert new.tolist() == [1.0] * 3 and old.tolist() == [0.5] * 3 and advantages.tolist() == [1.0] * 3
    assert new.grad is not None and new.grad.tolist() == [-6.0] * 3

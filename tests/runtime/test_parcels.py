"""What ranks send each other arrives as it was: values, number types, and as memory of its own that may be written to."""

from __future__ import annotations

import pytest
import torch

from rftcli.runtime.parcels import ARRAYS, packed, unpacked

KINDS = [*sorted(ARRAYS, key=str), torch.bfloat16, torch.float16, torch.int16]


def sent(value: object) -> object:
    return unpacked(memoryview(packed(value)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)], ids=str)
def test_every_kind(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(kind)
    found = sent(tensor)
    assert isinstance(found, torch.Tensor) and found.dtype is kind and found.shape == tensor.shape and torch.equal(found, tensor)
    before = tensor.clone()
    found.fill_(1)  # a mask is taken away in place
    assert torch.equal(tensor, before)


def test_bits_stay() -> None:
    tensor = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    assert torch.equal(sent(tensor).view(torch.int32), tensor.view(torch.int32))


def test_part_of_a_tensor_is_sent_alone() -> None:
    whole = torch.arange(100_000, dtype=torch.float32).reshape(100, 1000)
    for part in (whole[3], whole[:, 7], whole[:2].T):
        assert torch.equal(sent(part), part) and len(packed(part)) < 4 * part.numel() + 400


def test_what_has_a_gradient_keeps_it() -> None:
    tensor = torch.ones(3, requires_grad=True)
    assert sent(tensor).requires_grad


def test_what_is_shared_stays_shared() -> None:
    one = torch.ones(2)
    first, second = sent((one, one))
    assert first is second

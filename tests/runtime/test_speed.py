"""Speed of a step: told for GPUs alone, and an unknown card has no share of a peak."""

import doctest

import pytest
import torch

from rftcli.runtime import speed


def test_examples():
    assert doctest.testmod(speed, optionflags=doctest.ELLIPSIS).failed == 0


def test_a_cpu_has_neither():
    assert speed.card_of(torch.device("cpu")) is None
    assert speed.speed_metrics(tokens=100, passed=100, seconds=1.0, ranks=1, parameters=10, card=None) == {}


def test_both_are_of_one_gpu():
    """4 GPUs, 2,000 tokens in 2 s: 250 each a second; 6 operations for each of 1e9 parameters and tokens, of 312e12 a second."""
    found = speed.speed_metrics(tokens=2000, passed=2000, seconds=2.0, ranks=4, parameters=10**9, card="NVIDIA A100-SXM4-80GB")
    assert found == pytest.approx({"tokens_per_second_per_gpu": 250.0, "mfu": 6 * 1e9 * 250 / 312e12})
    sizes = {"tokens": 2000, "passed": 2000, "ranks": 4, "parameters": 10**9}
    assert speed.speed_metrics(**sizes, seconds=2.0, card="Voodoo 2") == {"tokens_per_second_per_gpu": 250.0}
    assert speed.speed_metrics(**sizes, seconds=0.0, card="NVIDIA H200") == {}


def test_what_the_update_leaves_out_is_no_arithmetic():
    found = speed.speed_metrics(tokens=2000, passed=500, seconds=2.0, ranks=4, parameters=10**9, card="NVIDIA A100-SXM4-80GB")
    assert found == pytest.approx({"tokens_per_second_per_gpu": 250.0, "mfu": 6 * 1e9 * 62.5 / 312e12})


def test_no_row_is_hidden_by_one_before_it():
    for index, (part, _) in enumerate(speed.TERAFLOPS):
        assert not any(earlier in part for earlier, _ in speed.TERAFLOPS[:index]), part


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L40S", 362)],
)
def test_cards(name, teraflops):
    assert speed.peak_flops(name) == teraflops * 1e12

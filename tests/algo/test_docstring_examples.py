"""The examples in the docstrings are true."""

import doctest

import pytest

from rftcli.algo import batchmath, keyed, stats


@pytest.mark.parametrize("module", [batchmath, keyed, stats])
def test_examples(module) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0

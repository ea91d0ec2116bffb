"""What ranks agree on about the hf engine before the first rollout."""

from types import SimpleNamespace

import pytest

from rftcli.engines.trial import Found
from rftcli.runtime.hf_proof import prove_hf
from tests.rank_threads import on_ranks

OWN = Found(rows_alike=True, plain=None, padding_drops=True)
OTHER = Found(rows_alike=False, plain="its scores differ", padding_drops=False)


class Engine:
    """Of one rank, with what its own trials say."""

    def __init__(self, found: Found) -> None:
        self.found = found

    def prove(self) -> Found:
        return self.found


@pytest.mark.parametrize(
    ("every", "agreed", "told"),
    [
        ((OWN, OWN), OWN, "hf engine: tokens go through its own decode step"),
        ((OWN, OTHER), OTHER, "hf engine: tokens go through the model's forward (its scores differ)"),
        ((OTHER, OWN), OTHER, "hf engine: tokens go through the model's forward (its scores differ)"),
    ],
)
def test_all_ranks_decode_alike(every: tuple[Found, ...], agreed: Found, told: str) -> None:
    engines, lines = [Engine(found) for found in every], [[] for _ in every]
    on_ranks(2, lambda world: prove_hf(engines[world.rank], world, SimpleNamespace(log=lines[world.rank].append)))
    assert [engine.found for engine in engines] == [agreed, agreed] and lines == [[told], [told]]

"""Scorers that are services: reached from any process, with a model loaded nowhere here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from rftcli.errors import UsageError

if TYPE_CHECKING:
    from rftcli.rewards.scorers.desk import Remote
    from rftcli.rewards.scorers.spec import ScorerSpec
    from rftcli.rewards.scorers.view import View


def remote_scorer(spec: ScorerSpec, ranks: int, gone: Callable[[], str | None] | None = None) -> Remote:
    """`ranks` share the service's limits. `gone`: as for `Service`."""
    from rftcli.rewards.scorers.http import HttpScorer
    from rftcli.rewards.scorers.judge import ServerJudge
    from rftcli.rewards.scorers.service import Service

    assert spec.service is not None
    service = Service(spec.name, spec.service, ranks=ranks, gone=gone)
    if spec.preset is None:
        return ServerJudge(spec, service)
    return HttpScorer(service, preset=spec.preset, score_field=spec.score_field, batch_size=spec.batch_size)


class NotLoaded:
    """Stands for a model that is left out: each question to it is an error that says so."""

    remote: Literal[False] = False
    collective = False

    def __init__(self, name: str) -> None:
        self._name = name

    def key(self, view: View) -> str:
        return view.completion

    def score(self, views: Sequence[View]) -> list[float | Exception]:
        return [UsageError(f"the model of scorer `{self._name}` is left out") for _ in views]

    def close(self) -> None:
        """Nothing is held."""

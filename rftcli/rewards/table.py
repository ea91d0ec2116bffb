"""The reward table: for each label a few weighted parts. Completions in, scored samples out; the Scorer of a run.

r = sum of w_j s_j over the parts that gave a value; weights are used as they are. A part that abstains is left out. A part that errors leaves the
sample without a reward, unless its `on_error` says otherwise. Parts of weight 0 are logged only: they neither give a sample its reward nor, by an
error, take it away. A sample without a value from any weighted part has the reward None, which is not 0.

Leaves out what a run does about too many failures (`errors.ErrorWindow`), and shaping of the sum.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from rftcli.errors import RftError, UsageError
from rftcli.rewards.functions import EventLoop, as_number, describe, load_function
from rftcli.rewards.inputs import HeavyRule, RuleInput
from rftcli.rewards.rules import check_options, open_rule
from rftcli.rewards.spec import DEFAULT_LABEL, PartSpec
from rftcli.types import Completion, PartScore, ScoredSample

Score = Callable[[Completion, str], Any]
"""(completion, the text this part reads) -> the raw value of a part."""


class RewardTable:
    """Implements `protocols.Scorer`. `step` may be set by the loop; user functions that ask for it get it.

    Construction opens every part: UsageError for unknown rules, wrong options, functions that cannot be found, MachineError for missing packages.
    Helper processes start with the first completion that needs one.
    """

    def __init__(
        self,
        parts_by_label: Mapping[str, Sequence[PartSpec]],
        *,
        score_prefill: bool = True,
        search_path: Iterable[Path | str] = (),
        threads: int = 8,
    ) -> None:
        self.step: int | None = None
        self._score_prefill = score_prefill
        self._rules: dict[str, Callable[..., Any]] = {}
        self._loop = EventLoop()
        search_path = tuple(search_path)
        try:
            self._parts = {label: self._open(label, parts, search_path) for label, parts in parts_by_label.items()}
        except BaseException:
            self._close_rules()
            raise
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="rewards")

    def score(self, completions: Iterable[Completion]) -> Iterator[ScoredSample]:
        """Each completion once, in the order in which scoring ends. `completions` is iterated here, in the caller's thread, and each one is handed
        on at once, so slow rewards run while the engine still generates. RftError for a part that failed with `on_error: stop`."""
        pending: set[Future[ScoredSample]] = set()
        try:
            for completion in completions:
                pending.add(self._executor.submit(self._score_one, completion, self.step))
                done = {future for future in pending if future.done()}
                pending -= done
                yield from (future.result() for future in done)
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            for future in pending:
                future.cancel()

    def close(self) -> None:
        """End helper processes and event loop, and do not wait for functions that are still running."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._close_rules()
        self._loop.close()

    def _close_rules(self) -> None:
        for rule in self._rules.values():
            if isinstance(rule, HeavyRule):
                rule.close()

    def _open(self, label: str, parts: Sequence[PartSpec], search_path: tuple[Path | str, ...]) -> tuple[tuple[PartSpec, Any], ...]:
        if not any(part.weight for part in parts):
            raise UsageError(f"rewards.{label} has no part with a weight other than 0, so nothing would have a reward")
        return tuple((part, self._open_part(label, part, search_path)) for part in parts)

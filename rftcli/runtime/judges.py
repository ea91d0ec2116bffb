"""Judges that the run starts: servers on their way before models are loaded, waited for before the first rollout, watched, and ended with the run.

Those with GPUs of their own are children of the first rank, and every rank asks them; one beside the ranks is each rank's own, on its device. An end
while it is needed ends the run, with the last lines of its log. Leaves out the servers (`judge_servers`) and what they are asked
(`rewards.scorers.judge`). No torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from rftcli.protocols import World
from rftcli.rewards.scorers.desk import Local, Remote, ScorerGoneError
from rftcli.rewards.scorers.judge import ServerJudge
from rftcli.rewards.scorers.remote import remote_scorer
from rftcli.rewards.scorers.spec import ScorerSpec
from rftcli.rewards.scorers.view import View
from rftcli.runtime.agreed import agreed
from rftcli.runtime.judge_servers import JudgeServers, Starter, end_all, owner, started, told_of
from rftcli.runtime.rundir import AttemptDir, write_text

GONE_SECONDS = 3.0
"""How long a broken connection waits for word that the server has ended: the guard sees it within a third of a second, other ranks by a file."""
LOOK_SECONDS = 0.2


class Judges:
    """All judges of the run as one rank sees them."""

    def __init__(
        self, specs: Sequence[ScorerSpec], own: Mapping[str, JudgeServers], told: Mapping[str, tuple[str, tuple[str, ...]]], notes: Path | None
    ) -> None:
        """`own`: started by this process, by the name of their first scorer. `told`: model and addresses of all. `notes`: where the process that has
        started them tells others that one is gone; None: nobody else asks."""
        self._owners = {spec.name: owner(specs, spec) for spec in specs if spec.start is not None}
        self._own, self._told, self._notes, self._over = dict(own), dict(told), notes, threading.Event()
        self._noting = threading.Lock()
        if any(not servers.beside for servers in own.values()) and notes is not None:
            notes.mkdir(parents=True, exist_ok=True)
            threading.Thread(target=self._watch, name="judge-watch", daemon=True).start()

    def placed(self, spec: ScorerSpec) -> ScorerSpec:
        """The scorer with the addresses of its servers, where the run has started some."""
        if spec.start is None:
            return spec
        assert spec.service is not None
        model, urls = self._told[self._owners[spec.name]]
        return replace(spec, model=model, service=replace(spec.service, urls=urls))

    def asked(self, spec: ScorerSpec, ranks: int) -> Remote | Local:
        """What the desk asks for a scorer that is a service, or whose servers the run has started."""
        remote = remote_scorer(self.placed(spec), ranks, self.gone(spec))
        if spec.start is None or not spec.start.beside:
            return remote
        assert isinstance(remote, ServerJudge)
        return JudgeBeside(remote, partial(self.at_work, spec))

    def gone(self, spec: ScorerSpec) -> Callable[[], str | None] | None:
        """Asked after a broken connection: why the scorer's server has ended, None where it has not."""
        if spec.start is None:
            return None
        name = self._owners[spec.name]

        def look() -> str | None:
            end = time.monotonic() + GONE_SECONDS
            while True:
                words = self._last_words(name)
                if words is not None or time.monotonic() > end or self._over.is_set():
                    return words
                time.sleep(LOOK_SECONDS)

        return look

    def wait(self, *, beside: bool = False) -> None:
        """For those that this process has started, or those of them beside the rank. RftError for one that does not get ready; all are ended then."""
        try:
            for servers in self._own.values():
                if servers.beside or not beside:
                    servers.wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._over.set()
        end_all(self._own)

    def at_work(self, spec: ScorerSpec) -> AbstractContextManager[None]:
        """Of a judge beside this rank."""
        return self._own[self._owners[spec.name]].at_work()

    def _last_words(self, name: str) -> str | None:
        note = None if self._notes is None else self._notes / f"{name}.gone"
        if name not in self._own:
            return note.read_text(encoding="utf-8") if note is not None and note.is_file() else None
        words = self._own[name].last_words()
        if words is not None and note is not None and not self._over.is_set():
            with self._noting:  # who watches and who scores see it at once
                if not note.is_file():
                    write_text(note, words)  # before this rank ends by it
        return words

    def _watch(self) -> None:
        """Other ranks hear of an end whether or not this one asks."""
        left = {name for name, servers in self._own.items() if not servers.beside}
        while left and not self._over.wait(LOOK_SECONDS):
            left = {name for name in left if self._last_words(name) is None}


NO_JUDGES = Judges((), {}, {}, None)


class JudgeBeside:
    """A judge on the rank's own device, in a process of its own: asked once a round with all rows of the rank, as models inside the rank are."""

    remote: Literal[False] = False
    collective = False

    def __init__(self, judge: ServerJudge, at_work: Callable[[], AbstractContextManager[None]]) -> None:
        self._judge, self._at_work = judge, at_work

    def key(self, view: View) -> str:
        return self._judge.key(view)

    def score(self, views: Sequence[View]) -> list[float | Exception]:
        if not views:
            return []
        with self._at_work():
            return [_outcome(future) for future in [self._judge.submit(view) for view in views]]

    def close(self) -> None:
        self._judge.close()


def _outcome(future: Future[float]) -> float | Exception:
    """ScorerGoneError where nobody answers any more."""
    try:
        return future.result()
    except ScorerGoneError:
        raise
    except Exception as error:  # what went wrong with this row alone
        return error


def begin_judges(specs: Sequence[ScorerSpec], world: World, attempt: AttemptDir, by: Starter) -> Judges:
    """On their way, and those beside the ranks ready: what is loaded next sees how much of the device is left. `await_judges` waits for the others.
    Collective where there are any."""
    if all(spec.start is None for spec in specs):
        return NO_JUDGES
    own = agreed(world, lambda: started(specs, attempt.logs, by, apart=world.rank == 0), undo=end_all)
    told = world.gather(told_of(own))[0] | told_of(own)
    judges = Judges(specs, own, told, attempt.path / "judges" if world.size > 1 else None)
    if any(spec.start is not None and spec.start.beside for spec in specs):
        agreed(world, lambda: judges.wait(beside=True), undo=lambda _: judges.stop())
    return judges


def await_judges(judges: Judges, specs: Sequence[ScorerSpec], world: World) -> None:
    """Until every judge is ready; RftError on every rank alike. Collective where there are any."""
    if any(spec.start is not None for spec in specs):
        agreed(world, judges.wait, undo=lambda _: judges.stop())



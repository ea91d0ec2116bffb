"""Checkpoints written behind the next steps: the same files, committed when all ranks have written, and nothing half after a full disk or a kill."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import ThreadWorld, ends_on_ranks, on_ranks

from rftcli.errors import RftError
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import Plan
from rftcli.recipe.load import load_text
from rftcli.runtime.behind import WRITTEN, Behind
from rftcli.runtime.checkpoint import UNFINISHED, restore, save
from rftcli.runtime.rundir import RunDir
from rftcli.runtime.world import SoloWorld
from rftcli.runtime.writes import NOW, Later, host_copy

MINIMAL = """\
models: {policy: {path: org/model}}
data: {train: {path: train.jsonl}}
rewards: {default: [{rule: exact}]}
train: {steps: 10}
"""


class Weight:
    """A learner of one vector that hands its file to a writer. `gate`: what its writing waits for."""

    def __init__(self, world: Any, value: float, *, gate: threading.Event | None = None, numbers: int = 4, fails: bool = False) -> None:
        self.value = torch.full((numbers,), value)
        self._world, self._gate, self._fails = world, gate, fails

    def save(self, directory: Path, to: Any = NOW) -> None:
        to.call(self._wait)
        to.tensors({"value": self.value}, directory / f"rank_{self._world.rank}.pt")

    def _wait(self) -> None:
        if self._gate is not None:
            assert self._gate.wait(10)
        if self._fails:
            with Path("/dev/full").open("wb") as file:
                file.write(bytes(100_000))

    def load(self, directory: Path) -> None:
        self.value = torch.load(directory / f"rank_{self._world.rank}.pt")["value"]

    def state_dict(self) -> Mapping[str, Any]:
        return {"first": float(self.value[0])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=1.0), model=ModelFacts(path="m"), ranks=1)
    return compile_plan(load_text(MINIMAL, env={}).recipe, facts, name="n", search_path="/", policy_path="m")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def begin(run: RunDir, plan: Plan, step: int, learner: Weight, world: Any, behind: Behind | None, *, keep: int = 10) -> Path:
    def export(directory: Path, later: Later | None = None) -> None:
        text = str(learner.value.tolist())

        def action() -> None:
            directory.mkdir()
            (directory / "weights").write_text(text)

        if world.rank == 0:
            (later or NOW).call(action)
        world.barrier("exported")

    plan = replace(plan, checkpoint=replace(plan.checkpoint, keep=keep), world=replace(plan.world, ranks=world.size))
    return save(run, step, plan=plan, learner=learner, registry={"learner": learner}, export=export, reward_sources=(), world=world, behind=behind)


def names(run: RunDir) -> list[str]:
    return [path.name for path in run.committed_checkpoints()]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_bytes_as_a_checkpoint_written_before_the_next_step(tmp_path: Path, plan: Plan, ranks: int) -> None:
    def written(world: ThreadWorld, background: bool) -> None:
        run = RunDir(tmp_path / str(background))
        if world.rank == 0:
            run.create()
        world.barrier("created")
        behind = Behind(world) if background else None
        learner = Weight(world, 1.0 + world.rank)
        begin(run, plan, 5, learner, world, behind)
        if behind is not None:
            learner.value += 1.0  # the next step
            done = behind.settle(wait=True)
            assert done is not None and (done.step, done.target.name) == (5, "step_000005") and done.seconds > 0

    for background in (False, True):
        on_ranks(ranks, lambda world, background=background: written(world, background))
    before, behind = files(tmp_path / "False" / "checkpoints"), files(tmp_path / "True" / "checkpoints")
    assert len(before) == 5 + ranks - 1 and before == behind


def test_the_next_step_goes_on_meanwhile_and_nothing_counts_before_the_commit(run: RunDir, plan: Plan) -> None:
    world, gate = SoloWorld(), threading.Event()
    behind = Behind(world)
    learner = Weight(world, 3.0, gate=gate)
    begin(run, plan, 5, learner, world, behind)
    assert names(run) == [] and behind.settle(wait=False) is None
    learner.value.fill_(9.0)
    gate.set()
    assert behind.settle(wait=True) is not None and behind.settle(wait=True) is None
    assert names(run) == ["step_000005"] and not list(run.checkpoints.glob(f"*/{WRITTEN}*"))
    found = Weight(world, 0.0)
    assert restore(run.checkpoints / "step_000005", learner=found, registry={"learner": found}, world=world) == 5
    assert found.value.tolist() == [3.0] * 4


def test_old_ones_go_when_the_new_one_is_committed(run: RunDir, plan: Plan) -> None:
    world = SoloWorld()
    behind = Behind(world)
    for step in (1, 2, 3):
        begin(run, plan, step, Weight(world, step), world, behind, keep=2)
        behind.settle(wait=True)
    assert names(run) == ["step_000002", "step_000003"]


def test_it_is_committed_when_the_slowest_rank_has_written(run: RunDir, plan: Plan) -> None:
    gate = threading.Event()

    def work(world: ThreadWorld) -> bool:
        behind = Behind(world)
        begin(run, plan, 5, Weight(world, 1.0, gate=gate if world.rank == 1 else None), world, behind)
        early = behind.settle(wait=False) is None and names(run) == []
        world.barrier("looked")
        gate.set()
        done = behind.settle(wait=True)
        return early and done is not None and names(run) == ["step_000005"]

    assert on_ranks(2, work) == [True, True]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_is_told_to_all_ranks_at_the_next_boundary(run: RunDir, plan: Plan, failing: int) -> None:
    def work(world: ThreadWorld) -> None:
        behind = Behind(world)
        begin(run, plan, 5, Weight(world, 1.0), world, behind)
        behind.settle(wait=True)
        before = files(run.checkpoints)
        begin(run, plan, 6, Weight(world, 2.0, fails=world.rank == failing), world, behind)
        with pytest.raises(RftError) as caught:
            behind.settle(wait=True)
        world.barrier("told")
        assert f"the checkpoint step_000006 could not be written: rank {failing}: no space left on the disk" in caught.value.message
        assert files(run.checkpoints) == before and names(run) == ["step_000005"]
        assert not list(run.checkpoints.glob(f"{UNFINISHED}*"))
        world.barrier("looked")
        begin(run, plan, 7, Weight(world, 3.0), world, behind)  # with space again the next one is written
        assert behind.settle(wait=True) is not None

    on_ranks(2, work)
    assert names(run) == ["step_000005", "step_000007"]


def test_an_error_while_something_is_written_leaves_it_to_the_next_attempt(run: RunDir, plan: Plan) -> None:
    """Rank 1 is gone: rank 0's part alone is no checkpoint, and the run ends."""

    def work(world: ThreadWorld) -> None:
        behind = Behind(world)
        begin(run, plan, 5, Weight(world, 1.0), world, behind)
        behind.settle(wait=True)
        begin(run, plan, 6, Weight(world, 2.0, gate=NEVER if world.rank == 1 else None), world, behind)
        behind.close(0.2)

    assert ends_on_ranks(2, work) == [None, None]
    assert names(run) == ["step_000005"] and (run.checkpoints / f"{UNFINISHED}step_000006").is_dir()
    world = SoloWorld()
    begin(run, plan, 7, Weight(world, 1.0), world, None)
    assert names(run) == ["step_000005", "step_000007"] and not list(run.checkpoints.glob(f"{UNFINISHED}*"))
    NEVER.set()


NEVER = threading.Event()
Pair = namedtuple("Pair", "left right")


class Counter:
    """An object of a library."""

    def __init__(self) -> None:
        self.value = [1]


def test_a_copy_shares_what_the_original_shares_and_nothing_with_it(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    original: dict[str, Any] = {
        "whole": base, "part": base[4:8], "turned": base.view(3, 4).t(), "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "pair": Pair(torch.zeros(1), 2), "ordered": OrderedDict(b=base[:2], a=None),
        "empty": torch.empty(0), "size": torch.Size([2]), "dtype": torch.float32, "object": Counter(),
    }  # fmt: skip
    base.mark = ["of a library"]  # type: ignore[attr-defined]
    copied = host_copy(original)
    before, after = tmp_path / "1" / "x.pt", tmp_path / "2" / "x.pt"
    before.parent.mkdir()
    after.parent.mkdir()
    torch.save(original, before)
    torch.save(copied, after)
    assert before.read_bytes() == after.read_bytes()
    assert copied["part"].untyped_storage().data_ptr() == copied["whole"].untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    assert copied["turned"].stride() == original["turned"].stride() and isinstance(copied["pair"], Pair)
    assert isinstance(copied["parameter"], torch.nn.Parameter) and list(copied["ordered"]) == ["b", "a"]
    base.add_(1.0)
    original["groups"][0]["lr"] = 9.0
    original["object"].value.append(2)
    assert copied["whole"].tolist() == list(range(12)) and copied["part"].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert copied["groups"][0]["lr"] == 0.1 and copied["object"].value == [1]


def test_what_is_kept_for_later_touches_no_disk_before(tmp_path: Path) -> None:
    later = Later()
    later.tensors({"x": torch.ones(3)}, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()
    for action in later.actions:
        action()
    assert torch.load(tmp_path / "x.pt")["x"].tolist() == [1.0] * 3

"""Checkpoints: whole or not at all, older ones untouched, on a full disk and after kills, for one rank and for several."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import ThreadWorld, ends_on_ranks

from rftcli.errors import ResumeError, RftError
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import Plan, plan_from_json, plan_hash
from rftcli.plan.plan_sampling import PartialPlan
from rftcli.protocols import StepOutcome, Weights
from rftcli.recipe.load import load_text
from rftcli.runtime.checkpoint import UNFINISHED, read_progress, restore, save
from rftcli.runtime.retention import prune
from rftcli.runtime.rundir import COMMITTED, RunDir, commit_text, step_name
from rftcli.runtime.world import SoloWorld
from rftcli.stages.outcomes import Ask
from rftcli.stages.partial import Held, Kept, Piece
from rftcli.types import FinishReason, TokenTrace

MINIMAL = """\
models: {policy: {path: org/model}}
data: {train: {path: train.jsonl}}
rewards: {default: [{rule: exact}]}
train: {steps: 10}
"""


class Weight:
    """A learner of one vector: a Learner as far as a checkpoint is concerned, and a Stateful."""

    lr = 0.1

    def __init__(self, world: Any, value: float, numbers: int = 4, write: Callable[[Path, torch.Tensor], None] | None = None) -> None:
        self.version = 0
        self.value = torch.full((numbers,), value)
        self._world = world
        self._write = write or (lambda path, value: torch.save(value, path))

    def backward(self, batch: Any, loss: Any, last: bool) -> Mapping[str, torch.Tensor]:
        return {}

    def step(self) -> StepOutcome:
        self.version += 1
        self.value = self.value + 1.0
        return StepOutcome(applied=True, grad_norm=1.0, lr=self.lr)

    def weights(self, of: str = "live") -> Weights:
        yield "value", self.value

    def save(self, directory: Path) -> None:
        self._write(directory / f"rank_{self._world.rank}.pt", self.value)

    def load(self, directory: Path) -> None:
        self.value = torch.load(directory / f"rank_{self._world.rank}.pt")

    def state_dict(self) -> Mapping[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])


class Position:
    """Something small that remembers."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> Mapping[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `size_bytes`: writes fail with EFBIG, as on a disk that is too small for the file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def to_a_full_disk(path: Path, value: torch.Tensor) -> None:
    """A few numbers fit; then the device is full, in earnest."""
    path.write_bytes(value[:100].numpy().tobytes())
    rest = path.with_suffix(".rest")
    rest.symlink_to("/dev/full")
    with rest.open("wb") as file:
        file.write(value.numpy().tobytes())


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=1.0), model=ModelFacts(path="m"), ranks=1)
    return compile_plan(load_text(MINIMAL, env={}).recipe, facts, name="n", search_path="/", policy_path="m")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    made.recipe.write_text("# mine\n")
    return made


def write(
    run: RunDir, step: int, plan: Plan, learner: Weight, *, keep: int = 10, world: Any = None, export: Callable[[Path], None] | None = None,
    position: Any = None, sources: tuple[Path, ...] = (),
) -> Path:  # fmt: skip
    world = world or SoloWorld()

    def to_hf(directory: Path) -> None:
        if world.rank == 0:
            directory.mkdir()
            (directory / "weights").write_text(str(learner.value.tolist()))

    plan = replace(plan, checkpoint=replace(plan.checkpoint, keep=keep))
    registry = {"learner": learner, "source": position or Position(step)}
    return save(run, step, plan=plan, learner=learner, registry=registry, export=export or to_hf, reward_sources=sources, world=world)


def names(run: RunDir) -> list[str]:
    return [path.name for path in run.committed_checkpoints()]


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_a_checkpoint_holds(run: RunDir, plan: Plan, tmp_path: Path) -> None:
    plan = replace(plan, rewards=replace(plan.rewards, search_path=str(tmp_path)))
    source = tmp_path / "mine" / "my_rewards.py"
    source.parent.mkdir()
    source.write_text("def f(): ...\n")
    run.attempt(3).create()
    folder = write(run, 5, plan, Weight(SoloWorld(), 2.0), sources=(source,), position=Position(40), keep=2)
    assert folder == run.checkpoints / "step_000005"
    assert set(everything(folder)) == {
        COMMITTED, "plan.json", "policy/weights", "progress.json", "recipe.yaml", "reward_sources/mine/my_rewards.py", "trainer/rank_0.pt",
    }  # fmt: skip
    saved = plan_from_json((folder / "plan.json").read_text())
    assert saved == replace(plan, checkpoint=replace(plan.checkpoint, keep=2))
    assert (folder / COMMITTED).read_text() == "step 5 attempt 3\n"
    assert read_progress(folder) == {
        "step": 5, "plan": plan_hash(saved), "ranks": 1, "state": {"learner": {"version": 0}, "source": {"at": 40}},
    }  # fmt: skip
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000005"]


def test_everything_that_remembers_comes_back(run: RunDir, plan: Plan) -> None:
    learner, position = Weight(SoloWorld(), 2.0), Position(40)
    learner.step()
    folder = write(run, 5, plan, learner, position=position)
    again, other = Weight(SoloWorld(), 0.0), Position()
    assert restore(folder, learner=again, registry={"learner": again, "source": other}, world=SoloWorld()) == 5
    assert again.value.tolist() == [3.0] * 4 and again.version == 1 and other.at == 40


def test_without_the_policy_in_hf_form(run: RunDir, plan: Plan) -> None:
    lean = replace(plan, checkpoint=replace(plan.checkpoint, save_hf=False))

    def never(directory: Path) -> None:
        raise AssertionError("not asked for")

    assert not (write(run, 5, lean, Weight(SoloWorld(), 1.0), export=never) / "policy").exists()


def test_the_newest_stay(run: RunDir, plan: Plan) -> None:
    for step in (2, 4, 6, 8):
        write(run, step, plan, Weight(SoloWorld(), 1.0), keep=2)
    assert names(run) == ["step_000006", "step_000008"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_000006", "step_000008"]
    prune(run, replace(plan.checkpoint, keep=0))
    assert len(names(run)) == 2  # 0 keeps all
    prune(run, replace(plan.checkpoint, keep=1))
    assert names(run) == ["step_000008"]


def test_going_back_makes_older_steps_newer(run: RunDir, plan: Plan) -> None:
    """A run that reached step 30, was set back to 10 and came to 20: the checkpoint of 20 is the newest, and the last to be deleted."""
    for step in (10, 20, 30):
        write(run, step, plan, Weight(SoloWorld(), step))
    run.attempt(1).create()
    write(run, 20, plan, Weight(SoloWorld(), 99.0))
    assert names(run) == ["step_000010", "step_000030", "step_000020"]
    write(run, 24, plan, Weight(SoloWorld(), 99.0), keep=2)
    assert names(run) == ["step_000020", "step_000024"]


def test_what_only_looks_like_a_checkpoint(run: RunDir, plan: Plan) -> None:
    write(run, 5, plan, Weight(SoloWorld(), 1.0))
    shutil.copytree(run.checkpoints / "step_000005", run.checkpoints / "step_000005_best")
    (run.checkpoints / "step_000007").mkdir()
    (run.checkpoints / "notes").write_text("mine")
    (run.checkpoints / "step_000009").write_text("a file")
    assert names(run) == ["step_000005"]
    write(run, 10, plan, Weight(SoloWorld(), 1.0), keep=1)
    kept = sorted(path.name for path in run.checkpoints.iterdir())
    assert kept == ["notes", "step_000005_best", "step_000007", "step_000009", "step_000010"]  # what others put there is theirs


def test_a_million_steps_are_in_order(run: RunDir) -> None:
    for step in (999_999, 1_000_000, 2_000_000):
        folder = run.checkpoints / step_name(step)
        folder.mkdir()
        (folder / COMMITTED).write_text(commit_text(step, 1))
    assert names(run) == ["step_999999", "step_1000000", "step_2000000"]


FAILURES: dict[str, tuple[Callable[[Path, torch.Tensor], None], str]] = {
    "full device": (to_a_full_disk, "no space left on the disk"),
    "torch": (lambda path, value: torch.save(value, path), "no space left on the disk"),
    "plain write": (lambda path, value: path.write_bytes(value.numpy().tobytes()) and None, "no space left on the disk"),
}


@pytest.mark.parametrize("how", sorted(FAILURES))
def test_a_disk_that_is_full(run: RunDir, plan: Plan, how: str) -> None:
    """No half checkpoint, the one before untouched, the way out named; with space again the next one is written, and the same step too."""
    writes, message = FAILURES[how]
    write(run, 5, plan, Weight(SoloWorld(), 1.0))
    before = everything(run.checkpoints)
    big = Weight(SoloWorld(), 2.0, numbers=100_000, write=writes)
    with largest_file(50_000), pytest.raises(RftError) as caught:
        write(run, 10, plan, big)
    assert caught.value.message.startswith("the checkpoint step_000010 could not be written: rank 0: ") and message in caught.value.message
    assert "df -h" in str(caught.value.hint) and f"rft resume {run.path}" in str(caught.value.hint)
    assert everything(run.checkpoints) == before and names(run) == ["step_000005"]
    assert list(run.checkpoints.iterdir()) == [run.checkpoints / "step_000005"]
    write(run, 10, plan, Weight(SoloWorld(), 2.0))
    assert names(run) == ["step_000005", "step_000010"]


def test_a_disk_that_is_full_at_the_first_checkpoint(run: RunDir, plan: Plan) -> None:
    """Nothing is whole that a run could go on from."""
    with pytest.raises(RftError) as caught:
        write(run, 5, plan, Weight(SoloWorld(), 1.0, write=to_a_full_disk))
    assert str(caught.value.hint).endswith("then start it again: there is no whole checkpoint yet")


def test_deepspeeds_writer_waits_with_its_error(tmp_path: Path) -> None:
    """A rank that left DeepSpeed's save in the middle would leave the others in its barriers: the error is kept until all are through."""
    from rftcli.runtime.learner import HeldBackWriter

    writer = HeldBackWriter()
    with largest_file(50_000):
        writer.save({"big": torch.zeros(100_000)}, str(tmp_path / "big.pt"))
        first = writer.failure
        writer.save({"small": torch.ones(10)}, str(tmp_path / "small.pt"))
        writer.save({"big": torch.zeros(100_000)}, str(tmp_path / "gone" / "big.pt"))
    assert isinstance(first, (OSError, RuntimeError)) and writer.failure is first
    assert writer.load(str(tmp_path / "small.pt"))["small"].tolist() == [1.0] * 10


def test_a_disk_that_fills_up_with_the_small_files(run: RunDir, plan: Plan) -> None:
    write(run, 5, plan, Weight(SoloWorld(), 1.0))
    learner = Weight(SoloWorld(), 1.0, write=lambda path, value: None)
    with largest_file(200), pytest.raises(RftError, match=r"step_000010 could not be written.*no space left on the disk"):
        write(run, 10, plan, learner, export=lambda directory: directory.mkdir())
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000005"]


def test_an_export_that_fails_leaves_no_half_checkpoint(run: RunDir, plan: Plan) -> None:
    def fails(directory: Path) -> None:
        directory.mkdir()
        (directory / "half").write_text("x")
        raise RftError("the policy could not be written", hint="free space")

    with pytest.raises(RftError, match="the policy could not be written"):
        write(run, 5, plan, Weight(SoloWorld(), 1.0), export=fails)
    assert list(run.checkpoints.iterdir()) == []


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_all_ranks_fail_together(run: RunDir, plan: Plan, broken: int) -> None:
    """One of three ranks cannot write: all of them get the error, which names it."""

    def work(world: ThreadWorld) -> None:
        write(run, 5, plan, Weight(world, 1.0, numbers=1000, write=to_a_full_disk if world.rank == broken else None), world=world)

    ends = ends_on_ranks(3, work)
    assert all(isinstance(end, RftError) and f"rank {broken}: no space left on the disk" in end.message for end in ends), ends
    assert list(run.checkpoints.iterdir()) == []


def test_several_ranks_write_one_checkpoint(run: RunDir, plan: Plan) -> None:
    plan = replace(plan, world=replace(plan.world, ranks=3))
    assert ends_on_ranks(3, lambda world: write(run, 5, plan, Weight(world, float(world.rank)), world=world) and None) == [None] * 3
    folder = run.checkpoints / "step_000005"
    assert {path.name for path in (folder / "trainer").iterdir()} == {"rank_0.pt", "rank_1.pt", "rank_2.pt"}
    values: dict[int, float] = {}

    def back(world: ThreadWorld) -> None:
        learner = Weight(world, 9.0)
        restore(folder, learner=learner, registry={"learner": learner, "source": Position()}, world=world)
        values[world.rank] = float(learner.value[0])

    assert ends_on_ranks(3, back) == [None] * 3 and values == {0: 0.0, 1: 1.0, 2: 2.0}


def test_what_every_rank_keeps_for_itself_comes_back_to_it(run: RunDir, plan: Plan) -> None:
    """Answers that wait: rank r has r of them. All are in the one file, and each rank gets its own."""
    plan = replace(plan, world=replace(plan.world, ranks=3))

    def kept_by(world: Any) -> Kept:
        return Kept(PartialPlan(budget_tokens=2, max_version_lag=1), world, updates=1, newest=lambda: 3, data="rows")

    def waiting(rank: int) -> list[Held]:
        trace = TokenTrace(ids=(5, 6), logprobs=(-0.1, -0.25), segments=((0, 2), (1, 3)))
        piece = Piece(sample=0, text="a", text_with_special="a<e>", trace=trace, finish=FinishReason.LENGTH, policy_version=3)
        return [Held(ask=Ask(draw=10 * rank + number, turn=number), pieces=(piece,)) for number in range(rank)]

    def there(world: ThreadWorld) -> None:
        kept = kept_by(world)
        kept.keep(waiting(world.rank))
        write(run, 5, plan, Weight(world, 1.0), world=world, position=kept)

    found: dict[int, list[Held]] = {}

    def back(world: ThreadWorld) -> None:
        learner, kept = Weight(world, 9.0), kept_by(world)
        restore(run.checkpoints / "step_000005", learner=learner, registry={"learner": learner, "source": kept}, world=world)
        found[world.rank] = kept.held

    assert ends_on_ranks(3, there) == [None] * 3 and ends_on_ranks(3, back) == [None] * 3
    assert found == {rank: waiting(rank) for rank in range(3)}


def test_a_step_that_is_done_again_replaces_its_checkpoint_only_when_whole(run: RunDir, plan: Plan) -> None:
    write(run, 5, plan, Weight(SoloWorld(), 1.0))
    before = everything(run.checkpoints / "step_000005")
    with pytest.raises(RftError):
        write(run, 5, plan, Weight(SoloWorld(), 2.0, numbers=1000, write=to_a_full_disk))
    assert everything(run.checkpoints / "step_000005") == before and names(run) == ["step_000005"]
    write(run, 5, plan, Weight(SoloWorld(), 2.0))
    assert everything(run.checkpoints / "step_000005")["policy/weights"] == b"[2.0, 2.0, 2.0, 2.0]"
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000005"]


class Killed(BaseException):
    """Stands for a process that is gone at once: no handler of the checkpoint runs to its end."""


def kill(*_: object) -> None:
    raise Killed


@pytest.mark.parametrize("where", ["trainer", "policy"])
def test_a_kill_in_the_middle_leaves_nothing_to_resume_from(run: RunDir, plan: Plan, where: str) -> None:
    write(run, 5, plan, Weight(SoloWorld(), 1.0))
    with pytest.raises(Killed):
        if where == "trainer":
            write(run, 10, plan, Weight(SoloWorld(), 1.0, write=kill))
        else:
            write(run, 10, plan, Weight(SoloWorld(), 1.0), export=kill)
    assert names(run) == ["step_000005"] and (run.checkpoints / f"{UNFINISHED}step_000010").is_dir()
    write(run, 7, plan, Weight(SoloWorld(), 1.0))  # what was left over goes, whatever step it was of
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_000005", "step_000007"]


def test_a_kill_between_two_renames_loses_nothing(run: RunDir, plan: Plan) -> None:
    write(run, 5, plan, Weight(SoloWorld(), 1.0))
    folder = run.checkpoints / "step_000005"
    folder.rename(run.checkpoints / f"{UNFINISHED}step_000005_before")
    shutil.copytree(run.checkpoints / f"{UNFINISHED}step_000005_before", run.checkpoints / f"{UNFINISHED}step_000005")
    (run.checkpoints / f"{UNFINISHED}step_000005" / "policy" / "weights").write_text("newer")
    assert names(run) == []
    write(run, 10, plan, Weight(SoloWorld(), 1.0))
    assert names(run) == ["step_000005", "step_000010"] and (folder / "policy" / "weights").read_text() == "newer"
    assert len(list(run.checkpoints.iterdir())) == 2


def test_a_kill_while_an_old_one_is_deleted_leaves_nothing_half(run: RunDir, plan: Plan) -> None:
    """COMMITTED goes first."""
    write(run, 5, plan, Weight(SoloWorld(), 1.0))
    (run.checkpoints / "step_000005" / COMMITTED).unlink()
    assert names(run) == [] and (run.checkpoints / "step_000005" / "policy").is_dir()


def test_refusals_of_restore(run: RunDir, plan: Plan) -> None:
    folder = write(run, 5, plan, Weight(SoloWorld(), 1.0))
    learner = Weight(SoloWorld(), 7.0)
    with pytest.raises(ResumeError, match=r"remembers \['learner', 'source'\], this plan needs \['learner', 'moments', 'source'\]"):
        restore(folder, learner=learner, registry={"learner": learner, "source": Position(), "moments": Position()}, world=SoloWorld())
    assert learner.value.tolist() == [7.0] * 4  # refused before anything was loaded
    (folder / "progress.json").write_text("{")
    with pytest.raises(ResumeError, match=r"progress\.json cannot be read"):
        read_progress(folder)
    (folder / "progress.json").unlink()
    with pytest.raises(ResumeError, match=r"progress\.json cannot be read"):
        read_progress(folder)
    (folder / COMMITTED).unlink()
    with pytest.raises(ResumeError, match="is not a whole checkpoint"):
        read_progress(folder)


def test_progress_is_json_that_anybody_reads(run: RunDir, plan: Plan) -> None:
    folder = write(run, 5, plan, Weight(SoloWorld(), 1.0))
    assert json.loads((folder / "progress.json").read_text())["state"]["source"] == {"at": 5}


@pytest.mark.parametrize("text", ["[1]", "null", "{}", '{"step": 1, "ranks": 1}', '{"step": 1, "ranks": 1, "state": 3}', "{"])
def test_damaged_progress_names_the_checkpoint_before(run: RunDir, plan: Plan, text: str) -> None:
    for step in (4, 5):
        write(run, step, plan, Weight(SoloWorld(), 2.0), keep=5)
    (run.checkpoints / "step_000005" / "progress.json").write_text(text)
    with pytest.raises(ResumeError, match=r"progress\.json") as caught:
        read_progress(run.checkpoints / "step_000005")
    assert caught.value.hint is not None and "--step 4" in caught.value.hint


class Changed(Position):
    """What was counted in data that is not there any more."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise ResumeError("data set `train` has changed")


def test_what_a_changed_plan_does_not_share_starts_anew_and_says_so(run: RunDir, plan: Plan) -> None:
    folder = write(run, 5, plan, Weight(SoloWorld(), 1.0), position=Position(40))
    learner, changed, fresh = Weight(SoloWorld(), 7.0), Changed(), Position(3)
    parts = {"learner": learner, "source": changed, "moments": fresh}
    told: list[tuple[str, str]] = []
    with pytest.raises(ResumeError, match="has changed"):
        restore(folder, learner=learner, registry={"learner": learner, "source": changed}, world=SoloWorld())
    assert restore(folder, learner=learner, registry=parts, world=SoloWorld(), accept=True, warn=lambda *news: told.append(news)) == 5
    assert learner.value.tolist() == [1.0] * 4 and (changed.at, fresh.at) == (0, 3)
    assert [code for code, _ in told] == ["starts_anew", "starts_anew"]
    assert "`train` has changed" in told[0][1] and "`moments`" in told[1][1]
    told.clear()
    restore(folder, learner=learner, registry={"learner": learner}, world=SoloWorld(), accept=True, warn=lambda *news: told.append(news))
    assert told == [("left_behind", "the checkpoint remembers `source`, which this plan does not have")]


def test_without_the_trainers_state(run: RunDir, plan: Plan) -> None:
    """The policy alone: refused without a yes; with one, what remembers is still there."""
    plan = replace(plan, checkpoint=replace(plan.checkpoint, trainer_state=False))
    learner, position = Weight(SoloWorld(), 2.0), Position()
    folder = write(run, 5, plan, learner, position=Position(40))
    assert not (folder / "trainer").exists() and (folder / "policy").is_dir()
    parts = {"learner": learner, "source": position}
    with pytest.raises(ResumeError, match="no trainer state"):
        restore(folder, learner=learner, registry=parts, world=SoloWorld())
    assert restore(folder, learner=learner, registry=parts, world=SoloWorld(), accept=True) == 5 and position.at == 40


def test_a_checkpoint_that_would_not_fit_is_not_begun(run: RunDir, plan: Plan) -> None:
    """The one before takes more than is free: nothing is written, and the words say how much is missing."""
    before = write(run, 5, plan, Weight(SoloWorld(), 1.0))
    huge = before / "trainer" / "sparse"
    with huge.open("wb") as file:
        file.truncate(2**43)  # takes no room itself
    learner = Weight(SoloWorld(), 1.0, write=lambda path, value: pytest.fail("it was begun"))
    with pytest.raises(RftError, match=r"no space left on the disk.*a checkpoint takes about 8\.0 TiB, [0-9.]+ [KMGT]iB are free"):
        write(run, 10, plan, learner)
    assert names(run) == ["step_000005"] and len(list(run.checkpoints.iterdir())) == 1

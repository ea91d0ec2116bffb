"""What is removed from a run directory and what never is; a policy copied and converted."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rftcli.builtin import builtin_path
from rftcli.errors import UsageError
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import plan_to_json
from rftcli.recipe.load import load_text
from rftcli.runtime.clean import at_rest, removals, remove
from rftcli.runtime.export import INDEX, export
from rftcli.runtime.rundir import COMMITTED, RunDir, State, commit_text, step_name


def checkpoint(run: RunDir, step: int, *, committed: bool = True, prefix: str = "", folders: tuple[str, ...] = ("policy",)) -> Path:
    folder = run.checkpoints / f"{prefix}{step_name(step)}"
    for name in folders:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text('{"dtype": "float32"}')
    if committed:
        (folder / COMMITTED).write_text(commit_text(step, 1))
    return folder


RECIPE = """\
models: {policy: {path: org/model}}
data: {train: {path: train.jsonl}, eval: {test: {path: test.jsonl}}}
rewards: {default: [{rule: exact}]}
train: {steps: 10}
batch: {prompts_per_step: 2}
checkpoint: {keep_best: {metric: eval.test.mean@1}}
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    made.write_state(State(status="done", step=4, attempt=1, heartbeat=time.time()))
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=1.0), model=ModelFacts(path="m"), ranks=1, train_rows=2)
    plan = compile_plan(load_text(RECIPE, sets=[], env={}).recipe, facts, name="n", search_path="/", policy_path="m")
    made.plan.write_text(plan_to_json(plan))
    return made


def names(run: RunDir, keep: int | None = None) -> list[str]:
    return [item.path.name for item in removals(run, keep=keep)]


def test_only_what_is_half_goes(run: RunDir) -> None:
    whole = [checkpoint(run, step) for step in (1, 2, 3)]
    half = checkpoint(run, 4, committed=False, prefix=".writing_")
    broken = checkpoint(run, 5, committed=False)
    between = checkpoint(run, 6, prefix=".writing_")  # killed between two renames: the next attempt puts it back
    part = run.samples / ".step_000004.jsonl.1"
    part.write_text("x" * 10)
    kept = run.samples / "step_000003.jsonl"
    kept.write_text("{}\n")
    found = removals(run, keep=None)
    assert {item.path for item in found} == {half, broken, part} and {item.path: item.bytes for item in found}[part] == 10
    remove(found)
    assert not half.exists() and not broken.exists() and not part.exists()
    assert all(path.is_dir() for path in (*whole, between)) and kept.is_file() and names(run) == []


def test_the_newest_stay(run: RunDir) -> None:
    for step in (1, 2, 10):
        checkpoint(run, step)
    assert names(run, keep=1) == ["step_000001", "step_000002"] and names(run, keep=3) == [] and names(run, keep=9) == []
    remove(removals(run, keep=2))
    assert [path.name for path in run.committed_checkpoints()] == ["step_000002", "step_000010"]


def test_the_best_stays(run: RunDir) -> None:
    for step, value in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.4)):
        checkpoint(run, step)
        (run.evals / f"step_{step:06d}.json").write_text(json.dumps({"sets": {"test": {"mean@1": {"value": value}}}}))
    assert names(run, keep=1) == ["step_000001", "step_000003"]


def test_without_a_plan_nothing_old_goes(run: RunDir) -> None:
    checkpoint(run, 1)
    run.plan.write_text("{")
    assert names(run) == []
    with pytest.raises(UsageError, match="which checkpoints are kept"):
        names(run, keep=1)


def test_a_running_run_is_left_alone(run: RunDir) -> None:
    run.write_state(State(status="running", step=2, attempt=1, heartbeat=time.time()))
    with pytest.raises(UsageError, match="is running"), at_rest(run):
        pass
    long_ago = time.time() - 1000
    os.utime(run.state_file, (long_ago, long_ago))  # dead: its heartbeat is old
    with at_rest(run), pytest.raises(UsageError, match="is running"), at_rest(RunDir(run.path)):  # another command holds the lock
        pass


def test_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run directory"), at_rest(RunDir(tmp_path)):
        pass


def test_a_copy_loads(run: RunDir, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = run.checkpoints / step_name(3)
    folder.mkdir()
    (folder / COMMITTED).write_text(commit_text(3, 1))
    (folder / "policy").symlink_to(builtin_path("quickstart"))
    done = export(run.path, tmp_path / "out" / "half", dtype="bfloat16")
    before, after = load_file(folder / "policy" / "model.safetensors"), load_file(done.out / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name].bfloat16(), after[name]) for name in before)
    assert AutoModelForCausalLM.from_pretrained(done.out).dtype == torch.bfloat16
    assert [path.name for path in done.out.parent.iterdir()] == ["half"]  # nothing half is left
    plain = export(folder, tmp_path / "plain")
    assert (plain.out / "model.safetensors").read_bytes() == (folder / "policy" / "model.safetensors").read_bytes()


def test_shards_and_whole_numbers(run: RunDir, tmp_path: Path) -> None:
    policy = checkpoint(run, 1) / "policy"
    save_file({"a": torch.ones(4), "n": torch.arange(3)}, policy / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.full((2,), 0.5)}, policy / "model-2.safetensors")
    (policy / INDEX).write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": {"a": "model-1.safetensors"}}))
    out = export(run.path, tmp_path / "out", dtype="float16").out
    first = load_file(out / "model-1.safetensors")
    assert first["a"].dtype == torch.float16 and first["n"].dtype == torch.int64
    assert json.loads((out / INDEX).read_text())["metadata"]["total_size"] == 4 * 2 + 3 * 8 + 2 * 2
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"


def test_which_policy(run: RunDir, tmp_path: Path) -> None:
    checkpoint(run, 1, folders=("policy", "adapter"))
    checkpoint(run, 2)
    assert export(run.path, tmp_path / "a").source == run.checkpoints / step_name(2) / "policy"
    assert export(run.path, tmp_path / "b", step=1, what="adapter").source == run.checkpoints / step_name(1) / "adapter"
    assert export(run.path, tmp_path / "c", step=1, what="merged").source == run.checkpoints / step_name(1) / "policy"
    run.final.mkdir()
    (run.final / "config.json").write_text("{}")
    assert export(run.path, tmp_path / "d").source == run.final


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"what": "adapter"}, "holds no adapter/"),
        ({"what": "merged"}, "nothing was merged"),
        ({"what": "ema"}, "holds no ema/"),
        ({"what": "all"}, "is unknown"),
        ({"dtype": "int8"}, "is unknown"),
        ({"step": 9}, "no whole checkpoint of step 9"),
        ({"dtype": "float16"}, "holds no safetensors"),
    ],
)
def test_what_is_refused(run: RunDir, tmp_path: Path, options: dict[str, object], text: str) -> None:
    checkpoint(run, 2)
    with pytest.raises(UsageError, match=text):
        export(run.path, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_nothing_is_written_over(run: RunDir, tmp_path: Path) -> None:
    checkpoint(run, 2)
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="nothing is written over"):
        export(run.path, tmp_path / "out")
    with pytest.raises(UsageError, match="neither a whole checkpoint"):
        export(tmp_path / "out", tmp_path / "other")

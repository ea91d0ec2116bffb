"""A teacher on a rank: the same tokens before anything loads, log-probs of its plain forward, and a server that is asked first."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rank_threads import on_ranks

from rftcli.algo.align import Row, padded
from rftcli.builtin import builtin_path
from rftcli.errors import EXIT_USAGE, RecipeError, RftError, UsageError
from rftcli.models.policy import CausalPolicy
from rftcli.plan.plan import Plan
from rftcli.runtime.judge_servers import Starter
from rftcli.runtime.models import load_model, make_tokenizer
from rftcli.runtime.prepare import prepare
from rftcli.runtime.rundir import AttemptDir, RunDir
from rftcli.runtime.teacher import PROBE_TEXT, check_teacher, close_teacher, make_teacher
from rftcli.runtime.teacher_server import await_teacher, begin_teacher
from rftcli.runtime.world import SoloWorld
from rftcli.types import Batch, Denominators

RECIPE = """\
models: {policy: {path: 'builtin:quickstart'}}
data: {train: {path: rows.jsonl}}
rollout: {max_prompt_tokens: 24, max_new_tokens: 24}
rewards: {default: [{rule: exact}]}
algorithm: {advantage: {kind: distill}}
batch: {prompts_per_step: 4}
train: {steps: 2}
"""
CPU = torch.device("cpu")


@pytest.fixture
def plan_with(eight_rows: None, tmp_path: Path) -> Any:
    (tmp_path / "r.yaml").write_text(RECIPE)
    return lambda teacher: prepare(Path("r.yaml"), [f"models.teacher={{{teacher}}}"], ranks=1, gpus=None).plan


@pytest.fixture
def other_ids(tmp_path: Path) -> Path:
    """The quickstart model with two of its tokens changed about."""
    folder = tmp_path / "other"
    shutil.copytree(builtin_path("quickstart"), folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    return folder


def batch() -> Batch:
    inputs = padded([Row(torch.tensor([4, 9, 7, 3, 8]), 2, torch.tensor([True, False, True]))], 0)
    return Batch(
        input_ids=inputs.input_ids, position_ids=inputs.position_ids, attention_mask=inputs.attention_mask, select=inputs.select,
        target_ids=inputs.target_ids, sequence=inputs.sequence, num_sequences=1, advantages=torch.zeros(2), old_logprobs=None,
        reference_logprobs=None, sampler_logprobs=None, values=None, returns=None, denominators=Denominators(tokens=1, sequences=1),
    )  # fmt: skip


def test_a_local_teacher_gives_the_log_probs_of_its_model(plan_with: Any) -> None:
    plan: Plan = plan_with("path: 'builtin:quickstart'")
    check_teacher(plan, make_tokenizer(plan.policy), SoloWorld())
    teacher = make_teacher(plan, CPU, SoloWorld())
    assert teacher is not None
    found, _ = teacher.logprobs(batch(), 0.7)
    model = load_model(plan.policy, CPU)
    with torch.no_grad():
        scores = model(input_ids=batch().input_ids).logits[0].float() / 0.7
    expected = [float(scores[place].log_softmax(-1)[token]) for place, token in ((1, 7), (3, 8))]
    assert found.tolist() == pytest.approx(expected, abs=1e-5) and not found.requires_grad
    assert not any(parameter.requires_grad for parameter in vars(teacher)["_module"].parameters()) and isinstance(
        vars(teacher)["_module"], CausalPolicy
    )
    close_teacher(teacher)


def test_other_ids_are_found_before_anything_loads(plan_with: Any, other_ids: Path, tmp_path: Path) -> None:
    """At the recipe's place by the command that starts, whatever is remembered of another teacher, and by every rank of a plan that was made
    elsewhere."""
    for file in (tmp_path / "rows.jsonl", *other_ids.iterdir()):
        os.utime(file, (1e9, 1e9))  # old enough for what was measured to be remembered
    plan_with("path: 'builtin:quickstart'")
    with pytest.raises(RecipeError) as caught:
        plan_with(f"path: {other_ids}")
    (problem,) = caught.value.problems
    assert caught.value.exit_code == EXIT_USAGE and problem.path == "models.teacher.path" and "2 of the" in problem.message
    plan = plan_with("path: 'builtin:quickstart'")
    elsewhere = replace(plan, teacher=replace(plan.teacher, model=replace(plan.teacher.model, path=str(other_ids))))
    tokenizer = make_tokenizer(plan.policy)

    def work(world: Any) -> str:
        with pytest.raises(UsageError) as refused:
            check_teacher(elsewhere, tokenizer, world)
        return refused.value.message

    messages = on_ranks(2, work)
    assert messages[0] == messages[1] and "tokens of the policy have another id for the teacher" in messages[0]


@pytest.fixture
def served() -> Iterator[dict[str, Any]]:
    """An SGLang-like server; `text` makes the text of an id."""
    state: dict[str, Any] = {"asked": 0}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input_ids"]
            state["asked"] += 1
            rows = [[None if place == 0 else -1.0, number, state["text"](number)] for place, number in enumerate(ids)]
            data = json.dumps({"meta_info": {"input_token_logprobs": rows}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state["url"] = f"http://127.0.0.1:{http.server_port}"
    yield state
    http.shutdown()
    http.server_close()
    thread.join()


def test_a_server_is_asked_about_its_tokens_first(plan_with: Any, served: dict[str, Any]) -> None:
    plan: Plan = plan_with(f"server: '{served['url']}', api: sglang")
    tokenizer = make_tokenizer(plan.policy)
    assert len(tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids) > 3
    served["text"] = lambda number: tokenizer.decode([number])
    on_ranks(2, lambda world: check_teacher(plan, tokenizer, world))
    assert served["asked"] == 1  # rank 0 asks for all
    served["text"] = lambda number: tokenizer.decode([number + 1])
    with pytest.raises(UsageError, match=r"for the policy and .* for the server's model"):
        check_teacher(plan, tokenizer, SoloWorld())
    teacher = make_teacher(plan, CPU, SoloWorld())
    assert teacher is not None and teacher.logprobs(batch(), 1.0)[0].tolist() == [-1.0, -1.0]
    close_teacher(teacher)


COMMAND = [sys.executable, str(Path(__file__).parents[1] / "fake_judge_command.py")]


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AttemptDir:
    monkeypatch.setenv("FAKE_JUDGE_TOLD", str(tmp_path))
    run = RunDir(tmp_path / "run")
    run.create()
    found = run.attempt(1)
    found.create()
    return found


def alive(folder: Path) -> list[int]:
    pids = [pid for path in folder.glob("*.json") for pid in json.loads(path.read_text())["pids"]]
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_a_server_that_the_run_starts(plan_with: Any, attempt: AttemptDir, tmp_path: Path) -> None:
    """Every rank asks it, under the name that this run gave it; it ends with the teacher."""
    plan: Plan = plan_with(f"path: 'builtin:quickstart', placement: {{gpus: 0, command: {json.dumps(COMMAND)}}}")

    def work(world: Any) -> list[float]:
        check_teacher(plan, make_tokenizer(plan.policy), world)
        served = begin_teacher(plan, world, attempt, Starter(rank=world.rank))
        teacher = make_teacher(plan, CPU, world, served)
        await_teacher(served, world)
        assert teacher is not None
        found = teacher.logprobs(batch(), 1.0)[0].tolist()
        world.barrier("asked")
        close_teacher(teacher)
        return found

    assert on_ranks(2, work) == [[-7 / 8, -8 / 8]] * 2
    (told,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert "--max-model-len 49" in " ".join(told["rest"]) and not alive(tmp_path) and (attempt.logs / "teacher.log").is_file()


def test_the_end_of_its_server_is_told_with_its_log(plan_with: Any, attempt: AttemptDir, tmp_path: Path) -> None:
    shutil.copytree(builtin_path("quickstart"), tmp_path / "mortal")
    plan: Plan = plan_with(f"path: {tmp_path / 'mortal'}, placement: {{gpus: 0, command: {json.dumps(COMMAND)}}}, retries: 0, concurrency: 1")
    served = begin_teacher(plan, SoloWorld(), attempt, Starter(rank=0))
    teacher = make_teacher(plan, CPU, SoloWorld(), served)
    await_teacher(served, SoloWorld())
    assert teacher is not None
    with pytest.raises(RftError, match=r"(?s)the server of the teacher \(.*mortal\) is gone: it ended with code 9.*device-side assert"):
        for _ in range(3):
            teacher.logprobs(batch(), 1.0)
    close_teacher(teacher)
    assert not alive(tmp_path)


def test_a_server_that_is_not_there(plan_with: Any) -> None:
    plan = plan_with("server: 'http://127.0.0.1:9', api: sglang, retries: 0")
    with pytest.raises(RftError, match="did not answer in 1 tries"):
        check_teacher(plan, make_tokenizer(plan.policy), SoloWorld())


def test_no_teacher(plan_with: Any, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE.replace("distill", "opo"))
    plan = prepare(Path("r.yaml"), [], ranks=1, gpus=None).plan
    check_teacher(plan, None, SoloWorld())
    assert make_teacher(plan, CPU, SoloWorld()) is None
    close_teacher(None)

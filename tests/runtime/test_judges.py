"""Judges that the run starts: who starts them, who asks them, that they end with whoever started them, and that their end ends the run.

The servers are real processes, with real HTTP.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rank_threads import ends_on_ranks, on_ranks

from rftcli.cli.main import main
from rftcli.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, RftError
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts, ScorerFacts
from rftcli.plan.plan import Plan
from rftcli.recipe.load import load_text
from rftcli.rewards.scorers.desk import Desk
from rftcli.rewards.scorers.remote import remote_scorer
from rftcli.rewards.scorers.view import View
from rftcli.rewards.table import RewardTable
from rftcli.runtime.judge_servers import Starter, arguments, started, told_of
from rftcli.runtime.judges import NO_JUDGES, JudgeBeside, Judges, await_judges, begin_judges
from rftcli.runtime.rundir import AttemptDir, RunDir
from rftcli.runtime.world import SoloWorld
from rftcli.types import Completion, FinishReason, Prompt, TokenTrace

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "tests" / "fake_judge_command.py")]
JUDGE = f"kind: generative, prompt: '{{{{ completion }}}}', score: {{regex: 'score: (.+)'}}, placement: {{gpus: 0, command: {json.dumps(COMMAND)}}}"
RECIPE = """\
models: {policy: {path: 'builtin:quickstart'}}
data: {train: {path: rows.jsonl}}
rollout: {max_prompt_tokens: 64, max_new_tokens: 64}
train: {steps: 1}
"""


def judge(path: str = "org/judge", more: str = "") -> str:
    return f"{{path: {path}, {JUDGE}{more}}}"


def plan_of(ranks: int = 1, **scorers: str) -> Plan:
    sets = [f"models.scorers.{name}={text}" for name, text in scorers.items()]
    parts = ", ".join(f"{{model: {name}}}" for name in scorers)
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=4.0), model=ModelFacts(path="m"), ranks=ranks)
    recipe = load_text(RECIPE, sets=[f"rewards={{default: [{parts}]}}", *sets], env={}).recipe
    return compile_plan(recipe, facts, name="n", search_path="/", policy_path="m")


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AttemptDir:
    monkeypatch.setenv("FAKE_JUDGE_TOLD", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = RunDir(tmp_path / "run")
    run.create()
    found = run.attempt(1)
    found.create()
    return found


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(found: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def all_gone(folder: Path) -> bool:
    return not any(alive(pid) for one in told(folder) for pid in one["pids"])


def view(text: str) -> View:
    return View(prompt="", messages=(), completion=text, reference=None, label="default", columns={}, place="row")


def asked(plan: Plan, judges: Judges, *texts: str) -> dict[str, list[float]]:
    found = {}
    for spec in plan.scorers:
        with closing(remote_scorer(judges.placed(spec), 1, judges.gone(spec))) as scorer:
            found[spec.name] = [scorer.submit(view(text)).result(timeout=30) for text in texts]
    return found


def test_one_server_serves_all_ranks_and_ends_when_it_is_told_to(attempt: AttemptDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    plan = plan_of(2, a=judge(), b=judge(more=", max_tokens: 30, max_new_tokens: 12"), c=judge(more=", api: completions, samples: 2, temperature: 1"))

    def work(world: Any) -> dict[str, list[float]]:
        judges = begin_judges(plan.scorers, world, attempt, Starter(rank=world.rank))
        await_judges(judges, plan.scorers, world)
        found = asked(plan, judges, "four", "seven77")
        world.barrier("asked")
        judges.stop()
        return found

    assert on_ranks(2, work) == [{name: [4.0, 7.0] for name in "abc"}] * 2
    servers = told(tmp_path)
    assert len(servers) == 2  # a and c are one checkpoint under one set of arguments
    assert all(one["model"] == "org/judge" and one["environment"]["RANK"] is None for one in servers)
    words = [" ".join(one["rest"]) for one in servers]
    assert sorted("--max-model-len 42" in text for text in words) == [False, True]
    assert all("--dtype float32" in text and "--generation-config vllm" in text and "--enforce-eager" in text for text in words)
    assert all_gone(tmp_path) and {path.name for path in attempt.logs.iterdir()} == {"judge_a.log", "judge_b.log"}


def test_a_plan_without_such_judges_meets_nobody(attempt: AttemptDir) -> None:
    plan = plan_of(s="{kind: http, urls: ['http://x']}")
    judges = begin_judges(plan.scorers, None, attempt, Starter())  # type: ignore[arg-type]
    await_judges(judges, plan.scorers, None)  # type: ignore[arg-type]
    assert judges is NO_JUDGES and judges.placed(plan.scorers[0]) == plan.scorers[0] and judges.gone(plan.scorers[0]) is None


def test_all_ranks_hear_of_a_judge_that_does_not_start(attempt: AttemptDir, tmp_path: Path) -> None:
    plan = plan_of(2, good=judge(), bad=judge("org/broken"))

    def work(world: Any) -> None:
        judges = begin_judges(plan.scorers, world, attempt, Starter(rank=world.rank))
        await_judges(judges, plan.scorers, world)

    for end in ends_on_ranks(2, work):
        assert isinstance(end, RftError) and end.hint is not None and "placement.memory_share" in end.hint
        assert end.message.startswith("judge `bad` (org/broken): vLLM server http://127.0.0.1:")
        assert "did not start: it ended with code 1" in end.message and "\n  loading\n" in end.message
        assert end.message.endswith("\n  ValueError: this model is broken")
    assert all_gone(tmp_path)


def test_a_program_that_is_not_there(attempt: AttemptDir, tmp_path: Path) -> None:
    plan = plan_of(bad=judge().replace(COMMAND[0], "/nowhere/vllm"))
    own = started(plan.scorers, tmp_path, Starter())
    with pytest.raises(RftError, match=r"(?s)judge `bad`.*No such file or directory: '/nowhere/vllm'") as caught:
        Judges(plan.scorers, own, told_of(own), None).wait()
    assert caught.value.hint == "`placement.command` starts with a program that is there"


def test_every_rank_ends_when_the_judge_does(attempt: AttemptDir) -> None:
    """It ends at the third question; the part says to abstain, and errors are tolerated: the run ends all the same."""
    part = "rewards.default=[{model: j, on_error: abstain}]"
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=4.0), model=ModelFacts(path="m"), ranks=2)
    recipe = load_text(RECIPE, sets=[part, f"models.scorers.j={judge('org/mortal', ', retries: 0')}"], env={}).recipe
    plan = compile_plan(recipe, facts, name="n", search_path="/", policy_path="m")

    def work(world: Any) -> None:
        judges = begin_judges(plan.scorers, world, attempt, Starter(rank=world.rank))
        await_judges(judges, plan.scorers, world)
        desk = Desk(["j"])
        (spec,) = plan.scorers
        desk.fill({"j": remote_scorer(judges.placed(spec), world.size, judges.gone(spec))}, on_close=judges.stop)
        with closing(RewardTable(plan.rewards.labels, desk=desk)) as table:
            list(table.score(completion(world.rank, number) for number in range(4)))

    for end in ends_on_ranks(2, work):
        assert isinstance(end, RftError), end
        assert end.message.startswith("the server of judge `j` (org/mortal) is gone: it ended with code 9")
        assert "\n  CUDA Error: device-side assert triggered" in end.message and "resume" in str(end.hint)


def completion(rank: int, number: int) -> Completion:
    prompt = Prompt(draw=rank, row=0, row_id="t:0", source="t", label="default", text="", token_ids=())
    text = f"{rank} {number}"
    trace = TokenTrace(ids=(1,))
    return Completion(
        prompt=prompt, sample=number, text=text, text_with_special=text, trace=trace, finish=FinishReason.STOP, policy_version=0
    )


def test_what_a_server_is_started_with(tmp_path: Path) -> None:
    text = judge(
        more=", revision: v2, tokenizer: 'builtin:quickstart', template: '{{ messages }}', dtype: bfloat16, trust_remote_code: true, max_tokens: 100"
    )
    text = text.replace("gpus: 0", "gpus: 4, tensor_parallel: 2, options: {max_num_seqs: 64, quantization: awq}")
    machine = MachineFacts(cores=1, memory_gib=64.0, gpus=6, gpu_memory_gib=80.0)
    facts = Facts(machine=machine, model=ModelFacts(path="m"), ranks=2)
    recipe = load_text(RECIPE, sets=["rewards={default: [{model: j}]}", f"models.scorers.j={text}"], env={}).recipe
    known = {"j": ScorerFacts(model=ModelFacts(path="org/judge", revision="c0ffee"))}
    (spec,) = compile_plan(recipe, facts, name="n", search_path="/", policy_path="m", scorers=known).scorers
    assert spec.start is not None
    found = arguments(spec.start, "name", tmp_path / "t.jinja")
    expected = {
        "served_model_name": "name", "revision": "c0ffee", "tokenizer_revision": "main", "dtype": "bfloat16", "trust_remote_code": True,
        "tensor_parallel_size": 2, "max_model_len": 356, "gpu_memory_utilization": 0.9, "enforce_eager": None, "kv_cache_memory_bytes": None,
        "max_num_seqs": 64, "quantization": "awq", "chat_template": str(tmp_path / "t.jinja"),
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert str(found["tokenizer"]).endswith("builtin/quickstart") and "enable_chunked_prefill" not in found
    assert arguments(replace(spec.start, gpus=()), "name", None)["enable_chunked_prefill"] is False


def test_servers_see_their_own_gpus_and_the_template(attempt: AttemptDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # as a rank of two is told
    (spec,) = plan_of(j=judge(more=", template: '{{ messages }} é'")).scorers
    assert spec.start is not None
    spec = replace(spec, start=replace(spec.start, gpus=(2, 3, 4, 5), servers=2, tensor_parallel=2))
    own = started([spec], attempt.logs, Starter())
    judges = Judges([spec], own, told_of(own), None)
    judges.wait()
    placed = judges.placed(spec)
    assert placed.service is not None and {f"{one['url']}/v1" for one in told(tmp_path)} == set(placed.service.urls)
    judges.stop()
    assert sorted(one["environment"]["CUDA_VISIBLE_DEVICES"] for one in told(tmp_path)) == ["2,3", "4,5"]
    assert (attempt.logs / "judge_j.jinja").read_text() == "{{ messages }} é" and all_gone(tmp_path)
    assert {path.name for path in attempt.logs.glob("*.log")} == {"judge_j_0.log", "judge_j_1.log"}


# beside the ranks


@pytest.mark.parametrize("sleeps", [False, True])
def test_every_rank_has_a_judge_beside_it(attempt: AttemptDir, tmp_path: Path, sleeps: bool) -> None:
    scorer = "{kind: generative, path: org/judge, prompt: '{{ completion }}', score: {regex: 'score: (.+)'}, engine: vllm}"
    (spec,) = plan_of(2, j=scorer).scorers
    assert spec.start is not None
    specs = (replace(spec, start=replace(spec.start, sleeps=sleeps)),)

    def work(world: Any) -> list[Any]:
        judges = begin_judges(specs, world, attempt, Starter(rank=world.rank, own_command=tuple(COMMAND)))
        await_judges(judges, specs, world)
        remote = remote_scorer(judges.placed(specs[0]), world.size, judges.gone(specs[0]))
        scorer = JudgeBeside(remote, lambda: judges.at_work(specs[0]))
        desk = Desk(["j"])
        desk.fill({"j": scorer}, on_close=judges.stop)
        found = [scorer.score([view("four"), view("a" * world.rank)]), scorer.score([]), scorer.score([view("again")])]
        between = remote.submit(view("x")).exception(timeout=30)
        desk.close()
        return [*found, between is None]

    assert on_ranks(2, work) == [[[4.0, 0.0], [], [5.0], not sleeps], [[4.0, 1.0], [], [5.0], not sleeps]]
    assert len({one["url"] for one in told(tmp_path)}) == 2 and all_gone(tmp_path)
    assert {path.name for path in attempt.logs.iterdir()} == {"judge_j_rank_0.log", "judge_j_rank_1.log"}
    assert all(("--enable-sleep-mode" in one["rest"]) == sleeps for one in told(tmp_path))


def test_the_end_of_a_judge_beside_a_rank_ends_its_round(attempt: AttemptDir) -> None:
    scorer = "{kind: generative, path: org/mortal, prompt: '{{ completion }}', score: {regex: 'score: (.+)'}, engine: vllm, retries: 0}"
    (spec,) = specs = plan_of(j=scorer).scorers
    judges = begin_judges(specs, SoloWorld(), attempt, Starter(rank=0, own_command=tuple(COMMAND)))
    beside = JudgeBeside(remote_scorer(judges.placed(spec), 1, judges.gone(spec)), lambda: judges.at_work(spec))
    assert beside.score([view("one"), view("three")]) == [3.0, 5.0]
    with pytest.raises(RftError, match="the server of judge `j` \\(org/mortal\\) is gone: it ended with code 9"):
        beside.score([view("four")])
    beside.close()
    judges.stop()


# rft rewards try


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for name, value in {"NO_COLOR": "1", "TMPDIR": str(tmp_path / "tmp"), "FAKE_JUDGE_TOLD": str(tmp_path), "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    Path("r.yaml").write_text(RECIPE)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": "q", "answer": "a" * number}) + "\n" for number in (1, 2, 3, 4)))
    yield tmp_path
    assert all_gone(tmp_path)


def words(text: str) -> list[str]:
    return ["rewards", "try", "r.yaml", "--set", f"models.scorers.j={text}", "--set", "rewards={default: [{model: j}]}"]


def tried(text: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(words(text))
    return int(str(caught.value.code))


def test_trying_rewards_starts_the_judge_and_ends_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried(judge("builtin:quickstart")) == EXIT_OK
    shown = capsys.readouterr().out
    assert "4 completions" in shown and [line.split()[5:8] for line in shown.splitlines() if line.startswith("j ")] == [["2.50", "1.00", "4.00"]]
    assert not list((here / "tmp").iterdir())  # logs of what went well are not kept


def test_trying_rewards_with_a_judge_that_ends(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried(judge("org/mortal")) == EXIT_FAILED
    said = capsys.readouterr().err
    assert "is gone: it ended with code 9" in said and "device-side assert" in said
    assert len(list((here / "tmp").glob("rft-judges-*/judge_j.log"))) == 1


def test_trying_rewards_where_there_are_no_gpus(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried(judge("builtin:quickstart").replace("gpus: 0", "gpus: 3")) == EXIT_USAGE
    assert "models.scorers.j.placement.gpus  asks for 3 GPUs, and this run is on a CPU" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_command_that_ends_in_any_way_leaves_no_judge(here: Path, number: int) -> None:
    as_in_a_terminal = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # what starts in the background ignores it
    command = subprocess.Popen([sys.executable, "-m", "rftcli", *words(judge("org/silent"))], env=os.environ, preexec_fn=as_in_a_terminal)
    try:
        until(lambda: told(here))
        time.sleep(1.0)  # now it waits for a reply
        command.send_signal(number)
        command.wait(20)
    finally:
        command.kill()
        command.wait()
    until(lambda: all_gone(here))

"""Engines in other processes, from the plan: who starts them, who finds them, how weights go, and that all ranks hear of what went wrong.

The servers are small ones, with real HTTP; as a command they are real processes.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_vllm import TRAINED, FakeVLLM
from rank_threads import ends_on_ranks, on_ranks
from torch import nn

from rftcli.errors import HeldUpError, MachineError, RftError, UsageError
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import Plan
from rftcli.recipe.load import load_text
from rftcli.runtime import vllm_engine
from rftcli.runtime.engine_folder import config_folder
from rftcli.runtime.rundir import RunDir
from rftcli.runtime.vllm_apart import Place, check_servers, make_apart, serve_words, shared_folder
from rftcli.runtime.world import SoloWorld
from rftcli.types import Prompt, Request, SamplingSettings

RECIPE = """\
models: {policy: {path: org/model}}
data: {train: {path: train.jsonl}}
rewards: {default: [{rule: exact}]}
train: {steps: 1}
batch: {prompts_per_step: 2}
rollout: {engine: vllm, max_prompt_tokens: 30, max_new_tokens: 30}
"""
COMMAND = [sys.executable, str(Path(__file__).parents[1] / "fake_vllm_command.py")]


def plan_of(*sets: str, ranks: int = 1) -> Plan:
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=1.0), model=ModelFacts(path="m"), ranks=ranks, train_rows=2)
    return compile_plan(load_text(RECIPE, sets=list(sets), env={}).recipe, facts, name="n", search_path="/", policy_path="m")


class Words:
    """A tokenizer, as far as a rollout without words asks for one."""

    def decode(self, ids, **_) -> str:
        return " ".join(str(token) for token in ids)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """make(plan, world) -> the sampler of that rank, in a run directory of its own."""
    (tmp_path / "told").mkdir()
    monkeypatch.setenv("FAKE_VLLM_TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    run = RunDir(tmp_path / "run")
    run.create()
    attempt = run.attempt(1)
    attempt.create()
    logged: list[str] = []

    def make(plan: Plan, world, folder: str = "some/folder", device: str = "cpu"):
        emit = SimpleNamespace(log=logged.append, warn=lambda code, text: logged.append(f"{code}: {text}"))
        place = Place(
            plan=plan, world=world, device=torch.device(device), attempt=attempt, emit=emit, folder=folder, own_command=tuple(COMMAND)
        )  # fmt: skip
        return make_apart(place, nn.Module(), Words(), (2,), vllm_engine.UNLESS_SET, None)

    make.logged, make.attempt, make.told = logged, attempt, tmp_path / "told"
    return make


def sampled(sampler, world) -> list[tuple[int, tuple[int, ...]]]:
    prompt = Prompt(draw=world.rank, row=0, row_id="t:0", source="t", label="l", text="", token_ids=(10,))
    found = sampler.generate([Request(prompt=prompt, samples=(0, 1))], SamplingSettings(max_new_tokens=2, seed=0))
    return sorted((one.policy_version, one.trace.ids) for one in found)


@pytest.mark.parametrize(
    ("facts", "said"),
    [({}, "vllm: a seed for every completion"),
     ({"cuts_prompts": True}, "while it cuts prompts (`--no-enable-chunked-prefill` at its start lets it)")],
    ids=["free", "cuts prompts"],
)
def test_why_completions_have_no_seeds_is_told(made, facts: dict[str, bool], said: str) -> None:
    with FakeVLLM(max_model_len=4096, **facts) as fake:
        on_ranks(1, lambda world: made(plan_of(f"rollout.vllm.server={{urls: ['{fake.url}']}}"), world).close())
    (line,) = [line for line in made.logged if "of completions" in line or "every completion" in line]
    assert line.endswith(said)  # what memory the server has is its own affair


@pytest.mark.parametrize("weights", ["auto", "nccl", "files"])
def test_servers_that_run_already_serve_all_ranks_and_get_weights_from_one(made, weights: str) -> None:
    with FakeVLLM(max_model_len=4096) as one, FakeVLLM(max_model_len=4096) as two:
        plan = plan_of(f"rollout.vllm.server={{urls: ['{one.url}', '{two.url}'], weights: {weights}}}", ranks=2)

        def work(world):
            sampler = made(plan, world)
            sampler.load(TRAINED.items(), 5)
            found = sampled(sampler, world)
            sampler.close()
            return found

        assert on_ranks(2, work) == [[(5, (11, 12))] * 2] * 2
        assert [fake.calls.count("rft_take") for fake in (one, two)] == [1, 1] and [fake.calls.count("reset") for fake in (one, two)] == [1, 1]
        assert torch.equal(two.model.norm, TRAINED["norm"]) and [len(fake.asked) for fake in (one, two)] == [2, 2]
    how = "weights are broadcast" if weights == "nccl" else f"weights go through {made.attempt.path / 'weights'}"
    assert any(how in line for line in made.logged) and not (made.attempt.path / "weights").exists()


@pytest.mark.parametrize("folder", [None, "shared"])
def test_weights_that_a_killed_attempt_left_are_removed(made, tmp_path, folder: str | None) -> None:
    """They are as large as the model, and nobody reads them any more."""
    shared = "" if folder is None else f", folder: '{tmp_path / folder}'"
    place = made.attempt.path.parent / "7" / "weights" if folder is None else shared_folder(tmp_path / folder, made.attempt.run.path)
    left = place / ".version_000003" / "weights_00000.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x")
    with FakeVLLM(max_model_len=4096) as one:
        sampler = made(plan_of(f"rollout.vllm.server={{urls: ['{one.url}'], weights: files{shared}}}"), SoloWorld())
        assert not left.exists()
        sampler.load(TRAINED.items(), 5)
        sampler.close()
    assert not place.exists()


@pytest.mark.parametrize("start", ["server: {start: {servers: 2, command: COMMAND}}", "process: beside"])
def test_engines_of_the_run_are_started_found_and_ended(made, start: str, monkeypatch) -> None:
    plan = plan_of(f"rollout.vllm={{{start.replace('COMMAND', json.dumps(COMMAND))}, check_weights: true}}", ranks=2)
    monkeypatch.setenv("RANK", "0")

    def work(world):
        sampler = made(plan, world)
        sampler.load(TRAINED.items(), 1)
        found = sampled(sampler, world)
        servers = [(server.url, server.last_words) for server in sampler._servers]
        world.barrier("sampled")
        sampler.close()
        return found, servers

    (first, servers), (second, _) = on_ranks(2, work)
    assert first == second == [(1, (11, 12))] * 2
    assert all("ended" in (words() or "") for _, words in servers)
    told = [json.loads(path.read_text()) for path in made.told.iterdir()]
    assert len(told) == 2 and all(one["model"] == "some/folder" for one in told)
    assert all("RANK" not in one["environment"] and one["environment"]["VLLM_SERVER_DEV_MODE"] == "1" for one in told)
    for words in ("--worker-extension-cls rftcli.engines.vllm_worker.RftWorker", "--max-model-len 60", "--logprobs-mode processed_logprobs"):
        assert words in " ".join(told[0]["rest"])
    assert len({one["rest"][one["rest"].index("--seed") + 1] for one in told}) == 2


def test_every_rank_names_the_gpus_of_a_server_that_the_run_has_started(made) -> None:
    """A server that hangs is told with its address and its GPUs, by whichever rank waits for it."""
    plan = plan_of(f"rollout.vllm.server={{start: {{servers: 2, command: {json.dumps(COMMAND)}}}}}", ranks=2)
    vllm = plan.rollout.vllm
    start = replace(vllm.server.start, gpus=(6, 7, 4, 5))
    plan = replace(plan, rollout=replace(plan.rollout, vllm=replace(vllm, tensor_parallel=2, server=replace(vllm.server, start=start))))

    def work(world):
        sampler = made(plan, world)
        shown = [server.shown for server in sampler._servers]
        world.barrier("looked")
        sampler.close()
        return shown

    first, second = on_ranks(2, work)
    assert first == second and [text.partition(" (")[2] for text in first] == ["GPU 6, 7)", "GPU 4, 5)"]
    environments = [json.loads(path.read_text())["environment"] for path in made.told.iterdir()]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in environments} == {"6,7", "4,5"}


def test_all_ranks_hear_of_a_server_that_does_not_start(made) -> None:
    plan = plan_of(f"rollout.vllm.server={{start: {{command: {json.dumps(COMMAND)}}}}}", ranks=2)
    ends = ends_on_ranks(2, lambda world: made(plan, world, "broken"))
    for end in ends:
        assert isinstance(end, RftError)
        assert "`rollout.vllm.options`" in str(end.hint)
        assert "did not start: it ended with code 1" in end.message and "vllm_0.log says: ValueError: this model is broken" in end.message


def test_a_server_is_looked_at_before_models_are_loaded(tmp_path) -> None:
    with FakeVLLM(max_model_len=50) as fake:
        plan = plan_of(f"rollout.vllm.server={{urls: ['{fake.url}']}}", ranks=2)
        for end in ends_on_ranks(2, lambda world: check_servers(plan, world)):
            assert isinstance(end, UsageError) and "takes 50 tokens, the longest prompt and completion have 60" in end.message
    own = {"num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 262}
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "pytorch_model.bin").touch()
    for key, name, other in (("num_hidden_layers", "layers", 3), ("hidden_size", "hidden", 64), ("vocab_size", "vocabulary", 300), ("", "", 0)):
        with FakeVLLM(max_model_len=60, config=own | ({key: other} if key else {})) as fake:
            plan = plan_of(f"rollout.vllm.server={{urls: ['{fake.url}']}}")
            plan = replace(plan, policy=replace(plan.policy, path=str(folder)))
            if not key:
                check_servers(plan, SoloWorld())
                continue
            with pytest.raises(UsageError, match=rf"has another model than the policy \(fake\): {name} {other}, not {own[key]}"):
                check_servers(plan, SoloWorld())
            if key == "vocab_size":  # tokens that are added widen it
                check_servers(replace(plan, policy=replace(plan.policy, add_tokens=("<x>",))), SoloWorld())
    plan = plan_of("rollout.vllm.server={urls: ['http://127.0.0.1:9'], headers_env: {Authorization: NOT_SET_ANYWHERE}}")
    with pytest.raises(MachineError, match="`NOT_SET_ANYWHERE` is not set"):
        check_servers(plan, SoloWorld())
    check_servers(plan_of(), SoloWorld())


def test_who_waits_for_a_server_stops_when_asked_to() -> None:
    """No step would come for the run to stop after."""
    plan = plan_of("rollout.vllm.server={urls: ['http://127.0.0.1:9'], ready_seconds: 600}", ranks=2)
    for end in ends_on_ranks(2, lambda world: check_servers(plan, world, stop_asked=lambda: True)):
        assert isinstance(end, HeldUpError) and "asked to stop while vLLM server http://127.0.0.1:9 was waited for" in end.message


def test_a_server_that_is_silent_is_left_when_asked_to_stop(made) -> None:
    """At the start, and on every rank in the middle of a rollout; the time limits are ten minutes."""
    with FakeVLLM(max_model_len=4096) as fake:
        plan = plan_of(f"rollout.vllm.server={{urls: ['{fake.url}'], weights: files, timeout_seconds: 600, ready_seconds: 600}}", ranks=2)

        def work(world):
            sampler = made(plan, world)
            sampler.load(TRAINED.items(), 1)
            world.barrier("loaded")
            if world.rank == 0:
                fake.silent = True
                made.attempt.request_stop("terminate")
            world.barrier("asked")
            try:
                sampled(sampler, world)
            finally:
                sampler.close()

        start = time.monotonic()
        for end in ends_on_ranks(2, work):
            assert isinstance(end, HeldUpError) and "asked to stop, and vLLM server" in end.message, end
        for end in ends_on_ranks(2, lambda world: check_servers(plan, world, stop_asked=made.attempt.stop_asked)):
            assert isinstance(end, HeldUpError) and "was waited for" in end.message, end
        assert time.monotonic() - start < 30
        fake.silent = False


def test_a_command_that_is_not_there_is_told_before_models_are_loaded() -> None:
    plan = plan_of("rollout.vllm.server={start: {command: [no-such-vllm, serve]}}", ranks=2)
    for end in ends_on_ranks(2, lambda world: check_servers(plan, world)):
        assert isinstance(end, MachineError) and "rollout.vllm.server.start.command: there is no program `no-such-vllm`" in end.message


def test_a_folder_for_caches_that_cannot_be_written_is_told(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(MachineError, match=r"the engine's configuration cannot be written to .*: Not a directory") as caught:
        config_folder(SimpleNamespace(), None, "float32")
    assert "XDG_CACHE_HOME" in str(caught.value.hint)


@pytest.mark.parametrize("where", ["urls: ['http://127.0.0.1:9']", "start: {}"])
def test_the_folder_for_weights_is_looked_at_before_models_are_loaded(tmp_path, where: str) -> None:
    (tmp_path / "file").touch()
    plan = plan_of(f"rollout.vllm.server={{{where}, weights: files, folder: '{tmp_path / 'file' / 'x'}'}}", ranks=2)
    for end in ends_on_ranks(2, lambda world: check_servers(plan, world)):
        assert isinstance(end, UsageError) and "rollout.vllm.server.folder: nothing can be written to" in end.message
    plan = plan_of(f"rollout.vllm.server={{{where}, weights: files, folder: '{tmp_path / 'new'}'}}")
    plan = replace(plan, policy=replace(plan.policy, parameters=10**15))
    with pytest.raises(MachineError, match=r"MiB left, the weights on their way to the servers take 3,814,697,266 MiB"):
        check_servers(plan, SoloWorld())
    assert not list((tmp_path / "new").iterdir())


def test_where_no_broadcast_is_possible_auto_goes_by_files_and_nccl_is_refused(made) -> None:
    """Both sides say that they have a GPU, and this torch has no NCCL for it."""
    with FakeVLLM(max_model_len=4096, device="cuda") as fake:
        made(plan_of(f"rollout.vllm.server={{urls: ['{fake.url}'], timeout_seconds: 5}}"), SoloWorld(), device="cuda").close()
        assert any(line.startswith("weights_by_files: ") and fake.url in line for line in made.logged)
        assert any("weights go through" in line for line in made.logged)
        plan = plan_of(f"rollout.vllm.server={{urls: ['{fake.url}'], timeout_seconds: 5, weights: nccl}}")
        with pytest.raises(RftError, match=fake.url):
            made(plan, SoloWorld(), device="cuda")
        with pytest.raises(UsageError, match="needs GPUs on both sides, or on neither"):
            made(plan, SoloWorld())


def test_runs_of_one_name_do_not_share_a_place_in_a_folder(tmp_path) -> None:
    places = [shared_folder(tmp_path / "weights", tmp_path / parent / "run") for parent in ("a", "b", "a")]
    assert places[0] == places[2] != places[1] and {place.parent for place in places} == {tmp_path / "weights"}


def test_what_an_engine_is_started_with(tmp_path) -> None:
    plan = plan_of("rollout.vllm={process: beside, options: {block_size: 32}, max_sequences: 24}", ranks=2)
    place = Place(plan=plan, world=SoloWorld(), device=torch.device("cpu"), attempt=RunDir(tmp_path).attempt(3), emit=SimpleNamespace(), folder="f")
    words = serve_words(place, True, "0123456789abcdef", 0, {"gpu_memory_utilization": 0.5})
    text = " ".join(words)
    for piece in ("f --served-model-name rft-0123456789ab", "--load-format dummy", "--max-num-seqs 24", "--enforce-eager", "--block-size 32",
                  "--gpu-memory-utilization 0.5", "--generation-config vllm", "--kv-cache-memory-bytes", "--no-enable-chunked-prefill"):  # fmt: skip
        assert piece in text
    assert "--no-enable-chunked-prefill" in text
    place = replace(place, device=torch.device("cuda"))
    assert "chunked-prefill" not in " ".join(serve_words(place, True, "0123456789abcdef", 0, {}))
    assert "--enable-sleep-mode" not in text and "--graphs-up-to" not in text and "--trust-remote-code" not in text
    vllm = replace(place.vllm, graphs=True, sleep=1, max_sequences=1000)
    wide = replace(place, plan=replace(plan, rollout=replace(plan.rollout, vllm=vllm)))
    text = " ".join(serve_words(wide, True, "0123456789abcdef", 0, {}))
    assert "--graphs-up-to 1000" in text and "--enable-sleep-mode" in text and "--enforce-eager" not in text
    vllm = replace(vllm, options={"compilation_config": {"mode": 2}})
    own = replace(place, plan=replace(plan, rollout=replace(plan.rollout, vllm=vllm)))
    text = " ".join(serve_words(own, True, "0123456789abcdef", 0, {}))
    assert '--compilation-config {"mode": 2}' in text and "--graphs-up-to 1000" in text
    assert "--graphs-up-to" not in serve_words(wide, False, "0123456789abcdef", 0, {})  # vLLM's own command does not know it

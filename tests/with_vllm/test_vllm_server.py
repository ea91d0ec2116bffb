"""A real vLLM server on this machine, and two training ranks that sample from it: weights move, log-probs agree, its end is told by name.

One server is started for the file; a run that starts its own, and engines beside the ranks, have one test each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.builtin import builtin_path
from rftcli.engines.vllm_http import Server, Wire
from rftcli.engines.vllm_offer import EXTENSION, look, wait_for
from rftcli.engines.vllm_remote import RemoteVLLMSampler
from rftcli.engines.vllm_send import FilesPush
from rftcli.errors import UsageError
from rftcli.models.load import load_causal_lm, load_tokenizer
from rftcli.runtime.engine_process import EngineProcess, HeldPort, environment
from rftcli.runtime.vllm_apart import OWN_COMMAND
from rftcli.runtime.vllm_engine import UNLESS_SET
from rftcli.runtime.world import SoloWorld
from rftcli.types import Completion, Prompt, Request, SamplingSettings

Rft = Callable[..., tuple[int, str]]
ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 400.0
QUESTION = (1, 51, 28, 223, 24, 21, 15, 18, 19, 222, 35, 28)
SMALL = (
    "--ranks", "2", "--set", "data.eval.held_out.limit=8", "--set", "batch.prompts_per_step=8", "--set", "checkpoint.every=1",
)  # fmt: skip


def steps(run: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if line]
    return {line["step"]: line for line in lines if line["event"] == "step"}


def versions(run: Path, step: int) -> set[int]:
    return {json.loads(line)["policy_version"] for line in (run / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    port = HeldPort("127.0.0.1")
    words = [
        *OWN_COMMAND, str(builtin_path("quickstart")), "--host", "127.0.0.1", "--port", str(port.number), "--worker-extension-cls", EXTENSION,
        "--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "64",
        "--kv-cache-memory-bytes", str(128 << 20), "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    ]  # fmt: skip
    base = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    process = EngineProcess(words, environment(base, UNLESS_SET, None), log, port)
    found = Server(url=f"http://127.0.0.1:{port.number}", last_words=process.last_words)
    wire = Wire(timeout_seconds=60)
    try:
        wait_for(wire, found, READY_SECONDS)
        yield SimpleNamespace(url=found.url, process=process)
    finally:
        wire.close()
        process.stop()


def test_both_endpoints_give_what_the_trainer_would(tmp_path: Path, server: SimpleNamespace) -> None:
    """Weights by files; ids, log-probs, ends and forms by `/inference/v1/generate` and by `/v1/completions`, with the same seeds."""
    path = str(builtin_path("quickstart"))
    model = load_causal_lm(path, dtype="float32", attention="sdpa", dropout=0.0, options={}, trust_remote_code=False, device="cpu").eval()
    wire = Wire(timeout_seconds=100)
    one = Server(url=server.url)
    look(wire, one)
    sampler = RemoteVLLMSampler(
        wire, [one], model, load_tokenizer(path), (2,), push=FilesPush(wire, [one], tmp_path / "w"), leads=True, run="endpoints",
        world=SoloWorld(), seeded=True, at_once=64, check=True, dtype=torch.float32,
    )  # fmt: skip
    sampler.load(((name, parameter.data) for name, parameter in model.named_parameters()), 1)
    prompt = Prompt(draw=0, row=0, row_id="t:0", source="t", label="l", text="", token_ids=QUESTION)

    def made(generates: bool, samples: int = 8, **changes: Any) -> list[Completion]:
        one.generates = generates
        settings = SamplingSettings(**{"max_new_tokens": 24, "seed": 0, "logprobs": True, **changes})
        found = sampler.generate([Request(prompt=prompt, samples=tuple(range(samples)))], settings)
        return sorted(found, key=lambda completion: completion.sample)

    assert one.generates, "the newest endpoint is switched on"
    for changes in ({}, {"stop": ("####",)}, {"logit_bias": {"40": 100.0}}, {"bad_words": ("####",)}, {"structured": {"regex": "[0-9]{3}"}},
                    {"temperature": 0.0}, {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}, {"ignore_eos": True}):  # fmt: skip
        ids, text = made(True, **changes), made(False, **changes)
        assert [one.trace.ids for one in ids] == [one.trace.ids for one in text] and [one.finish for one in ids] == [one.finish for one in text]
        if changes == {}:
            whole = torch.tensor([[*QUESTION, *ids[0].trace.ids]])
            with torch.no_grad():
                scores = model(input_ids=whole).logits[0, len(QUESTION) - 1 : -1].float().log_softmax(-1)
            own = scores.gather(-1, whole[0, len(QUESTION) :, None])[:, 0]
            for made_by in (ids[0], text[0]):
                assert torch.allclose(torch.tensor(made_by.trace.logprobs), own, atol=1e-4)
    assert "decode steps for a turn of the scheduler" in server.process.log.read_text()
    with pytest.raises(UsageError, match=server.url):
        made(False, max_new_tokens=100)  # more than the model has room for
    sampler.close()


def of(server: SimpleNamespace, **more: Any) -> tuple[str, ...]:
    told = json.dumps({"check_weights": True, "server": {"urls": [server.url], "timeout_seconds": 100, **more}})
    return ("--set", "rollout.engine=vllm", "--set", f"rollout.vllm={told}")


def test_weights_reach_a_server_and_a_run_goes_on_with_it(rft: Rft, tmp_path: Path, server: SimpleNamespace) -> None:
    code, said = rft("train", "quickstart", *SMALL, *of(server, weights="nccl"), "--set", "train.steps=2", "--run-dir", "out")
    assert code == 0, said
    run = tmp_path / "out"
    assert steps(run)[1]["sampler_logprob_gap"]["mean"] < 1e-5 and [versions(run, step) for step in (1, 2)] == [{0}, {1}]
    text = (run / "events.jsonl").read_text()
    assert "engine against trainer: log-probs differ by" in text and "weights are broadcast" in text and "asked by ids alone" in text
    code, said = rft("resume", "out", "--set", "train.steps=3", "--set", "rollout.vllm.server.weights=files")
    assert code == 0, said
    assert versions(run, 3) == {2} and not (run / "attempts" / "2" / "weights").exists()


def test_a_server_that_dies_in_a_rollout_is_told_by_name(
    rft: Rft, tmp_path: Path, environment: dict[str, str], server: SimpleNamespace
) -> None:
    """The last that uses the server of this file."""
    arguments = [*SMALL, *of(server), "--set", "train.steps=50", "--run-dir", "out"]
    command = [sys.executable, "-m", "rftcli", "train", "quickstart", *arguments]
    running = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = tmp_path / "out"
    deadline = time.monotonic() + READY_SECONDS
    while not (run / "checkpoints" / "step_000002" / "COMMITTED").is_file():
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(server.process._guard.pid, signal.SIGTERM)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 1, said
    state = json.loads((run / "state.json").read_text())
    assert state["status"] == "failed" and f"vLLM server {server.url}" in state["cause"], state


@pytest.mark.parametrize(("ranks", "where"), [("2", "server: {start: {}}"), ("1", "process: beside")], ids=["server", "beside"])
def test_engines_that_the_run_starts_end_with_it(rft: Rft, tmp_path: Path, ranks: str, where: str) -> None:
    vllm = f"{{{where}, memory_share: 0.01, check_weights: true}}"
    sets = ("--set", "rollout.engine=vllm", "--set", f"rollout.vllm={vllm}", "--set", "train.steps=2", "--run-dir", "out")
    code, said = rft("train", "quickstart", "--ranks", ranks, *SMALL[2:], *sets)
    assert code == 0, said
    run = tmp_path / "out"
    assert steps(run)[1]["sampler_logprob_gap"]["mean"] < 1e-5 and [versions(run, step) for step in (1, 2)] == [{0}, {1}]
    assert list((run / "attempts" / "1" / "logs").glob("vllm_*.log"))
    assert not [path.name for path in Path("/proc").iterdir() if path.name.isdigit() and _writes_below(path, run)]


def _writes_below(process: Path, folder: Path) -> bool:
    """Whether its output goes there, as that of servers does."""
    try:
        return str((process / "fd" / "1").readlink()).startswith(str(folder))
    except OSError:
        return False

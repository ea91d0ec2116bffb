"""A judge at a real OpenAI-compatible server: what vLLM says of SmolLM2 is what the model itself says, read in each of the three ways."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fake_services import closed_port

from rftcli.builtin import builtin_path
from rftcli.models.load import load_causal_lm, load_tokenizer
from rftcli.rewards.scorers.judge import ServerJudge
from rftcli.rewards.scorers.reading import read_reply
from rftcli.rewards.scorers.service import Service
from rftcli.rewards.scorers.spec import ReadSpec, ScorerSpec, ServiceSpec
from rftcli.rewards.scorers.verdict import Verdict
from rftcli.rewards.scorers.view import View

START_SECONDS = 480
NAME = "org/judge"
MOST_POSITIONS = 512


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """One server for the file, and the same weights here."""
    source, folder = str(builtin_path("smollm2-135m-instruct")), tmp_path_factory.mktemp("judge")
    model = load_causal_lm(source, dtype="float32", attention="sdpa", dropout=0.0, options={}, trust_remote_code=False, device="cpu").eval()
    tokenizer = load_tokenizer(source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    port, log = closed_port(), folder / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", NAME, "--port", str(port),
               "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", str(MOST_POSITIONS), "--max-num-seqs", "8",
               "--generation-config", "vllm"]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as said:
        server = subprocess.Popen(command, stdout=said, stderr=said, env=environment, cwd=folder, start_new_session=True)
    try:
        await_health(f"http://127.0.0.1:{port}/health", server, log)
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}/v1", model=model, tokenizer=tokenizer)
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):  # the engine is a process of the same session
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)


def await_health(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(log.read_text(errors="replace")[-4000:])


def scored(judge: SimpleNamespace, read: ReadSpec, prompt: str, *texts: str, **changes: Any) -> list[float | str]:
    """What the server's judge says of each text, or what went wrong."""
    service = ServiceSpec(urls=(judge.url,), timeout_seconds=120.0, retries=0, concurrency=4, per_minute=None, headers_env={})
    values = {"max_new_tokens": 24, "temperature": 0.0, "samples": 1, "model": NAME, "api": "chat"} | changes
    spec = ScorerSpec(name="j", kind="generative", cache=False, service=service, prompt=prompt, read=read, seed=7, **values)
    with closing(ServerJudge(spec, Service("j", service, environ={}))) as asked:
        futures = [asked.submit(view(text)) for text in texts]
        errors = [future.exception(timeout=300) for future in futures]
        found = [future.result() if error is None else str(error) for future, error in zip(futures, errors, strict=True)]
    return [one.value if isinstance(one, Verdict) else one for one in found]


def view(text: str) -> View:
    return View(prompt="", messages=(), completion=text, reference=None, label="", columns={}, place="row")


def ids_of(judge: SimpleNamespace, question: str) -> torch.Tensor:
    """(1, T), as the checkpoint's own chat template writes the question."""
    turns = [{"role": "user", "content": question}]
    return judge.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]


@torch.no_grad()
def reply_of(judge: SimpleNamespace, question: str, tokens: int) -> str:
    """transformers' own greedy reply."""
    ids = ids_of(judge, question)
    out = judge.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return str(judge.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@torch.no_grad()
def first_token(judge: SimpleNamespace, ids: torch.Tensor, *words: str) -> list[float]:
    """Probability of each word as the first token of the reply, spaces around it apart."""
    probabilities = judge.model(input_ids=ids).logits[0, -1].double().softmax(-1)  # (V,)
    texts = judge.tokenizer.batch_decode([[token] for token in range(len(judge.tokenizer))])
    return [float(sum(probabilities[token] for token, text in enumerate(texts) if text.strip() == word)) for word in words]


NUMBERS = ("3", "8", "10")
SUM = "What is 2+{{ completion }}? Answer with a number."
REPEAT = 'Repeat this JSON exactly and say nothing else: {"score": {{ completion }}}'


@pytest.mark.parametrize(
    ("read", "prompt"), [(ReadSpec(regex=r"(\d+)\D*$", scale=0.1), SUM), (ReadSpec(json="score"), REPEAT)], ids=["pattern", "field"]
)
def test_a_reply_is_read_as_what_the_model_says(judge: SimpleNamespace, read: ReadSpec, prompt: str) -> None:
    expected: list[float | None] = []
    for number in NUMBERS:
        try:
            expected.append(read_reply(read, reply_of(judge, prompt.replace("{{ completion }}", number), 32)))
        except ValueError:
            expected.append(None)
    found = scored(judge, read, prompt, *NUMBERS, max_new_tokens=32)
    assert [value if isinstance(value, float) else None for value in found] == pytest.approx(expected)
    assert any(value is not None for value in expected)


WORDS = ("Yes", "No")
ASK = "Answer with Yes or No and nothing else. Is this right? {{ completion }}"
CLAIMS = ("2 + 2 = 4", "2 + 2 = 5", "Paris is in France.", "Fire is cold.")


def test_a_probability_is_that_of_a_plain_forward(judge: SimpleNamespace) -> None:
    found = scored(judge, ReadSpec(token="Yes", against=("No",)), ASK, *CLAIMS, max_new_tokens=1)
    for value, claim in zip(found, CLAIMS, strict=True):
        yes, no = first_token(judge, ids_of(judge, ASK.replace("{{ completion }}", claim)), *WORDS)
        assert value == pytest.approx(yes / (yes + no), abs=5e-4)  # of 20 tokens that the server lists, out of all
    assert len({round(float(value), 4) for value in found}) == len(CLAIMS)


def test_the_same_without_a_chat_template(judge: SimpleNamespace) -> None:
    found = scored(judge, ReadSpec(token="Yes", against=("No",)), "Q: {{ completion }} Yes or No?\nA:", *CLAIMS, max_new_tokens=1, api="completions")
    known = 0
    for value, claim in zip(found, CLAIMS, strict=True):
        ids = judge.tokenizer(f"Q: {claim} Yes or No?\nA:", return_tensors="pt")["input_ids"]
        yes, no = first_token(judge, ids, *WORDS)
        if isinstance(value, str):  # 5 tokens are listed there, and the words have to be among them
            assert "too few tokens" in value or "none of Yes, No" in value
        else:
            known += 1
            assert value == pytest.approx(yes / (yes + no), abs=5e-4)
    assert known >= 1


def test_several_replies_have_a_mean(judge: SimpleNamespace) -> None:
    read, prompt = ReadSpec(regex=r"^\D*(\d)"), "Say any digit from 1 to 9, and nothing else. {{ completion }}"
    first = scored(judge, read, prompt, "Now.", samples=4, temperature=0.7, max_new_tokens=8)
    assert scored(judge, read, prompt, "Now.", samples=4, temperature=0.7, max_new_tokens=8) == first  # the seed is sent
    assert isinstance(first[0], str) or 0 <= first[0] <= 9


def test_what_is_no_score_is_an_error(judge: SimpleNamespace) -> None:
    read = ReadSpec(regex=r"score: (\d+)")
    (long,) = scored(judge, read, REPEAT, "word " * MOST_POSITIONS)
    assert "replied with status 400" in str(long) and "maximum" in str(long)
    (unknown,) = scored(judge, read, REPEAT, "3", model="org/other")
    assert "replied with status 404" in str(unknown) and "org/other" in str(unknown)
    (silent,) = scored(judge, read, "Tell a story about {{ completion }}.", "a fox", max_new_tokens=8)
    assert "has no score" in str(silent)
    (cut,) = scored(judge, ReadSpec(json="score"), REPEAT, "8", max_new_tokens=5)
    assert "was cut at `max_new_tokens`" in str(cut)

"""A judge that the run itself starts with the real vLLM: its scores are those of the model's plain forward, and nothing of it is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from engine_runs import steps

from rftcli.builtin import builtin_path
from rftcli.models.load import load_causal_lm, load_tokenizer

Rft = Callable[..., tuple[int, str]]
ASK = "Answer with Yes or No and nothing else. Is this a number? {{ completion }}"
JUDGE = {
    "kind": "generative", "prompt": ASK, "score": {"token": "Yes", "against": ["No"]}, "dtype": "float32",
    "max_tokens": 255, "timeout_seconds": 120,
}  # fmt: skip


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """SmolLM2 as a directory, which vLLM reads, and here."""
    source, folder = str(builtin_path("smollm2-135m-instruct")), tmp_path_factory.mktemp("judge")
    model = load_causal_lm(source, dtype="float32", attention="sdpa", dropout=0.0, options={}, trust_remote_code=False, device="cpu").eval()
    tokenizer = load_tokenizer(source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return SimpleNamespace(path=str(folder), model=model, tokenizer=tokenizer)


@torch.no_grad()
def shares(judge: SimpleNamespace, texts: list[str]) -> list[float]:
    """P(Yes) among Yes and No, from a plain forward."""
    model, tokenizer, found = judge.model, judge.tokenizer, []
    words = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    for text in texts:
        turns = [{"role": "user", "content": ASK.replace("{{ completion }}", text)}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        probabilities = model(input_ids=ids).logits[0, -1].double().softmax(-1)  # (V,)
        yes, no = (float(sum(probabilities[token] for token, word in enumerate(words) if word.strip() == one)) for one in ("Yes", "No"))
        found.append(yes / (yes + no))
    return found


def servers() -> list[str]:
    return [line for process in psutil.process_iter(["cmdline"]) if "rft-judge-" in (line := " ".join(process.info["cmdline"] or []))]


APART = {"placement": {"gpus": 0, "options": {"max_num_seqs": 16}}}
BESIDE = {"engine": "vllm", "options": {"max_num_seqs": 16}, "batch_tokens": 2048}


@pytest.mark.parametrize(("engine", "place"), [("hf", APART), ("vllm", BESIDE)], ids=["apart", "beside a rank whose own engine is vLLM"])
def test_a_run_is_scored_by_a_judge_that_it_starts(
    rft: Rft, tmp_path: Path, judge: SimpleNamespace, engine: str, place: dict[str, object]
) -> None:
    scorer = json.dumps(JUDGE | {"path": judge.path} | place)
    code, said = rft(
        "train", "quickstart", "--ranks", "1", "--run-dir", "run", "--set", "batch.prompts_per_step=2", "--set", "rollout.samples_per_prompt=2",
        "--set", "train.steps=2", "--set", "eval={before_training: false, at_end: false}", "--set", f"rollout.engine={engine}",
        "--set", f"models.scorers.judge={scorer}", "--set", "rewards.default=[{model: judge}]",
    )  # fmt: skip
    assert code == 0, said
    assert [step["reward_errors"] for step in steps(tmp_path / "run").values()] == [0, 0] and not servers()
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples" / "step_000002.jsonl").read_text().splitlines()]
    texts = [line["completion"].removesuffix(line.get("special_end", "")) for line in lines]
    assert len(lines) == 4 and [line["reward"] for line in lines] == pytest.approx(shares(judge, texts), abs=5e-4)


def test_a_teacher_that_the_run_starts_says_what_the_policy_says(rft: Rft, tmp_path: Path) -> None:
    """Which has the same weights in the first step: nothing is to be learnt from it."""
    code, said = rft(
        "train", "quickstart", "--ranks", "1", "--run-dir", "run", "--set", "batch.prompts_per_step=2", "--set", "rollout.samples_per_prompt=2",
        "--set", "train.steps=1", "--set", "eval={before_training: false, at_end: false}", "--set", "rollout.engine=hf",
        "--set", "algorithm.advantage={kind: distill, whiten: 'off'}", "--set", "models.teacher={path: 'builtin:quickstart', placement: {gpus: 0}}",
    )  # fmt: skip
    assert code == 0, said
    step = steps(tmp_path / "run")[1]
    assert abs(step["advantage_mean"]) < 1e-5 and step["advantage_std"] < 1e-5 and not servers()
    assert (tmp_path / "run" / "logs" / "latest" / "teacher.log").is_file()


def test_a_judge_that_vllm_cannot_start_is_told_with_the_end_of_its_log(rft: Rft, tmp_path: Path, judge: SimpleNamespace) -> None:
    broken = JUDGE | {"path": judge.path, "placement": {"gpus": 0, "options": {"kv_cache_dtype": "no_such_type"}}}
    (tmp_path / "r.yaml").write_text(json.dumps({
        "extends": ["quickstart"], "models": {"scorers": {"judge": broken}}, "rewards": {"default": [{"model": "judge"}]},
    }))  # fmt: skip
    code, said = rft("rewards", "try", "r.yaml", "--rows", "1")
    assert code == 1 and f"judge `judge` ({judge.path})" in said and "no_such_type" in said and "\n  " in said, said
    assert not servers()

"""Token ids all the way: what the prompt holds is what is sampled from, and what is sampled is trained on. Nothing is tokenised twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rftcli.builtin import builtin_path
from rftcli.data.prompts import PromptBuilder
from rftcli.engines.fake import FakeSampler
from rftcli.models.load import load_tokenizer
from rftcli.plan.plan import Plan
from rftcli.protocols import Roles
from rftcli.rewards.scorers.desk import Desk
from rftcli.runtime.inputs import make_eval_sets, make_scorer, make_source
from rftcli.runtime.prepare import prepare
from rftcli.runtime.world import SoloWorld
from rftcli.stages.batches import count, make_batch
from rftcli.stages.collect import collect
from rftcli.stages.credit import credit

ROWS = [
    {"prompt": "12+34=", "answer": "46"},
    {"prompt": "<s>12+34=", "answer": "46"},
    {"prompt": [{"role": "user", "content": "12+34="}], "answer": "46"},
    {"prompt": "1+1=", "answer": "2"},
]
"""Plain text, text with the beginning of a sequence written out, a message list, and another one."""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(str(builtin_path("quickstart")))
    rows = [json.loads(json.dumps(row).replace("<s>", tokenizer.bos_token)) for row in ROWS]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("r.yaml").write_text(
        "models: {policy: {path: 'builtin:quickstart'}}\n"
        "data: {train: {path: rows.jsonl}, eval: {t: {path: rows.jsonl}}, shuffle: false}\n"
        "rollout: {engine: fake, samples_per_prompt: 2, max_new_tokens: 12, max_prompt_tokens: 64}\n"
        "rewards: {default: [{rule: exact}]}\nbatch: {prompts_per_step: 4}\ntrain: {steps: 1}\n"
    )
    plan = prepare(Path("r.yaml"), [], ranks=1, gpus=None).plan
    builder = PromptBuilder(tokenizer, plan.data.chat, plan.data.max_prompt_tokens, plan.data.overlong_prompt)
    return SimpleNamespace(plan=plan, tokenizer=tokenizer, builder=builder, paths=[tmp_path])


def test_one_beginning_of_sequence_in_training_and_in_evaluation(made: SimpleNamespace) -> None:
    source = make_source(made.plan, made.builder, made.paths)
    (held_out,) = make_eval_sets(made.plan, made.builder, made.paths)
    trained, evaluated = source.draw(0, 4), held_out.prompts
    bos = made.tokenizer.bos_token_id
    assert bos is not None
    for prompt, other in zip(trained, evaluated, strict=True):
        assert prompt.token_ids == other.token_ids and prompt.text == other.text
        assert prompt.token_ids[0] == bos and bos not in prompt.token_ids[1:]
    assert trained[0].token_ids == trained[1].token_ids


def test_sampled_ids_are_trained_ids(made: SimpleNamespace) -> None:
    """From rows to the tensors of a micro-batch. The sampled ids are random, so that most of them would not survive being written and read."""
    plan: Plan = made.plan
    source, scorer = make_source(plan, made.builder, made.paths), make_scorer(plan, made.paths, Desk())
    sampler = FakeSampler(made.tokenizer.decode, vocab_size=len(made.tokenizer), eos_ids=(made.tokenizer.eos_token_id,))
    collected = collect(source, sampler, scorer, plan, SoloWorld(), step=1, clock=lambda: 0.0, tick=lambda *_: None)
    scorer.close()
    credited = credit(collected, Roles(policy=None), plan, SoloWorld(), pad_id=0, device=torch.device("cpu"))
    experiences = [item for part in credited.mini_batches for item in part]
    assert len(experiences) == 8
    changed = 0
    for item in experiences:
        completion = item.sample.completion
        assert item.token_ids.tolist() == [*completion.prompt.token_ids, *completion.trace.ids]
        again = made.tokenizer(completion.text_with_special, add_special_tokens=False)["input_ids"]
        changed += tuple(again) != completion.trace.ids
    assert changed > 0, "the ids of this test must be such that tokenising the text again would change them"
    batch = make_batch(experiences, replace(plan.batch, layout="packed"), count(experiences), pad_id=0, device=torch.device("cpu"))
    assert batch.input_ids[0].tolist() == [token for item in experiences for token in item.token_ids.tolist()]
    assert batch.target_ids.tolist() == [token for item in experiences for token in item.sample.completion.trace.ids]

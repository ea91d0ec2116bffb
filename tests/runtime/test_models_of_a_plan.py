"""Models of a plan where they cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rftcli.errors import ResumeError
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.recipe.load import load_text
from rftcli.runtime.models import make_policy

RECIPE = """\
models: {policy: {path: org/model, lora: {rank: 4}}}
data: {train: {path: train.jsonl}}
rewards: {default: [{rule: exact}]}
train: {steps: 1}
batch: {prompts_per_step: 2}
"""


def test_an_adapter_cannot_be_found_again_in_merged_weights() -> None:
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=1.0), model=ModelFacts(path="m"), ranks=1, train_rows=2)
    plan = compile_plan(load_text(RECIPE, sets=[], env={}).recipe, facts, name="n", search_path="/", policy_path="m")
    nothing: Any = None
    with pytest.raises(ResumeError, match="no trainer state") as caught:
        make_policy(plan.policy, torch.device("cpu"), nothing, nothing, Path("/run/checkpoints/step_000001/policy"))
    assert caught.value.hint is not None and "step_000001/adapter" in caught.value.hint

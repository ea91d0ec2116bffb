"""A recipe, what the compiler is told about the world, and the plan of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import Plan
from rftcli.recipe.load import load_text

MINIMAL = """\
models: {policy: {path: org/model}}
data: {train: {path: train.jsonl}}
rewards: {default: [{rule: exact}]}
train: {steps: 10}
"""
CPU = MachineFacts(cores=8, memory_gib=16.0)
GPUS = MachineFacts(cores=64, memory_gib=512.0, gpus=8, gpu_name="H100", gpu_memory_gib=80.0)

Compiled = Callable[..., Plan]


@pytest.fixture
def cpu() -> MachineFacts:
    return CPU


@pytest.fixture
def gpus() -> MachineFacts:
    return GPUS


@pytest.fixture
def compiled() -> Compiled:
    """The plan of the minimal recipe with some `--set` on top."""

    def make(
        *sets: str,
        ranks: int = 1,
        nodes: int = 1,
        machine: MachineFacts = CPU,
        train_rows: int | None = 1000,
        reference_path: str | None = None,
        critic: ModelFacts | None = None,
        reference: ModelFacts | None = None,
        **model: Any,
    ) -> Plan:
        recipe = load_text(MINIMAL, sets=list(sets), env={}).recipe
        facts = Facts(machine=machine, model=ModelFacts(path="/models/policy", **model), ranks=ranks, nodes=nodes, train_rows=train_rows)
        paths = {"search_path": "/recipes", "policy_path": "/models/policy", "reference_path": reference_path}
        return compile_plan(recipe, facts, name=recipe.name or "minimal", critic=critic, reference_facts=reference, **paths)

    return make

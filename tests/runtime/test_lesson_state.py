"""What the warnings of a run are told about its estimator."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.recipe.load import load_text
from rftcli.runtime.tell import lesson_state

MINIMAL = """\
models: {policy: {path: org/model}}
data: {train: {path: train.jsonl}}
rewards: {default: [{rule: exact}]}
train: {steps: 10}
"""


@pytest.mark.parametrize(
    ("sets", "compares", "rewarded"),
    [
        ((), True, True),
        (("algorithm.advantage={kind: reinforce_pp_baseline, whiten: all}",), True, True),
        (("algorithm.advantage.kind=gdpo",), False, True),  # parts may differ where their sum does not
        (("algorithm.advantage.kind=remax",), False, True),
        (("algorithm.advantage.kind=reinforce_pp", "rollout.samples_per_prompt=1"), False, True),
        (("algorithm.advantage.kind=gae", "models.critic={}"), False, True),
        (("algorithm.advantage.kind=distill", "models.teacher.path=org/teacher"), False, False),
        (("models.teacher.path=org/teacher",), False, True),
        (("algorithm.advantage={kind: python, python: 'a:b'}",), False, True),
    ],
)
def test_what_warnings_know_of_the_estimator(sets: Sequence[str], compares: bool, rewarded: bool) -> None:
    """A group without spread teaches nothing only where answers are compared with their group and with nothing else."""
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=1.0), model=ModelFacts(path="m"), ranks=1, train_rows=100)
    plan = compile_plan(load_text(MINIMAL, sets=list(sets), env={}).recipe, facts, name="n", search_path="/", policy_path="m")
    state = lesson_state(plan)
    assert (state.compares, state.rewarded) == (compares, rewarded)
    assert state.on_policy is (plan.batch.needs_prepass is None)

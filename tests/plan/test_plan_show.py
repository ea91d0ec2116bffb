"""A plan as text: one line for each decision, in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rftcli.plan.facts import MachineFacts
from rftcli.plan.plan import Plan, plan_hash
from rftcli.plan.show import plan_text

Compiled = Callable[..., Plan]


def rows(plan: Plan) -> dict[str, str]:
    """Name -> text of the lines before the notes."""
    lines = [line for line in plan_text(plan).splitlines() if not line.startswith("note: ")]
    starts = {len(line) - len(line[len(line.split("  ")[0]) :].lstrip()) for line in lines}
    assert len(starts) == 1, "the texts stand in one column"
    (start,) = starts
    return {line[:start].rstrip(): line[start:] for line in lines}


def test_the_smallest_plan(compiled: Compiled) -> None:
    plan = compiled(parameters=134_515_008)
    found = rows(plan)
    assert found["plan"] == f"minimal  {plan_hash(plan)}"
    assert found["run"] == "10 steps, seed 0"
    assert found["ranks"] == "1 x cpu (gloo), 8 threads each"
    assert found["policy"] == "org/model, 134.5M parameters, float32, attention sdpa"
    assert found["reference"] == "none needed" and found["KL"] == "off" and found["evaluation"] == "none"
    assert found["batch"] == plan.batch.equation
    assert found["old log-probs"] == "from the update's own forward pass: one update per rollout"
    assert found["gradients"] == "norm at most 1"
    assert found["ZeRO"] == f"stage 0, {134_515_008 * 16 / 2**30:.2f} GiB a rank for weights, gradients and optimizer"
    assert found["reward default"] == "1 x exact"


def test_what_is_switched_on_is_said(compiled: Compiled) -> None:
    found = rows(
        compiled(
            "algorithm.kl.coefficient=0.05",
            "batch.epochs=2",
            "train.max_grad_norm=null",
            "algorithm.loss.dual_clip=3",
            "rewards.default=[{rule: exact, weight: 0.9}, {rule: length, name: short, weight: -0.1}]",
            "data.train={name: own, path: /rows.jsonl}",
            "data.eval={a: {path: /a.jsonl}, b: {path: /b.jsonl}}",
            parameters=7_000_000_000,
        )
    )
    assert found["policy"].startswith("org/model, 7.00B parameters") and found["reference"] == "org/model"
    assert found["KL"] == "0.05 x k3 in the loss"
    assert found["old log-probs"] == "several updates use one rollout"
    assert found["gradients"] == "not clipped"
    assert found["loss"] == "ppo_clip clip_low 0.2, clip_high 0.2, dual_clip 3.0, token_mean"
    assert found["reward default"] == "0.9 x exact + -0.1 x short"
    assert found["data"] == "own (/rows.jsonl)" and found["evaluation"] == "a, b"


@pytest.mark.parametrize("parameters", [None, 15 * 10**9])
def test_notes_stand_below(compiled: Compiled, gpus: MachineFacts, parameters: int | None) -> None:
    plan = compiled("models.reference.from=org/other", machine=gpus, ranks=8, parameters=parameters)
    notes = [line for line in plan_text(plan).splitlines() if line.startswith("note: ")]
    assert notes == [f"note: {text}" for text in plan.notes] and len(notes) == (4 if parameters is None else 5)
    assert ("an unknown number of parameters" in rows(plan)["policy"]) is (parameters is None)

"""What ranks do with scorers whose weights are partitioned. As `work.py`, whose helpers it uses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import models_work

CPU = torch.device("cpu")
TEXTS = [" #### 3", " 1+2=3 #### 3", " 4", " #### 12345", " 3"]


def scored(world: Any, *, folder: str, recipe: str, beside_zero: int | None, batch_tokens: int) -> list[Any]:
    """Scores of three rounds: rows on all ranks, on rank 0 alone, on the last rank alone. `beside_zero`: a policy under this stage is trained
    before and in between."""
    from transformers import AutoTokenizer

    from rftcli.builtin import builtin_path
    from rftcli.plan.compile import compile_plan
    from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
    from rftcli.recipe.load import load_text
    from rftcli.rewards.scorers.desk import Desk
    from rftcli.rewards.scorers.view import View
    from rftcli.runtime.judges import NO_JUDGES
    from rftcli.runtime.scorers import fill_desk

    text = "models: {policy: {path: org/m}}\ndata: {train: {path: t.jsonl}}\nrewards: {default: [{model: s}]}\ntrain: {steps: 1}"
    found = Facts(machine=MachineFacts(cores=1, memory_gib=4.0), model=ModelFacts(path="m"), ranks=world.size)
    sets = [f"models.scorers.s={recipe}", f"models.scorers.s.batch_tokens={batch_tokens}"]
    plan = compile_plan(load_text(text, sets=sets, env={}).recipe, found, name="n", search_path="/", policy_path="m")
    learner = None if beside_zero is None else models_work.adapted(world, zero=beside_zero, lora=False)
    desk = Desk(["s"])
    tokenizer = AutoTokenizer.from_pretrained(str(builtin_path("quickstart")))
    fill_desk(desk, plan, world, CPU, Path(folder) / "scores", [], tokenizer, print, NO_JUDGES)
    scorer: Any = desk._scorers["s"]

    def view(answer: str) -> View:
        return View(prompt="Q: 1+2\nA:", messages=(), completion=answer, reference="3", label="default", columns={}, place="row")

    rounds = []
    for texts in (TEXTS[world.rank :], TEXTS if world.rank == 0 else [], TEXTS[:2] if world.rank == world.size - 1 else []):
        assert scorer.collective or world.size == 1
        rounds.append(scorer.score([view(answer) for answer in texts]))
        if learner is not None:
            models_work.update(learner, world)
    parameters = sum(parameter.numel() for parameter in scorer._held.module.parameters())
    return [rounds, parameters]

"""The workloads of the benchmarks are recipes that can be planned, on the machines that they are for."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from benchmarks.against import SIDES, planned, recipe
from benchmarks.gpu import MACHINES, Item, against, without
from benchmarks.workloads import SHAPES, WORKLOADS
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts, ScorerFacts
from rftcli.recipe.load import load_text

ROOT = Path(__file__).parents[2]
H200 = MachineFacts(cores=64, memory_gib=1000.0, gpus=8, gpu_name="NVIDIA H200", gpu_memory_gib=140.4, vllm=True)


def facts(name: str) -> ModelFacts:
    shape = SHAPES[WORKLOADS[name].shape or "smollm2"]
    layers, hidden, inner, words = (shape[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"))
    heads = shape["num_attention_heads"]
    keys = hidden // heads * shape.get("num_key_value_heads", heads)
    parameters = words * hidden * (1 if shape.get("tie_word_embeddings") else 2) + layers * hidden * (2 * hidden + 2 * keys + 3 * inner + 2) + hidden
    return ModelFacts(
        path="/models/policy", architecture="LlamaForCausalLM", layers=layers, hidden=hidden, inner=inner, vocabulary=words, parameters=parameters,
        key_width=keys, query_width=hidden, max_positions=4096,
    )  # fmt: skip


def asked_ranks(item: Item) -> int:
    return int(item.command[item.command.index("--ranks") + 1]) if "--ranks" in item.command else 1


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_plan_that_fits(name: str) -> None:
    workload = WORKLOADS[name]
    text = yaml.safe_dump(recipe(workload, Path("/models/policy"), Path("/data/prompts.jsonl")))
    loaded = load_text(text, sets=list(workload.sets), env={})
    model = facts(name)
    gpus, ranks = max(((count, asked_ranks(item)) for count, items in MACHINES.items() for item in items if name in item.command), default=(1, 1))
    machine = H200 if workload.engine == "vllm" else MachineFacts(cores=2, memory_gib=24.0)
    given = Facts(machine=replace(machine, gpus=min(machine.gpus, gpus)), model=model, ranks=ranks, train_rows=1000)
    scorers = {"judge": ScorerFacts(model=model)} if workload.scorer else {}
    critic = model if loaded.recipe.models.critic is not None else None
    plan = compile_plan(
        loaded.recipe, given, name=name, critic=critic, scorers=scorers, search_path="/", policy_path="/models/policy", reference_path=None
    )
    assert plan.batch.prompts_per_step * plan.batch.samples_per_prompt == workload.rows
    assert plan.memory is not None and plan.memory.fits
    assert plan.batch.share_prompts is (name == "long-prompts")


def test_machines_name_what_there_is() -> None:
    for items in MACHINES.values():
        for item in items:
            if item.command[1] == "benchmarks.against":
                assert item.command[2] in WORKLOADS and set(item.command[4].split(",")) <= set(SIDES)
                others = {side for side in item.command[4].split(",") if not side.startswith("rft")}
                assert WORKLOADS[item.command[2]].for_all or not others, item
                assert asked_ranks(item) == 1 or not others, item
            module = ROOT / f"{item.command[1].replace('.', '/')}.py"
            assert module.is_file(), item
    real = [item.command[2] for items in MACHINES.values() for item in items if item.real]
    assert [WORKLOADS[name].ends_early for name in real] == [True] * len(real)


def test_results_have_names_of_their_own() -> None:
    """An item is left out where its result is there: no other one may leave a file that it takes for its own."""
    for items in MACHINES.values():
        patterns = [item.result for item in items]
        for card in ("cpu", "NVIDIA-H200"):
            files = [re.sub(r"\[.*\]\*|\*", card, pattern) for pattern in patterns]
            assert [[fnmatch(file, pattern) for pattern in patterns].count(True) for file in files] == [1] * len(files), files
    for gpus, scaling in ((2, "weak"), (4, "weak"), (2, "server")):
        assert any(scaling in item.result for item in MACHINES[gpus])
    for name, workload in WORKLOADS.items():
        if name.startswith("weak-"):
            assert workload.prompts == int(name[-1]) * WORKLOADS[f"std-{name.split('-')[1]}"].prompts


def test_what_a_plan_holds_by_stage() -> None:
    rows = [{"name": "weights", "gib": {"rollout": 1.0, "learn": 1.0}}, {"name": "cache", "gib": {"rollout": 3.0}}]
    assert planned({"memory": {"rows": rows}}) == {"rollout": 4.0, "learn": 1.0} and planned({"memory": None}) == {}


def test_sides_without_a_result_are_told(tmp_path: Path) -> None:
    result = tmp_path / "against-c1-cpu.json"
    result.write_text('{"sides": {"rft": {}, "plain": {}}}')
    assert without(against("c1", 1, "c1", sides="rft,trl-tuned,plain"), [result]) == ", but for trl-tuned: --again measures all sides"
    assert without(against("c1", 1, "c1", sides="rft,plain"), [result]) == ""
    assert without(Item(what="w", minutes=1, command=("-m", "benchmarks.growth"), result="g.json"), [result]) == ""

"""A rank's place in the words of every launcher, and what of the environment goes with it."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.recipe.load import load_text
from rftcli.runtime import environment, travel
from rftcli.runtime.environment import launch_environment
from rftcli.runtime.hosts import Hosts
from rftcli.runtime.travel import Place, interface_towards, place_of, rank_environment, travelling
from rftcli.runtime.ways import ManyMachines


def plan(*sets: str):  # type: ignore[no-untyped-def]
    from rftcli.plan.compile import compile_plan

    text = "models: {policy: {path: m}}\ndata: {train: {path: t.jsonl}}\nrewards: {default: [{rule: exact}]}\ntrain: {steps: 1}\n"
    facts = Facts(machine=MachineFacts(cores=8, memory_gib=1.0), model=ModelFacts(path="m"), ranks=4, nodes=2)
    return compile_plan(load_text(text, sets=list(sets), env={}).recipe, facts, name="n", search_path="/", policy_path="m")


def test_docstring_examples() -> None:
    assert doctest.testmod(travel).failed == 0 == doctest.testmod(environment).failed


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 3, 4)),  # nothing is said of nodes: one
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1, 2)),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, (2, 4, 0, 2)),
        (
            {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))},
            (1, 2, 1, 2),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 1, 2)),
    ],
)
def test_places(environment: dict[str, str], place: tuple[int, ...]) -> None:
    found = place_of(environment)
    assert found == Place(rank=place[0], size=place[1], local_rank=place[2], local_size=place[3])
    assert place_of(found.environment()) == found


def test_no_place() -> None:
    assert place_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None  # a batch script, which no srun has started
    assert place_of({"RANK": "0"}) is None and place_of({}) is None


def test_what_travels() -> None:
    given = {
        "NCCL_IB_HCA": "mlx5", "HF_HOME": "/models", "HF_TOKEN": "secret", "WANDB_API_KEY": "secret", "WANDB_MODE": "offline",
        "CUDA_VISIBLE_DEVICES": "3", "HOME": "/root", "SHELL": "/bin/sh", "RFT_CACHE_DIR": "/c", "OMP_NUM_THREADS": "64",
    }  # fmt: skip
    asked = plan("launch.env={NCCL_DEBUG: INFO, MY_FLAG: '1'}")
    found = {**travelling(asked, given), **rank_environment(asked)}
    assert {name: found.get(name) for name in (*given, "NCCL_DEBUG", "MY_FLAG")} == {
        "NCCL_IB_HCA": "mlx5", "HF_HOME": "/models", "HF_TOKEN": None, "WANDB_API_KEY": None, "WANDB_MODE": "offline",
        "CUDA_VISIBLE_DEVICES": None,
        "HOME": None, "SHELL": None, "RFT_CACHE_DIR": "/c", "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO", "MY_FLAG": "1",
    }  # fmt: skip


def test_the_way_to_this_machine_is_no_interface() -> None:
    assert interface_towards("127.0.0.1") is None and interface_towards("no such host") is None


def test_launch_env_is_written_as_the_recipe_has_it() -> None:
    """What a `${VAR}` says is nowhere on disk: a rank looks it up on its own machine."""
    asked = plan()
    asked = replace(asked, launch=replace(asked.launch, env={"ADDRESS": "${PLACE}:80", "PLAIN": "here"}))
    told = ManyMachines(Hosts(names=("a", "b"), per_host=2, launcher="pdsh"), asked, say=print).meeting()
    assert told["launch_env"] == {"ADDRESS": "${PLACE}:80", "PLAIN": "here"} and not {"ADDRESS", "PLAIN"} & set(told["env"])
    assert launch_environment(told["launch_env"], {"PLACE": "there"}) == {"ADDRESS": "there:80", "PLAIN": "here"}

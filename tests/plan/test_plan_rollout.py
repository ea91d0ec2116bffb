"""How completions are sampled: lengths, sizes of passes, what makes the sampled distribution another one, and the replica under ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rftcli.plan.compile_lengths import shorter
from rftcli.plan.compile_problems import CompileError
from rftcli.plan.compile_rollout import ROW_MULTIPLE
from rftcli.plan.facts import MachineFacts
from rftcli.plan.plan import Plan

Compiled = Callable[..., Plan]


def refused(compiled: Compiled, *sets: str, **arguments: object) -> dict[str, str]:
    with pytest.raises(CompileError) as caught:
        compiled(*sets, **arguments)
    return {problem.path: f"{problem.message}; {problem.hint}" for problem in caught.value.problems}


def test_auto_is_what_the_models_positions_leave(compiled: Compiled) -> None:
    plan = compiled("rollout={max_prompt_tokens: 100, max_new_tokens: auto}", "data.eval.test={path: t.jsonl}", max_positions=2048)
    assert plan.rollout.max_new_tokens == plan.eval.max_new_tokens == 1948
    assert "rollout.max_new_tokens 1948: 2048 positions of the model - 100 of the longest prompt" in plan.notes
    written = compiled("rollout={max_prompt_tokens: 100, max_new_tokens: 1948}", "data.eval.test={path: t.jsonl}", max_positions=2048)
    assert written.batch == plan.batch and written.rollout == plan.rollout


def test_auto_without_positions_or_room(compiled: Compiled) -> None:
    auto = "rollout.max_new_tokens=auto"
    assert "its files do not say" in refused(compiled, auto)["rollout.max_new_tokens"]
    assert "leaves no position" in refused(compiled, auto, max_positions=1024)["rollout.max_new_tokens"]
    assert compiled(auto, max_positions=1025).rollout.max_new_tokens == 1
    assert "must be at most `max_new_tokens`, got 9 above 6" in refused(compiled, auto, "rollout.min_new_tokens=9", max_positions=1030)[
        "rollout.min_new_tokens"
    ]


@pytest.mark.parametrize(("prompts", "samples"), [(64, 8), (2, 8), (3, 3)])
def test_a_limit_in_tokens_leaves_the_rows_to_the_engine_and_caps_them_at_a_step(compiled: Compiled, prompts: int, samples: int) -> None:
    sets = (f"batch.prompts_per_step={prompts}", f"rollout.samples_per_prompt={samples}", "rollout.hf.batch_tokens=4096")
    for ranks in (1, prompts):
        rollout = compiled(*sets, ranks=ranks).rollout
        assert rollout.batch_tokens == 4096 and rollout.batch_rows % ROW_MULTIPLE == 0
        assert 0 <= rollout.batch_rows - prompts * samples < ROW_MULTIPLE
    assert compiled(*sets[:2]).rollout.batch_tokens is None


RESHAPING = {
    "rollout.top_p=0.9": "top_p", "rollout.top_k=5": "top_k", "rollout.min_p=0.1": "min_p", "rollout.min_new_tokens=2": "min_new_tokens",
    "rollout.penalties.repetition=1.1": "penalties", "rollout.penalties.presence=-0.1": "penalties", "rollout.penalties.frequency=0.1": "penalties",
    "rollout.logit_bias={'3': 1}": "logit_bias", "rollout.bad_words=[a]": "bad_words", "rollout.structured={regex: a}": "structured",
    "rollout.hf.options.typical_p=0.9": "hf.options.typical_p", "rollout.hf.options.epsilon_cutoff=0.1": "hf.options.epsilon_cutoff",
    "rollout.hf.options.eta_cutoff=0.1": "hf.options.eta_cutoff", "rollout.hf.options.no_repeat_ngram_size=2": "hf.options.no_repeat_ngram_size",
    "rollout.hf.options.suppress_tokens=[1]": "hf.options.suppress_tokens",
}  # fmt: skip


@pytest.mark.parametrize("setting", RESHAPING)
def test_what_reshapes_the_distribution_is_told_and_not_compared(compiled: Compiled, setting: str) -> None:
    plan = compiled(setting)
    assert plan.rollout.reshaped_by == (RESHAPING[setting],) and not plan.probes(1)
    (note,) = [note for note in plan.notes if "off-policy" in note]
    assert note.startswith(f"rollout.{RESHAPING[setting]}: completions come from another distribution")


def test_what_does_not_reshape_it(compiled: Compiled) -> None:
    plan = compiled("rollout={temperature: 0.7, stop: [a], stop_token_ids: [4], ignore_eos: true, hf: {batch_tokens: 4096, continuous: true}}")
    assert plan.rollout.reshaped_by == () and plan.probes(1) and not any("off-policy" in note for note in plan.notes)
    assert compiled("rollout.hf.options={typical_p: 1, suppress_tokens: []}").rollout.options == {}


def test_a_replica_that_fits_beside_stage_3(compiled: Compiled, gpus: MachineFacts) -> None:
    # bfloat16: 2 bytes a parameter for the replica, 18 / 8 for the training state
    plan = compiled("train.deepspeed.zero_stage=3", ranks=8, machine=gpus, parameters=15 * 2**30)
    assert not plan.rollout.shares_weights
    assert any("30.00 GiB of weights + 33.75 GiB of training state = 63.75 GiB a rank, of 90% of 80 GiB" in note for note in plan.notes)


def test_a_replica_that_does_not_fit_is_refused_with_the_sum(compiled: Compiled, gpus: MachineFacts, cpu: MachineFacts) -> None:
    for stage in ("3", "auto"):
        found = refused(compiled, f"train.deepspeed.zero_stage={stage}", ranks=8, machine=gpus, parameters=17 * 2**30)
        assert "34.00 GiB of weights + 38.25 GiB of training state = 72.25 GiB a rank" in found["train.deepspeed.zero_stage"]
        assert "smaller model" in found["train.deepspeed.zero_stage"]
    # ranks on a CPU share its memory: 4 + 20 / 2 bytes a parameter, of 90% of 8 GiB
    found = refused(compiled, "train.deepspeed.zero_stage=3", ranks=2, machine=cpu, parameters=2**30)
    assert "4.00 GiB of weights + 10.00 GiB of training state" in found["train.deepspeed.zero_stage"]


def test_a_replica_is_weighed_beside_what_stays_on_the_device(compiled: Compiled, gpus: MachineFacts) -> None:
    sets = ("train.deepspeed.zero_stage=3", "rollout.engine=hf")
    found = refused(compiled, *sets, ranks=8, machine=gpus, parameters=17 * 2**30)["train.deepspeed.zero_stage"]
    assert "; `train.offload.optimizer: cpu`, `models.policy.lora: {}`, a smaller model" in found
    # 18 / 8 bytes a parameter of training state, of which 16 / 8 lie on the CPU
    plan = compiled(*sets, "train.offload.optimizer=cpu", ranks=8, machine=gpus, parameters=17 * 2**30)
    assert any("34.00 GiB of weights + 4.25 GiB of training state" in note for note in plan.notes)
    larger = refused(compiled, *sets, "train.offload.optimizer=cpu", ranks=8, machine=gpus, parameters=40 * 2**30)["train.deepspeed.zero_stage"]
    assert "offload" not in larger


def test_engines_without_a_replica_are_not_measured_by_it(compiled: Compiled, gpus: MachineFacts) -> None:
    compiled("rollout.engine=fake", "train.deepspeed.zero_stage=3", ranks=8, machine=gpus, parameters=17 * 2**30)
    compiled("train.deepspeed.zero_stage=2", ranks=8, machine=gpus, parameters=17 * 2**30)
    unknown = compiled("train.deepspeed.zero_stage=3", ranks=8, machine=gpus)
    assert any("the model's size is not known" in note and "replica" in note for note in unknown.notes)


@pytest.mark.parametrize(
    ("prompt", "new", "limit", "text"),
    [
        (1024, 24, 512, "the sum must be at most 512: `rollout.max_prompt_tokens: 488`"),
        (100, 600, 512, "the sum must be at most 512: at most 412 new tokens"),
        (400, 200, 512, "the sum must be at most 512: `rollout.max_prompt_tokens: 312` or at most 112 new tokens"),
        (600, 600, 512, "the sum must be at most 512"),
    ],
)
def test_which_lengths_would_fit(prompt: int, new: int, limit: int, text: str) -> None:
    assert shorter(prompt, new, limit) == text

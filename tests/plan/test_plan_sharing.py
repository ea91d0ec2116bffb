"""When a group's prompt goes through the model once: what `true` and `auto` come to, what rules it out, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rftcli.plan.compile import CompileError
from rftcli.plan.facts import MachineFacts, ModelFacts
from rftcli.plan.plan import Plan
from rftcli.plan.show import plan_text

Compiled = Callable[..., Plan]
LONG = ("rollout.max_prompt_tokens=2048", "rollout.max_new_tokens=256")
TRUE = "batch.share_prompts=true"


def came_to(plan: Plan) -> tuple[str, str, bool]:
    return plan.policy.attention, plan.batch.layout, plan.batch.share_prompts


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (LONG, ("sdpa", "padded", False)),  # padded rows have a prompt each
        ((*LONG, TRUE), ("varlen", "packed", True)),
        ((*LONG, TRUE, "models.policy.attention=sdpa"), ("sdpa", "packed", True)),
        ((*LONG, "models.policy.attention=varlen"), ("varlen", "packed", True)),
        ((*LONG, "models.policy.attention=varlen", "batch.share_prompts=false"), ("varlen", "packed", False)),
        ((*LONG, "models.policy.attention=varlen", "batch.layout=padded"), ("varlen", "padded", False)),
        (("models.policy.attention=varlen", "rollout.max_prompt_tokens=64", "rollout.max_new_tokens=1024"), ("varlen", "packed", False)),  # 5%
        ((TRUE, "rollout.max_prompt_tokens=64", "rollout.max_new_tokens=1024"), ("varlen", "packed", True)),
        ((*LONG, "models.policy.attention=flash_2"), ("flash_2", "packed", False)),
    ],
)
def test_what_it_comes_to(compiled: Compiled, sets: tuple[str, ...], expected: tuple[str, str, bool]) -> None:
    assert came_to(compiled(*sets)) == expected


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (LONG, ("varlen", "packed", True)),  # 78%
        (("rollout.max_prompt_tokens=512", "rollout.max_new_tokens=512"), ("sdpa", "padded", False)),  # 44%
        ((*LONG, "models.policy.dtype=float32"), ("sdpa", "padded", False)),  # no flash kernel for it
        ((*LONG, "batch.layout=padded"), ("sdpa", "padded", False)),
        ((*LONG, "models.policy.attention=sdpa"), ("sdpa", "padded", False)),
        ((*LONG, "batch.share_prompts=false"), ("sdpa", "padded", False)),
        ((*LONG, "train.compile=true"), ("sdpa", "padded", False)),
    ],
)
def test_on_a_gpu_long_prompts_are_shared_where_nothing_is_said(
    compiled: Compiled, gpus: MachineFacts, sets: tuple[str, ...], expected: tuple[str, str, bool]
) -> None:
    assert came_to(compiled(*sets, machine=gpus)) == expected


SMALL = ("rollout.max_prompt_tokens=64", "rollout.max_new_tokens=1024")
SHORT = ("rollout.max_prompt_tokens=512", "rollout.max_new_tokens=512")
LLAMA = {"architecture": "LlamaForCausalLM"}


@pytest.mark.parametrize(
    ("sets", "facts", "expected"),
    [
        ((), LLAMA, ("varlen", "packed", True)),  # 29%
        (SMALL, LLAMA, ("varlen", "packed", False)),  # 5%
        (LONG, LLAMA, ("varlen", "packed", True)),
        (("rollout.ignore_eos=true",), LLAMA, ("sdpa", "padded", False)),  # all answers have one length
        ((*SMALL, "rollout.ignore_eos=true", "rollout.stop=[done]"), LLAMA, ("varlen", "packed", False)),
        (("rollout.min_new_tokens=1024", "rollout.max_new_tokens=1024"), LLAMA, ("sdpa", "padded", False)),
        (("models.policy.dtype=float32",), LLAMA, ("sdpa", "padded", False)),  # no flash kernel for it
        (("models.policy.attention=sdpa",), LLAMA, ("sdpa", "padded", False)),
        (("batch.layout=padded",), LLAMA, ("sdpa", "padded", False)),
        ((*SMALL, "batch.layout=packed"), LLAMA, ("varlen", "packed", False)),
        ((*SMALL, "batch.layout=packed", "rollout.ignore_eos=true"), LLAMA, ("varlen", "packed", False)),
        (("batch.layout=packed",), {}, ("sdpa", "packed", False)),
        ((*SHORT,), LLAMA, ("varlen", "packed", True)),  # 44%, and packed in any case
        (("rollout.max_prompt_tokens=128", "rollout.max_new_tokens=512"), LLAMA, ("varlen", "packed", True)),  # 17%
        (("rollout.max_prompt_tokens=128", "rollout.max_new_tokens=512", "batch.micro_batch_size=32"), LLAMA, ("varlen", "packed", False)),
        ((*SHORT, "batch.micro_batch_size=32"), LLAMA, ("varlen", "packed", True)),
        ((*SHORT, "rollout.ignore_eos=true"), LLAMA, ("sdpa", "padded", False)),
        ((*SHORT, "batch.micro_batch_size=1"), LLAMA, ("varlen", "packed", False)),  # every answer alone
        (("models.policy.dropout=0.1",), LLAMA, ("sdpa", "padded", False)),
        (("models.policy.trust_remote_code=true",), LLAMA, ("sdpa", "padded", False)),
        (("train.compile=true",), LLAMA, ("sdpa", "padded", False)),
        ((), {"architecture": "BloomForCausalLM"}, ("sdpa", "padded", False)),  # not known to take borders
        ((), {**LLAMA, "plain_attention": False}, ("sdpa", "padded", False)),
        ((), {**LLAMA, "attends_only": False}, ("sdpa", "padded", False)),
        (("algorithm.advantage.kind=gae", "models.critic={}"), {**LLAMA, "critic": ModelFacts(path="/critic")}, ("sdpa", "padded", False)),
    ],
)
def test_on_a_gpu_rows_are_packed_where_answers_end_by_themselves(
    compiled: Compiled, gpus: MachineFacts, sets: tuple[str, ...], facts: dict[str, object], expected: tuple[str, str, bool]
) -> None:
    plan = compiled(*sets, machine=gpus, **facts)
    assert came_to(plan) == expected
    assert ("rows are packed, with varlen attention, since answers end at different lengths" in plan.notes) is (
        expected[1] == "packed" and "batch.layout=packed" not in sets
    )
    assert came_to(compiled(*sets, **facts))[0] == "sdpa"  # on a CPU


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-16GB", "Tesla T4", "NVIDIA GeForce RTX 2080 Ti", "T4"])
def test_cards_without_a_flash_kernel_have_padded_rows(compiled: Compiled, gpus: MachineFacts, name: str) -> None:
    assert came_to(compiled(*LONG, machine=replace(gpus, gpu_name=name), **LLAMA)) == ("sdpa", "padded", False)
    assert came_to(compiled(*LONG, machine=replace(gpus, gpu_name="NVIDIA RTX 4090"), **LLAMA)) == ("varlen", "packed", True)


@pytest.mark.parametrize(
    ("sets", "note"),
    [
        ((*LONG, "batch.layout=padded"), "prompts are not shared, which would save up to 78% of the update's tokens: `batch.layout: padded`"),
        ((*LONG, "models.policy.attention=sdpa"), "which would save up to 78% of the update's tokens: `models.policy.attention: sdpa`"),
        (("rollout.ignore_eos=true",), "rows are padded, since all answers have one length"),
    ],
)
def test_the_plan_says_why_rows_are_as_they_are(compiled: Compiled, gpus: MachineFacts, sets: tuple[str, ...], note: str) -> None:
    assert any(note in found for found in compiled(*sets, machine=gpus, **LLAMA).notes)
    assert not any("rows are padded" in found for found in compiled(*LONG, "rollout.ignore_eos=true", machine=gpus, **LLAMA).notes)  # shared


@pytest.mark.parametrize(
    ("cut", "saved"),
    [("micro_batch_size=8", 78), ("micro_batch_size=4", 67), ("micro_batch_size=3", 52), ("micro_batch_size=2", 44), ("micro_batch_size=16", 78),
     ("tokens_per_micro_batch=4096", 78), ("tokens_per_micro_batch=3072", 67)],
)  # fmt: skip
def test_what_is_saved_counts_prompts_of_groups_that_are_cut(compiled: Compiled, cut: str, saved: int) -> None:
    """8 answers of 256 behind 2,048: of 8 prompts 7 are saved, 6 where a group is cut once, 8 - 10/3 where three answers go together."""
    notes = compiled(*LONG, "models.policy.attention=varlen", f"batch.{cut}").notes
    assert any(f"up to {saved}% of the update's tokens are saved" in note for note in notes)


@pytest.mark.parametrize(
    ("sets", "vary"), [((), True), (("rollout.ignore_eos=true",), False), (("rollout.ignore_eos=true", "rollout.stop=[x]"), True)]
)
def test_whether_answers_end_at_different_lengths(compiled: Compiled, sets: tuple[str, ...], vary: bool) -> None:
    assert compiled(*sets).rollout.lengths_vary is vary


NO_GROUPS = ("rollout.samples_per_prompt=1", "algorithm.advantage.kind=reinforce")


@pytest.mark.parametrize(
    ("sets", "facts", "reason"),
    [
        (("batch.layout=padded",), {}, "padded rows have a prompt each"),
        (("models.policy.attention=flash_2",), {}, "attention `flash_2` does not know them"),
        (NO_GROUPS, {}, "a group has one completion"),
        (("models.policy.dropout=0.1",), {}, "dropout would draw once for a prompt"),
        (("models.policy.lora={dropout: 0.1}",), {}, "dropout would draw once for a prompt"),
        (("models.policy.router_loss=0.1",), {"experts": 4}, "router_loss looks at each completion's whole sequence"),
        (("train.compile=true",), {}, "train.compile"),
        (("models.teacher.server=http://host:8000",), {}, "the teacher's server takes whole sequences"),
        (LONG, {"window": 2303}, "/models/policy has a sliding window of 2303 tokens, and sequences have up to 2304"),
        ((), {"attends_only": False}, "/models/policy has layers that are no attention"),
        ((), {"plain_attention": False}, "/models/policy caps its attention scores"),
        (("algorithm.advantage.kind=gae", "models.critic={}"), {"critic": ModelFacts(path="/critic", attends_only=False)}, "/critic has layers"),
    ],
)
def test_what_rules_it_out(compiled: Compiled, sets: tuple[str, ...], facts: dict[str, object], reason: str) -> None:
    with pytest.raises(CompileError) as caught:
        compiled(TRUE, *sets, **facts)
    (problem,) = [found for found in caught.value.problems if found.path == "batch.share_prompts"]
    assert problem.reason is not None and reason in problem.reason


def test_auto_leaves_off_what_cannot_be_and_says_why(compiled: Compiled) -> None:
    plan = compiled(*LONG, "models.policy.attention=varlen", window=1000)
    assert not plan.batch.share_prompts
    assert "prompts are not shared: /models/policy has a sliding window of 1000 tokens, and sequences have up to 2304" in plan.notes
    assert compiled(*LONG, "models.policy.attention=varlen", window=2304).batch.share_prompts


def test_the_plan_shows_it(compiled: Compiled) -> None:
    plan = compiled(*LONG, "models.policy.attention=varlen", "batch.prompts_per_step=32")
    assert plan.batch.equation.endswith("(micro-batches of at most 8192 tokens, a group's prompt once in each)")
    assert "packed, prompts shared" in plan_text(plan)
    assert any("up to 78% of the update's tokens are saved" in note for note in plan.notes)  # 7 x 2048 of 8 x 2304


def test_a_whole_update_needs_no_room_for_prompts_that_stand_once(compiled: Compiled, gpus: MachineFacts) -> None:
    """Two groups of eight: 2 x (2048 + 8 x 256) positions instead of 16 x 2304."""
    shape = {"layers": 2, "hidden": 64, "vocabulary": 100, "parameters": 10**6, "machine": gpus}
    sets = (*LONG, "models.policy.attention=varlen", "batch.prompts_per_step=2", "batch.tokens_per_micro_batch=65536")
    kept = []
    for shares in ("true", "false"):
        table = compiled(*sets, f"batch.share_prompts={shares}", **shape).memory
        assert table is not None
        kept.append(next(row.gib["learn"] for row in table.rows if row.name == "activations"))
    assert kept[0] / kept[1] == pytest.approx(2 * 4096 / (16 * 2304))

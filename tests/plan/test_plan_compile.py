"""Recipe and facts to a plan: every number that is derived, every decision with its reason, and nothing of the recipe left out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.data.spec import Columns
from rftcli.errors import EXIT_USAGE
from rftcli.plan.compile import compile_plan
from rftcli.plan.compile_problems import CompileError
from rftcli.plan.compile_rollout import ROW_MULTIPLE
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.memory_ladder import MOST_TOKENS
from rftcli.plan.plan import Plan, plan_to_json
from rftcli.recipe.kinds import keys
from rftcli.recipe.load import load_text

Compiled = Callable[..., Plan]


def problems_of(compiled: Compiled, *sets: str, **arguments: object) -> dict[str, str]:
    with pytest.raises(CompileError) as caught:
        compiled(*sets, **arguments)
    assert caught.value.exit_code == EXIT_USAGE
    return {problem.path: problem.message for problem in caught.value.problems}


def test_the_machine_decides_device_and_number_type(compiled: Compiled, gpus: MachineFacts) -> None:
    on_cpu, on_gpus = compiled(ranks=2), compiled(ranks=8, machine=gpus)
    assert (on_cpu.world.device, on_cpu.world.backend, on_cpu.world.threads_per_rank, on_cpu.policy.dtype) == ("cpu", "gloo", 4, "float32")
    assert (on_gpus.world.device, on_gpus.world.backend, on_gpus.world.threads_per_rank, on_gpus.policy.dtype) == ("cuda", "nccl", 8, "bfloat16")
    assert compiled(ranks=16).world.threads_per_rank == 1  # more ranks than cores
    assert [MachineFacts(cores=8, memory_gib=1.0, threads=threads).threads_of_a_rank(2) for threads in (None, 1, 3, 16)] == [4, 1, 3, 4]
    assert compiled("models.policy.dtype=bfloat16").policy.dtype == "bfloat16"
    assert compiled("models.policy.dtype=float32", machine=gpus).policy.dtype == "float32"


@pytest.mark.parametrize(
    ("parameters", "on_gpu", "asked", "expected"),
    [(2_000_000_000, True, "auto", True), (1_999_999_999, True, "auto", False), (None, True, "auto", False), (7_000_000_000, False, "auto", False),
     (1, False, "true", True), (7_000_000_000, True, "false", False)],
)  # fmt: skip
def test_gradient_checkpointing(
    compiled: Compiled, cpu: MachineFacts, gpus: MachineFacts, parameters: int | None, on_gpu: bool, asked: str, expected: bool
) -> None:
    plan = compiled(f"models.policy.gradient_checkpointing={asked}", machine=gpus if on_gpu else cpu, parameters=parameters)
    assert plan.policy.gradient_checkpointing is expected


@pytest.mark.parametrize(
    ("sets", "expected"),
    [((), ("sdpa", "padded")), (("models.policy.attention=varlen",), ("varlen", "packed")),
     (("models.policy.attention=flash_2",), ("flash_2", "packed")),
     (("models.policy.attention=varlen", "batch.layout=padded"), ("varlen", "padded"))],
)  # fmt: skip
def test_rows_are_packed_where_attention_packs(compiled: Compiled, sets: tuple[str, ...], expected: tuple[str, str]) -> None:
    plan = compiled(*sets)
    assert (plan.policy.attention, plan.batch.layout) == expected


def test_packed_attention_is_refused_for_a_model_it_cannot_compute(compiled: Compiled) -> None:
    assert set(problems_of(compiled, "models.policy.attention=varlen", plain_attention=False)) == {"models.policy.attention"}
    assert compiled("models.policy.attention=eager", plain_attention=False).policy.attention == "eager"


def test_the_same_inputs_give_the_same_plan(compiled: Compiled) -> None:
    assert compiled("seed=3") == compiled("seed=3") != compiled("seed=4")


def test_micro_batches_in_numbers(compiled: Compiled) -> None:
    # 64 prompts x 8 = 512 rows of up to 2048 positions: 8192 // 2048 = 4 rows a micro-batch
    assert compiled().batch.micro_batch_size == 4
    # 24 + 24 positions: up to 170 rows; 512 rows in 4 micro-batches of 128
    short = ("rollout.max_prompt_tokens=24", "rollout.max_new_tokens=24")
    assert compiled(*short).batch.micro_batch_size == 128
    assert compiled(*short, ranks=64).batch.micro_batch_size == 8  # one group a rank
    assert compiled("rollout.max_prompt_tokens=9000").batch.micro_batch_size == 1  # even one row is more than the budget
    assert compiled("batch.micro_batch_size=7").batch.micro_batch_size == 7
    assert compiled("batch.micro_batch_size=10000", ranks=4).batch.micro_batch_size == 128  # a rank has no more rows
    text = compiled("batch={prompts_per_step: 32, updates_per_step: 2, micro_batch_size: 24}", ranks=2).batch.equation
    assert text == "32 prompts x 8 samples = 256 completions a step = 2 updates x 2 ranks x 64 rows (micro-batches of 24: 24 + 24 + 16)"


@settings(max_examples=50, deadline=None)
@given(groups=st.integers(1, 20), samples=st.integers(2, 16), positions=st.integers(2, 9000))
def test_automatic_micro_batches_are_as_few_as_fit_and_as_even_as_one_size_allows(groups: int, samples: int, positions: int) -> None:
    recipe = load_text(
        "models: {policy: {path: org/m}}\ndata: {train: {path: t.jsonl}}\nrewards: {default: [{rule: exact}]}\ntrain: {steps: 1}\n"
        f"rollout: {{samples_per_prompt: {samples}, max_prompt_tokens: 1, max_new_tokens: {positions - 1}}}\nbatch: {{prompts_per_step: {groups}}}",
        env={},
    ).recipe
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=1.0), model=ModelFacts(path="m"), ranks=1)
    micro = compile_plan(recipe, facts, name="n", search_path="/", policy_path="m").batch.micro_batch_size
    rows, most = groups * samples, max(1, MOST_TOKENS["cpu"] // positions)
    assert 1 <= micro <= most
    assert math.ceil(rows / micro) == math.ceil(rows / most)  # no more passes than the budget asks for
    assert micro == 1 or math.ceil(rows / (micro - 1)) > math.ceil(rows / micro)  # a smaller size would need more


@pytest.mark.parametrize(
    ("passes", "rows", "prompts", "steps"), [("1", 100, 10, 10), ("1", 101, 10, 11), ("0.07", 100, 1, 7), ("2.5", 10, 10, 3), ("0.001", 10, 64, 1)]
)
def test_passes_over_the_data_in_steps(compiled: Compiled, passes: str, rows: int, prompts: int, steps: int) -> None:
    sets = (f"train={{steps: null, data_passes: {passes}}}", f"batch.prompts_per_step={prompts}")
    assert compiled(*sets, train_rows=rows).steps == steps


def test_schedules_count_updates(compiled: Compiled) -> None:
    several = ("batch.updates_per_step=2", "batch.epochs=3")
    plan = compiled(*several, "train.optimizer.warmup_steps=4")
    assert plan.batch.optimizer_updates_per_step == 6
    assert (plan.learner.warmup_updates, plan.learner.schedule_updates) == (24, 60)
    longer = compiled(*several, "train.optimizer.schedule_steps=10", "train.steps=25")
    assert longer.learner.schedule_updates == 60 and longer.steps == 25  # the horizon stays when a run is made longer


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        ((), None),
        (("batch.updates_per_step=2",), "several updates use one rollout"),
        (("batch.epochs=2",), "several updates use one rollout"),
        (("models.policy.dropout=0.1",), "dropout changes the log-probs of the update's own forward pass"),
        (("algorithm.loss.correction={}",), "the correction compares the sampler's log-probs with those at rollout time"),
        (("algorithm.loss.kind=kl_cov",), "`kl_cov` chooses tokens over a whole update before it"),
        (("algorithm.loss.old=recompute",), "the recipe asks for it"),
        (("algorithm.loss.old=current",), None),
        (("algorithm.loss.old=sampler", "batch.epochs=2"), None),
        (("algorithm.loss={old: sampler, top_entropy_share: 0.2}",),
         "the share of tokens with the highest entropy is taken over a whole update before it"),
    ],
)
def test_old_log_probs_are_computed_apart_only_with_a_reason(compiled: Compiled, sets: tuple[str, ...], reason: str | None) -> None:
    assert compiled(*sets).batch.needs_prepass == reason


def test_a_reference_only_where_something_needs_it(compiled: Compiled) -> None:
    assert compiled().reference is None
    unused = compiled("models.reference.from=org/other", reference_path="/models/other")
    assert unused.reference is None and any("models.reference is not loaded" in note for note in unused.notes)
    same = compiled("algorithm.kl.coefficient=0.1", parameters=5)
    assert same.reference == same.policy and same.policy.parameters == 5
    other = compiled("algorithm.kl.coefficient=0.1", "models.reference.from=org/other", reference_path="/models/other", parameters=5)
    assert other.reference is not None and other.policy.path == "/models/policy"
    assert (other.reference.path, other.reference.given, other.reference.parameters) == ("/models/other", "org/other", None)


@pytest.mark.parametrize(
    ("prompts", "samples", "rows", "most"),
    [
        (64, 8, 64, 64), (32, 8, 64, 64), (8, 8, 32, 64), (2, 8, 8, 16), (1, 8, 8, 8), (4, 3, 8, 16), (64, 100, 104, 104), (1, 2, 8, 8),
        (64, 6, 64, 64),
    ],
)
def test_rows_of_a_decode_pass(compiled: Compiled, prompts: int, samples: int, rows: int, most: int) -> None:
    """At most half a step, whole groups, at most 64 rows unless one group is larger, a multiple of eight; the same for any number of ranks. A whole
    step where that changes no bits."""
    sets = (f"batch.prompts_per_step={prompts}", f"rollout.samples_per_prompt={samples}")
    plans = [compiled(*sets, ranks=ranks).rollout for ranks in (1, 2, 4) if prompts % ranks == 0]
    assert {(plan.batch_rows, plan.most_rows) for plan in plans} == {(rows, most)} and rows % ROW_MULTIPLE == 0


@pytest.mark.parametrize(("length", "most"), [(24, 256), (88, 128), (100, 112), (984, 64)])
def test_a_pass_of_short_answers_has_more_rows_where_that_changes_no_bits(compiled: Compiled, length: int, most: int) -> None:
    sets = ("batch.prompts_per_step=64", "rollout.samples_per_prompt=8", "rollout.max_prompt_tokens=40", f"rollout.max_new_tokens={length}")
    plan = compiled(*sets).rollout
    assert plan is not None and (plan.batch_rows, plan.most_rows) == (64, most)
    assert compiled(*sets, "rollout.hf.batch_rows=32").rollout.most_rows == 32


def test_an_engine_shares_weights_unless_they_are_sharded(compiled: Compiled) -> None:
    shares = [compiled(f"train.deepspeed.zero_stage={stage}", ranks=2).rollout.shares_weights for stage in range(4)]
    assert shares == [True, True, True, False]


def test_no_clipping(compiled: Compiled) -> None:
    assert compiled().learner.max_grad_norm == 1.0 and compiled().learner.deepspeed["gradient_clipping"] == 1.0
    off = compiled("train.max_grad_norm=null").learner
    assert off.max_grad_norm is None and off.deepspeed["gradient_clipping"] == 0.0


def test_a_batch_that_does_not_divide(compiled: Compiled) -> None:
    """500 prompts on 6 ranks: the rule and the nearest values that fit."""
    found = problems_of(compiled, "batch.prompts_per_step=500", ranks=6)
    message = found["batch.prompts_per_step"]
    assert "updates_per_step x ranks (1 x 6 = 6)" in message and "prompts_per_step 498 or 504" in message and "ranks 5 or 10" in message


def test_bfloat16_needs_a_stage_that_keeps_float32_weights(compiled: Compiled, gpus: MachineFacts) -> None:
    """Number type auto is bfloat16 on GPUs: found now, not by a rank that has loaded the model."""
    unsharded = "train.deepspeed.zero_stage=0"
    refused = {"train.deepspeed.zero_stage": "must be at least 1 for a policy in bfloat16"}
    assert problems_of(compiled, unsharded, machine=gpus) == refused
    assert problems_of(compiled, unsharded, "models.policy.dtype=bfloat16") == refused
    assert compiled(unsharded, "models.policy.dtype=float32", machine=gpus).learner.zero_stage == 0
    assert compiled(unsharded).learner.zero_stage == 0
    assert compiled(machine=gpus, parameters=5).learner.zero_stage == 1


@pytest.mark.parametrize(
    ("sets", "paths"),
    [
        (("rollout.max_new_tokens=1025",), {"rollout.max_new_tokens"}),
        (("rollout.max_new_tokens=1024",), set()),
        (("eval.max_new_tokens=1025", "data.eval.test={path: t.jsonl}"), {"eval.max_new_tokens"}),
        (("eval.max_new_tokens=1025",), set()),  # nothing is evaluated
        (("rollout.max_new_tokens=2000", "data.eval.test={path: t.jsonl}"), {"rollout.max_new_tokens"}),
    ],
)
def test_lengths_beyond_the_model(compiled: Compiled, sets: tuple[str, ...], paths: set[str]) -> None:
    if not paths:
        compiled(*sets, max_positions=2048)
        return
    found = problems_of(compiled, *sets, max_positions=2048)
    assert set(found) == paths and all("the model has 2048" in message for message in found.values())
    compiled(*sets, max_positions=None)  # the model's files do not say


def test_frequencies_that_the_longest_row_changes_are_told(compiled: Compiled) -> None:
    def told(switch: int | None) -> list[str]:
        sets = ("rollout.max_prompt_tokens=100", "rollout.max_new_tokens=100")
        return [note for note in compiled(*sets, rope_switch=switch).notes if "rotary frequencies are others from" in note]

    (note,) = told(199)
    assert "200 here, within 199" in note and not told(200) and not told(None)


def test_all_problems_at_once(compiled: Compiled) -> None:
    found = problems_of(compiled, "batch.prompts_per_step=3", "train={steps: null, data_passes: 1}", ranks=2, max_positions=100, train_rows=None)
    assert set(found) == {"batch.prompts_per_step", "rollout.max_new_tokens", "train.data_passes"}


def test_data_sets(compiled: Compiled) -> None:
    plan = compiled(
        "data.train=[{path: /a.jsonl}, {name: own, path: /b.jsonl, weight: 0.5}, {python: 'm:rows', options: {n: 1}}]",
        "data.eval={held_out: {path: /c.jsonl, samples_per_prompt: 4, columns: {prompt: question, reference: answer}}}",
        "eval.temperature=1",
    )
    assert [(spec.name, spec.path, spec.python, spec.weight) for spec in plan.data.train] == [
        ("train", "/a.jsonl", None, 1.0), ("own", "/b.jsonl", None, 0.5), ("train2", None, "m:rows", 1.0),
    ]  # fmt: skip
    (held_out,) = plan.data.eval
    assert (held_out.name, held_out.samples_per_prompt, held_out.columns) == ("held_out", 4, Columns(prompt="question", reference="answer"))


def test_names_of_reward_parts(compiled: Compiled) -> None:
    parts = compiled("rewards.default=[{rule: exact}, {python: 'pkg.mod:fn'}, {rule: length, name: short, weight: -0.5}]").rewards.labels["default"]
    assert [(part.name, part.kind, part.target, part.weight) for part in parts] == [
        ("exact", "rule", "exact", 1.0), ("fn", "python", "pkg.mod:fn", 1.0), ("short", "rule", "length", -0.5),
    ]  # fmt: skip


def test_options_of_an_estimator_that_has_none(compiled: Compiled) -> None:
    assert compiled().advantage.options == {"normalise_std": True, "std": "group"}
    assert compiled("algorithm.advantage.kind=rloo").advantage.options == {}


@pytest.mark.parametrize(("written", "planned"), [("null", None), ("false", None), ("true", "tensorboard"), ("logs/tb", "logs/tb")])
def test_tensorboard(compiled: Compiled, written: str, planned: str | None) -> None:
    assert compiled(f"track.tensorboard={written}").track.tensorboard == planned


def test_when_to_save_and_evaluate(compiled: Compiled) -> None:
    plan = compiled("checkpoint.every=4", "eval.every=3", "data.eval.test={path: /t.jsonl}")
    assert [step for step in range(1, 11) if plan.saves(step)] == [4, 8, 10]
    assert [step for step in range(1, 11) if plan.evaluates(step)] == [3, 6, 9, 10]
    best = compiled("checkpoint.keep_best.metric=eval.test.mean@1", "eval.every=3", "data.eval.test={path: /t.jsonl}")
    assert [step for step in range(1, 11) if best.saves(step)] == [3, 6, 9, 10]
    bare = compiled()
    assert [step for step in range(1, 11) if bare.saves(step)] == [10]
    assert not any(bare.evaluates(step) for step in range(1, 11))  # nothing to evaluate on
    by_pass = compiled("eval={every: pass, at_end: false}", "data.eval.test={path: /t.jsonl}", "batch.prompts_per_step=40", train_rows=100)
    assert [step for step in range(1, 11) if by_pass.evaluates(step)] == [3, 5, 8, 10]  # 120, 200, 320, 400 prompts
    no_end = compiled("eval.at_end=false", "data.eval.test={path: /t.jsonl}")
    assert not any(no_end.evaluates(step) for step in range(1, 11))


def test_when_the_engines_log_probs_are_compared(compiled: Compiled) -> None:
    """In the first step and every fiftieth after it, where it samples from the very distribution that is trained on."""
    plan = compiled("train.steps=200")
    assert [step for step in range(1, 201) if plan.probes(step)] == [1, 51, 101, 151]
    assert compiled("rollout.temperature=0.5").probes(1) and compiled("rollout.engine=hf").probes(1)
    for setting in ("top_p=0.9", "top_k=5", "min_p=0.1", "min_new_tokens=2", "engine=fake"):
        assert not compiled(f"rollout.{setting}").probes(1), setting


BASE = (
    "data.eval.test={path: /t.jsonl}",
    "data.train=[{python: 'a:b', options: {n: 1}}]",
    "rewards.default=[{rule: exact}]",
    "eval.rewards.default=[{rule: exact}]",
    "train.early_stop.metric=reward_mean",
    "algorithm.kl.coefficient=0.1",
    "track.wandb={}",
)
OTHER: dict[str, str] = {
    "name": "x", "seed": "1",
    "models.policy.path": "org/other", "models.policy.trust_remote_code": "true", "models.policy.dtype": "bfloat16",
    "models.policy.attention": "eager", "models.policy.dropout": "0.1", "models.policy.gradient_checkpointing": "true",
    "models.policy.options": "{a: 1}", "models.policy.chat.template": "'{{ x }}'", "models.policy.chat.options": "{a: 1}",
    "models.policy.chat.system": "s", "models.policy.chat.prefill": "p", "models.policy.chat.score_prefill": "false",
    "models.reference.from": "org/ref",
    "models.policy.revision": "v2", "models.policy.tokenizer": "org/words", "models.policy.tokenizer_options": "{legacy: false}",
    "models.policy.add_tokens": "[<plan>]", "models.policy.freeze": "['*.bias']",
    "models.policy.quantise.bits": "8", "models.policy.quantise.kind": "fp4", "models.policy.quantise.nested": "true",
    "models.policy.lora.rank": "8", "models.policy.lora.alpha": "16", "models.policy.lora.dropout": "0.1",
    "models.policy.lora.targets": "[q_proj]", "models.policy.lora.save_also": "[lm_head]", "models.policy.lora.start_from": "org/adapter",
    "models.policy.lora.options": "{use_dora: true}",
    "models.policy.ema.decay": "0.9", "models.policy.ema.evaluate": "true", "models.policy.ema.export": "true", "eval.weights": "ema",
    "models.reference.refresh.every": "5", "models.reference.refresh.mix": "0.5", "models.reference.offload": "true",
    "models.reference.shard": "true",
    "data.train[].path": "/u.jsonl", "data.train[].python": "'a:c'", "data.train[].options": "{n: 2}", "data.train[].limit": "3",
    "data.train[].label": "default", "data.train[].system": "s", "data.train[].columns.prompt": "q", "data.train[].columns.reference": "r",
    "data.train[].columns.label": "l", "data.train[].columns.id": "i", "data.train[].extract_reference": "'(.)'", "data.train[].as_chat": "true",
    "data.train[].name": "own", "data.train[].weight": "2",
    "data.eval.NAME.path": "/u.jsonl", "data.eval.NAME.python": "'a:c'", "data.eval.NAME.options": "{n: 2}", "data.eval.NAME.limit": "3",
    "data.eval.NAME.label": "default", "data.eval.NAME.system": "s", "data.eval.NAME.columns.prompt": "q",
    "data.eval.NAME.columns.reference": "r", "data.eval.NAME.columns.label": "l", "data.eval.NAME.columns.id": "i",
    "data.eval.NAME.extract_reference": "'(.)'", "data.eval.NAME.as_chat": "true", "data.eval.NAME.samples_per_prompt": "2",
    "data.train[].split": "test", "data.train[].where": "a > 1", "data.train[].template": "'{}:'", "data.train[].streaming": "true",
    "data.eval.NAME.split": "test", "data.eval.NAME.where": "a > 1", "data.eval.NAME.template": "'{}:'",
    "data.seed": "5", "data.check_reference": "refuse", "data.shuffle": "false", "data.overlong_prompt": "drop",
    "rollout.engine": "fake", "rollout.samples_per_prompt": "4", "rollout.max_prompt_tokens": "99", "rollout.max_new_tokens": "99",
    "rollout.min_new_tokens": "2", "rollout.temperature": "0.9", "rollout.top_p": "0.9", "rollout.top_k": "9", "rollout.min_p": "0.1",
    "rollout.stop": "[a]", "rollout.stop_token_ids": "[1]", "rollout.ignore_eos": "true", "rollout.hf.batch_rows": "8",
    "rollout.penalties.repetition": "1.1", "rollout.penalties.presence": "0.1", "rollout.penalties.frequency": "0.1",
    "rollout.logit_bias": "{a: 1}", "rollout.bad_words": "[a]",
    "rollout.structured.regex": "'a+'", "rollout.structured.json_schema": "{type: object}",
    "rollout.hf.batch_tokens": "4096", "rollout.hf.continuous": "true", "rollout.hf.options.typical_p": "0.9",
    "rollout.hf.options.epsilon_cutoff": "0.1", "rollout.hf.options.eta_cutoff": "0.1", "rollout.hf.options.no_repeat_ngram_size": "3",
    "rollout.hf.options.suppress_tokens": "[4]",
    "rollout.vllm.memory_share": "0.3", "rollout.vllm.max_model_tokens": "4000", "rollout.vllm.max_sequences": "9", "rollout.vllm.seeds": "engine",
    "rollout.vllm.check_weights": "true", "rollout.vllm.options": "{block_size: 32}", "rollout.vllm.lora": "adapter",
    "rollout.vllm.process": "beside",
    **{f"rollout.sglang.{key}": value for key, value in {
        "memory_share": "0.3", "max_model_tokens": "4000", "max_sequences": "9", "seeds": "engine", "check_weights": "true",
        "options": "{page_size: 16}",
    }.items()},
    **{f"rollout.vllm.server.{key}": value for key, value in {
        "urls": "['http://y:2']", "weights": "nccl", "folder": "/shared/weights", "timeout_seconds": "9", "ready_seconds": "9", "retries": "0",
        "headers_env": "{A: B}", "start.servers": "2", "start.command": "[vllm, serve]",
    }.items()},
    "rewards.LABEL.parts[].rule": "length", "rewards.LABEL.parts[].python": "'a:b'", "rewards.LABEL.parts[].name": "n",
    "rewards.LABEL.parts[].weight": "2", "rewards.LABEL.parts[].options": "{strip: false}", "rewards.LABEL.parts[].on_error": "stop",
    "rewards.LABEL.parts[].text": "keep_special", "rewards.LABEL.parts[].clip": "[0, 1]", "rewards.LABEL.parts[].timeout_seconds": "3",
    "rewards.LABEL.renormalise": "true", "rewards.LABEL.combine.python": "'a:c'", "rewards.LABEL.combine.options": "{n: 2}",
    "reward_shaping.max_error_rate": "0.5", "reward_shaping.truncated": "mask", "reward_shaping.truncated_factor": "0.5",
    "reward_shaping.missing_eos_penalty": "0.5", "reward_shaping.overlong.buffer": "8", "reward_shaping.overlong.factor": "0.5",
    "reward_shaping.running_norm": "full", "reward_shaping.clip": "[-1, 1]",
    "rewards.LABEL.parts[].model": "s",
    **{f"models.scorers.NAME.{key}": value for key, value in {
        "kind": "classifier", "path": "org/other", "revision": "v2", "tokenizer": "org/words", "template": "'{{ x }}'", "dtype": "bfloat16",
        "trust_remote_code": "true", "quantise.bits": "8", "quantise.kind": "fp4", "quantise.nested": "true", "options": "{a: 1}",
        "max_tokens": "99", "overlong": "cut_left", "batch_tokens": "999", "head": "1",
        "prompt": "'{{ label }}'", "score.regex": "'(.+)'", "score.json": "b", "score.token": "maybe", "score.against": "[no]", "score.scale": "2",
        "max_new_tokens": "9", "temperature": "0.5", "samples": "2", "placement.server": "'http://y'", "api": "completions",
        "preset": "lightrft", "urls": "['http://y']", "score_field": "scores", "batch_size": "3", "timeout_seconds": "9", "retries": "1",
        "concurrency": "2", "per_minute": "60", "headers_env": "{A: B}", "python": "'a:C'", "memory_gib": "2", "cache": "true",
        "engine": "vllm", "placement.memory_share": "0.2", "placement.ready_seconds": "9", "placement.command": "[x]", "placement.options": "{a: 1}",
    }.items()},
    "algorithm.advantage.kind": "rloo", "algorithm.advantage.normalise_std": "false", "algorithm.advantage.std": "batch",
    "algorithm.loss.kind": "dro", "algorithm.loss.python": "'m:g'", "algorithm.loss.options": "{importance_weight: true}",
    "algorithm.loss.old": "recompute", "algorithm.loss.off_policy_mask": "0.1", "algorithm.loss.entropy_coefficient": "0.01",
    "algorithm.loss.top_entropy_share": "0.2", "algorithm.loss.entropy_controller.target": "0.4", "algorithm.loss.entropy_controller.delta": "0.1",
    "algorithm.loss.entropy_controller.min": "0.01", "algorithm.loss.entropy_controller.max": "0.5",
    "algorithm.loss.correction.kind": "mask", "algorithm.loss.correction.level": "sequence", "algorithm.loss.correction.cap": "3",
    "algorithm.loss.correction.band": "[0.1, 3]", "algorithm.loss.correction.gate": "kl", "algorithm.loss.correction.bound": "0.2",
    "algorithm.loss.correction.batch_normalise": "true", "algorithm.loss.correction.reject.by": "k3",
    "algorithm.loss.correction.reject.band": "[0.9, 1.1]", "algorithm.loss.correction.reject.bound": "0.3",
    "algorithm.kl.unbiased_gradient": "true", "algorithm.kl.ratio_weighted": "true",
    "algorithm.loss.clip_low": "0.1", "algorithm.loss.clip_high": "0.3", "algorithm.loss.dual_clip": "3",
    "algorithm.advantage.whiten": "all", "algorithm.advantage.clip": "5", "algorithm.advantage.gamma": "0.9", "algorithm.advantage.lam": "0.9",
    "algorithm.advantage.min_std": "0.1", "algorithm.advantage.passk_std": "true", "algorithm.advantage.baseline": "batch",
    "algorithm.advantage.bootstrap_truncated": "true", "algorithm.advantage.distill_coefficient": "0.5", "algorithm.advantage.python": "'a:c'",
    "algorithm.advantage.options": "{n: 2}",
    "models.teacher.path": "org/other", "models.teacher.revision": "v2", "models.teacher.dtype": "bfloat16", "models.teacher.offload": "true",
    **{f"models.teacher.placement.{key}": value for key, value in {
        "memory_share": "0.2", "ready_seconds": "9", "command": "[x]", "options": "{a: 1}",
    }.items()},
    "models.teacher.server": "http://other:1", "models.teacher.api": "sglang", "models.teacher.served_model": "m",
    "models.teacher.timeout_seconds": "9", "models.teacher.retries": "0", "models.teacher.concurrency": "2", "models.teacher.headers_env": "{A: B}",
    "algorithm.kl.place": "reward", "algorithm.kl.level": "mean", "algorithm.kl.controller.kind": "fixed",
    "algorithm.kl.controller.target": "2", "algorithm.kl.controller.horizon": "5",
    "models.policy.router_loss": "0.1",
    "models.critic.from": "org/critic", "models.critic.head": "v", "models.critic.value_clip": "0.5", "models.critic.warmup_steps": "2",
    "models.critic.max_grad_norm": "0.5", "models.critic.optimizer.lr": "1e-4", "models.critic.optimizer.betas": "[0.8, 0.9]",
    "models.critic.optimizer.eps": "1e-7", "models.critic.optimizer.weight_decay": "0.1", "models.critic.optimizer.schedule": "cosine",
    "models.critic.optimizer.warmup_steps": "3", "models.critic.optimizer.min_lr": "1e-9", "models.critic.optimizer.schedule_steps": "20",
    "models.critic.optimizer.options": "{amsgrad: true}", "models.critic.optimizer.no_decay": "['*bias']",
    "train.freeze_policy_steps": "1",
    "train.supervised.data.path": "/s.jsonl", "train.supervised.data.python": "'a:c'", "train.supervised.data.options": "{n: 2}",
    "train.supervised.data.limit": "3", "train.supervised.data.system": "s", "train.supervised.data.as_chat": "true",
    "train.supervised.data.columns.prompt": "q", "train.supervised.data.columns.reference": "r", "train.supervised.coefficient": "0.3",
    "train.supervised.rows_per_update": "7",
    "algorithm.loss.aggregate": "sequence_mean", "algorithm.kl.coefficient": "0.2", "algorithm.kl.estimator": "k2",
    "batch.prompts_per_step": "32", "batch.updates_per_step": "2", "batch.epochs": "2", "batch.micro_batch_size": "3", "batch.layout": "packed",
    "batch.share_prompts": "true", "batch.balance": "false", "batch.skip_zero_advantage": "false",
    "train.steps": "11", "train.data_passes": "5", "train.max_grad_norm": "0.5",
    "train.optimizer.lr": "1e-5", "train.optimizer.betas": "[0.8, 0.9]", "train.optimizer.eps": "1e-7", "train.optimizer.weight_decay": "0.1",
    "train.optimizer.schedule": "cosine", "train.optimizer.warmup_steps": "3", "train.optimizer.min_lr": "1e-9",
    "train.optimizer.schedule_steps": "20", "train.deepspeed.zero_stage": "2", "train.nonfinite.skip_at_most": "1",
    "batch.rollouts_per_update": "2", "batch.tokens_per_micro_batch": "4096",
    "train.optimizer.kind": "muon", "train.optimizer.no_decay": "['*bias']", "train.optimizer.options": "{amsgrad: true}",
    "train.precision.master": "bfloat16", "train.precision.gradients": "bfloat16", "train.precision.reduce": "bfloat16",
    "train.offload.optimizer": "cpu", "train.offload.parameters": "cpu", "train.compile": "true", "train.deterministic": "true",
    "train.deepspeed.extra": "{zero_optimization: {overlap_comm: true}}",
    "eval.before_training": "false", "eval.every": "2", "eval.at_end": "false", "eval.temperature": "0.5", "eval.max_new_tokens": "7",
    "eval.pass_k": "[]", "eval.vote_k": "[1]",
    "data.eval.NAME.sampling.temperature": "0.7", "data.eval.NAME.sampling.top_p": "0.7", "data.eval.NAME.sampling.top_k": "7",
    "data.eval.NAME.sampling.min_p": "0.07", "data.eval.NAME.sampling.max_new_tokens": "77", "data.eval.NAME.sampling.min_new_tokens": "7",
    "train.early_stop.metric": "loss", "train.early_stop.patience": "9", "train.early_stop.mode": "min", "train.early_stop.min_delta": "0.1",
    "samples.every": "3", "samples.max": "8",
    "checkpoint.every": "2", "checkpoint.keep": "5", "checkpoint.save_hf": "false",
    "train.max_hours": "2", "train.max_tokens": "9", "checkpoint.every_minutes": "5", "checkpoint.before_deadline": "true",
    "checkpoint.deadline_margin_seconds": "9",
    "checkpoint.keep_best.metric": "eval.test.pass@1", "checkpoint.keep_best.mode": "min", "checkpoint.keep_best.keep": "2",
    "checkpoint.max_gib": "9", "checkpoint.trainer_state": "false", "checkpoint.background": "true",
    "track.tensorboard": "true", "track.wandb.project": "p", "track.wandb.entity": "e", "track.wandb.group": "g", "track.wandb.name": "n",
    "track.wandb.tags": "[a]", "track.wandb.mode": "offline",
    "track.wandb.upload_samples": "3", "track.python": "'a:B'", "launch.env": "{A: b}", "launch.timeout_minutes": "2",
    "profile.steps": "[2]", "profile.ranks": "all",
    "rollout.first_token_temperature": "5.0",
    **{f"rollout.by_label.LABEL.{key}": value for key, value in {
        "temperature": "0.7", "top_p": "0.9", "top_k": "7", "min_p": "0.07", "max_new_tokens": "77", "min_new_tokens": "7", "stop": "[a]",
        "stop_token_ids": "[4]",
    }.items()},
    "rollout.dynamic.max_extra_rollouts": "5", "rollout.dynamic.range": "[0.1, 0.9]", "rollout.dynamic.metric": "exact",
    "rollout.over_sample.factor": "2.0", "rollout.over_sample.slice_tokens": "7", "rollout.keep.best": "3", "rollout.keep.worst": "3",
    "rollout.replay.after_steps": "5", "rollout.replay.times": "2", "rollout.replay.share": "0.5", "rollout.replay.max_waiting": "7",
    "rollout.replay.below": "0.5", "rollout.partial.budget_tokens": "8", "rollout.max_version_lag": "3",
    "data.curriculum.kind": "pass_rate", "data.curriculum.range": "[0.2, 0.8]", "data.curriculum.share": "0.2", "data.curriculum.metric": "exact",
    "data.curriculum.pass_mark": "0.5", "data.curriculum.memory": "0.1", "data.curriculum.python": "'a:C'", "data.curriculum.options": "{n: 2}",
}  # fmt: skip
"""Every key of the language that has more than one value, with another value than BASE or the default has."""
USED = "rewards.default=[{rule: exact}, {model: s}]"
CLASSIFIER = "models.scorers.s={kind: classifier, path: org/s}"
HTTP = "models.scorers.s={kind: http, urls: ['http://x']}"
JUDGE = "models.scorers.s={kind: generative, path: org/s, prompt: '{{ x }}', score: {regex: '(.)'}"
PPO = ("algorithm.advantage.kind=gae", "models.critic={}")
TAUGHT, SERVED = "models.teacher.path=org/teacher", "models.teacher.server=http://host:8000"
OWN = "algorithm.advantage={kind: python, python: 'a:b'}"
SETUP: dict[str, tuple[str, ...]] = {
    "algorithm.advantage.passk_std": ("algorithm.advantage.kind=grpo_passk",),
    "algorithm.advantage.baseline": ("algorithm.advantage.kind=reinforce",),
    "algorithm.advantage.bootstrap_truncated": PPO,
    "algorithm.advantage.distill_coefficient": (TAUGHT,),
    "algorithm.advantage.python": (OWN,), "algorithm.advantage.options": (OWN,),
    **{f"models.teacher.{key}": (TAUGHT,) for key in ("path", "revision", "dtype", "offload")},
    **{f"models.teacher.placement.{key}": (TAUGHT, "models.teacher.placement={gpus: 0}") for key in (
        "memory_share", "ready_seconds", "command", "options",
    )},
    **{f"models.teacher.{key}": (SERVED,) for key in ("server", "api", "served_model", "timeout_seconds", "retries", "concurrency", "headers_env")},
    "batch.skip_zero_advantage": ("algorithm.kl.coefficient=0",),
    "data.train[].path": ("data.train=[{path: /a.jsonl}]",),
    "data.train[].split": ("data.train=[{path: org/name}]",),
    "data.eval.NAME.split": ("data.eval.test.path=org/name",),
    "data.eval.NAME.options": ("data.eval.test={path: null, python: 'a:b', options: {n: 1}}",),
    "data.eval.NAME.samples_per_prompt": ("eval.temperature=1",),
    "train.optimizer.min_lr": ("train.optimizer.schedule=linear",),
    "train.optimizer.no_decay": ("train.optimizer.weight_decay=0.1",),
    "train.precision.master": ("models.policy.dtype=bfloat16", "train.precision.gradients=bfloat16"),
    "train.precision.gradients": ("models.policy.dtype=bfloat16",),
    "train.precision.reduce": ("models.policy.dtype=bfloat16",),
    "rollout.structured.regex": ("rollout.structured.regex=b",),
    "rollout.structured.json_schema": ("rollout.structured.json_schema={type: string}",),
    "algorithm.advantage.gamma": ("algorithm.advantage.kind=reinforce",),
    "algorithm.advantage.lam": PPO,
    "algorithm.kl.level": ("algorithm.kl.place=reward",),
    "algorithm.loss.options": ("algorithm.loss.kind=reinforce",),
    "algorithm.loss.python": ("algorithm.loss={kind: python, python: 'm:f'}",),
    "algorithm.loss.off_policy_mask": ("batch.epochs=2",),
    **{f"algorithm.loss.entropy_controller.{key}": ("algorithm.loss={entropy_coefficient: 0.1, entropy_controller: {target: 1}}",)
       for key in ("target", "delta", "min", "max")},
    **{f"algorithm.loss.correction.{key}": ("algorithm.loss.correction={}",) for key in ("kind", "level", "cap", "batch_normalise")},
    "algorithm.loss.correction.band": ("algorithm.loss.correction={kind: mask}",),
    "algorithm.loss.correction.gate": ("algorithm.loss.correction={kind: mask, gate: tv, bound: 0.1}",),
    "algorithm.loss.correction.bound": ("algorithm.loss.correction={kind: mask, gate: tv, bound: 0.1}",),
    "algorithm.loss.correction.reject.by": ("algorithm.loss.correction.reject={by: k2, bound: 1}",),
    "algorithm.loss.correction.reject.band": ("algorithm.loss.correction.reject={band: [0.5, 2]}",),
    "algorithm.loss.correction.reject.bound": ("algorithm.loss.correction.reject={by: k2, bound: 1}",),
    "algorithm.kl.controller.kind": ("algorithm.kl.controller={kind: adaptive, target: 1}",),
    "algorithm.kl.controller.target": ("algorithm.kl.controller={kind: adaptive, target: 1}",),
    "algorithm.kl.controller.horizon": ("algorithm.kl.controller={kind: adaptive, target: 1}",),
    "models.critic.from": PPO, "models.critic.head": (*PPO, "models.critic.from=org/critic"), "models.critic.value_clip": PPO,
    "models.critic.warmup_steps": PPO, "models.critic.max_grad_norm": PPO, "train.freeze_policy_steps": PPO,
    **{f"models.critic.optimizer.{key}": PPO for key in ("lr", "betas", "eps", "weight_decay", "schedule", "warmup_steps", "schedule_steps")},
    "models.critic.optimizer.kind": PPO, "models.critic.optimizer.options": PPO,
    "models.critic.optimizer.no_decay": (*PPO, "models.critic.optimizer.weight_decay=0.1"),
    "models.critic.optimizer.min_lr": (*PPO, "models.critic.optimizer.schedule=linear"),
    "train.supervised.data.python": ("train.supervised={data: {path: /p.jsonl}}",),
    "train.supervised.data.options": ("train.supervised={data: {python: 'a:b'}}",),
    **{f"train.supervised.{key}": ("train.supervised={data: {path: /p.jsonl}}",) for key in (
        "data.path", "data.limit", "data.system", "data.as_chat", "data.columns.prompt", "data.columns.reference", "coefficient", "rows_per_update",
    )},
    **{f"models.policy.quantise.{name}": ("models.policy.lora={}", "models.policy.quantise={}") for name in ("bits", "kind", "nested")},
    "eval.weights": ("models.policy.ema={}",),
    "data.curriculum.kind": ("data.curriculum={kind: python, python: 'a:B'}",),
    "data.curriculum.python": ("data.curriculum={kind: python, python: 'a:B'}",),
    "data.curriculum.options": ("data.curriculum={kind: python, python: 'a:B'}",),
    "rewards.LABEL.combine.python": ("rewards.default={combine: {python: 'a:b'}, parts: [{rule: exact}]}",),
    "rewards.LABEL.combine.options": ("rewards.default={combine: {python: 'a:b'}, parts: [{rule: exact}]}",),
    "reward_shaping.truncated_factor": ("reward_shaping.truncated=penalise",),
    "reward_shaping.overlong.factor": ("reward_shaping.overlong.buffer=4",),
    "rewards.LABEL.parts[].model": (USED, HTTP), "models.scorers.NAME.kind": (USED, HTTP),
    **{f"models.scorers.NAME.{key}": (USED, CLASSIFIER) for key in (
        "path", "revision", "tokenizer", "template", "dtype", "trust_remote_code", "options", "max_tokens", "overlong", "batch_tokens", "head",
        "cache",
    )},
    **{f"models.scorers.NAME.quantise.{key}": (USED, CLASSIFIER, "models.scorers.s.quantise={}") for key in ("bits", "kind", "nested")},
    **{f"models.scorers.NAME.{key}": (USED, f"{JUDGE}, placement: {{server: 'http://x'}}}}") for key in (
        "prompt", "score.regex", "score.scale", "max_new_tokens", "temperature", "placement.server", "api",
    )},
    **{f"models.scorers.NAME.placement.{key}": (USED, f"{JUDGE}, placement: {{gpus: 0}}}}") for key in (
        "memory_share", "ready_seconds", "command", "options",
    )},
    "models.scorers.NAME.engine": (USED, f"{JUDGE}}}"),
    "models.scorers.NAME.samples": (USED, f"{JUDGE}, temperature: 1}}"),
    "models.scorers.NAME.score.json": (USED, f"{JUDGE}}}"), "models.scorers.NAME.score.token": (USED, f"{JUDGE}}}"),
    "models.scorers.NAME.score.against": (USED, "models.scorers.s={kind: generative, path: org/s, prompt: '{{ x }}', score: {token: yes}}"),
    **{f"models.scorers.NAME.{key}": (USED, HTTP) for key in (
        "preset", "urls", "score_field", "batch_size", "timeout_seconds", "retries", "concurrency", "per_minute", "headers_env",
    )},
    **{f"models.scorers.NAME.{key}": (USED, "models.scorers.s={kind: python, python: 'a:B'}") for key in ("python", "memory_gib")},
    **{f"rollout.{engine}.{key}": (f"rollout.engine={engine}",) for engine in ("vllm", "sglang") for key in (
        "memory_share", "max_model_tokens", "max_sequences", "seeds", "check_weights", "options",
    )},
    "rollout.vllm.process": ("rollout.engine=vllm",),
    "rollout.vllm.lora": ("rollout.engine=vllm", "models.policy.lora={}"),
    **{key: ("rollout={partial: {budget_tokens: 16}, max_version_lag: 2}", "algorithm.loss.old=sampler") for key in (
        "rollout.partial.budget_tokens", "rollout.max_version_lag",
    )},
    **{f"rollout.vllm.server.{key}": ("rollout.engine=vllm", "rollout.vllm.server={urls: ['http://x:1']}") for key in (
        "urls", "weights", "folder", "timeout_seconds", "ready_seconds", "retries", "headers_env",
    )},
    **{f"rollout.vllm.server.start.{key}": ("rollout.engine=vllm", "rollout.vllm.server={start: {}}") for key in ("servers", "command")},
    **{f"checkpoint.keep_best.{key}": ("checkpoint.keep_best={metric: eval.test.mean@1}",) for key in ("metric", "mode", "keep")},
}  # fmt: skip
"""What has to stand in the recipe for the key to be allowed."""
INSTEAD_OF: dict[str, str] = {
    "data.eval.NAME.python": "data.eval.test.path=null",
    "rewards.LABEL.parts[].python": "rewards.default[0].rule=null",
    "rewards.LABEL.parts[].model": "rewards.default=[{weight: 1}]",
    "models.scorers.NAME.kind": "models.scorers.s={urls: [], path: org/s}",
    **{f"models.scorers.NAME.score.{key}": "models.scorers.s.score.regex=null" for key in ("json", "token")},
    "train.data_passes": "train.steps=null",
    "data.curriculum.kind": "data.curriculum.python=null",
    "train.supervised.data.python": "train.supervised.data.path=null",
    "algorithm.kl.controller.kind": "algorithm.kl.controller.target=null",
}
"""What the key takes the place of."""
ONE_VALUE = {"models.scorers.NAME.offload", "models.scorers.NAME.shard", "models.critic.optimizer.kind", "profile.tool", "train.kernels"} | {
    f"rollout.vllm.{key}" for key in ("server.start.gpus", "tensor_parallel", "sleep")
} | {"models.teacher.placement.gpus"} | {f"models.scorers.NAME.placement.{key}" for key in ("gpus", "tensor_parallel")
} | {f"rollout.sglang.{key}" for key in ("tensor_parallel", "sleep")}
"""Keys with a single value so far, or on one rank of a CPU."""
MERGED = {"extends"}
for _table in (OTHER, SETUP, INSTEAD_OF):  # `eval.rewards` has the form of `rewards`
    _table.update({f"eval.{pattern}": value for pattern, value in list(_table.items()) if pattern.startswith("rewards.")})
_OWN = [pattern for pattern in SETUP if pattern.startswith("eval.rewards.")]
SETUP.update({pattern: tuple(item.replace("rewards.", "eval.rewards.") for item in SETUP[pattern]) for pattern in _OWN})
INSTEAD_OF.update({pattern: f"eval.{INSTEAD_OF[pattern]}" for pattern in INSTEAD_OF if pattern.startswith("eval.rewards.")})
ONE_VALUE |= {f"eval.{pattern}" for pattern in ONE_VALUE if pattern.startswith("rewards.")}


def test_the_table_knows_every_key() -> None:
    leaves = {key.pattern for key in keys() if key.kind.section is None and (key.kind.items or key.kind.values or key.kind).section is None}
    assert leaves == set(OTHER) | ONE_VALUE | MERGED


@pytest.mark.parametrize("pattern", sorted(OTHER))
def test_no_key_is_ignored(compiled: Compiled, pattern: str) -> None:
    """Another value of any key gives another plan: nothing that a person writes is dropped on the way."""
    path = pattern.replace("data.train[]", "data.train[0]").replace("eval.NAME", "eval.test").replace("rewards.LABEL.parts[]", "rewards.default[0]")
    path = path.replace("rewards.LABEL", "rewards.default").replace("by_label.LABEL", "by_label.default").replace("scorers.NAME", "scorers.s")
    setup = (*BASE, *SETUP.get(pattern, ()))
    instead = (INSTEAD_OF[pattern],) if pattern in INSTEAD_OF else ()
    before = compiled(*setup, experts=4)
    other_models = {
        "reference_path": "/ref" if pattern == "models.reference.from" else None,
        "critic": ModelFacts(path="/critic") if pattern == "models.critic.from" else None,
    }
    after = compiled(*setup, *instead, f"{path}={OTHER[pattern]}", experts=4, **other_models)
    assert plan_to_json(before) != plan_to_json(after)


@pytest.mark.parametrize(
    ("sets", "on_gpu", "path", "message"),
    [
        (("train.optimizer.kind=adamw_8bit",), False, "train.optimizer.kind", "`adamw_8bit` needs a GPU, and this run is on a CPU"),
        (
            (*PPO, "models.critic.optimizer.kind=adamw_8bit"), False, "models.critic.optimizer.kind",
            "`adamw_8bit` needs a GPU, and this run is on a CPU",
        ),
        (("train.optimizer.kind=muon",), True, "train.optimizer.kind", "`muon` needs a policy in float32"),
        (("train.precision.reduce=bfloat16",), False, "train.precision.reduce", "must be float32 for a policy in float32"),
    ],
)
def test_updates_that_the_machine_or_the_policy_rules_out(
    compiled: Compiled, cpu: MachineFacts, gpus: MachineFacts, sets: tuple[str, ...], on_gpu: bool, path: str, message: str
) -> None:
    assert problems_of(compiled, *sets, machine=gpus if on_gpu else cpu) == {path: message}


def test_the_critics_optimizer_is_its_own(compiled: Compiled, gpus: MachineFacts) -> None:
    plan = compiled(*PPO, "models.critic.optimizer.kind=adamw_8bit", machine=gpus)
    assert plan.critic is not None and (plan.critic.learner.kind, plan.learner.kind) == ("adamw_8bit", "adamw")


def test_a_critic_beside_an_adapter_is_trained_whole(compiled: Compiled, gpus: MachineFacts) -> None:
    plan = compiled(*PPO, "models.policy={lora: {}, quantise: {}, ema: {}, dtype: bfloat16}", machine=gpus)
    assert plan.critic is not None and plan.policy.lora is not None
    model = plan.critic.model
    assert (model.dtype, model.lora, model.quantise, model.ema) == ("float32", None, None, None)


def test_a_compiled_model_is_refused_where_the_plan_chose_stage_3(compiled: Compiled, gpus: MachineFacts) -> None:
    big = {"machine": gpus, "ranks": 8, "parameters": 14_000_000_000}
    assert set(problems_of(compiled, "train.compile=true", **big)) == {"train.compile"}
    assert compiled("train.compile=true", machine=gpus, ranks=8, parameters=1_000_000_000).learner.compile is True


def test_stages_that_the_optimizer_and_offloading_ask_for(compiled: Compiled, gpus: MachineFacts) -> None:
    def stage(*sets: str, **facts: object) -> int:
        return compiled(*sets, **facts).learner.zero_stage

    assert stage("train.optimizer.kind=muon", ranks=2) == 0
    assert stage("train.offload.optimizer=cpu", parameters=5) == 1
    assert stage("train.offload.parameters=cpu", parameters=5) == 3
    big = {"machine": gpus, "ranks": 1, "parameters": 7_000_000_000}
    note = next(text for text in compiled("train.offload.optimizer=cpu", **big).notes if text.startswith("ZeRO stage 1"))
    assert "39.12 GiB a rank" in note  # 2 + 4 bytes a parameter instead of 18: 7B on one GPU


def test_several_rollouts_have_whole_groups_on_every_rank(compiled: Compiled) -> None:
    found = problems_of(compiled, "batch.rollouts_per_update=32", ranks=4)
    assert "(64 / 4 = 16)" in found["batch.rollouts_per_update"]
    assert compiled("batch.rollouts_per_update=16", ranks=4).batch.rollouts_per_update == 16


def test_a_number_of_rows_switches_the_token_budget_off(compiled: Compiled) -> None:
    assert compiled().batch.tokens_per_micro_batch == MOST_TOKENS["cpu"]
    assert compiled("batch.tokens_per_micro_batch=3000").batch.tokens_per_micro_batch == 3000
    assert compiled("batch.micro_batch_size=2").batch.tokens_per_micro_batch is None


def test_a_history_of_memory_needs_a_gpu(compiled: Compiled, gpus: MachineFacts) -> None:
    assert problems_of(compiled, "profile.tool=memory") == {"profile.tool": "`memory` needs a GPU, and this run is on a CPU"}
    assert compiled("profile.tool=memory", machine=gpus).profile.tool == "memory"

"""Real allocations that fail, in each stage: one error that names the stage, the memory in use and the keys that help."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.errors import RftError
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import Plan
from rftcli.recipe.load import load_text
from rftcli.rewards.scorers.desk import Desk
from rftcli.rewards.spec import PartSpec
from rftcli.rewards.table import RewardTable
from rftcli.runtime.memory_errors import told
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import collect
from rftcli.stages.evaluate import EvalSet, evaluate
from rftcli.stages.learn import one_update
from rftcli.types import Experience, Prompt

PETABYTE = 2**50
RECIPE = """\
models: {policy: {path: org/model}}
data: {train: {path: train.jsonl}, eval: {e: {path: test.jsonl}}}
rewards: {default: [{rule: exact}]}
train: {steps: 1}
batch: {prompts_per_step: 2}
"""


def plan_of(*sets: str, ranks: int = 1) -> Plan:
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=1.0), model=ModelFacts(path="m"), ranks=ranks, train_rows=2)
    return compile_plan(load_text(RECIPE, sets=list(sets), env={}).recipe, facts, name="n", search_path="/", policy_path="m")


def allocate() -> torch.Tensor:
    return torch.empty(PETABYTE, dtype=torch.int8)


class Greedy:
    """A sampler, a policy and a learner, each of which wants more memory than there is."""

    version, lr = 0, 0.1

    def generate(self, requests: Any, settings: Any) -> Iterator[Any]:
        allocate()
        yield from ()

    def logprobs(self, batch: Any, temperature: float) -> Any:
        return allocate()

    def backward(self, batch: Any, loss: Any, last: bool) -> Any:
        return allocate()

    def draw(self, first: int, count: int) -> list[Prompt]:
        return [Prompt(draw=first, row=0, row_id="n:0", source="n", label="default", text="?", token_ids=(1,), reference=None)] * count

    def score(self, completions: Any) -> Iterator[Any]:
        yield from completions

    next_draw = 0
    step = None


def experience() -> Experience:
    ids = torch.tensor([1, 2, 3])
    return Experience(sample=None, token_ids=ids, prompt_tokens=1, mask=torch.ones(2, dtype=torch.bool), advantages=torch.ones(2))  # type: ignore[arg-type]


def failure(stage: str, plan: Plan) -> BaseException:
    greedy: Any = Greedy()
    where = {"pad_id": 0, "device": torch.device("cpu")}
    with pytest.raises(RuntimeError) as caught:
        if stage == "rollout":
            collect(greedy, greedy, greedy, plan, SoloWorld(), step=1, clock=lambda: 0.0, tick=lambda *_: None)
        elif stage == "credit":
            from rftcli.stages.credit import _fill

            _fill([experience()], greedy, "old_logprobs", plan, SoloWorld(), **where)
        elif stage == "learn":
            one_update([experience()], greedy, None, plan, SoloWorld(), **where)  # type: ignore[arg-type]
        else:
            sets = [EvalSet(name="e", prompts=greedy.draw(0, 1), samples_per_prompt=1)]
            evaluate(sets, greedy, greedy, plan, SoloWorld(), step=0, tick=lambda *_: None, write=lambda *_: None)
    return caught.value


@pytest.mark.parametrize(
    ("stage", "words", "knobs"),
    [
        ("rollout", "in rollout", ["rollout.hf.batch_rows (now 8)", "rollout.max_new_tokens (now 1024)"]),
        ("evaluation", "in evaluation", ["rollout.hf.batch_rows (now 8)"]),
        ("credit", "before the update", ["batch.tokens_per_micro_batch (now 8192)"]),
        ("learn", "in learn", ["batch.tokens_per_micro_batch (now 8192)", "models.policy.gradient_checkpointing: true"]),
    ],
)
def test_the_stage_and_what_helps(stage: str, words: str, knobs: list[str]) -> None:
    plan = plan_of()
    error = told(failure(stage, plan), plan)
    assert isinstance(error, RftError) and error.message.startswith("out of memory") and words in error.message
    assert "GiB in memory" in error.message and "can't allocate memory" in error.message
    assert error.hint is not None and not [knob for knob in knobs if knob not in error.hint]


class Hungry:
    """Whatever is asked of it takes more memory than there is."""

    def __getattr__(self, name: str) -> Any:
        return allocate()


def engine_fails(stage: str) -> BaseException:
    from rftcli.engines.vllm import VLLMSampler
    from rftcli.runtime.engine_folder import config_folder

    hungry: Any = Hungry()
    with pytest.raises(RuntimeError) as caught:
        if stage == "engine":
            config_folder(hungry, None, "float32")
        else:
            own: Any = {"world": SoloWorld(), "seeded": True, "dtype": torch.float32, "device": torch.device("cpu")}
            tokenizer: Any = SimpleNamespace(decode=str)
            VLLMSampler(hungry, lambda **_: None, (), torch.nn.Linear(1, 1), tokenizer, (0,), **own).load([("weight", torch.ones(1, 1))], 1)
    return caught.value


@pytest.mark.parametrize(("stage", "words"), [("engine", "while the engine was started"), ("weights", "while the engine took new weights")])
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engine_that_has_no_room_is_told_with_its_own_keys(stage: str, words: str, name: str) -> None:
    plan = plan_of(f"rollout.engine={name}", f"rollout.{name}.max_sequences=24")
    error = told(engine_fails(stage), plan)
    assert error is not None and words in error.message
    assert f"lower rollout.{name}.max_sequences (now 24)" in str(error.hint) and f"rollout.{name}.memory_share (now auto)" in str(error.hint)
    in_rollout = told(failure("rollout", plan_of()), plan)
    assert in_rollout is not None and f"rollout.{name}.max_sequences" in str(in_rollout.hint) and "rollout.hf" not in str(in_rollout.hint)


def test_a_server_s_memory_is_not_the_rank_s() -> None:
    error = told(failure("rollout", plan_of()), plan_of("rollout.vllm.server={urls: ['http://h:1']}"))
    assert error is not None and error.hint == "lower rollout.max_new_tokens (now 1024)"


def test_only_keys_that_can_still_help_are_named() -> None:
    plan = plan_of("batch.micro_batch_size=2", "models.policy.gradient_checkpointing=true", "train.deepspeed.zero_stage=2", ranks=2)
    error = told(failure("learn", plan), plan)
    assert error is not None
    assert error.hint == "lower batch.micro_batch_size (now 2); or set train.deepspeed.zero_stage to 3 (now 2)"


def test_reward_models_inside_a_rollout() -> None:
    class Hungry:
        remote, collective = False, True

        def score(self, views: Any) -> Any:
            return allocate()

    plan = plan_of("models.scorers.big={kind: classifier, path: org/big, batch_tokens: 999}", "rewards.default=[{model: big}]")
    desk = Desk(["big"])
    desk.fill({"big": Hungry()})  # type: ignore[dict-item]
    table = RewardTable({"default": (PartSpec(name="big", kind="model", target="big"),)}, desk=desk)

    class Silent:
        def generate(self, requests: Any, settings: Any) -> Iterator[Any]:
            return iter(())

    greedy: Any = Greedy()
    silent: Any = Silent()
    with pytest.raises(RuntimeError) as caught:
        collect(greedy, silent, table, plan, SoloWorld(), step=1, clock=lambda: 0.0, tick=lambda *_: None)
    error = told(caught.value, plan)
    assert error is not None and "while reward models scored" in error.message
    assert error.hint == "lower models.scorers.big.batch_tokens (now 999)"


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (MemoryError("Unable to allocate 8 PiB"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shape '[2]' is invalid"), False),
        (ValueError("out of memory"), False),
        (RftError("out of memory"), False),
    ],
)
def test_which_errors_are_meant(error: BaseException, known: bool) -> None:
    assert (told(error, plan_of()) is not None) is known

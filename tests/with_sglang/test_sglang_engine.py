"""The real engine beside this process, over the quickstart model: weights, log-probs, ends, penalties, forms, and what it leaves of the process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import engine_contract
import pytest
import torch
from engine_contract import Kit

from rftcli.builtin import builtin_path
from rftcli.engines.sglang import SGLangSampler
from rftcli.engines.sglang_start import EngineDied, start
from rftcli.errors import RftError, UsageError
from rftcli.models.load import load_causal_lm, load_tokenizer
from rftcli.runtime.engine_folder import config_folder
from rftcli.runtime.world import SoloWorld
from rftcli.types import FinishReason

QUESTION = (1, 51, 28, 223, 24, 21, 15, 18, 19, 222, 35, 28)
CPU = torch.device("cpu")
ARGUMENTS = {
    "load_format": "dummy", "dtype": "float32", "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "disable_cuda_graph": True, "max_total_tokens": 8192, "mem_fraction_static": 0.3, "context_length": 136, "max_running_requests": 64,
    "random_seed": 3, "schedule_policy": "lpm",
}  # fmt: skip


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    path = str(builtin_path("quickstart"))
    model = load_causal_lm(path, dtype="float32", attention="sdpa", dropout=0.0, options={}, trust_remote_code=False, device="cpu").eval()
    tokenizer = load_tokenizer(path)
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    running = start(str(config_folder(model, tokenizer, "float32")), ARGUMENTS, {}, CPU)
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before and running.checkable and running.pack is not None
    sampler = SGLangSampler(running, model, tokenizer, (2,), world=SoloWorld(), check=True, dtype=torch.float32, device=CPU)
    yield Kit(model=model, tokenizer=tokenizer, sampler=sampler, question=QUESTION, end=2, word="####")
    sampler.close()
    assert running.processes and not any(process.is_alive() for process in running.processes)


def test_it_refuses_to_sample_before_the_first_push(kit: Kit) -> None:
    kit.sampler.version = None
    with pytest.raises(RftError, match="no weights yet"):
        kit.sample()


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_the_contract(kit: Kit, check: Callable[[Kit], None]) -> None:
    check(kit)


def test_weights_travel_as_lists_too(kit: Kit) -> None:
    packed, kit.sampler._running.pack = kit.sampler._running.pack, None
    engine_contract.new_weights_change_what_is_sampled(kit)
    kit.sampler._running.pack = packed


def test_a_stale_weight_is_found(kit: Kit) -> None:
    with pytest.raises(RftError, match="does not hold the trainer's weights"):
        kit.sampler.load(((name, tensor) for name, tensor in [*kit.weights(), ("nowhere.weight", torch.ones(1))]), 2)
    with pytest.raises(RftError, match="no weights yet"):
        kit.sample()
    kit.sampler.load(kit.weights(), 3)
    read = kit.sampler._running.engine.get_weights_by_name("model.norm.weight", 1000)
    assert torch.equal(torch.tensor(read), kit.model.model.norm.weight.data)


def test_a_form(kit: Kit) -> None:
    kit.sampler.load(kit.weights(), 1)
    formed = kit.sample(structured={"regex": "[0-9]{3}"})
    assert all(len(made.text) == 3 and made.text.isdecimal() and made.finish is FinishReason.STOP for made in formed)


def test_what_sglang_refuses_is_an_error_of_the_recipe(kit: Kit) -> None:
    with pytest.raises(UsageError, match=r"SGLang cannot sample so: .*frequency_penalty must be in"):
        kit.sample(frequency_penalty=9.0)
    assert len(kit.sample(2)) == 2


def test_a_process_that_dies_is_told(kit: Kit) -> None:
    """Last: the engine is gone then."""
    os.kill(kit.sampler._running.processes[0].pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="a process of SGLang's engine has ended"):
        kit.sample(64, ignore_eos=True, max_new_tokens=100)
        time.sleep(5.0)

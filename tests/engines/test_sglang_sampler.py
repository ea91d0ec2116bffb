"""SGLang's sampler over a small stand-in with its offline engine's interface, which computes samples, log-probs and weights with a real model.

Runs with the real one are in `tests/with_sglang`; both keep to `engine_contract`.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import engine_contract
import pytest
import torch
from engine_contract import Kit
from rank_threads import on_ranks

from rftcli.builtin import builtin_path
from rftcli.engines.separate import Row
from rftcli.engines.sglang import SGLangSampler, _answer
from rftcli.engines.sglang_start import EngineDied, Running, failed_to_start, start
from rftcli.engines.sglang_weights import buckets
from rftcli.errors import MachineError, RftError, UsageError
from rftcli.models.load import load_causal_lm, load_tokenizer
from rftcli.ports import HeldPort
from rftcli.runtime.engine_folder import config_folder
from rftcli.runtime.world import SoloWorld
from rftcli.types import FinishReason, SamplingSettings, TokenTrace

CPU = torch.device("cpu")
QUESTION = (1, 51, 28, 223, 24, 21, 15, 18, 19, 222, 35, 28)
ARGUMENTS = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "context_length": 136, "random_seed": 3, "cuda_graph_max_bs": 8}


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in is the package `sglang` for as long as a test runs."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "stand_ins")
    names = [name for name in sys.modules if name.split(".")[0] == "sglang"]
    kept = {name: sys.modules.pop(name) for name in names}
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    path = str(builtin_path("quickstart"))
    model = load_causal_lm(path, dtype="float32", attention="sdpa", dropout=0.0, options={}, trust_remote_code=False, device="cpu").eval()
    return SimpleNamespace(model=model, tokenizer=load_tokenizer(path))


Make = Callable[..., Kit]


@pytest.fixture
def make(sglang: None, trained: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = str(config_folder(trained.model, trained.tokenizer, "float32"))
    before, made = signal.getsignal(signal.SIGQUIT), []

    def kit(arguments: dict | None = None, options: dict | None = None, world: object = None, **changes: object) -> Kit:
        settings = {"world": world or SoloWorld(), "dtype": torch.float32, "device": CPU, **changes}
        running = settings.pop("running", None) or start(folder, ARGUMENTS | (arguments or {}), options or {}, CPU)
        made.append(running)
        sampler = SGLangSampler(running, trained.model, trained.tokenizer, (2,), **settings)
        return Kit(model=trained.model, tokenizer=trained.tokenizer, sampler=sampler, question=QUESTION, end=2, word="####")

    yield kit
    for running in made:
        running.end()
        running.loop.close()
    signal.signal(signal.SIGQUIT, before)


def engine(kit: Kit):
    return kit.sampler._running.engine


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_the_contract(make: Make, check: Callable[[Kit], None]) -> None:
    check(make(check=True))


def test_every_sample_once_group_by_group_with_the_version(make: Make) -> None:
    kit = make()
    kit.sampler.load(kit.weights(), 3)
    requests = [kit.request(4, 4), kit.request(2, 9)]
    made = list(kit.sampler.generate(requests, SamplingSettings(max_new_tokens=3, seed=0)))
    assert {(one.prompt.draw, one.sample) for one in made} == {(4, 0), (4, 1), (4, 2), (4, 3), (9, 0), (9, 1)} and len(made) == 6
    assert all(one.policy_version == 3 and one.trace.segments == ((0, 3),) and one.trace.logprobs is None for one in made)
    assert [ids for ids, _ in engine(kit).asked] == [list(QUESTION)] * 6 and all("sampling_seed" not in params for _, params in engine(kit).asked)


def test_a_deterministic_engine_has_a_seed_for_every_row(make: Make) -> None:
    kit = make({"enable_deterministic_inference": True})
    kit.sampler.load(kit.weights(), 1)
    first, again, other = kit.sample(6), kit.sample(6), kit.sample(6, draw=1)
    assert [made.trace.ids for made in first] == [made.trace.ids for made in again] != [made.trace.ids for made in other]
    seeds = [params["sampling_seed"] for _, params in engine(kit).asked]
    assert len(set(seeds)) == 12 and all(0 <= seed < 2**63 for seed in seeds)


def test_an_earlier_part_is_gone_on_with(make: Make) -> None:
    kit = make()
    kit.sampler.load(kit.weights(), 3)
    earlier = {
        0: TokenTrace(ids=(28, 29), logprobs=(-1.0, -2.0), segments=((0, 1),)),
        1: TokenTrace(ids=(28, 2), logprobs=None, segments=((0, 1),)),
    }
    made = {
        one.sample: one
        for one in kit.sampler.generate([kit.request(2, partial=earlier)], SamplingSettings(max_new_tokens=3, seed=0, logprobs=True))
    }
    assert made[0].trace.ids[:2] == (28, 29) and made[0].trace.segments == ((0, 1), (2, 3)) and len(made[0].trace.logprobs or ()) == 3
    assert (made[1].trace.ids, made[1].finish) == ((28, 2), FinishReason.STOP)  # it was complete
    assert [(ids, params["max_new_tokens"]) for ids, params in engine(kit).asked] == [([*QUESTION, 28, 29], 1)]


def test_an_engine_without_the_newest_weights_refuses(make: Make) -> None:
    kit = make(newest=lambda: 4)
    with pytest.raises(RftError, match="no weights yet"):
        kit.sample()
    kit.sampler.load(kit.weights(), 3)
    with pytest.raises(RftError, match="version 3, the trainer is at 4"):
        kit.sample()


def test_a_push_that_did_not_end_leaves_no_weights_and_can_be_repeated(make: Make) -> None:
    kit = make()
    with pytest.raises(RftError, match="SGLang did not take the weights: The size of tensor"):
        kit.sampler.load(kit.weights(lambda name, tensor: tensor[:2]), 1)
    with pytest.raises(RftError, match="no weights yet"):
        kit.sample()
    kit.sampler.load(kit.weights(), 2)
    assert len(kit.sample(2)) == 2


def test_weights_are_compared_bit_for_bit(make: Make) -> None:
    kit = make()
    one = kit.weights(lambda name, tensor: tensor)
    lost = ((name + ".elsewhere" if name.endswith("layers.1.mlp.down_proj.weight") else name, tensor) for name, tensor in one)
    with pytest.raises(RftError, match="does not hold the trainer's weights: the sums over all weights differ"):
        kit.sampler.load(lost, 1)  # the first push is always compared
    kit.sampler.load(kit.weights(), 1)
    kit.sampler.load(kit.weights(lambda name, tensor: tensor), 2)
    assert engine(kit).calls.count("update rftcli.engines.sglang_worker.tell_sum") == 2  # twice the first, and no more
    read = torch.tensor(engine(kit).get_weights_by_name("model.norm.weight", 1000))
    assert torch.equal(read, kit.model.model.norm.weight.data)


def test_weights_travel_in_flat_buckets_or_in_lists(make: Make) -> None:
    kit = make(checkable=False)
    kit.sampler.load(kit.weights(), 1)
    kit.sampler._running.pack = None
    kit.sampler.load(kit.weights(), 2)
    assert engine(kit).calls == ["flush", "update flattened_bucket", "flush", "update None", "flush"]


def test_a_bucket_has_one_type_and_a_size() -> None:
    named = [("a", torch.zeros(4)), ("b", torch.zeros(4)), ("c", torch.zeros(9)), ("d", torch.zeros(1, dtype=torch.int64)), ("e", torch.zeros(1))]
    assert [[name for name, _ in bucket] for bucket in buckets(iter(named), 32)] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_bfloat16_weights_arrive_as_they_are_computed_with(make: Make) -> None:
    kit = make({"dtype": "bfloat16"}, dtype=torch.bfloat16)
    kit.sampler.load(kit.weights(), 1)
    read = torch.tensor(engine(kit).get_weights_by_name("model.norm.weight", 1000))
    assert torch.equal(read, kit.model.model.norm.weight.data.bfloat16().float())


@pytest.mark.parametrize(("level", "keeps"), [(1, True), (1, False), (2, True)])
def test_sleep_gives_memory_back_and_weights_wake_before_the_cache(make: Make, level: int, keeps: bool) -> None:
    kit = make({"enable_memory_saver": True, "enable_weights_cpu_backup": keeps and level == 1}, sleep=level, checkable=False)
    kit.sampler.load(kit.weights(), 1)
    greedy = kit.sample(1, temperature=0.0)[0].trace.ids
    engine(kit).calls.clear()
    kit.sampler.sleep()
    kit.sampler.sleep()
    if level == 1 and keeps:
        assert kit.sample(1, temperature=0.0)[0].trace.ids == greedy
        assert engine(kit).calls == ["release ['weights', 'kv_cache']", "resume ['weights', 'kv_cache']"]
        return
    with pytest.raises(RftError, match="no weights yet"):
        kit.sample()
    kit.sampler.load(kit.weights(), 2)
    assert kit.sample(1, temperature=0.0)[0].trace.ids == greedy
    pushed = ["resume ['weights']", "update flattened_bucket", "flush"]
    assert engine(kit).calls == ["release ['weights', 'kv_cache']", *pushed, "resume ['kv_cache']"]


def test_an_engine_that_is_not_to_sleep_stays_awake(make: Make) -> None:
    kit = make(checkable=False)
    kit.sampler.load(kit.weights(), 1)
    kit.sampler.sleep()
    assert engine(kit).calls == ["flush", "update flattened_bucket", "flush"]


def test_a_form_ends_with_an_end_token(make: Make) -> None:
    kit = make()
    kit.sampler.load(kit.weights(), 1)
    made = kit.sample(4, structured={"regex": "[0-9]{3}"})
    assert all(len(one.text) == 3 and one.text.isdecimal() and one.finish is FinishReason.STOP for one in made)


def test_what_sglang_refuses_is_an_error_of_the_recipe(make: Make) -> None:
    kit = make()
    kit.sampler.load(kit.weights(), 1)
    with pytest.raises(UsageError, match=r"SGLang cannot sample so: frequency_penalty must be in"):
        kit.sample(4, frequency_penalty=3.0)
    assert len(kit.sample(2)) == 2  # nothing is left behind
    kit.question = ()
    with pytest.raises(UsageError, match="has no tokens"):
        kit.sample(1)
    ids_only = make({"skip_tokenizer_init": True})
    ids_only.sampler.load(ids_only.weights(), 1)
    assert len(ids_only.sample(2)) == 2
    with pytest.raises(UsageError, match="unavailable when skip_tokenizer_init"):
        ids_only.sample(2, stop=("a",))


def test_scores_that_are_no_numbers_are_an_error(make: Make) -> None:
    kit = make()
    kit.sampler.load(kit.weights(), 1)
    engine(kit).nan = True
    with pytest.raises(RftError, match="scores were no numbers"):
        kit.sample(1)


def test_a_completion_that_is_cut_or_given_up_is_an_error(make: Make) -> None:
    kit = make({"context_length": 20})
    kit.sampler.load(kit.weights(), 1)
    with pytest.raises(RftError, match="had room for 6 of the 24 tokens"):
        kit.sample(1, ignore_eos=True)
    engine(kit).loop.call_later(0.02, lambda: [aborted.set() for aborted in engine(kit)._running.values()])
    with pytest.raises(RftError, match="SGLang gave a completion up: Abort before prefill"):
        kit.sample(64, ignore_eos=True, max_new_tokens=6)


def test_log_probs_of_other_tokens_than_the_sampled_are_an_error() -> None:
    """Shifted by one, or of a token fewer: nothing is trained on log-probs that belong elsewhere."""
    row = Row(prefix=(5,), draw=0, sample=0, done=0, limit=2)
    about = {"finish_reason": {"type": "length"}, "output_token_logprobs": [(-0.5, 7, None), (-0.25, 8, None)]}
    settings = SamplingSettings(max_new_tokens=2, seed=0, logprobs=True)
    assert _answer({"output_ids": [7, 8], "meta_info": about}, settings, row) == ((7, 8), (-0.5, -0.25), FinishReason.LENGTH)
    for told in (about["output_token_logprobs"][::-1], about["output_token_logprobs"][:1]):
        with pytest.raises(RftError, match="log-probs of"):
            _answer({"output_ids": [7, 8], "meta_info": {**about, "output_token_logprobs": told}}, settings, row)


def test_ranks_of_one_engine_get_their_own_from_the_first(make: Make) -> None:
    """Two engines over two ranks each; the first of two ranks has it, and the second rank asks for nothing."""
    leaders = {rank: make({"tp_size": 2}, checkable=False) for rank in (0, 2)}
    loops = {rank: kit.sampler._running.loop for rank, kit in leaders.items()}

    def work(world):
        kit, one = leaders[world.rank // 2 * 2], leaders.get(world.rank)
        running = None if one is None else one.sampler._running
        sampler = SGLangSampler(
            running, kit.model, kit.tokenizer, (2,), world=world, tensor_parallel=2, checkable=False, dtype=torch.float32, device=CPU
        )
        sampler.load(kit.weights(), 1)
        requests = [] if world.rank == 1 else [kit.request(2, 10 * world.rank, limit=1 if world.rank == 3 else None)]
        made = list(sampler.generate(requests, SamplingSettings(max_new_tokens=2, seed=0, ignore_eos=True)))
        assert all(len(one.trace.ids) == (1 if world.rank == 3 else 2) for one in made)
        with pytest.raises(UsageError, match="it has no `bad_words`"):
            list(sampler.generate(requests, SamplingSettings(max_new_tokens=2, seed=0, bad_words=("a",))))
        return sorted((one.prompt.draw, one.sample) for one in made)

    assert on_ranks(4, work) == [[(0, 0), (0, 1)], [], [(20, 0), (20, 1)], [(30, 0), (30, 1)]]
    assert len(loops) == 2 and [len(engine(kit).asked) for kit in leaders.values()] == [2, 4]


def test_the_process_stays_the_trainers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    torch.manual_seed(5)

    def state() -> tuple:
        return (
            dict(os.environ), multiprocessing.get_start_method(allow_none=True), type(asyncio.get_event_loop_policy()), logging.root.handlers[:],
            logging.root.level, signal.getsignal(signal.SIGTERM), torch.get_rng_state().tolist(),
        )  # fmt: skip

    before = state()
    kit = make()
    assert state() == before and engine(kit).place["RANK"] is None  # its processes are a job of their own
    kit.sampler.load(kit.weights(), 1)
    kit.sample(2, temperature=0.0)
    assert state()[:-1] == before[:-1] and "terminated" not in engine(kit).calls


def test_a_process_that_ends_is_told_wherever_the_rank_is(make: Make) -> None:
    kit = make(check=True)
    kit.sampler.load(kit.weights(), 1)
    with pytest.raises(EngineDied, match="a process of SGLang's engine has ended"):
        os.kill(os.getpid(), signal.SIGQUIT)  # as its processes do, while the rank trains
    with pytest.raises(EngineDied):
        kit.sample(1)

    asking = make()
    asking.sampler.load(asking.weights(), 1)
    engine(asking).loop.call_later(0.05, os.kill, os.getpid(), signal.SIGQUIT)
    with pytest.raises(EngineDied):
        asking.sample(64, ignore_eos=True, max_new_tokens=100)
    assert "child failed" not in engine(asking).calls
    with pytest.raises(EngineDied):
        failed_to_start(signal.SIGQUIT, None)


def test_where_its_processes_meet_is_kept_for_them(make: Make) -> None:
    """From before they start until they end nobody else is given the port: another engine on the machine would meet the wrong ones."""
    first, second = make(), make()
    ports = [engine(kit).server_args.nccl_port for kit in (first, second)]
    assert len(set(ports)) == 2
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", ports[0]))
    with socket.create_server(("127.0.0.1", ports[0]), reuse_port=False):
        pass  # its own processes may listen there
    first.sampler.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports[0]))


def test_only_its_own_processes_end(sglang: None) -> None:
    own, other = (multiprocessing.get_context("spawn").Process(target=signal.pause) for _ in range(2))
    own.start()
    other.start()
    before = signal.getsignal(signal.SIGQUIT)
    Running(engine=None, loop=None, processes=[own], seeded=False, keeps_weights=False, checkable=False, pack=None, port=HeldPort("127.0.0.1")).end()
    signal.signal(signal.SIGQUIT, before)
    assert not own.is_alive() and other.is_alive()
    other.kill()
    other.join()


def test_arguments_are_looked_up_by_name(make: Make) -> None:
    kit = make(options={"page_size": 16})
    asked = engine(kit).server_args
    assert (asked.page_size, asked.custom_weight_loader) == (16, ["rftcli.engines.sglang_worker.tell_sum"]) and asked.nccl_port
    assert kit.sampler._running.checkable and not kit.sampler._running.keeps_weights  # `cuda_graph_max_bs` is not known here, and left out
    with pytest.raises(UsageError, match="this version of SGLang has no argument `nothing_such`"):
        make(options={"nothing_such": 1})
    with pytest.raises(UsageError, match="SGLang does not start: Unknown dtype"):
        make({"dtype": "float13"})


def test_a_release_that_lacks_what_is_asked_is_refused_before_it_starts(sglang: None) -> None:
    import sglang as package

    class Older:
        def __init__(self, **_: object) -> None:
            raise AssertionError("it was started")

        async def async_generate(self, prompt=None, sampling_params=None, input_ids=None, return_logprob=False): ...

    package.Engine = Older
    with pytest.raises(UsageError, match=r"this version of SGLang has no argument `rid` of `Engine\.async_generate`"):
        start("nowhere", {}, {}, CPU)
    del Older.async_generate
    with pytest.raises(UsageError, match=r"has no `Engine\.async_generate`"):
        start("nowhere", {}, {}, CPU)


def test_a_missing_package_is_told_with_the_command() -> None:
    with pytest.raises(MachineError, match="needs the package `sglang`") as caught:
        start("nowhere", {}, {}, CPU)
    assert caught.value.hint == "pip install 'rftcli[sglang]'"


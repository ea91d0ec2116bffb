"""The engine's side that needs no vLLM: which requests it gets, what becomes of its answers, when it refuses. A small stand-in has vLLM's interface.

Runs with the real one are in `tests/with_vllm`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fake_vllm import TRAINED, Fused
from rank_threads import on_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from rftcli.engines.separate import own_randomness
from rftcli.engines.vllm import VLLMSampler, start
from rftcli.engines.vllm_adapter import held_by, room_for, sent
from rftcli.engines.vllm_weights import push
from rftcli.engines.weights import Sums, bit_sum, compare, file_form, fused_name
from rftcli.errors import MachineError, RftError, UsageError
from rftcli.runtime.vllm_engine import _check_build
from rftcli.runtime.world import SoloWorld
from rftcli.types import FinishReason, SamplingSettings, TokenTrace

FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "stop",
    "include_stop_str_in_output", "stop_token_ids", "ignore_eos", "detokenize", "skip_special_tokens", "max_tokens", "min_tokens", "logprobs",
)  # fmt: skip


class StandIn:
    """Answers each request with its last id + 1, + 2, ... up to `max_tokens`, one request a step, newest first."""

    def __init__(self) -> None:
        self.model = Fused()
        self.asked: dict[str, tuple[list[int], dict]] = {}
        self.open: list[str] = []
        self.calls: list[str] = []
        self.reason: str | None = None
        self.llm_engine = self
        self.folders: list[str] = []
        self.loras: list = []

    def apply_model(self, function):
        return [function(self.model)]

    def add_request(self, number, prompt, params, **rest) -> None:
        self.loras += [rest["lora_request"] and rest["lora_request"].lora_int_id] if rest else []
        if params.get("top_k") == 13:
            raise ValueError("13 is not sampled here")
        self.asked[number] = (prompt["prompt_token_ids"], params)
        self.open.append(number)

    def has_unfinished_requests(self) -> bool:
        return bool(self.open)

    def step(self):
        number = self.open.pop()
        prompt, params = self.asked[number]
        ids = [prompt[-1] + 1 + place for place in range(params["max_tokens"])]
        entries = [{token: SimpleNamespace(logprob=-float(token))} for token in ids] if params["logprobs"] is not None else None
        made = SimpleNamespace(token_ids=ids, logprobs=entries, finish_reason=self.reason or "length")
        return [SimpleNamespace(request_id=number, finished=True, outputs=[made])]

    def abort_request(self, numbers) -> None:
        self.calls.append(f"abort {len(numbers)}")
        self.open.clear()

    def add_lora(self, request) -> bool:
        if request.lora_path.endswith("/13"):
            raise ValueError("13 is not loaded here")
        self.calls.append(f"lora {request.lora_int_id}")
        self.folders.append(request.lora_path)
        return True

    def collective_rpc(self, method, kwargs) -> None:
        assert method == "reload_weights"
        self.calls.append("base")
        self.model.load_weights(kwargs["weights_iterator"])

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def sleep(self, level) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags) -> None:
        self.calls.extend(f"wake {tag}" for tag in tags)


def make(kit, llm=None, world=None, **changes) -> VLLMSampler:
    settings = {"seeded": True, "dtype": torch.float32, "device": torch.device("cpu"), **changes}
    tokenizer = kit.build_tokenizer(40)
    return VLLMSampler(llm or StandIn(), dict, FIELDS, nn.Module(), tokenizer, (kit.EOS,), world=world or SoloWorld(), **settings)


def loaded(kit, llm=None, **changes) -> VLLMSampler:
    sampler = make(kit, llm, **changes)
    sampler.load(TRAINED.items(), 3)
    return sampler


def settings(**changes) -> SamplingSettings:
    return SamplingSettings(**{"max_new_tokens": 3, "seed": 0, **changes})


def test_every_sample_once_group_by_group_with_the_version(kit) -> None:
    llm = StandIn()
    requests = [kit.make_request(4, [5, 6]), kit.make_request(9, [7], (0, 1))]
    made = list(loaded(kit, llm).generate(requests, settings(logprobs=True)))
    assert {(one.prompt.draw, one.sample) for one in made} == {(4, 0), (4, 1), (4, 2), (4, 3), (9, 0), (9, 1)} and len(made) == 6
    assert [prompt for prompt, _ in llm.asked.values()] == [[5, 6]] * 4 + [[7]] * 2  # a group stands together: its prompt is cached
    assert len({params["seed"] for _, params in llm.asked.values()}) == 6
    one = next(one for one in made if one.prompt.draw == 9)
    assert (one.trace.ids, one.trace.logprobs, one.finish, one.policy_version) == ((8, 9, 10), (-8.0, -9.0, -10.0), FinishReason.LENGTH, 3)
    assert one.trace.segments == ((0, 3),)


def test_an_earlier_part_is_gone_on_with(kit) -> None:
    llm = StandIn()
    earlier = {
        0: TokenTrace(ids=(11, 12), logprobs=(-1.0, -2.0), segments=((0, 1),)),
        1: TokenTrace(ids=(11, 12, 13), logprobs=None, segments=((0, 1),)),
    }
    made = {one.sample: one for one in loaded(kit, llm).generate([kit.make_request(4, [5], (0, 1), partial=earlier)], settings(logprobs=True))}
    assert (made[0].trace.ids, made[0].trace.logprobs, made[0].trace.segments) == ((11, 12, 13), (-1.0, -2.0, -13.0), ((0, 1), (2, 3)))
    assert (made[1].trace.ids, made[1].trace.logprobs, made[1].finish) == ((11, 12, 13), None, FinishReason.LENGTH)  # it was complete
    assert [prompt for prompt, _ in llm.asked.values()] == [[5, 11, 12]]


def test_an_engine_without_the_newest_weights_refuses(kit) -> None:
    with pytest.raises(RftError, match="no weights yet"):
        next(make(kit).generate([kit.make_request(0, [5])], settings()))
    sampler = loaded(kit, newest=lambda: 4)
    with pytest.raises(RftError, match="version 3, the trainer is at 4"):
        next(sampler.generate([kit.make_request(0, [5])], settings()))


def test_a_push_that_did_not_end_leaves_no_weights(kit) -> None:
    llm = StandIn()
    sampler = loaded(kit, llm)
    llm.model.drops = "norm"
    with pytest.raises(RftError, match="1 weights did not arrive in the engine, the first is `norm`"):
        sampler.load(TRAINED.items(), 4)
    with pytest.raises(RftError, match="no weights yet"):
        next(sampler.generate([kit.make_request(0, [5])], settings()))


@pytest.mark.parametrize("level", [1, 2])
def test_weights_wake_before_the_cache(kit, level: int) -> None:
    llm = StandIn()
    sampler = loaded(kit, llm, sleep=level)
    llm.calls.clear()
    sampler.sleep()
    sampler.sleep()
    if level == 2:
        with pytest.raises(RftError, match="no weights yet"):
            next(sampler.generate([kit.make_request(0, [5])], settings()))
    sampler.load(TRAINED.items(), 4)
    list(sampler.generate([kit.make_request(0, [5], (0,))], settings()))
    assert llm.calls == [f"sleep {level}", "wake weights", "reset", "wake kv_cache"]


def test_a_rollout_after_sleep_without_new_weights_wakes_in_the_same_order(kit) -> None:
    llm = StandIn()
    sampler = loaded(kit, llm, sleep=1)
    llm.calls.clear()
    sampler.sleep()
    list(sampler.generate([kit.make_request(0, [5], (0,))], settings()))
    assert llm.calls == ["sleep 1", "wake weights", "wake kv_cache"]


def test_an_engine_that_is_not_to_sleep_stays_awake(kit) -> None:
    llm = StandIn()
    loaded(kit, llm).sleep()
    assert llm.calls == ["reset"]


def test_a_caller_that_leaves_early_leaves_nothing_behind(kit) -> None:
    llm = StandIn()
    completions = loaded(kit, llm).generate([kit.make_request(0, [5])], settings())
    next(completions)
    completions.close()
    assert llm.calls == ["reset", "abort 3"] and not llm.open


def test_what_vllm_refuses_is_an_error_of_the_recipe(kit) -> None:
    with pytest.raises(UsageError, match="vLLM cannot sample so: 13 is not sampled here"):
        list(loaded(kit).generate([kit.make_request(0, [5])], settings(top_k=13)))
    with pytest.raises(UsageError, match="has no tokens"):
        list(loaded(kit).generate([kit.make_request(0, [])], settings()))
    llm = StandIn()
    llm.reason = "error"
    with pytest.raises(RftError, match="ended a completion with `error`"):
        list(loaded(kit, llm).generate([kit.make_request(0, [5])], settings()))


def test_ranks_of_one_engine_give_it_the_same_requests_and_keep_their_own(kit) -> None:
    """Two engines over two ranks each: every rank of an engine asks for the same rows in the same order."""

    def work(world):
        llm = StandIn()
        requests = [kit.make_request(10 * world.rank, [5 + world.rank], (0, 1))] if world.rank != 1 else []
        made = list(loaded(kit, llm, world=world, tensor_parallel=2, checkable=False).generate(requests, settings()))
        return [(one.prompt.draw, one.sample) for one in made], [(prompt, params["seed"]) for prompt, params in llm.asked.values()]

    results = on_ranks(4, work)
    assert [sorted(made) for made, _ in results] == [[(0, 0), (0, 1)], [], [(20, 0), (20, 1)], [(30, 0), (30, 1)]]
    assert results[0][1] == results[1][1] and len(results[0][1]) == 2
    assert results[2][1] == results[3][1] and [prompt for prompt, _ in results[2][1]] == [[7], [7], [8], [8]]


class Adapted:
    """`protocols.AdaptedWeights` of the trained ones and a small adapter."""

    def __iter__(self):
        return iter(TRAINED.items())

    def base(self):
        return iter(TRAINED.items())

    def save_adapter(self, directory) -> None:
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 6.0}))
        save_file({"m.lora_A.weight": torch.ones(4, 3), "m.lora_B.weight": torch.ones(2, 4)}, directory / "adapter_model.safetensors")


@pytest.fixture
def lora_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's record of an adapter, where vLLM is not."""
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    record = SimpleNamespace(LoRARequest=lambda **fields: SimpleNamespace(**fields))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", record)


def test_an_adapter_travels_alone_after_the_base(kit, lora_request: None) -> None:
    llm = StandIn()
    sampler = make(kit, llm, adapters=True, checkable=False, sleep=2)
    for version in (1, 2):
        sampler.load(Adapted(), version)
    assert llm.calls == ["base", "lora 1", "reset", "lora 2", "reset"]
    list(sampler.generate([kit.make_request(0, [5], (0, 1))], settings()))
    assert llm.loras == [2, 2] and [Path(folder).is_dir() for folder in llm.folders] == [False, True]
    llm.calls.clear()
    sampler.sleep()  # level 2 gives the base up
    sampler.load(Adapted(), 3)
    assert llm.calls == ["sleep 2", "wake weights", "base", "lora 3", "reset"]
    sampler.load(TRAINED.items(), 4)  # of a checkpoint, merged
    list(sampler.generate([kit.make_request(0, [5], (0,))], settings()))
    assert llm.loras[-1] is None
    sampler.load(Adapted(), 5)
    assert llm.calls[-3:] == ["base", "lora 4", "reset"]
    sampler.close()
    assert not any(Path(folder).is_dir() for folder in llm.folders)


def test_an_adapter_that_vllm_refuses_has_a_way_out(kit, lora_request: None) -> None:
    sampler = make(kit, adapters=True, checkable=False)
    sampler._slot._number = 12
    with pytest.raises(UsageError, match="vLLM does not take the adapter: 13 is not loaded here") as caught:
        sampler.load(Adapted(), 1)
    assert caught.value.hint is not None and "merged" in caught.value.hint
    with pytest.raises(RftError, match="no weights yet"):
        next(sampler.generate([kit.make_request(0, [5])], settings()))
    sampler.close()


def test_the_sum_of_an_adapter_is_that_of_the_layers_that_hold_it(tmp_path) -> None:
    """B is scaled by alpha / rank when it is loaded, and fills a part of its place."""
    Adapted().save_adapter(tmp_path / "1")
    engine, layer = nn.Module(), nn.Module()
    engine.add_module("layer", layer)
    layer.lora_a_stacked = (torch.zeros(1, 1, 8, 3),)
    layer.lora_b_stacked = (torch.zeros(1, 1, 2, 8),)
    layer.lora_a_stacked[0][0, 0, :4] = 1.0
    layer.lora_b_stacked[0][0, 0, :, :4] = 1.5
    compare(sent(tmp_path / "1", torch.float32), held_by(engine), {})
    layer.lora_b_stacked[0][0, 0, 0, 0] = 1.0
    with pytest.raises(RftError, match="does not hold the trainer's weights"):
        compare(sent(tmp_path / "1", torch.float32), held_by(engine), {})


def test_room_for_an_adapter_comes_in_sizes() -> None:
    assert [room_for(rank) for rank in (1, 8, 9, 200, 512)] == [8, 8, 16, 256, 512]
    with pytest.raises(UsageError, match="rank 512 at most"):
        room_for(513)


def test_the_trainers_generators_stay_as_they_were(kit) -> None:
    sampler = loaded(kit)
    torch.manual_seed(5)
    random.seed(5)
    before, python = torch.get_rng_state(), random.getstate()
    list(sampler.generate([kit.make_request(0, [5])], settings()))
    with own_randomness(torch.device("cpu"), 1):
        torch.rand(3)
        random.random()
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == python


def test_bits_are_summed_exactly_in_any_order() -> None:
    numbers = torch.randn(64, dtype=torch.bfloat16)
    assert bit_sum(numbers) == bit_sum(numbers.flip(0)) == bit_sum(numbers[:20]) + bit_sum(numbers[20:])
    assert bit_sum(torch.tensor([0.0])) == bit_sum(torch.tensor([-0.0])) == 0
    changed = numbers.clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(100.0, dtype=torch.bfloat16))
    assert abs(bit_sum(changed) - bit_sum(numbers)) == 1


def test_fused_weights_are_proved_and_a_difference_is_named() -> None:
    llm = StandIn()
    push(llm, TRAINED.items(), dtype=torch.float32, model=nn.Module(), check=True)
    llm.model.drops = "k.weight"
    stale = {**TRAINED, "k.weight": TRAINED["k.weight"] + 1}
    with pytest.raises(RftError, match=r"1 weights differ, the first is `qk\.weight`"):
        push(llm, stale.items(), dtype=torch.float32, model=nn.Module(), check=True)
    push(llm, stale.items(), dtype=torch.float32, model=nn.Module(), check=False)  # nobody looks


def test_weights_of_another_type_are_compared_as_they_arrive() -> None:
    llm = StandIn()
    llm.model.to(torch.bfloat16)
    push(llm, {name: tensor + 1 / 3 for name, tensor in TRAINED.items()}.items(), dtype=torch.bfloat16, model=nn.Module(), check=True)


def test_names_of_fused_layers() -> None:
    assert fused_name("model.layers.0.self_attn.q_proj.weight", {"qkv_proj": ["q_proj", "k_proj"]}) == "model.layers.0.self_attn.qkv_proj.weight"
    with pytest.raises(RftError, match="the sums over all weights differ"):
        compare(Sums({"a": 1}), Sums({"b": 2}), {})
    compare(Sums({"a": 1, "b": 4}), Sums({"c": 5}), {})  # other names, the same numbers


def test_the_model_says_what_belongs_into_its_files() -> None:
    """A buffer of a checkpoint goes along, one that is computed does not."""
    module = nn.Module()
    module.register_buffer("bias", torch.ones(2))
    module.register_buffer("angles", torch.ones(2), persistent=False)
    assert [name for name, _ in file_form(module, [])] == ["bias"]


@pytest.mark.parametrize("config", [Qwen3MoeConfig, MixtralConfig, LlamaConfig], ids=lambda config: config.__name__)
def test_names_and_pieces_are_those_of_the_models_files(config, tmp_path) -> None:
    """transformers joins experts at load; vLLM's loaders read the pieces that `save_pretrained` writes."""
    shape = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {} if config is LlamaConfig else {"num_experts": 3, "num_local_experts": 3, "moe_intermediate_size": 16, "num_experts_per_tok": 1}
    model = AutoModelForCausalLM.from_config(config(vocab_size=64, tie_word_embeddings=False, **shape, **experts))
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    given = dict(file_form(model, ((name, parameter.data) for name, parameter in model.named_parameters())))
    assert given.keys() == written.keys() and all(torch.equal(given[name], written[name]) for name in written)


def test_a_request_has_a_limit_of_its_own(kit) -> None:
    llm = StandIn()
    earlier = {0: TokenTrace(ids=(11, 12), logprobs=(-1.0, -2.0), segments=((0, 1),))}
    requests = [kit.make_request(0, [5], (0,), limit=2), kit.make_request(1, [5], (0,), partial=earlier, limit=5), kit.make_request(2, [5], (0,))]
    made = {one.prompt.draw: one.trace.ids for one in loaded(kit, llm).generate(requests, settings(max_new_tokens=6, min_new_tokens=4))}
    assert made == {0: (6, 7), 1: (11, 12, 13, 14, 15), 2: tuple(range(6, 12))}
    assert [(params["max_tokens"], params["min_tokens"]) for _, params in llm.asked.values()] == [(2, 2), (3, 2), (6, 4)]


def test_a_stop_string_that_was_cut_in_two_still_ends_the_answer(kit) -> None:
    """`sun` before the cut and `day` behind it; what vLLM sampled after it is let go, and so are its log-probs."""
    llm = StandIn()
    cut = {0: TokenTrace(ids=(kit.X, kit.SUN), logprobs=(-1.0, -2.0), segments=((0, 1),))}
    (made,) = loaded(kit, llm).generate([kit.make_request(0, [9], (0,), partial=cut)], settings(max_new_tokens=9, stop=("sunday",), logprobs=True))
    assert (made.trace.ids, made.finish) == ((kit.X, kit.SUN, kit.DAY), FinishReason.STOP)
    assert made.trace.logprobs == (-1.0, -2.0, -float(kit.DAY)) and made.text == "xsunday"
    whole = {0: TokenTrace(ids=(kit.X, kit.X), logprobs=(-1.0, -2.0), segments=((0, 1),))}
    (other,) = loaded(kit, llm).generate([kit.make_request(0, [9], (0,), partial=whole)], settings(max_new_tokens=4, stop=("sunday",)))
    assert (len(other.trace.ids), other.finish) == (4, FinishReason.LENGTH)


def test_what_goes_on_has_other_noise_without_seeds_of_rows_too(kit) -> None:
    """The engine's own generator is seeded by what is sampled: the same call the same, a later part of the same answers another."""

    class Seeds(StandIn):
        def __init__(self) -> None:
            super().__init__()
            self.seeds: list[int] = []

        def step(self):
            self.seeds.append(torch.initial_seed())
            return super().step()

    llm = Seeds()
    sampler = loaded(kit, llm, seeded=False)
    parts = [{}, {0: TokenTrace(ids=(11,))}, {0: TokenTrace(ids=(11, 12))}]
    for partial in (*parts, *parts):
        list(sampler.generate([kit.make_request(4, [5], (0,), partial=partial)], settings()))
    assert llm.seeds[:3] == llm.seeds[3:] and len(set(llm.seeds)) == 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "Error: "),
        ("raise ImportError('_C.so: undefined symbol: x')", "ImportError: _C.so: undefined symbol: x"),
        ("raise OSError('libcudart.so.13')", "OSError: libcudart.so.13"),
    ],
    ids=["another-one", "built-for-another-torch", "a-library-is-missing"],
)
def test_a_vllm_that_cannot_be_imported_is_told_with_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str) -> None:
    """Whatever is wrong with the package: no traceback, and no matter for the recipe."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for work in (lambda: start("folder", {}, {}), _check_build):
        with pytest.raises(MachineError, match="needs the package `vllm`, which cannot be imported") as caught:
            work()
        assert said in caught.value.message and "rftcli[vllm]" in str(caught.value.hint)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]  # undoing would put a stand-in back

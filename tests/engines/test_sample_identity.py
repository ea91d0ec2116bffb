"""The same weights and the same key give the same bits, whatever else is sampled, in whatever order, on however many ranks."""

import os
import random
import subprocess
import sys

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from rftcli.builtin import builtin_path
from rftcli.engines.hf import HFSampler
from rftcli.errors import MachineError
from rftcli.models.load import load_causal_lm, load_tokenizer
from rftcli.types import SamplingSettings, TokenTrace

VOCAB = 97


def bits(sampler, requests, max_new_tokens=10, **changes):
    """(draw, sample) -> ids and log-probs, every bit."""
    settings = SamplingSettings(max_new_tokens=max_new_tokens, seed=1, temperature=0.9, top_p=0.95, logprobs=True, **changes)
    return {(made.prompt.draw, made.sample): (made.trace.ids, made.trace.logprobs) for made in sampler.generate(requests, settings)}


def requests_of(kit):
    """Eight groups: prompts of 1 to 40 tokens in three width buckets, one group larger than a batch, two draws of one prompt."""
    lengths = (1, 40, 15, 16, 7, 31, 12, 12)
    content = [[5 + (length * 7 + place * 3) % 80 for place in range(length)] for length in lengths]
    return [kit.make_request(draw, ids, range(19 if draw == 2 else 4)) for draw, ids in enumerate(content)]


def build_mistral(**changes):
    torch.manual_seed(5)
    shape = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MistralForCausalLM(MistralConfig(vocab_size=VOCAB, initializer_range=0.2, sliding_window=8, **shape, **changes)).eval()


NOT_REFILLED = ("sliding window", "continuous")
"""What a row of such a layer sees depends on where it stands in the cache."""


def models(kit):
    return {
        "llama": lambda: kit.build_llama(VOCAB),
        "llama eager": lambda: kit.build_llama(VOCAB, attn_implementation="eager"),
        "gpt2": lambda: kit.build_gpt2(VOCAB),
        "sliding window": build_mistral,
    }


WAYS = {"plain": {}, "tokens": {"batch_rows": 64, "batch_tokens": 640}, "continuous": {"continuous": True}}
"""How rows become passes."""


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in ("llama", "llama eager", "gpt2", "sliding window") for way in WAYS if (name, way) != NOT_REFILLED]
)
def test_order_company_and_ranks(kit, name, way):
    sampler = kit.make_sampler(models(kit)[name](), VOCAB, **WAYS[way])
    requests = requests_of(kit)
    reference = bits(sampler, requests)
    assert len(reference) == 19 + 7 * 4 and len({ids for ids, _ in reference.values()}) == len(reference)
    shuffled = random.Random(0).sample(requests, len(requests))
    assert bits(sampler, shuffled) == reference
    for ranks in (2, 3, 8):
        union = {}
        for rank in range(ranks):
            union.update(bits(sampler, shuffled[rank::ranks]))
        assert union == reference


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_thread_count(kit, name):
    """With the variable that ranks are started with, which these tests have too (`tests/conftest.py`)."""
    sampler = kit.make_sampler(models(kit)[name](), VOCAB)
    requests = requests_of(kit)[3:6]
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(bits(sampler, requests, max_new_tokens=4))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_any_subset_of_samples(kit):
    sampler = kit.make_sampler(kit.build_llama(VOCAB), VOCAB)
    requests = requests_of(kit)
    reference = bits(sampler, requests)
    draws = random.Random(1)
    for _ in range(5):
        chosen = [kit.make_request(r.prompt.draw, r.prompt.token_ids, draws.sample(r.samples, draws.randint(0, 4))) for r in requests]
        found = bits(sampler, chosen)
        assert found == {key: reference[key] for key in found}


def test_finished_rows_change_nothing_for_the_others(kit):
    """With an end token that comes early, rows finish at different times; the others' bits are those of a run without it, up to the end token."""
    model = kit.build_llama(VOCAB)
    requests = requests_of(kit)
    free = bits(kit.make_sampler(model, VOCAB, eos_ids=()), requests)
    common = tuple(range(2, 40))
    ended = bits(kit.make_sampler(model, VOCAB, eos_ids=common), requests)
    assert len({len(ids) for ids, _ in ended.values()}) > 5
    for key, (ids, logprobs) in ended.items():
        count = next((place for place, token in enumerate(free[key][0]) if token in common), 9) + 1
        assert (ids, logprobs) == (free[key][0][:count], free[key][1][:count])


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_different_lengths(kit, way):
    """Rows end early and late, and where they are refilled others begin in between: the same bits in any order and on any number of ranks."""
    sampler = kit.make_sampler(kit.build_llama(VOCAB), VOCAB, eos_ids=tuple(range(2, 20)), **WAYS[way])
    requests = requests_of(kit)
    shaping = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {"5": 1.0}, "options": {"no_repeat_ngram_size": 2}}
    for changes in ({}, shaping):
        reference = bits(sampler, requests, max_new_tokens=24, **changes)
        assert len({len(ids) for ids, _ in reference.values()}) > 5
        shuffled = random.Random(0).sample(requests, len(requests))
        for ranks in (1, 2, 5):
            union = {}
            for rank in range(ranks):
                union.update(bits(sampler, shuffled[rank::ranks], max_new_tokens=24, **changes))
            assert union == reference


def test_the_way_to_passes_changes_last_bits_only(kit):
    """Other shapes, other last bits: the tokens of a small model are the same, the log-probs are within rounding."""
    found = [bits(kit.make_sampler(kit.build_llama(VOCAB), VOCAB, **changes), requests_of(kit)) for changes in WAYS.values()]
    for other in found[1:]:
        for key, (ids, logprobs) in found[0].items():
            assert other[key][0] == ids and other[key][1] == pytest.approx(logprobs, abs=1e-4)


def test_a_pool_is_never_idle_while_rows_wait(kit):
    """20 rows of 3 and 20 of 15 tokens at 8 places: 360 tokens, 45 full passes. In batches of eight the long rows keep the short ones' places."""
    model = kit.build_llama(VOCAB)
    passes = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, inputs, output: passes.append(output.shape[0]))
    partial = {sample: TokenTrace(ids=(30,) * (1 if sample % 2 else 13)) for sample in range(40)}  # all of one width
    request = kit.make_request(0, (5, 6), range(40), partial=partial)
    counts = {}
    for continuous in (False, True):
        sampler = kit.make_sampler(model, VOCAB, eos_ids=(), continuous=continuous)
        settings = SamplingSettings(max_new_tokens=16, seed=1)
        assert not list(sampler.generate([], settings))  # the trial of the first call
        passes.clear()
        assert all(len(made.trace.ids) == 16 for made in sampler.generate([request], settings))
        counts[continuous] = sum(1 for rows in passes if rows == 8)
    assert counts[False] == 5 * 14 and counts[True] <= 50  # the first token of a row comes from its prefill


def test_refilling_needs_layers_that_see_everything(kit):
    with pytest.raises(MachineError, match="cannot refill rows of a cache layer of the kind DynamicSlidingWindowLayer"):
        bits(kit.make_sampler(build_mistral(), VOCAB, continuous=True), requests_of(kit))


def test_rows_of_a_pass_under_a_limit_in_tokens(kit):
    sampler = kit.make_sampler(kit.build_llama(VOCAB), VOCAB, batch_rows=64, batch_tokens=4096)
    rows = {(width, new): sampler.pass_rows(width, SamplingSettings(max_new_tokens=new, seed=0)) for width in (16, 128, 1024) for new in (16, 1024)}
    assert rows == {(16, 16): 64, (16, 1024): 8, (128, 16): 24, (128, 1024): 8, (1024, 16): 8, (1024, 1024): 8}  # 128 rows would fit: 64 are enough
    assert kit.make_sampler(kit.build_llama(VOCAB), VOCAB, batch_rows=24).pass_rows(1024, SamplingSettings(max_new_tokens=1024, seed=0)) == 24


def test_what_was_sampled_before_is_sampled_today(kit):
    """The quickstart model's answers, written down: a change that is to change no result changes none of these."""
    path = str(builtin_path("quickstart"))
    model = load_causal_lm(path, dtype="float32", attention="sdpa", dropout=0.0, options={}, trust_remote_code=False, device="cpu").eval()
    tokenizer = load_tokenizer(path)
    ids = tokenizer("What is 12 + 30?")["input_ids"]
    for way in WAYS.values():
        sampler = HFSampler(model, tokenizer, (2,), pad_id=0, device="cpu", owns_weights=False, **{"batch_rows": 8, **way})
        made = sampler.generate([kit.make_request(draw, ids) for draw in range(2)], SamplingSettings(max_new_tokens=16, seed=3))
        assert {(one.prompt.draw, one.sample): one.text for one in made} == {
            (0, 0): ", 2-0== ####", (0, 1): "1=9 #### 1", (0, 2): " 2-1= 9", (0, 3): " 2-1= 8",
            (1, 0): ", 2-0== ####", (1, 1): " #### 2", (1, 2): " 2-1=8 #### 82", (1, 3): "02-2= 1",
        }  # fmt: skip


def test_seed_draw_and_sample_are_the_key(kit):
    sampler = kit.make_sampler(kit.build_llama(VOCAB), VOCAB)
    ids = {key: ids for key, (ids, _) in bits(sampler, [kit.make_request(draw, [5, 9]) for draw in (0, 1)]).items()}
    assert len(set(ids.values())) == 8  # one prompt, drawn twice


def test_a_bucket_is_wider_than_its_prompt_and_of_its_own(kit):
    sampler = kit.make_sampler(kit.build_llama(VOCAB), VOCAB, width_bucket=16)
    assert [sampler.width(tokens) for tokens in (1, 15, 16, 31, 32, 33, 64, 100)] == [16, 16, 32, 32, 64, 64, 128, 128]


WIDE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models
from rftcli.engines.hf import HFSampler
from rftcli.types import Prompt, Request, SamplingSettings
torch.manual_seed(0)
shape = dict(hidden_size=320, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=5)
model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **shape)).eval()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
sampler = HFSampler(model, tokenizer, (), pad_id=0, batch_rows=8, device="cpu", owns_weights=False)
prompt = Prompt(draw=0, row=0, row_id="a", source="a", label="a", text="", token_ids=tuple(range(5, 60)))
found = []
for threads in (1, 2):
    torch.set_num_threads(threads)
    made = sampler.generate([Request(prompt=prompt, samples=tuple(range(8)))], SamplingSettings(max_new_tokens=12, seed=0, logprobs=True))
    found.append([(one.sample, one.trace.ids, one.trace.logprobs) for one in made])
assert found[0] == found[1], "other bits with another thread count"
"""


@pytest.mark.slow
def test_strict_matrix_products_make_wide_models_independent_of_threads():
    """Without the variable these widths give other last bits with two threads."""
    ran = subprocess.run([sys.executable, "-c", WIDE], env={**os.environ, "MKL_CBWR": "AUTO,STRICT"}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-500:]

"""Structured output: every completion keeps to the form, ends where it is complete, and has the log-probs of what was allowed."""

import json
import re

import pytest
import torch

from rftcli.builtin import builtin_path
from rftcli.engines.grammar import Grammar, problem
from rftcli.engines.hf import HFSampler
from rftcli.errors import RftError, UsageError
from rftcli.models.load import load_tokenizer
from rftcli.types import FinishReason, SamplingSettings, TokenTrace

NUMBERS = r" [0-9]{2}-[0-9]{2}=( [0-9]+)? ####"
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"enum": [True, False]}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def characters():
    return load_tokenizer(str(builtin_path("quickstart")))


def sampled(kit, tokenizer, vocabulary, form, samples=8, prompt=(57, 74), **changes):
    settings = SamplingSettings(**{"max_new_tokens": 64, "seed": 2, "structured": form, "logprobs": True, **changes})
    refill = bool(settings.seed % 2)
    engine = HFSampler(kit.build_llama(vocabulary), tokenizer, (2,), pad_id=0, batch_rows=8, device="cpu", owns_weights=False, continuous=refill)
    return list(engine.generate([kit.make_request(0, prompt, range(samples))], settings))


@pytest.mark.parametrize("seed", [2, 3])
def test_a_regular_expression(kit, characters, seed):
    found = sampled(kit, characters, 262, {"regex": NUMBERS}, seed=seed)
    assert len(found) == 8 and len({made.text for made in found}) > 4
    for made in found:
        assert made.finish is FinishReason.STOP and re.fullmatch(NUMBERS, made.text)
        assert made.trace.ids[-1] != 2  # complete: no end token is needed
        assert all(-20 < logprob <= 0 for logprob in made.trace.logprobs)


def test_a_json_schema(kit, characters):
    for made in sampled(kit, characters, 262, {"json_schema": SCHEMA}):
        value = json.loads(made.text)
        assert set(value) == {"sum", "sure"} and 0 <= value["sum"] <= 99 and made.finish is FinishReason.STOP


def test_an_end_token_may_come_where_the_form_allows_it(kit, characters):
    found = sampled(kit, characters, 262, {"regex": "[0-9]*"}, samples=32)
    ended = [made for made in found if made.trace.ids[-1] == 2]
    assert ended and all(re.fullmatch("[0-9]*", made.text) for made in found)
    assert {made.finish for made in ended} == {FinishReason.STOP}


def test_a_limit_that_comes_first(kit, characters):
    (made,) = sampled(kit, characters, 262, {"regex": "[0-9]{9}"}, samples=1, max_new_tokens=4)
    assert made.finish is FinishReason.LENGTH and re.fullmatch("[0-9]{4}", made.text)


def test_log_probs_are_of_the_tokens_that_were_allowed(kit, characters):
    model = kit.build_llama(262).requires_grad_(False)
    for made in sampled(kit, characters, 262, {"regex": "[ab]{3}"}, temperature=0.7):
        ids = torch.tensor([[*made.prompt.token_ids, *made.trace.ids]])
        scores = model(ids).logits[0, 1:-1] / 0.7
        allowed = characters.convert_tokens_to_ids(["a", "b"])
        wanted = scores[:, allowed].log_softmax(-1)
        assert [float(wanted[at, allowed.index(token)]) for at, token in enumerate(made.trace.ids)] == pytest.approx(made.trace.logprobs, abs=1e-4)


def test_greedy_keeps_to_the_form_too(kit, characters):
    (made,) = sampled(kit, characters, 262, {"regex": NUMBERS}, samples=1, temperature=0.0)
    assert re.fullmatch(NUMBERS, made.text)


def test_other_rows_change_nothing(kit, characters):
    many = {made.sample: made.trace for made in sampled(kit, characters, 262, {"regex": NUMBERS}, samples=20)}
    few = {made.sample: made.trace for made in sampled(kit, characters, 262, {"regex": NUMBERS}, samples=3)}
    assert few == {sample: many[sample] for sample in few}


def test_an_answer_that_goes_on_stands_where_it_stopped_in_the_form(kit, characters):
    (whole,) = sampled(kit, characters, 262, {"regex": NUMBERS}, samples=1)
    settings = SamplingSettings(max_new_tokens=64, seed=2, structured={"regex": NUMBERS})
    engine = HFSampler(kit.build_llama(262), characters, (2,), pad_id=0, batch_rows=8, device="cpu", owns_weights=False)
    for cut in (3, len(whole.trace.ids)):
        partial = {0: TokenTrace(ids=whole.trace.ids[:cut])}
        (made,) = engine.generate([kit.make_request(0, (57, 74), (0,), partial=partial)], settings)
        assert made.trace.ids == whole.trace.ids and made.finish is FinishReason.STOP


def test_a_model_with_more_scores_than_the_tokenizer_has_tokens(kit, characters):
    for made in sampled(kit, characters, 300, {"regex": NUMBERS}):
        assert max(made.trace.ids) < 262 and re.fullmatch(NUMBERS, made.text)


def pairs():
    """Pieces that span several parts of a form."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<|end|>": 0, "1": 1, "2": 2, "=": 3, "=1": 4, "12": 5, "2=": 6, "a": 7}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("=", "1"), ("1", "2"), ("2", "=")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def test_byte_pairs():
    """What is allowed is any piece that is the beginning of a match."""
    form = Grammar({"regex": "[0-9]+=[0-9]"}, pairs(), (0,))
    row = form.matcher()
    assert row.allowed(8).nonzero()[0].tolist() == [1, 2, 5, 6]
    row.push(6)
    assert row.allowed(10).nonzero()[0].tolist() == [1, 2]
    row.push(1)
    assert row.complete and form.matcher([1, 4]).complete and not form.matcher([1, 3]).complete
    with pytest.raises(RftError, match="token 7 does not fit"):
        form.matcher([7])


def test_a_form_that_the_tokenizer_cannot_spell():
    """There is no token for a `q`: found at once where the form begins with it, and no silent end of the answer where it comes later."""
    tokenizer = pairs()
    with pytest.raises(RftError, match=r"no token of this tokenizer goes on with rollout\.structured"):
        Grammar({"regex": "q+"}, tokenizer, (0,))
    row = Grammar({"regex": "aq"}, tokenizer, (0,)).matcher([7])
    with pytest.raises(RftError, match=r"no token of this tokenizer goes on with rollout\.structured"):
        row.allowed(8)


def test_a_tokenizer_whose_pieces_the_library_cannot_read(kit):
    with pytest.raises(UsageError, match="cannot be used with this tokenizer: can't determine decoder type"):
        sampled(kit, kit.build_tokenizer(97), 97, {"regex": "q+"})


@pytest.mark.parametrize(
    ("form", "message"),
    [({"regex": "(a"}, "unclosed group"), ({"json_schema": {"type": "objct"}}, "Invalid type: objct"), ({"json_schema": {"$ref": "#/no"}}, "no")],
)
def test_what_is_no_form(form, message, characters):
    assert message in problem(form)
    with pytest.raises(UsageError, match=message):
        Grammar(form, characters, (2,))


@pytest.mark.parametrize("form", [{"regex": NUMBERS}, {"json_schema": SCHEMA}, {"json_schema": {}}])
def test_what_is_a_form(form):
    assert problem(form) is None


def test_a_slow_tokenizer(kit):
    class Slow:
        pass

    with pytest.raises(UsageError, match="kind Slow"):
        Grammar({"regex": "a"}, Slow(), (2,))

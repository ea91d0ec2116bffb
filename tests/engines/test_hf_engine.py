"""The hf engine: what is sampled, when it stops, and what it leaves behind."""

import math

import pytest
import torch

from rftcli.engines.noise import RowNoise
from rftcli.errors import RftError, UsageError
from rftcli.types import FinishReason, SamplingSettings, TokenTrace

VOCAB = 97


def settings(**changes) -> SamplingSettings:
    return SamplingSettings(**{"max_new_tokens": 8, "seed": 0, **changes})


def generated(sampler, requests, **changes):
    made = list(sampler.generate(requests, settings(**changes)))
    found = {(one.prompt.draw, one.sample): one for one in made}
    assert len(found) == len(made) == sum(len(request.samples) for request in requests)
    return found


def plain_logprobs(model, prompt, ids, temperature):
    """(T,) by the model's plain forward over prompt and answer."""
    with torch.no_grad():
        scores = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / temperature
    return scores.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).squeeze(-1).tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["build_llama", "build_gpt2"])
def test_log_probs_equal_a_plain_forward(kit, family, attention):
    model = getattr(kit, family)(VOCAB, attn_implementation=attention)
    requests = [kit.make_request(draw, range(5, 6 + 5 * draw)) for draw in range(5)]  # prompts of 1, 6, 11, 16 and 21 tokens
    for made in generated(kit.make_sampler(model, VOCAB), requests, temperature=0.7, logprobs=True).values():
        assert made.trace.logprobs == pytest.approx(plain_logprobs(model, made.prompt.token_ids, made.trace.ids, 0.7), abs=1e-5)


def test_the_token_is_the_one_that_the_key_chooses(kit):
    probabilities = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.2, 0.3, 0.25, 0.15])
    model = kit.build_bigram(probabilities.log().clamp(min=-300.0).repeat(8, 1))
    found = generated(kit.make_sampler(model, 8), [kit.make_request(9, [4], range(20))], max_new_tokens=3)
    bounds = probabilities.cumsum(0).tolist()
    for (draw, sample), made in found.items():
        numbers = [RowNoise(0, draw, sample).uniform(token) for token in range(3)]
        assert list(made.trace.ids) == [next(index for index, bound in enumerate(bounds) if bound > number) for number in numbers]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.05, 0.1, 0.15, 0.2, 0.2, 0.15, 0.1, 0.05]),
        ({"temperature": 0.5}, [0.0025, 0.01, 0.0225, 0.04, 0.04, 0.0225, 0.01, 0.0025]),
        ({"top_k": 4}, [0, 0, 0.15, 0.2, 0.2, 0.15, 0, 0]),
        ({"top_p": 0.45}, [0, 0, 0.15, 0.2, 0.2, 0, 0, 0]),
        ({"min_p": 0.45}, [0, 0.1, 0.15, 0.2, 0.2, 0.15, 0.1, 0]),
        ({"logit_bias": {"0": math.log(3.0), "7": math.log(2.0)}}, [0.15, 0.1, 0.15, 0.2, 0.2, 0.15, 0.1, 0.1]),
        ({"logit_bias": {"0": math.log(2.0)}, "temperature": 0.5}, [0.01, 0.01, 0.0225, 0.04, 0.04, 0.0225, 0.01, 0.0025]),
        ({"options": {"suppress_tokens": [3, 4]}}, [0.05, 0.1, 0.15, 0, 0, 0.15, 0.1, 0.05]),
        ({"options": {"epsilon_cutoff": 0.12}}, [0, 0, 0.15, 0.2, 0.2, 0.15, 0, 0]),
        ({"bad_words": ("sun", "x")}, [0.05, 0.1, 0.15, 0.2, 0, 0.15, 0.1, 0]),
    ],
)
def test_frequencies_are_those_of_the_softmax(kit, changes, expected):
    model = kit.build_bigram(torch.tensor([0.05, 0.1, 0.15, 0.2, 0.2, 0.15, 0.1, 0.05]).log().repeat(8, 1))
    sampler = kit.make_sampler(model, 8, batch_rows=512, eos_ids=())
    found = generated(sampler, [kit.make_request(0, [4], range(2048))], max_new_tokens=2, logprobs=True, **changes)
    counts = torch.bincount(torch.tensor([token for made in found.values() for token in made.trace.ids]), minlength=8).double()
    probabilities = torch.tensor(expected, dtype=torch.float64) / sum(expected)
    assert counts[probabilities == 0].sum() == 0
    wanted = (probabilities * counts.sum())[probabilities > 0]
    chi_square = float(((counts[probabilities > 0] - wanted) ** 2 / wanted).sum())
    assert chi_square < 24.3  # the 99.9% point at 7 degrees of freedom
    for made in list(found.values())[:50]:
        assert made.trace.logprobs == pytest.approx([math.log(probabilities[token]) for token in made.trace.ids], abs=1e-4)


@pytest.mark.parametrize("continuous", [False, True])
def test_penalties_along_a_completion(kit, continuous):
    """Eight equal scores of 1: each penalty changes what follows by exactly its definition, and the log-probs say so."""
    model = kit.build_bigram(torch.ones(8, 8))
    changes = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25, "temperature": 0.5}
    sampler = kit.make_sampler(model, 8, eos_ids=(), continuous=continuous)
    found = generated(sampler, [kit.make_request(0, [4, 5], range(12))], max_new_tokens=6, logprobs=True, **changes)
    for made in found.values():
        for at, (token, logprob) in enumerate(zip(made.trace.ids, made.trace.logprobs, strict=True)):
            before = made.trace.ids[:at]
            scores = [0.5 if other in (4, 5, *before) else 1.0 for other in range(8)]
            scores = [s - 0.25 * before.count(other) - 0.5 * (other in before) for other, s in enumerate(scores)]
            wanted = torch.tensor(scores, dtype=torch.float64).div(0.5).log_softmax(-1)[token]
            assert logprob == pytest.approx(float(wanted), abs=1e-5)


def test_penalties_and_bans_hold_for_greedy_answers_too(kit):
    model = kit.build_chain((kit.X, kit.SUN), (kit.SUN, kit.DAY), (kit.DAY, kit.X))
    request = [kit.make_request(0, [kit.X], (0,))]

    def ids(**changes):
        return generated(kit.make_sampler(model, 12), request, temperature=0.0, max_new_tokens=4, **changes)[0, 0].trace.ids

    assert ids() == (kit.SUN, kit.DAY, kit.X, kit.SUN)
    assert ids(bad_words=("day",)) == (kit.SUN, 0, kit.END, kit.END)  # all others tie, and the lowest id is first
    assert ids(presence_penalty=300.0) == (kit.SUN, kit.DAY, kit.X, 0)
    assert ids(options={"no_repeat_ngram_size": 2}) == (kit.SUN, kit.DAY, kit.X, 0)  # `x sun` began in the prompt


@pytest.mark.parametrize("family", ["build_llama", "build_gpt2"])
def test_greedy_equals_the_librarys(kit, family):
    model = getattr(kit, family)(VOCAB)
    requests = [kit.make_request(draw, range(5, 8 + 6 * draw), (0,)) for draw in range(4)]
    for made in generated(kit.make_sampler(model, VOCAB), requests, temperature=0.0, max_new_tokens=12, logprobs=True).values():
        prompt = torch.tensor([made.prompt.token_ids])
        theirs = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, eos_token_id=kit.EOS, pad_token_id=0
        )
        assert list(made.trace.ids) == theirs[0, prompt.shape[1] :].tolist()
        assert set(made.trace.logprobs) == {0.0}  # a greedy choice is certain


def test_a_greedy_twin_beside_its_group(kit):
    sampler = kit.make_sampler(kit.build_llama(VOCAB), VOCAB)
    warm = generated(sampler, [kit.make_request(0, [5, 9], (-1, 0, 1))])
    assert warm[0, -1].trace.ids == generated(sampler, [kit.make_request(0, [5, 9], (0,))], temperature=0.0)[0, 0].trace.ids
    assert warm[0, 0].trace.ids == generated(sampler, [kit.make_request(0, [5, 9], (0,))])[0, 0].trace.ids


def test_what_is_sampled_is_what_comes_back(kit):
    """`sun` + `day` is never handed over as `sunday`, and the end token is part of the trace."""
    model = kit.build_chain((kit.X, kit.SUN), (kit.SUN, kit.DAY), (kit.DAY, kit.EOS))
    made = generated(kit.make_sampler(model, 12), [kit.make_request(0, [kit.X], (0,))], logprobs=True)[0, 0]
    assert made.trace.ids == (kit.SUN, kit.DAY, kit.EOS) and len(made.trace.logprobs) == 3
    assert (made.text, made.text_with_special, made.finish) == ("sunday", "sunday</s>", FinishReason.STOP)


def test_a_stop_string_across_tokens_is_kept(kit):
    model = kit.build_chain((kit.X, kit.SUN), (kit.SUN, kit.DAY), (kit.DAY, kit.X))
    made = generated(kit.make_sampler(model, 12), [kit.make_request(0, [kit.X], (0,))], stop=("nda",))[0, 0]
    assert (made.trace.ids, made.text, made.finish) == ((kit.SUN, kit.DAY), "sunday", FinishReason.STOP)
    assert generated(kit.make_sampler(model, 12), [kit.make_request(0, [kit.X], (0,))])[0, 0].finish is FinishReason.LENGTH


def test_every_end_token_stops_and_ignore_eos_lifts_the_models_own(kit):
    model = kit.build_chain((kit.X, kit.SUN), (kit.SUN, kit.END), (kit.END, kit.EOS), (kit.EOS, kit.X))
    request = [kit.make_request(0, [kit.X], (0,))]

    def ids(eos_ids, **changes):
        return generated(kit.make_sampler(model, 12, eos_ids=eos_ids), request, max_new_tokens=6, **changes)[0, 0].trace.ids

    assert ids((kit.EOS, kit.END)) == (kit.SUN, kit.END)
    assert ids((kit.EOS,)) == (kit.SUN, kit.END, kit.EOS)
    assert ids((kit.EOS,), stop_token_ids=(kit.END,)) == (kit.SUN, kit.END)
    assert ids((kit.EOS, kit.END), ignore_eos=True) == (kit.SUN, kit.END, kit.EOS, kit.X, kit.SUN, kit.END)
    assert ids((kit.EOS, kit.END), ignore_eos=True, stop_token_ids=(kit.EOS,)) == (kit.SUN, kit.END, kit.EOS)


def test_end_tokens_wait_for_min_new_tokens(kit):
    table = torch.full((8, 8), -300.0)
    table[:, kit.EOS], table[:, kit.END], table[:, kit.SUN], table[:, kit.DAY] = 5.0, 4.0, math.log(0.25), math.log(0.75)
    sampler = kit.make_sampler(kit.build_bigram(table), 8)
    found = generated(sampler, [kit.make_request(0, [kit.X], range(16))], min_new_tokens=3, stop_token_ids=(kit.END,), logprobs=True)
    for made in found.values():
        assert made.trace.ids[-1] in (kit.EOS, kit.END) and len(made.trace.ids) == 4
        wanted = [math.log(0.25 if token == kit.SUN else 0.75) for token in made.trace.ids[:3]]
        assert made.trace.logprobs[:3] == pytest.approx(wanted, abs=1e-4)  # of the distribution without end tokens
    assert min(len(made.trace.ids) for made in generated(sampler, [kit.make_request(0, [kit.X], range(16))]).values()) == 1


def test_an_interrupted_answer_goes_on(kit):
    model = kit.build_llama(VOCAB)
    sampler = kit.make_sampler(model, VOCAB, eos_ids=())
    whole = generated(sampler, [kit.make_request(0, [5, 9, 11])], max_new_tokens=12, logprobs=True)
    sampler.load(iter(()), version=7)
    partial = {
        sample: TokenTrace(ids=made.trace.ids[:cut], logprobs=made.trace.logprobs[:cut], segments=((0, 0),))
        for cut, (sample, made) in zip((3, 11, 12), ((sample, whole[0, sample]) for sample in (0, 1, 2)), strict=True)
    }
    rest = generated(sampler, [kit.make_request(0, [5, 9, 11], partial=partial)], max_new_tokens=12, logprobs=True)
    for sample in range(4):
        assert rest[0, sample].trace.ids == whole[0, sample].trace.ids
        assert rest[0, sample].trace.logprobs == pytest.approx(whole[0, sample].trace.logprobs, abs=1e-5)
    assert [rest[0, sample].trace.segments for sample in range(4)] == [((0, 0), (3, 7)), ((0, 0), (11, 7)), ((0, 0),), ((0, 7),)]
    assert [rest[0, sample].policy_version for sample in range(4)] == [7, 7, 0, 7]
    unknown = {0: TokenTrace(ids=whole[0, 0].trace.ids[:3])}
    assert generated(sampler, [kit.make_request(0, [5, 9, 11], (0,), partial=unknown)], logprobs=True)[0, 0].trace.logprobs is None


def test_finished_rows_stay_inside_a_learned_position_table(kit):
    """Row 0 is nearly done and its neighbour is not: going on as a dummy it must not run off the table of 32 positions."""
    sampler = kit.make_sampler(kit.build_gpt2(VOCAB, n_positions=32), VOCAB, eos_ids=())
    near = kit.make_request(0, range(5, 15), (0,), partial={0: TokenTrace(ids=tuple(range(20, 33)))})
    far = kit.make_request(1, range(5, 22), (0,))
    found = generated(sampler, [near, far], max_new_tokens=14)
    assert [len(made.trace.ids) for made in found.values()] == [14, 14]


def test_an_empty_prompt_is_refused(kit):
    with pytest.raises(UsageError, match="train:3 has no tokens"):
        list(kit.make_sampler(kit.build_llama(VOCAB), VOCAB).generate([kit.make_request(3, [])], settings()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_weights_fail_and_never_sample(kit, temperature):
    model = kit.build_llama(VOCAB)
    model.lm_head.weight.data[3] = math.nan
    with pytest.raises(RftError, match="not numbers"):
        generated(kit.make_sampler(model, VOCAB), [kit.make_request(0, [5])], temperature=temperature)


def test_training_goes_on_between_two_completions_and_after_them(kit):
    model = kit.build_llama(VOCAB, attention_dropout=0.5).train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    sampler = kit.make_sampler(model, VOCAB)
    steady = generated(sampler, [kit.make_request(0, [5])])
    assert generated(sampler, [kit.make_request(0, [5])]) == steady  # dropout is off while sampling
    stream = sampler.generate([kit.make_request(0, [5])], settings())
    next(stream)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    model(torch.tensor([[5, 6]])).logits.sum().backward()
    stream.close()
    assert [module.training for module in model.modules()] == before
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_shared_module_takes_only_the_version(kit):
    def untouched():
        raise AssertionError("shared weights are already here")
        yield

    sampler = kit.make_sampler(kit.build_llama(VOCAB), VOCAB)
    assert generated(sampler, [kit.make_request(0, [5], (0,))])[0, 0].trace.segments == ((0, 0),)
    sampler.load(untouched(), version=3)
    made = generated(sampler, [kit.make_request(0, [5], (0,))])[0, 0]
    assert made.policy_version == 3 and made.trace.segments == ((0, 3),)


@pytest.mark.parametrize("tied", [False, True])
def test_a_replica_copies_all_weights(kit, tied):
    trained = kit.build_llama(VOCAB, tie_word_embeddings=tied)
    replica = kit.build_llama(VOCAB, tie_word_embeddings=tied)
    for parameter in replica.parameters():
        parameter.data.normal_()
    sampler = kit.make_sampler(replica, VOCAB, owns_weights=True)
    request = [kit.make_request(0, [5, 9])]
    # gathered weights name a tied tensor once, and may have another dtype
    sampler.load(((name, parameter.detach().double()) for name, parameter in trained.named_parameters()), version=1)
    wanted = generated(kit.make_sampler(trained, VOCAB), request)
    assert {key: made.trace.ids for key, made in generated(sampler, request).items()} == {key: made.trace.ids for key, made in wanted.items()}
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(replica.parameters(), trained.parameters(), strict=True))
    with torch.no_grad():
        trained.lm_head.weight.add_(1.0)
    assert not torch.equal(replica.lm_head.weight, trained.lm_head.weight)  # a copy, no view


def test_a_replica_refuses_weights_that_do_not_fit(kit):
    model = kit.build_llama(VOCAB)
    sampler = kit.make_sampler(model, VOCAB, owns_weights=True)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    cases = {
        "did not arrive.*layers.1.mlp.up_proj": {name: weight for name, weight in weights.items() if "layers.1.mlp.up_proj" not in name},
        "`other` is unknown": {**weights, "other": torch.zeros(1)},
        r"`lm_head.weight` has the shape \(1,\)": {**weights, "lm_head.weight": torch.zeros(1)},
    }
    for message, given in cases.items():
        with pytest.raises(RftError, match=message):
            sampler.load(given.items(), version=1)
    assert sampler.version == 0


def test_a_closed_engine_lets_go_of_the_model(kit):
    model = kit.build_llama(VOCAB)
    sampler = kit.make_sampler(model, VOCAB)
    sampler.sleep()
    assert len(generated(sampler, [kit.make_request(0, [5])])) == 4
    sampler.close()
    assert not any(value is model for value in vars(sampler).values())

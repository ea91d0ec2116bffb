"""A temperature of the first token alone (FIRE, 2410.21236): one request, log-probs as sampled, the same bits in any company."""

from __future__ import annotations

import math

import pytest
import torch

from rftcli.types import SamplingSettings, TokenTrace

VOCAB = 97
P = torch.tensor([0.05, 0.1, 0.15, 0.2, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)


def generated(sampler, requests, **changes):
    settings = SamplingSettings(**{"max_new_tokens": 6, "seed": 0, "logprobs": True, **changes})
    return {(made.prompt.draw, made.sample): made for made in sampler.generate(requests, settings)}


@pytest.mark.parametrize("continuous", [False, True])
def test_only_the_first_token_is_hot(kit, continuous):
    """Of a bigram model whose scores are log P everywhere: the first token follows P^(1/4), the others P^2; log-probs are those."""
    model = kit.build_bigram(P.log().float().repeat(8, 1))
    sampler = kit.make_sampler(model, 8, batch_rows=256, eos_ids=(), continuous=continuous)
    found = generated(sampler, [kit.make_request(0, [4], range(2048))], max_new_tokens=3, temperature=0.5, first_token_temperature=4.0)
    for position, temperature in ((0, 4.0), (1, 0.5), (2, 0.5)):
        expected = P ** (1 / temperature) / (P ** (1 / temperature)).sum()
        counts = torch.bincount(torch.tensor([made.trace.ids[position] for made in found.values()]), minlength=8).double()
        chi_square = float(((counts - expected * 2048) ** 2 / (expected * 2048)).sum())
        assert chi_square < 24.3, position  # the 99.9% point at 7 degrees of freedom
        for made in list(found.values())[:50]:
            assert made.trace.logprobs[position] == pytest.approx(math.log(expected[made.trace.ids[position]]), abs=1e-4)


def test_a_hot_first_end_token_ends_the_answer(kit):
    model = kit.build_bigram(P.log().float().repeat(8, 1))
    found = generated(kit.make_sampler(model, 8, eos_ids=(3,)), [kit.make_request(0, [4], range(64))], first_token_temperature=50.0)
    ended = [made for made in found.values() if made.trace.ids[0] == 3]
    assert ended and all(made.trace.ids == (3,) and str(made.finish) == "stop" for made in ended)


def test_an_answer_that_goes_on_has_no_second_first_token(kit):
    sampler = kit.make_sampler(kit.build_llama(VOCAB), VOCAB, eos_ids=())
    whole = generated(sampler, [kit.make_request(0, [5, 6], (0,))], first_token_temperature=5.0)[0, 0]
    begun = TokenTrace(ids=whole.trace.ids[:2], logprobs=whole.trace.logprobs[:2], segments=((0, 0),))
    rest = generated(sampler, [kit.make_request(0, [5, 6], (0,), partial={0: begun})], first_token_temperature=5.0)[0, 0]
    assert rest.trace.ids == whole.trace.ids and rest.trace.logprobs == pytest.approx(whole.trace.logprobs, abs=1e-5)


def test_greedy_rows_and_equal_temperatures_are_as_without(kit):
    sampler = kit.make_sampler(kit.build_llama(VOCAB), VOCAB)
    requests = [kit.make_request(draw, range(5, 6 + draw), (-1, 0, 1)) for draw in range(4)]
    plain = generated(sampler, requests, temperature=0.9)
    assert generated(sampler, requests, temperature=0.9, first_token_temperature=0.9) == plain
    hot = generated(sampler, requests, temperature=0.9, first_token_temperature=9.0)
    assert hot != plain and all(hot[draw, -1] == plain[draw, -1] for draw in range(4))


def test_company_changes_no_bit(kit):
    sampler = kit.make_sampler(kit.build_llama(VOCAB), VOCAB, continuous=True)
    requests = [kit.make_request(draw, range(5, 6 + draw)) for draw in range(5)]
    together = generated(sampler, requests, first_token_temperature=3.0)
    for request in requests:
        alone = generated(sampler, [request], first_token_temperature=3.0)
        assert all(together[key].trace == made.trace for key, made in alone.items())

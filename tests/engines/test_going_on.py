"""Answers that go on: interrupted anywhere and any number of times, under unchanged weights, an answer is the one that was never interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.engines.fake import FakeSampler
from rftcli.types import Completion, FinishReason, SamplingSettings, TokenTrace

VOCAB, LONGEST = 40, 10
SETTINGS = SamplingSettings(max_new_tokens=LONGEST, seed=5, logprobs=True)


@pytest.fixture(scope="module", params=["fake", "hf", "hf continuous"])
def sampler(request, kit):
    if request.param == "fake":
        return FakeSampler(lambda ids, skip_special_tokens: str(ids), vocab_size=12, eos_ids=(kit.EOS,))
    return kit.make_sampler(kit.build_llama(VOCAB), VOCAB, continuous=request.param == "hf continuous")


def answers(sampler, requests, options: SamplingSettings = SETTINGS) -> dict[tuple[int, int], Completion]:
    return {(made.prompt.draw, made.sample): made for made in sampler.generate(requests, options)}


def in_pieces(sampler, kit, cuts: Sequence[int], samples: Sequence[int], options: SamplingSettings = SETTINGS) -> dict[tuple[int, int], Completion]:
    """Sample by sample up to each cut, all of one request together; what has ended before a cut is left alone."""
    found: dict[tuple[int, int], Completion] = {}
    for cut in (*cuts, options.max_new_tokens):
        open_ones = tuple(sample for sample in samples if (0, sample) not in found or found[0, sample].finish is FinishReason.LENGTH)
        partial = {sample: found[0, sample].trace for sample in open_ones if (0, sample) in found}
        if open_ones:
            found |= answers(sampler, [kit.make_request(0, [5, 9, 11], open_ones, partial=partial, limit=cut)], options)
            assert all(len(found[0, sample].trace.ids) <= cut for sample in open_ones)
    return found


def test_interrupted_at_any_token_it_is_the_same_answer(kit, sampler) -> None:
    samples = range(6)
    whole = answers(sampler, [kit.make_request(0, [5, 9, 11], samples)])
    assert {made.finish for made in whole.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    for cut in range(1, LONGEST):
        pieces = in_pieces(sampler, kit, [cut], samples)
        for key, made in whole.items():
            assert (pieces[key].trace.ids, pieces[key].text, pieces[key].finish) == (made.trace.ids, made.text, made.finish)
            assert pieces[key].trace.logprobs == pytest.approx(made.trace.logprobs, abs=1e-5)
            assert pieces[key].trace.segments == ((0, 0),)  # one version is one segment


@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, LONGEST - 1)), seed=st.integers(0, 50))
def test_the_fake_engine_goes_on_bit_for_bit(kit, cuts: set[int], seed: int) -> None:
    sampler = FakeSampler(lambda ids, skip_special_tokens: str(ids), vocab_size=6, eos_ids=(2,))
    options = replace(SETTINGS, seed=seed)
    whole = answers(sampler, [kit.make_request(0, [5, 9, 11])], options)
    assert in_pieces(sampler, kit, sorted(cuts), range(4), options) == whole


def test_requests_of_one_call_are_cut_where_each_of_them_says(kit, sampler) -> None:
    """Lengths of their own side by side; a limit behind what is there, or beyond `max_new_tokens`, changes nothing."""
    whole = answers(sampler, [kit.make_request(draw, [5, 9], (0, 1)) for draw in range(4)])
    earlier = {0: TokenTrace(ids=whole[3, 0].trace.ids[:4], logprobs=whole[3, 0].trace.logprobs[:4], segments=((0, 0),))}
    requests = [
        kit.make_request(0, [5, 9], (0, 1), limit=2), kit.make_request(1, [5, 9], (0, 1), limit=7), kit.make_request(2, [5, 9], (0, 1), limit=99),
        kit.make_request(3, [5, 9], (0,), partial=earlier, limit=3),
    ]  # fmt: skip
    found = answers(sampler, requests)
    for draw, limit in ((0, 2), (1, 7), (2, LONGEST)):
        for sample in (0, 1):
            assert found[draw, sample].trace.ids == whole[draw, sample].trace.ids[:limit]
    assert found[3, 0].trace.ids == whole[3, 0].trace.ids[:4]

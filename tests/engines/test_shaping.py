"""Bias, penalties, bans and filters, against their definitions and against transformers' own."""

import math

import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TypicalLogitsWarper,
)

from rftcli.engines.sampling import log_weights
from rftcli.engines.shaping import FILTERS, Shaping, rules_of
from rftcli.errors import RftError, UsageError
from rftcli.recipe.sections.rollout import HfOptions
from rftcli.types import SamplingSettings

CPU = torch.device("cpu")
VOCAB = 12


def rules(kit, **changes):
    return rules_of(SamplingSettings(**{"max_new_tokens": 8, "seed": 0, **changes}), frozenset({kit.EOS}), kit.build_tokenizer(VOCAB), CPU)


def shaped(kit, scores, prompt=(), tokens=(), **changes):
    """Scores (V,) of one row among three, whose neighbours have other histories."""
    state = Shaping(rules(kit, **changes), 3, len(scores), CPU)
    state.place(0, (0, 1), [1, 1])
    state.place(1, prompt, [0])
    mine: list[int] = []
    state.place(1, prompt, mine)
    state.place(2, (1,), [0])
    for token in tokens:
        mine.append(token)
        state.push(1, token)
    return state.apply(torch.stack([torch.zeros(len(scores)), torch.tensor(scores), torch.ones(len(scores))]))[1]


def test_nothing_is_shaped_when_nothing_is_asked(kit):
    assert not rules(kit).shapes and not rules(kit, temperature=0.5, top_p=0.9, ignore_eos=True, stop=("a",)).shapes
    asked = {
        "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"4": 1.0}, "bad_words": ("sun",),
        "min_new_tokens": 1, "options": {"suppress_tokens": [4]},
    }  # fmt: skip
    for name, value in asked.items():
        assert rules(kit, **{name: value}).shapes, name


def test_penalties_in_numbers(kit):
    scores = [2.0, -2.0, 2.0, -2.0, 2.0, 0.0]
    prompt, tokens = (0, 1), (2, 3, 2)
    assert shaped(kit, scores, prompt, tokens, repetition_penalty=2.0).tolist() == [1.0, -4.0, 1.0, -4.0, 2.0, 0.0]  # prompt and completion
    assert shaped(kit, scores, prompt, tokens, presence_penalty=0.5).tolist() == [2.0, -2.0, 1.5, -2.5, 2.0, 0.0]  # the completion, once
    assert shaped(kit, scores, prompt, tokens, frequency_penalty=0.5).tolist() == [2.0, -2.0, 1.0, -2.5, 2.0, 0.0]  # as often as it is there
    # bias, then repetition, then frequency and presence
    every = {"logit_bias": {"2": 2.0, "5": -1.0}, "repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    assert shaped(kit, scores, prompt, tokens, **every).tolist() == [1.0, -4.0, 4.0 / 2 - 0.5 - 0.5, -4.0 - 0.25 - 0.5, 2.0, -1.0]


def test_the_repetition_penalty_is_the_librarys(kit):
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    history = [3, 9, 4, 4, 7]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([history]), scores[None].clone())[0]
    assert torch.equal(shaped(kit, scores.tolist(), history[:2], history[2:], repetition_penalty=1.3), theirs)


def test_penalties_of_an_answer_that_goes_on_count_what_it_had(kit):
    state = Shaping(rules(kit, frequency_penalty=1.0), 1, VOCAB, CPU)
    state.place(0, (4,), [5, 5, 6])
    assert state.apply(torch.zeros(1, VOCAB))[0].tolist() == [0, 0, 0, 0, 0, -2, -1, 0, 0, 0, 0, 0]
    state.place(0, (4,), [])  # another row takes the place
    assert state.apply(torch.zeros(1, VOCAB))[0].tolist() == [0] * VOCAB


def banned(scores):
    return (scores == -math.inf).nonzero().flatten().tolist()


def test_bad_words_are_banned_where_they_would_be_complete(kit):
    class TwoTokens:
        """`sun day` as two tokens."""

        inner = kit.build_tokenizer(VOCAB)

        def encode(self, text, add_special_tokens):
            return {"sun day": [kit.SUN, kit.DAY], "x": [kit.X]}.get(text, [])

        def decode(self, ids, **_):
            return {(kit.SUN, kit.DAY): "sun day", (kit.X,): "x"}[tuple(ids)]

        def __len__(self):
            return VOCAB

    asked = rules_of(SamplingSettings(max_new_tokens=8, seed=0, bad_words=("sun day", "x")), frozenset(), TwoTokens(), CPU)
    state = Shaping(asked, 2, VOCAB, CPU)
    tokens: list[int] = []
    state.place(0, (kit.SUN,), tokens)  # the prompt does not count
    found = []
    for token in (kit.DAY, kit.SUN, kit.SUNDAY, kit.SUN):
        found.append(banned(state.apply(torch.zeros(2, VOCAB))[0]))
        tokens.append(token)
        state.push(0, token)
    found.append(banned(state.apply(torch.zeros(2, VOCAB))[0]))
    assert found == [[kit.X], [kit.X], [kit.DAY, kit.X], [kit.X], [kit.DAY, kit.X]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_repeated_ngrams_are_the_librarys(kit, size):
    history = [4, 5, 6, 4, 5, 7, 4, 5]
    theirs = NoRepeatNGramLogitsProcessor(size)(torch.tensor([history]), torch.zeros(1, VOCAB))[0]
    for cut in (0, 3, 8):
        mine = shaped(kit, [0.0] * VOCAB, history[:cut], history[cut:], options={"no_repeat_ngram_size": size})
        assert banned(mine) == banned(theirs) != []


def test_suppressed_tokens_and_early_end_tokens(kit):
    assert banned(shaped(kit, [0.0] * VOCAB, options={"suppress_tokens": [1, 9]})) == [1, 9]
    assert banned(shaped(kit, [0.0] * VOCAB, (4,), (5, 5), min_new_tokens=3)) == [kit.EOS]
    assert banned(shaped(kit, [0.0] * VOCAB, (4,), (5, 5, 5), min_new_tokens=3)) == []


def test_ids_that_the_model_has_no_score_for(kit):
    for changes in ({"options": {"suppress_tokens": [11]}}, {"logit_bias": {"11": 1.0}}):
        Shaping(rules(kit, **changes), 1, 12, CPU)
        with pytest.raises(UsageError, match="there is no token 11"):
            Shaping(rules(kit, **changes), 1, 11, CPU)


def test_an_option_that_is_not_known(kit):
    with pytest.raises(UsageError, match="no sampling option `top_h`"):
        rules(kit, options={"top_h": 0.5})


def test_scores_that_are_not_numbers(kit):
    with pytest.raises(RftError, match="not numbers"):
        shaped(kit, [0.0, math.nan], logit_bias={"1": 1.0})


@pytest.mark.parametrize(
    ("name", "value", "theirs"),
    [("typical_p", 0.6, TypicalLogitsWarper(0.6)), ("epsilon_cutoff", 0.05, EpsilonLogitsWarper(0.05)), ("eta_cutoff", 0.05, EtaLogitsWarper(0.05))],
)
def test_filters_come_after_the_others_and_leave_what_the_library_leaves(name, value, theirs):
    scores = 2.0 * torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    weights = log_weights(scores, temperature=0.7, top_k=20, filters=(FILTERS[name](value, CPU),))
    wanted = theirs(None, log_weights(scores, temperature=0.7, top_k=20))
    assert torch.equal(weights.isfinite(), wanted.isfinite()) and 0 < int(weights.isfinite().sum()) < 100
    assert weights.dtype == torch.float64 and torch.equal(weights.amax(-1), torch.zeros(5, dtype=torch.float64))


def test_the_recipe_knows_every_filter():
    assert {*FILTERS, "suppress_tokens", "no_repeat_ngram_size"} == set(HfOptions.model_fields)

import pytest

from rftcli.engines.finish import completion, stop_rule
from rftcli.types import FinishReason, SamplingSettings, TokenTrace


def rule_of(kit, **settings):
    return stop_rule(SamplingSettings(seed=0, **{"max_new_tokens": 8, **settings}), (kit.EOS,), kit.build_tokenizer(20).decode)


@pytest.mark.parametrize("string", ["nda", "unday", "day", "ysu", "sundaysun", "x", "<|end|>"])
def test_a_stop_string_is_found_in_the_token_that_completes_it(kit, string):
    rule = rule_of(kit, stop=("nothing", string), max_new_tokens=99)
    ids = [kit.X + 1, kit.SUN, kit.DAY, kit.SUN, kit.X, kit.END]
    text, found = "", None
    for count in range(1, len(ids) + 1):
        text = kit.build_tokenizer(20).decode(ids[:count])
        found = rule.finished(ids[:count])
        assert (found is FinishReason.STOP) == (string in text), text
        if found:
            break
    assert found is FinishReason.STOP


def test_a_stop_string_inside_one_token(kit):
    assert rule_of(kit, stop=("nda",)).finished([kit.X, kit.SUNDAY]) is FinishReason.STOP


def test_a_stop_string_before_min_new_tokens_counts_no_more(kit):
    rule = rule_of(kit, stop=("x",), min_new_tokens=3)
    assert rule.finished([kit.SUN, kit.X]) is None
    assert rule.finished([kit.SUN, kit.X, kit.DAY]) is None
    assert rule.finished([kit.SUN, kit.X, kit.DAY, kit.X]) is FinishReason.STOP
    assert rule.finished([kit.SUN, kit.SUN, kit.X]) is FinishReason.STOP


def test_a_repeated_string_that_overlaps_itself(kit):
    rule = rule_of(kit, stop=("xx",), min_new_tokens=3)
    assert rule.finished([kit.X, kit.X]) is None
    assert rule.finished([kit.X, kit.X, kit.X]) is FinishReason.STOP


def test_torn_characters_are_no_obstacle():
    """Byte pieces: each token is one byte of the text, and a character of three bytes is complete with its last."""

    def decode(ids, skip_special_tokens):
        return bytes(ids).decode(errors="replace")

    text = "ab — cd".encode()
    rule = stop_rule(SamplingSettings(max_new_tokens=99, seed=0, stop=("— c",)), (), decode)
    assert [rule.finished(list(text[:count])) is not None for count in range(1, len(text) + 1)] == [False] * 7 + [True, False]


def test_end_tokens_and_length(kit):
    assert rule_of(kit).finished([kit.X, kit.EOS]) is FinishReason.STOP
    assert rule_of(kit, ignore_eos=True).finished([kit.X, kit.EOS]) is None
    assert rule_of(kit, ignore_eos=True, stop_token_ids=(kit.X,)).finished([kit.X]) is FinishReason.STOP
    assert rule_of(kit, max_new_tokens=2).finished([kit.X, kit.X]) is FinishReason.LENGTH
    assert rule_of(kit, max_new_tokens=2).finished([kit.X, kit.EOS]) is FinishReason.STOP
    assert rule_of(kit).finished([]) is None


def test_a_completion_continues_the_trace_of_an_earlier_rollout(kit):
    decode = kit.build_tokenizer(20).decode
    earlier = TokenTrace(ids=(kit.SUN, kit.X), logprobs=(-1.0, -2.0), mask=(True, False), segments=((0, 3),))
    request = kit.make_request(0, [1], samples=(2,), partial={2: earlier})
    made = completion(
        request, 2, ids=[kit.SUN, kit.X, kit.EOS], logprobs=[-1.0, -2.0, -0.5], finish=FinishReason.STOP, version=5, decode=decode
    )
    assert made.trace.segments == ((0, 3), (2, 5)) and made.policy_version == 5
    assert made.trace.mask == (True, False, True) and made.trace.logprobs == (-1.0, -2.0, -0.5)
    assert made.text == "sunx" and made.text_with_special == "sunx</s>"
    same = completion(request, 2, ids=[kit.SUN, kit.X, kit.X], logprobs=None, finish=FinishReason.LENGTH, version=3, decode=decode)
    assert same.trace.segments == ((0, 3),) and same.policy_version == 3

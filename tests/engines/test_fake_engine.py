import math
import subprocess
import sys

import pytest

from rftcli.engines.fake import FakeSampler
from rftcli.engines.table import SAMPLERS, sampler_class
from rftcli.errors import UsageError
from rftcli.types import FinishReason, SamplingSettings, TokenTrace


def decode(ids, skip_special_tokens):
    return "".join(f"{token}," for token in ids if not (skip_special_tokens and token == 2))


def settings(**changes) -> SamplingSettings:
    return SamplingSettings(**{"max_new_tokens": 6, "seed": 0, **changes})


def traces(sampler, requests, **changes):
    return {(made.prompt.draw, made.sample): made for made in sampler.generate(requests, settings(**changes))}


def echo(prompt, sample, settings):
    """The prompt again, then the sample's number, then an end token."""
    return [*prompt.token_ids, sample, 2]


def test_answers_depend_on_the_key_alone(kit):
    sampler = FakeSampler(decode, vocab_size=50, eos_ids=(2,))
    requests = [kit.make_request(draw, [5]) for draw in range(3)]
    together = traces(sampler, requests)
    assert len(together) == 12 and len({made.trace.ids for made in together.values()}) == 12
    assert traces(sampler, requests[::-1]) == together
    assert {**traces(sampler, requests[:1]), **traces(FakeSampler(decode, vocab_size=50, eos_ids=(2,)), requests[1:])} == together
    assert all(made.trace != together[key].trace for key, made in traces(sampler, requests, seed=1).items())



def test_an_answer_of_yours_by_function_or_by_name(kit, tmp_path, monkeypatch):
    (tmp_path / "answers_of_mine.py").write_text("def echo(prompt, sample, settings):\n    return [*prompt.token_ids, sample, 2]\n")
    monkeypatch.syspath_prepend(tmp_path)
    for respond in (echo, "answers_of_mine:echo"):
        made = traces(FakeSampler(decode, respond, vocab_size=50, eos_ids=(2,)), [kit.make_request(0, [7, 8], (0, 1))], logprobs=True)[0, 1]
        assert made.trace.ids == (7, 8, 1, 2) and made.trace.logprobs == (0.0,) * 4
        assert (made.text, made.text_with_special, made.finish) == ("7,8,1,", "7,8,1,2,", FinishReason.STOP)


def test_an_answer_ends_where_it_ends_and_never_after_the_limit(kit):
    request = [kit.make_request(0, [5], (0,))]
    assert traces(FakeSampler(decode, lambda *_: [9, 9], vocab_size=50), request)[0, 0].finish is FinishReason.STOP
    long = traces(FakeSampler(decode, lambda *_: [9] * 99, vocab_size=50), request)[0, 0]
    assert (long.finish, len(long.trace.ids)) == (FinishReason.LENGTH, 6)
    stopped = traces(FakeSampler(decode, lambda *_: [9, 8, 7], vocab_size=50), request, stop=("8,",))[0, 0]
    assert (stopped.trace.ids, stopped.finish) == ((9, 8), FinishReason.STOP)


@pytest.mark.parametrize("name", ["no_such_module:f", "math:no_such_function", "math", "math:pi"])
def test_a_name_that_is_no_function(name):
    with pytest.raises(UsageError):
        FakeSampler(decode, name, vocab_size=5)


def test_log_probs_are_those_of_the_uniform_stream(kit):
    made = traces(FakeSampler(decode, vocab_size=50), [kit.make_request(0, [5], (0,))], logprobs=True)[0, 0]
    assert made.trace.logprobs == (-math.log(50),) * 6
    assert traces(FakeSampler(decode, vocab_size=50), [kit.make_request(0, [5], (0,))])[0, 0].trace.logprobs is None


def test_greedy_rows_are_one_answer(kit):
    sampler = FakeSampler(decode, vocab_size=50)
    request = [kit.make_request(0, [5], (-1, 0, 1))]
    cold = traces(sampler, request, temperature=0.0)
    warm = traces(sampler, request)
    assert len({made.trace.ids for made in cold.values()}) == 1
    assert warm[0, -1].trace.ids == cold[0, 0].trace.ids != warm[0, 0].trace.ids


def test_end_tokens_wait_for_min_new_tokens(kit):
    request = [kit.make_request(0, [5], range(40))]
    sampler = FakeSampler(decode, vocab_size=4, eos_ids=(2,))
    assert min(len(made.trace.ids) for made in traces(sampler, request).values()) == 1
    assert {made.trace.ids.index(2) for made in traces(sampler, request, min_new_tokens=4).values() if 2 in made.trace.ids} == {4, 5}


def test_versions_and_partial_answers(kit):
    sampler = FakeSampler(decode, vocab_size=50)
    whole = traces(sampler, [kit.make_request(0, [5], (3,))], logprobs=True)[0, 3]
    sampler.load(iter(()), version=4)
    half = TokenTrace(ids=whole.trace.ids[:2], logprobs=whole.trace.logprobs[:2], segments=((0, 0),))
    rest = traces(sampler, [kit.make_request(0, [5], (3,), partial={3: half})], logprobs=True)[0, 3]
    assert rest.trace.ids == whole.trace.ids and rest.trace.logprobs == whole.trace.logprobs
    assert rest.trace.segments == ((0, 0), (2, 4)) and rest.policy_version == 4


def test_the_table_names_classes_and_the_fake_needs_no_torch():
    assert sampler_class("fake") is FakeSampler
    assert [sampler_class(kind).__name__ for kind in SAMPLERS] == ["HFSampler", "FakeSampler", "VLLMSampler", "SGLangSampler"]
    code = "import sys, rftcli.engines.fake, rftcli.engines.table; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

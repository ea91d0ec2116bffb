"""A recipe's sampling in vLLM's words: every key arrives, ends are ours, and what cannot be done is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from rftcli.engines.vllm_settings import arguments, compilation, graphs, needs_tokenizer, of_row, rollout_seed, row_seed
from rftcli.errors import UsageError
from rftcli.types import SamplingSettings

FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "stop",
    "include_stop_str_in_output", "stop_token_ids", "ignore_eos", "detokenize", "skip_special_tokens", "max_tokens", "min_tokens", "logprobs",
)  # fmt: skip

CHANGED = {
    "max_new_tokens": 9, "seed": 4, "min_new_tokens": 3, "temperature": 0.5, "first_token_temperature": 3.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
    "stop": ("x",), "stop_token_ids": (9,), "ignore_eos": True, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
    "logit_bias": {"4": 1.5}, "bad_words": ("sun",), "structured": {"regex": "a+"}, "options": {"typical_p": 0.9}, "logprobs": True,
}  # fmt: skip
REFUSED = ("first_token_temperature", "options")


def found(kit, fields=FIELDS, **changes) -> dict:
    settings = SamplingSettings(**{"max_new_tokens": 8, "seed": 0, **changes})
    return arguments(settings, (2, 7), kit.build_tokenizer(12), fields)


def test_plain_sampling_leaves_everything_off(kit) -> None:
    plain = found(kit)
    assert (plain["temperature"], plain["top_p"], plain["top_k"], plain["min_p"], plain["repetition_penalty"]) == (1.0, 1.0, 0, 0.0, 1.0)
    assert [plain[name] for name in ("logit_bias", "bad_words", "stop", "logprobs")] == [None] * 4
    assert (plain["detokenize"], plain["max_tokens"], plain["min_tokens"]) == (False, 8, 0)
    assert (plain["include_stop_str_in_output"], plain["skip_special_tokens"]) == (True, False)  # text is that of the ids, all of them


def test_end_tokens_are_stop_ids(kit) -> None:
    assert (found(kit)["stop_token_ids"], found(kit)["ignore_eos"]) == ([2, 7], True)
    assert found(kit, stop_token_ids=(9, 2))["stop_token_ids"] == [2, 7, 9]
    assert found(kit, ignore_eos=True)["stop_token_ids"] is None
    assert found(kit, ignore_eos=True, stop_token_ids=(9,))["stop_token_ids"] == [9]


def test_every_key_arrives(kit) -> None:
    made = found(
        kit, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3,
        logit_bias={"4": 1.5}, stop=("x", ""), min_new_tokens=3, logprobs=True,
    )  # fmt: skip
    assert (made["temperature"], made["top_p"], made["top_k"], made["min_p"], made["min_tokens"]) == (0.7, 0.9, 5, 0.1, 3)
    assert (made["repetition_penalty"], made["presence_penalty"], made["frequency_penalty"]) == (1.1, 0.2, 0.3)
    assert (made["logit_bias"], made["stop"], made["detokenize"], made["logprobs"]) == ({4: 1.5}, ["x"], True, 0)


def test_only_the_sampled_tokens_log_probs_flat_where_this_vllm_can(kit) -> None:
    assert "flat_logprobs" not in found(kit, logprobs=True)
    assert found(kit, (*FIELDS, "flat_logprobs", "skip_clone"), logprobs=True)["flat_logprobs"] is True
    assert found(kit, (*FIELDS, "flat_logprobs"))["flat_logprobs"] is False


@pytest.mark.parametrize(("rows", "largest"), [(1, 1), (3, 4), (5, 8), (8, 8), (250, 256), (257, 272), (280, 288), (512, 512), (1000, 1008)])
def test_graphs_reach_the_real_concurrency(rows, largest) -> None:
    """vLLM captures 1, 2, 4, multiples of 8 to 256 and of 16 from there on, and cuts a largest number between two of them down."""
    assert graphs(rows, one_number=True) == {"max_cudagraph_capture_size": largest}
    sizes = graphs(rows, one_number=False)["cudagraph_capture_sizes"]
    assert max(sizes) == largest >= rows and sizes == sorted(set(sizes))
    assert set(sizes) <= {1, 2, 4, *range(8, 257, 8), *range(256, 2048, 16)}


def test_a_persons_compilation_goes_beside_the_graphs() -> None:
    assert compilation(24, {"mode": 2}, one_number=True) == {"max_cudagraph_capture_size": 24, "mode": 2}
    assert compilation(24, 3, one_number=True) == {"max_cudagraph_capture_size": 24, "mode": 3}
    for own in ({"max_cudagraph_capture_size": 8, "mode": 2}, {"cudagraph_capture_sizes": [1, 8]}):
        assert compilation(24, own, one_number=True) == own


def test_refusals(kit) -> None:
    with pytest.raises(UsageError, match="no sampling option `typical_p`"):
        found(kit, options={"typical_p": 0.9})
    with pytest.raises(UsageError, match="one temperature for a whole completion"):
        found(kit, first_token_temperature=3.0)  # never trained on as if it had been sampled so
    with pytest.raises(UsageError, match="there is no token 99"):
        found(kit, logit_bias={"99": 1.0})
    with pytest.raises(UsageError, match="no sampling argument `min_p`"):
        found(kit, tuple(name for name in FIELDS if name != "min_p"))


def test_a_row_that_goes_on_has_less_left_and_other_noise() -> None:
    settings = SamplingSettings(max_new_tokens=8, min_new_tokens=3, seed=1)
    first = of_row({"top_k": 4}, settings, draw=5, sample=0, done=0, limit=settings.max_new_tokens, seeded=True, greedy=False)
    later = of_row({"top_k": 4}, settings, draw=5, sample=0, done=5, limit=settings.max_new_tokens, seeded=True, greedy=False)
    assert (first["max_tokens"], first["min_tokens"], later["max_tokens"], later["min_tokens"]) == (8, 3, 3, 0)
    assert first["seed"] != later["seed"] and first["top_k"] == 4
    assert of_row({}, settings, draw=5, sample=0, done=0, limit=settings.max_new_tokens, seeded=False, greedy=False)["seed"] is None
    greedy = of_row({"temperature": 1.0}, settings, draw=5, sample=-1, done=0, limit=settings.max_new_tokens, seeded=True, greedy=True)
    assert (greedy["temperature"], greedy["seed"]) == (0.0, None)


def test_seeds_are_keyed_and_fit() -> None:
    seeds = [row_seed(seed, draw, sample) for seed in range(3) for draw in range(3) for sample in range(3)]
    assert len(set(seeds)) == 27 and all(0 <= seed < 2**63 for seed in seeds)
    assert rollout_seed(0, [1, 2]) != rollout_seed(0, [1, 3]) and rollout_seed(0, [1, 2]) == rollout_seed(0, [1, 2])


def test_text_is_read_only_where_it_has_to_be() -> None:
    assert not needs_tokenizer(stop=(), bad_words=(), structured=None)
    assert needs_tokenizer(stop=("a",), bad_words=(), structured=None)
    assert needs_tokenizer(stop=(), bad_words=("a",), structured=None) and needs_tokenizer(stop=(), bad_words=(), structured={"regex": "a"})


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingSettings)])
def test_no_key_is_accepted_and_ignored(kit, name: str) -> None:
    """What vLLM is asked is another with each. A form goes along with its row, made where vLLM is there; that text is read for it is seen here."""

    def asked(**changes) -> object:
        settings = SamplingSettings(**{"max_new_tokens": 8, "seed": 0, **changes})
        shared = arguments(settings, (2, 7), kit.build_tokenizer(12), FIELDS)
        row = of_row(shared, settings, draw=0, sample=0, done=0, limit=settings.max_new_tokens, seeded=True, greedy=False)
        return row, settings.structured and needs_tokenizer(stop=(), bad_words=(), structured=settings.structured)

    if name in REFUSED:
        with pytest.raises(UsageError):
            asked(**{name: CHANGED[name]})
    else:
        assert asked(**{name: CHANGED[name]}) != asked()

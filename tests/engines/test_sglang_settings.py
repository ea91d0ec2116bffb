"""A recipe's sampling in SGLang's words: every key arrives, and what SGLang does not do, or does in another way, is refused."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from rftcli.engines.sglang_settings import arguments, needs_tokenizer, of_row
from rftcli.errors import UsageError
from rftcli.types import SamplingSettings

CHANGED = {
    "max_new_tokens": 9, "seed": 4, "min_new_tokens": 3, "temperature": 0.5, "first_token_temperature": 3.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
    "stop": ("x",), "stop_token_ids": (9,), "ignore_eos": True, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
    "logit_bias": {"4": 1.5}, "bad_words": ("sun",), "structured": {"regex": "a+"}, "options": {"typical_p": 0.9}, "logprobs": True,
}  # fmt: skip
REFUSED = ("first_token_temperature", "options", "bad_words", "repetition_penalty")


def found(kit, **changes) -> dict:
    return arguments(SamplingSettings(**{"max_new_tokens": 8, "seed": 0, **changes}), (2, 7), kit.build_tokenizer(12))


def test_plain_sampling_leaves_everything_off(kit) -> None:
    plain = found(kit)
    assert (plain["temperature"], plain["top_p"], plain["top_k"], plain["min_p"], plain["repetition_penalty"]) == (1.0, 1.0, -1, 0.0, 1.0)
    assert [plain[name] for name in ("logit_bias", "stop", "regex", "json_schema")] == [None] * 4
    assert (plain["max_new_tokens"], plain["min_new_tokens"], plain["ignore_eos"], plain["no_stop_trim"]) == (8, 0, False, True)


def test_the_trainers_end_tokens_end_completions_too(kit) -> None:
    assert found(kit)["stop_token_ids"] == [2, 7] and found(kit, stop_token_ids=(9, 2))["stop_token_ids"] == [2, 7, 9]
    off = found(kit, ignore_eos=True)
    assert off["stop_token_ids"] is None and off["ignore_eos"] is True


def test_every_key_arrives(kit) -> None:
    made = found(
        kit, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=0.2, frequency_penalty=0.3, logit_bias={"4": 1.5}, stop=("x", ""),
    )  # fmt: skip
    assert (made["temperature"], made["top_p"], made["top_k"], made["min_p"]) == (0.7, 0.9, 5, 0.1)
    assert (made["presence_penalty"], made["frequency_penalty"], made["logit_bias"], made["stop"]) == (0.2, 0.3, {"4": 1.5}, ["x"])
    assert found(kit, min_new_tokens=3)["min_new_tokens"] == 3 and found(kit, structured={"regex": "a+"})["regex"] == "a+"
    assert json.loads(found(kit, structured={"json_schema": {"type": "object"}})["json_schema"]) == {"type": "object"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"typical_p": 0.9}}, "no sampling option `typical_p`"),
        ({"bad_words": ("sun",)}, "it has no `bad_words`"),
        ({"first_token_temperature": 3.0}, "one temperature for a whole completion"),
        ({"repetition_penalty": 1.1}, "counts a repetition penalty over the completion alone"),
        ({"ignore_eos": True, "stop_token_ids": (3,)}, "ignores `stop_token_ids` together with `ignore_eos`"),
        ({"stop": ("x",), "min_new_tokens": 2}, "ends at a stop string before `min_new_tokens`"),
        *(({"logprobs": True, **one}, "from before top-p, top-k and min-p") for one in ({"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1})),
        ({"logit_bias": {"99": 1.0}}, "there is no token 99"),
    ],
)
def test_refusals(kit, changes: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        found(kit, **changes)


def test_a_row_that_goes_on_has_less_left_and_other_noise() -> None:
    settings = SamplingSettings(max_new_tokens=8, min_new_tokens=3, seed=1)
    first = of_row({"top_k": 4}, settings, draw=5, sample=0, done=0, limit=8, seeded=True, greedy=False)
    later = of_row({"top_k": 4}, settings, draw=5, sample=0, done=5, limit=8, seeded=True, greedy=False)
    cut = of_row({"top_k": 4}, settings, draw=5, sample=0, done=1, limit=2, seeded=True, greedy=False)
    assert (cut["max_new_tokens"], cut["min_new_tokens"]) == (1, 1)
    assert (first["max_new_tokens"], first["min_new_tokens"], later["max_new_tokens"], later["min_new_tokens"]) == (8, 3, 3, 0)
    assert first["sampling_seed"] != later["sampling_seed"] and first["top_k"] == 4 and 0 <= first["sampling_seed"] < 2**63
    assert "sampling_seed" not in of_row({}, settings, draw=5, sample=0, done=0, limit=8, seeded=False, greedy=False)
    assert of_row({"temperature": 1.0}, settings, draw=5, sample=-1, done=0, limit=8, seeded=False, greedy=True)["temperature"] == 0.0


def test_text_is_read_only_where_it_has_to_be() -> None:
    assert not needs_tokenizer(stop=False, structured=None, least=[0, 0])
    assert needs_tokenizer(stop=True, structured=None, least=[]) and needs_tokenizer(stop=False, structured={"regex": "a"}, least=[])
    assert needs_tokenizer(stop=False, structured=None, least=[0, 2])


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingSettings)])
def test_no_key_is_accepted_and_ignored(kit, name: str) -> None:
    """What SGLang is asked is another with each."""

    def asked(**changes) -> object:
        settings = SamplingSettings(**{"max_new_tokens": 8, "seed": 0, **changes})
        shared = arguments(settings, (2, 7), kit.build_tokenizer(12))
        row = of_row(shared, settings, draw=0, sample=0, done=0, limit=settings.max_new_tokens, seeded=True, greedy=False)
        return row, settings.logprobs  # which are asked for beside the parameters

    if name in REFUSED:
        with pytest.raises(UsageError):
            asked(**{name: CHANGED[name]})
    else:
        assert asked(**{name: CHANGED[name]}) != asked()

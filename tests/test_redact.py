"""Secrets do not get into what is written; ordinary words do."""

from __future__ import annotations

import doctest

import pytest

from rftcli import redact
from rftcli.redact import is_secret_name, known_values, redacted, redacted_arguments, redacted_text


def test_docstring_examples() -> None:
    assert doctest.testmod(redact).failed == 0 and doctest.testmod(redact).attempted > 0


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "token", "db.password", "AWS_SECRET", "Authorization", "my-cookie", "credentials"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["max_new_tokens", "keys", "monkey", "tokenizer", "key_count", "stop_token_ids", "WANDB_PROJECT"])
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


def test_values_of_the_environment() -> None:
    values = known_values({"A_TOKEN": "abcdefgh", "B_KEY": "abcdefghij", "C_KEY": "short", "HOME": "/home/somebody"})
    assert values == ["abcdefghij", "abcdefgh"]  # the longer one first, or its rest would stay
    assert redacted_text("1 abcdefghij 2 abcdefgh short /home/somebody", values) == "1 *** 2 *** short /home/somebody"
    assert redacted({"a": ["x abcdefgh"], "api_key": "y", "n": 3}, values) == {"a": ["x ***"], "api_key": "***", "n": 3}


def test_command_lines() -> None:
    given = ["rft", "train", "--set", "a.api_key=abc", "--set", "s={token: 'abc d', url: 'http://me:abc@host', n: 4}", "--password", "abc", "--quiet"]
    assert redacted_arguments(given) == [
        "rft", "train", "--set", "a.api_key=***", "--set", "s={token: ***, url: 'http://***@host', n: 4}", "--password", "***", "--quiet",
    ]  # fmt: skip
    harmless = ["--set", "rollout.stop_token_ids=[1]", "--token", "--quiet"]
    assert redacted_arguments(harmless) == harmless

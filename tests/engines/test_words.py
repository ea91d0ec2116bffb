"""Words to token ids, with a tokenizer of words and with byte-level pieces."""

import pytest

from rftcli.builtin import builtin_path
from rftcli.engines.words import banned_sequences, bias_ids
from rftcli.errors import UsageError
from rftcli.models.load import load_tokenizer


@pytest.fixture(scope="module")
def characters():
    """The quickstart tokenizer: byte-level, one piece a character, and `####`."""
    return load_tokenizer(str(builtin_path("quickstart")))


def pieces(tokenizer, *texts):
    return tuple(tokenizer.convert_tokens_to_ids(list(texts)))


def test_a_bias_by_id_and_by_text(kit, characters):
    assert bias_ids({"5": 1.0, "sun": -2.0}, kit.build_tokenizer(12)) == {5: 1.0, kit.SUN: -2.0}
    (hashes,) = pieces(characters, "####")
    assert bias_ids({"####": 3.0, "=": -1.0}, characters) == {hashes: 3.0, pieces(characters, "=")[0]: -1.0}


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"ab": 1.0}, "`ab` is not one token but 2"),
        ({"262": 1.0}, "there is no token 262"),
        ({"####": 1.0, "260": 2.0}, "`260` is token 260, which has a bias already"),
    ],
)
def test_a_bias_that_names_no_token(characters, bias, message):
    with pytest.raises(UsageError, match=message):
        bias_ids(bias, characters)


def test_a_text_that_only_the_unknown_token_stands_for(kit):
    with pytest.raises(UsageError, match="no token is `moon`"):
        bias_ids({"moon": 1.0}, kit.build_tokenizer(12))
    with pytest.raises(UsageError, match="no tokens for `moon`"):
        banned_sequences(["moon"], kit.build_tokenizer(12))


def test_a_word_is_a_sequence(kit, characters):
    assert banned_sequences(["sun"], kit.build_tokenizer(12)) == ((kit.SUN,),)
    assert banned_sequences(["no"], characters) == (pieces(characters, "n", "o"),)  # after a space it is the same, with the space before it
    assert banned_sequences(["####"], characters) == ((260,), (261,))  # of its own, and with the space in front
    assert banned_sequences(["no", "=", "no"], characters) == (pieces(characters, "n", "o"), pieces(characters, "="))


def test_a_word_after_a_space_has_pieces_of_its_own():
    """As in most byte-pair vocabularies: `sun` and ` sun` are two tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"s": 0, "u": 1, "n": 2, "Ġ": 3, "su": 4, "sun": 5, "Ġsun": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("s", "u"), ("su", "n"), ("Ġ", "sun")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert banned_sequences(["sun"], PreTrainedTokenizerFast(tokenizer_object=tokenizer)) == ((5,), (6,))

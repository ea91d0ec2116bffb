r"""The rule `instructions`: does an answer follow instructions that a program can check? Names and arguments are IFEval's (arXiv:2311.07911).

A row brings its own (columns `instruction_id_list` and `kwargs`, as IFEval data has them), or the option `checks` lists the same for all rows:
[{id: "length_constraints:number_words", num_words: 50, relation: "at least"}, ...]. The part before the colon may be left out.

Words are those of `words`; sentences end at . ! ? and their full-width forms; paragraphs are parted by `***` where the instruction says so, else by
blank lines. Language needs the package langdetect.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rftcli.rewards.inputs import RuleInput, cut_after
from rftcli.rewards.json_form import MISSING, read_json
from rftcli.rewards.words import words

INSTALL = "pip install 'rftcli[instructions]'"
RELATIONS = ("less than", "at least", "at most", "exactly")
Given = Mapping[str, Any]
Check = Callable[[str, Given], bool]


def instructions(item: RuleInput, *, checks: Sequence[Mapping[str, Any]] | None = None, partial: bool = False, after: str | None = None) -> float:
    """1 if every instruction is followed; with `partial` the share that is. An empty answer follows none. ValueError for a row without instructions,
    or with one that is not known or lacks an argument."""
    wanted = read_checks(item.columns if checks is None else checks)
    text = cut_after(item.text, after)
    if text is None or not text.strip():
        return 0.0
    followed = [CHECKS[name].follows(text, given) for name, given in wanted]
    return sum(followed) / len(followed) if partial else float(all(followed))


def read_checks(source: Any) -> list[tuple[str, Given]]:
    """(name, arguments) of a row's columns, or of the option. ValueError, naming what is wrong."""
    if isinstance(source, Mapping):
        ids, arguments = source.get("instruction_id_list"), source.get("kwargs")
        if not isinstance(ids, Sequence) or isinstance(ids, str) or not isinstance(arguments, Sequence) or len(ids) != len(arguments):
            raise ValueError("the row has no columns `instruction_id_list` and `kwargs` of equal length")
        each = zip(ids, arguments, strict=True)
        pairs = [(str(name), {key: value for key, value in (given or {}).items() if value is not None}) for name, given in each]
    else:
        pairs = [(str(check.get("id")), {key: value for key, value in check.items() if key != "id"}) for check in source]
    if not pairs:
        raise ValueError("the list of instructions is empty")
    return [_known(name, given) for name, given in pairs]


def _known(written: str, given: Given) -> tuple[str, Given]:
    name = written.rpartition(":")[2]
    if name not in CHECKS:
        raise ValueError(f"there is no instruction `{written}`; known: {', '.join(sorted(CHECKS))}")
    missing = sorted(CHECKS[name].arguments - set(given))
    if missing:
        raise ValueError(f"the instruction `{written}` needs {', '.join(f'`{argument}`' for argument in missing)}")
    for argument, value in given.items():
        if argument.endswith("relation") and value not in RELATIONS:
            raise ValueError(f"the instruction `{written}`: `{argument}` is one of {', '.join(RELATIONS)}, got {value!r}")
    if name == "response_language" and importlib.util.find_spec("langdetect") is None:
        raise ValueError(f"the instruction `{written}` needs the package langdetect: {INSTALL}")
    return name, given


def compared(count: int, relation: str, wanted: int) -> bool:
    """
    >>> compared(3, "less than", 3), compared(3, "at least", 3), compared(3, "at most", 3), compared(4, "exactly", 3)
    (False, True, True, False)
    """
    return {"less than": count < wanted, "at least": count >= wanted, "at most": count <= wanted, "exactly": count == wanted}[relation]


def _contains(text: str, phrase: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


def _keyword_count(text: str, given: Given) -> bool:
    found = len(re.findall(rf"(?<!\w){re.escape(given['keyword'])}(?!\w)", text, re.IGNORECASE))
    return compared(found, given.get("relation", "at least"), given["frequency"])


def _letters(text: str, given: Given) -> bool:
    return compared(text.casefold().count(given["letter"].casefold()), given.get("let_relation", "at least"), given["let_frequency"])


def _language(text: str, given: Given) -> bool:
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0  # the same text, the same verdict
    try:
        return detect(text).partition("-")[0] == str(given["language"]).partition("-")[0]
    except LangDetectException:  # nothing in it that has a language
        return False


def sentences(text: str) -> int:
    """
    >>> sentences("One. Two! 3.5 is no end? 是的。"), sentences("no end")
    (4, 1)
    """
    return len([piece for piece in re.split(r"(?<=[.!?])[\"'”’)\]*_]*\s+|(?<=[。！？])", text) if words(piece)])


def _paragraphs(text: str, given: Given) -> bool:
    pieces = re.split(r"\s?\*\*\*\s?", text.strip())
    return all(piece.strip() for piece in pieces) and len(pieces) == given["num_paragraphs"]


def _first_word(text: str, given: Given) -> bool:
    pieces = [piece for piece in re.split(r"\n\s*\n", text) if piece.strip()]
    place = given["nth_paragraph"]
    if len(pieces) != given["num_paragraphs"] or not 1 <= place <= len(pieces):
        return False
    return (words(pieces[place - 1]) or [""])[0].casefold() == given["first_word"].casefold()


def _postscript(text: str, given: Given) -> bool:
    marker = given["postscript_marker"]
    pattern = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}.get(marker, re.escape(marker))
    return re.search(rf"(?<!\w){pattern}.*\S", text, re.IGNORECASE | re.DOTALL) is not None


def _bullets(text: str, given: Given) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!-)|•)[ \t]*\S", text, re.MULTILINE)) == given["num_bullets"]


def _highlights(text: str, given: Given) -> bool:
    bold = re.findall(r"\*\*[^\n*]*\S[^\n*]*\*\*", text)
    single = re.findall(r"(?<!\*)\*(?![*\s])[^\n*]+\*(?!\*)", re.sub(r"\*\*[^\n*]*\*\*", " ", text))
    return len(bold) + len(single) >= given["num_highlights"]


def _sections(text: str, given: Given) -> bool:
    return len(re.findall(rf"(?<!\w){re.escape(given['section_spliter'])}\s?\d+", text)) >= given["num_sections"]


def _json(text: str, given: Given) -> bool:
    return read_json(text, fence=True) is not MISSING


def _two_responses(text: str, given: Given) -> bool:
    pieces = [piece.strip() for piece in re.split(r"\*{6,}", text)]
    pieces = pieces[(not pieces[0]) : len(pieces) - (not pieces[-1])]
    return len(pieces) == 2 and all(pieces) and pieces[0] != pieces[1]


def _capital_words(text: str, given: Given) -> bool:
    capital = [word for word in words(text) if word.isupper()]
    return compared(len(capital), given.get("capital_relation", "at least"), given["capital_frequency"])


def _quoted(text: str, given: Given) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _cased(upper: bool) -> Check:
    return lambda text, given: text.isupper() if upper else text.islower()


class Known:
    """An instruction: its check, and the arguments it cannot do without."""

    def __init__(self, follows: Check, *arguments: str) -> None:
        self.follows, self.arguments = follows, frozenset(arguments)


# How to add one: a function (text, arguments) -> bool and a row here.
CHECKS: dict[str, Known] = {
    "existence": Known(lambda text, given: all(_contains(text, word) for word in given["keywords"]), "keywords"),
    "forbidden_words": Known(lambda text, given: not any(_contains(text, word) for word in given["forbidden_words"]), "forbidden_words"),
    "frequency": Known(_keyword_count, "keyword", "frequency"),
    "letter_frequency": Known(_letters, "letter", "let_frequency"),
    "response_language": Known(_language, "language"),
    "number_words": Known(lambda text, given: compared(len(words(text)), given.get("relation", "at least"), given["num_words"]), "num_words"),
    "number_sentences": Known(
        lambda text, given: compared(sentences(text), given.get("relation", "at least"), given["num_sentences"]), "num_sentences"
    ),
    "number_paragraphs": Known(_paragraphs, "num_paragraphs"),
    "nth_paragraph_first_word": Known(_first_word, "num_paragraphs", "nth_paragraph", "first_word"),
    "number_placeholders": Known(lambda text, given: len(re.findall(r"\[[^\[\]\n]+\]", text)) >= given["num_placeholders"], "num_placeholders"),
    "postscript": Known(_postscript, "postscript_marker"),
    "number_bullet_lists": Known(_bullets, "num_bullets"),
    "constrained_response": Known(lambda text, given: any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))),
    "number_highlighted_sections": Known(_highlights, "num_highlights"),
    "multiple_sections": Known(_sections, "section_spliter", "num_sections"),
    "json_format": Known(_json),
    "title": Known(lambda text, given: re.search(r"<<[^<>\n]*[^<>\s][^<>\n]*>>", text) is not None),
    "two_responses": Known(_two_responses),
    "repeat_prompt": Known(
        lambda text, given: text.strip().casefold().startswith(given["prompt_to_repeat"].strip().casefold()), "prompt_to_repeat"
    ),
    "end_checker": Known(
        lambda text, given: text.strip().strip('"').rstrip().casefold().endswith(given["end_phrase"].strip().casefold()), "end_phrase"
    ),
    "capital_word_frequency": Known(_capital_words, "capital_frequency"),
    "english_capital": Known(_cased(True)),
    "english_lowercase": Known(_cased(False)),
    "no_comma": Known(lambda text, given: "," not in text),
    "quotation": Known(_quoted),
}


def check_instructions(options: Mapping[str, Any]) -> list[str]:
    if options["checks"] is None:
        return []
    if not all(isinstance(check, Mapping) and "id" in check for check in options["checks"]):
        return ["option `checks` is a list of mappings with an `id`"]
    try:
        read_checks(options["checks"])
    except ValueError as error:
        return [f"option `checks`: {error}"]
    return []

"""What a completion answers, as a key for votes: two completions with the same key gave the same answer.

The first weighted part of a label whose rule reads an answer says where it stands; its options are used. A label without such a part does not vote.
Leaves out the vote (`algo.votes`) and whether an answer is right (the rules).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rftcli.rewards import mathtext, rules, simple
from rftcli.rewards.choice import chosen_letters
from rftcli.rewards.find_answer import find_answer
from rftcli.rewards.inputs import cut_after
from rftcli.rewards.spec import DEFAULT_LABEL, PartSpec
from rftcli.types import Completion


def math_key(text: str, options: Mapping[str, Any]) -> str | None:
    r"""The number that the answer stands for, exactly, else its text without decoration. Algebra is not asked: x+1 and 1+x are two answers.

    >>> math_key(r"so \boxed{\frac{1}{2}}", {}), math_key("#### 0.5", {}), math_key("none", {})
    ('1/2', '1/2', None)
    """
    found = find_answer(text, options.get("read", rules.READ))
    if found is None:
        return None
    answer = mathtext.read(found)
    return mathtext.text_key(answer.text) or None if answer.number is None else str(answer.number)


def exact_key(text: str, options: Mapping[str, Any]) -> str | None:
    """The text as `exact` compares it; an empty one is no answer."""
    return simple.normal(text, options["strip"], options["casefold"], options["whitespace"]) or None


def regex_key(text: str, options: Mapping[str, Any]) -> str | None:
    """What the group finds. None without a match, and over the time limit."""
    wanted = ("pattern", "dotall", "ignore_case", "full", "time_limit_seconds")
    try:
        match = simple.last_match(text.strip(), **{name: options[name] for name in wanted})
    except TimeoutError:
        return None
    found = None if match is None else match[options["group"]]
    return found.strip() or None if found is not None else None


def choice_key(text: str, options: Mapping[str, Any]) -> str | None:
    """The letters in order."""
    letters = chosen_letters(text, options["choices"], options["several"])
    return None if letters is None else "".join(sorted(letters))


# How to add one: a function (text after `after`, all options of the rule) -> key or None, and a row here.
READERS: dict[str, Callable[[str, Mapping[str, Any]], str | None]] = {
    "choice": choice_key,
    "exact": exact_key,
    "math_answer": math_key,
    "regex": regex_key,
}


def reading_part(parts: Iterable[PartSpec]) -> PartSpec | None:
    """The part that says what the answer is; None: there is none. A `regex` reads one only with a `group`."""
    for part in parts:
        if part.kind == "rule" and part.weight and part.target in READERS and (part.target != "regex" or part.options.get("group") is not None):
            return part
    return None


def reads_answers(parts: Iterable[PartSpec]) -> bool:
    return reading_part(parts) is not None


class Answers:
    """Reads answers by label. `score_prefill`: the prefill is part of the answer, as it is for rewards."""

    def __init__(self, labels: Mapping[str, Iterable[PartSpec]], *, score_prefill: bool) -> None:
        self._parts = {label: reading_part(parts) for label, parts in labels.items()}
        self._score_prefill = score_prefill

    def votes(self, label: str) -> bool:
        """Whether completions of the label have answers that can be counted."""
        return self._part(label) is not None

    def read(self, completion: Completion) -> str | None:
        """The key of its answer; None where it has none, or its label does not vote."""
        part = self._part(completion.prompt.label)
        if part is None:
            return None
        options = {**rules.RULES[part.target].options, **part.options}
        text = completion.text if part.text == "clean" else completion.text_with_special
        tail = cut_after(completion.prompt.prefill + text if self._score_prefill else text, options["after"])
        return None if tail is None else READERS[part.target](tail, options)

    def _part(self, label: str) -> PartSpec | None:
        return self._parts[label] if label in self._parts else self._parts.get(DEFAULT_LABEL)

"""The light rules: exact, regex, think_format, length, overlong, and the checks of their options.

Leaves out the table that names them (`rules`) and everything that needs a helper process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import regex as regular_expressions  # its searches take a time limit and let other threads run

from rftcli.algo.shaping import overlong_penalty
from rftcli.rewards.inputs import RuleInput, cut_after, references
from rftcli.rewards.rules import check_time_limit


def exact(item: RuleInput, *, after: str | None = None, strip: bool = True, casefold: bool = False, whitespace: bool = False) -> float:
    """1 if the text equals the reference, or one of a list of references. Both sides are normalised alike: `strip` the ends, `casefold`, and
    `whitespace`: runs of it are one space. ValueError without a reference."""
    golds = {normal(gold, strip, casefold, whitespace) for gold in references(item.reference)}
    text = cut_after(item.text, after)
    return float(text is not None and normal(text, strip, casefold, whitespace) in golds)


def normal(text: str, strip: bool, casefold: bool, whitespace: bool) -> str:
    """A text as `exact` compares it."""
    text = " ".join(text.split()) if whitespace else text
    text = text.strip() if strip else text
    return text.casefold() if casefold else text


def regex(
    item: RuleInput,
    *,
    pattern: str,
    dotall: bool = True,
    ignore_case: bool = False,
    full: bool = False,
    group: str | int | None = None,
    after: str | None = None,
    time_limit_seconds: float = 5.0,
) -> float:
    r"""1 if `pattern` is found in the text, white space at its ends aside. `full`: it must match all of it. `group`: 1 if that group of the last
    match equals the reference or one of them. `dotall` is on, since answers have many lines: `.` matches line ends too.

    TimeoutError over the time limit, which is there because a pattern may backtrack without end on some answer; ValueError for a `group` without a
    reference.
    """
    golds = set() if group is None else {gold.strip() for gold in references(item.reference)}
    text = cut_after(item.text, after)
    if text is None:
        return 0.0
    text = text.strip()
    if group is None and not full:
        match = _compile(pattern, dotall, ignore_case).search(text, timeout=time_limit_seconds)
    else:
        match = last_match(text, pattern, dotall=dotall, ignore_case=ignore_case, full=full, time_limit_seconds=time_limit_seconds)
    if match is None:
        return 0.0
    return 1.0 if group is None else float(match[group] is not None and match[group].strip() in golds)


def think_format(item: RuleInput, *, tag: str = "think", answer_tag: str | None = None) -> float:
    """1 if the text is `<think>..</think>` and then an answer that is not empty, each tag exactly once, white space and line ends anywhere around
    them. With `answer_tag`, the answer must stand in that pair of tags, once and with nothing behind it."""
    text = item.text.strip()
    parts = _tagged(text, tag)
    if parts is None:
        return 0.0
    answer = parts[1].strip()
    if answer_tag is not None:
        inner = _tagged(answer, answer_tag)
        if inner is None or inner[1] or f"<{answer_tag}>" in parts[0] or f"</{answer_tag}>" in parts[0]:
            return 0.0
        answer = inner[0].strip()
    return float(bool(answer))


def _tagged(text: str, tag: str) -> tuple[str, str] | None:
    """(what is inside, what follows) `<tag>..</tag>` at the very start of `text`; None if it is not there or a tag comes twice."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    if not text.startswith(opening) or text.count(opening) != 1 or text.count(closing) != 1:
        return None
    inside, _, behind = text.removeprefix(opening).partition(closing)
    return inside, behind


def length(item: RuleInput, *, target: int, limit: int, reverse: bool = False) -> float:
    """1 up to `target` tokens, falling in a straight line to 0 at `limit`. `reverse`: 0 up to `target`, rising to 1 at `limit`."""
    short = min(1.0, max(0.0, (limit - item.tokens) / (limit - target)))
    return 1.0 - short if reverse else short


def overlong(item: RuleInput, *, limit: int, buffer: int) -> float:
    """0 up to limit - buffer tokens, falling in a straight line to -1 at `limit` (DAPO, arXiv:2503.14476)."""
    return overlong_penalty(item.tokens, limit, buffer)


def check_overlong(options: Mapping[str, Any]) -> list[str]:
    limit, buffer = options["limit"], options["buffer"]
    return [] if 0 < buffer <= limit else [f"options `buffer` and `limit` must satisfy 0 < buffer <= limit, got {buffer} and {limit}"]


def check_regex(options: Mapping[str, Any]) -> list[str]:
    try:
        compiled = _compile(options["pattern"], options["dotall"], options["ignore_case"])
    except regular_expressions.error as error:
        return [f"option `pattern` is not a regular expression: {error}"]
    if problems := check_time_limit(options):
        return problems
    group = options["group"]
    if group is None or group in compiled.groupindex or (isinstance(group, int) and 0 <= group <= compiled.groups):
        return []
    names = f" (named {', '.join(compiled.groupindex)})" if compiled.groupindex else ""
    return [f"option `group`: the pattern has no group `{group}`, its number of groups is {compiled.groups}{names}"]


def check_length(options: Mapping[str, Any]) -> list[str]:
    target, limit = options["target"], options["limit"]
    return [] if 0 <= target < limit else [f"options `target` and `limit` must satisfy 0 <= target < limit, got {target} and {limit}"]


def check_tags(options: Mapping[str, Any]) -> list[str]:
    given = {name: options[name] for name in ("tag", "answer_tag") if options[name] is not None}
    problems = [f"option `{name}` is the bare name of a tag, such as `think`, got `{tag}`" for name, tag in given.items() if not tag.isidentifier()]
    return problems or (["options `tag` and `answer_tag` must differ"] if options["tag"] == options["answer_tag"] else [])


def last_match(text: str, pattern: str, *, dotall: bool, ignore_case: bool, full: bool, time_limit_seconds: float) -> Any:
    """What a `regex` with a group looks at: the match of the whole text if `full`, else the last one; None where there is none."""
    compiled = _compile(pattern, dotall, ignore_case)
    if full:
        return compiled.fullmatch(text, timeout=time_limit_seconds)
    return next(iter(deque(compiled.finditer(text, timeout=time_limit_seconds), maxlen=1)), None)


def _compile(pattern: str, dotall: bool, ignore_case: bool) -> regular_expressions.Pattern[str]:
    flags = (regular_expressions.DOTALL if dotall else 0) | (regular_expressions.IGNORECASE if ignore_case else 0)
    return regular_expressions.compile(pattern, flags)

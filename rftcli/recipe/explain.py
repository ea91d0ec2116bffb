"""`rft explain`: what a key takes, its default, its meaning and its rules, or what a rule says. Everything comes from `sections` and `rules`.

Estimators, losses and other kinds have pages of their own (`methods`), and so have presets (`presets`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rftcli.errors import UsageError
from rftcli.recipe.finding import REQUIRED, RewardRule
from rftcli.recipe.kinds import ANY_KEY, Key, Kind, fields_of, key_table, keys, pattern_of, show_pattern
from rftcli.recipe.layers import preset_names, shipped_recipes
from rftcli.recipe.methods import FAMILIES, NEEDED_WORD, family_of, method_page, named, rule_notes, unknown_name
from rftcli.recipe.names import OTHER_NAMES, SURE, closest, either
from rftcli.recipe.not_yet import VALUES, key_reason
from rftcli.recipe.paths import parse_path
from rftcli.recipe.presets import PREFIX, preset_page
from rftcli.recipe.rules import RULES
from rftcli.recipe.schema import as_yaml, default_of
from rftcli.recipe.sections import Recipe
from rftcli.recipe.sections.loss import OPTION_MEANINGS

MOST_MEANT = 8
"""Keys that a hint lists."""
RULES_TOPIC = "rules"
"""Lists the reward rules, as the key that takes their names does."""
RULE_KEY = ("rewards", ANY_KEY, "parts", ANY_KEY, "rule")
RULE_PREFIX = "rule:"
RULE_OPTIONS_KEY = (*RULE_KEY[:-1], "options")
LOSS_OPTIONS_KEY = ("algorithm", "loss", "options")


Metrics = Mapping[str, tuple[str, Sequence[tuple[str, str]]]]
"""Name of a metric of a run, `pass@k` among them -> (what it is, rows of what else there is to say)."""


def explain(
    path_or_code: str | None = None, rules: Mapping[str, RewardRule] | None = None, warnings: Mapping[str, str] | None = None,
    metrics: Metrics | None = None,
) -> str:  # fmt: skip
    """The explanation of a key (`rollout.temperature`, `data.train[0].path`, `rewards.math`), of a rule's code (`group-of-one`), or of one of the
    reward `rules`, by name (`exact`, `rule:exact`), of a preset (`preset:dapo`), or of a kind (`loss:gspo`, see `methods`), or of one
    of a run's `warnings`, by its code, or of its `metrics`; None: the sections of a recipe and what else there are pages of.

    Raises UsageError with the nearest names if there is no such key or rule.
    """
    rules, warnings, metrics = rules or {}, warnings or {}, metrics or {}
    if path_or_code is None:
        presets = f"presets: {', '.join(preset_names(shipped_recipes()))}. `rft explain {PREFIX}NAME` says more."
        sections = _members(Kind(section=Recipe), ())
        kinds = "".join(f"  {name}:NAME  {', '.join(family.names)}\n" for name, family in FAMILIES.items())
        shown = f"  rule:NAME  {', '.join(rules)}\n" if rules else ""
        shown += f"  METRIC  {', '.join(metrics)}\n" if metrics else ""
        return f"{_page('A recipe', 'What a person wants, whole. `rft explain KEY` says more.', [], sections)}\n  {presets}\n\n{kinds}{shown}"
    if path_or_code in (RULES_TOPIC, RULES_TOPIC.removesuffix("s")):
        path_or_code = show_pattern(RULE_KEY)
    if path_or_code.startswith(PREFIX):
        return preset_page(path_or_code.removeprefix(PREFIX))
    prefix, colon, name = path_or_code.partition(":")
    if colon and prefix in FAMILIES:
        return method_page(prefix, name)
    if path_or_code.startswith(RULE_PREFIX):
        return _named_rule(name, rules)
    if colon and prefix.isidentifier():
        raise unknown_name(path_or_code)
    if path_or_code in RULES:
        return _rule(path_or_code)
    if path_or_code in CODES:
        return _page(path_or_code, CODES[path_or_code], [], [])
    metric = _metric(path_or_code, metrics)
    if path_or_code in warnings:
        return _page(f"warning {path_or_code}", warnings[path_or_code], [], []) + (f"\n{metric}" if metric else "")
    if metric is not None:
        return metric
    try:
        pattern = _lenient(path_or_code)
    except ValueError as error:
        raise UsageError(f"`{path_or_code}` is neither a key nor a rule: {error.args[0]}") from error
    for end in range(len(pattern), 0, -1):
        reason = key_reason(pattern[:end])
        if reason is not None:
            return f"{show_pattern(pattern)}\n\n  Not yet supported: {reason}.\n"
    if pattern == RULE_KEY:
        return _key(key_table()[pattern], [(name, rule.summary) for name, rule in rules.items()])
    if pattern == LOSS_OPTIONS_KEY:
        return _key(key_table()[pattern], [(name, f"{kind}: {text}") for kind, own in OPTION_MEANINGS.items() for name, text in own.items()])
    if pattern in key_table():
        return _key(key_table()[pattern], [])
    if path_or_code in rules:
        return _reward_rule(path_or_code, rules[path_or_code])
    above = key_table().get(pattern[:-1])
    inner = None if above is None or pattern[-1] != ANY_KEY else above.kind.items or above.kind.values
    if inner is None or inner.section is None:
        raise _unknown(path_or_code, pattern, rules, [*warnings, *metrics])
    return _page(show_pattern(pattern), str(inner.section.__doc__), _laid_on(inner), _members(inner, pattern))


CODES: dict[str, str] = {
    "yaml": "The text is not YAML as recipes use it: one document of mappings, lists and values, without tags, in UTF-8.",
    "duplicate-key": "A key stands twice in one mapping, so that one of the two values would be lost.",
    "unknown-key": "The key does not exist in this section.",
    "missing-key": "A key without a default is not written.",
    "wrong-value": "The value is not of the kind or in the range that the key takes.",
    "unknown-value": "The value is none of the words that the key takes.",
    "not-yet-supported": "The language has this key or value, this version does not.",
    "empty-value": "Nothing stands behind a key where null would remove what a parent recipe wrote or switch something off: an unfinished line "
    "should do neither.",
    "variable": "A `${VAR}` names a variable of the environment that is not set, or no variable.",
    "bad-extends": "A recipe that is built on cannot be read, or is built on this one.",
    "bad-set": "A `--set` is not of the form PATH=VALUE, or its path leads nowhere. A mapping is merged into what the recipe has there, a list "
    "takes its place, null takes it out.",
    "no-recipe": "The recipe's file cannot be read.",
}
"""Code of a problem that is no rule's -> what it says. Those of rules are in `rules.RULES`."""


def _lenient(text: str) -> tuple[str, ...]:
    """The pattern meant by a path or pattern: an index may be missing, `[]` or a number."""
    given = pattern_of(parse_path(text.replace("[]", "[0]")))
    pieces: list[str] = []
    for piece in given:
        above = key_table().get(tuple(pieces))
        if above is not None and above.kind.items is not None and above.kind.items.section is not None:
            pieces.append(ANY_KEY)
            if piece == ANY_KEY or piece.isdecimal():
                continue
        pieces.append(piece)
    return tuple(pieces)


def _key(key: Key, values: list[tuple[str, str]]) -> str:
    """`values`: what it may be, and what each means, where `sections` does not say."""
    kind = key.kind
    rows: list[tuple[str, str]] = []
    inner = kind.items or kind.values
    if kind.section is None or kind.null:
        rows.append(("takes", ", ".join((kind.words(), *kind.bounds, *(f"each {bound}" for bound in (inner.bounds if inner else ()))))))
    if key.info.is_required():
        rows.append(("default", "none: the key is needed"))
    elif kind.section is None or kind.null:
        rows.append(("default", as_yaml(default_of(key.info))))
    prefix = family_of(tuple(key.pieces))
    rows += [("pages", f"`rft explain {prefix}:NAME` of each")] if prefix is not None else []
    rows += [("pages", f"`rft explain {RULE_PREFIX}NAME` has those of a rule")] if tuple(key.pieces) == RULE_OPTIONS_KEY else []
    rows += _laid_on(kind)
    later = VALUES.get(key.pattern, {})
    rows += [("not yet", ", ".join(later))] if later else []
    rows += [("rule", f"{code}: {rule.text}") for code, rule in RULES.items() if key.pattern in rule.about]
    return _page(key.pattern, str(key.info.description), rows, values or _members(kind, key.pieces))


def _laid_on(kind: Kind) -> list[tuple[str, str]]:
    """What a value does to one that is written already, with `--set` and with `extends`."""
    if kind.section is not None or kind.values is not None:
        return [("--set", "a mapping is merged into what is written; KEY=null takes that out first")]
    return [("--set", "a list takes the place of what is written")] if kind.items is not None else []


def _members(kind: Kind, pieces: tuple[str, ...]) -> list[tuple[str, str]]:
    """(key, meaning) of what is in a section."""
    below = pieces
    if kind.section is None and (kind.items or kind.values) is not None:
        below, kind = (*pieces, ANY_KEY), kind.items or kind.values or kind
    if kind.section is None:
        return []
    return [(name, str(key_table()[(*below, name)].info.description)) for name in fields_of(kind.section)]


def _rule(code: str) -> str:
    rule = RULES[code]
    return _page(code, rule.text, [("about", ", ".join(rule.about))], [])


def _named_rule(name: str, rules: Mapping[str, RewardRule]) -> str:
    if name in rules:
        return _reward_rule(name, rules[name])
    found = [f"{RULE_PREFIX}{item}" for item in closest(name, rules)] or named(name)
    hint = f"did you mean {either(found)}?" if found else f"rules: {', '.join(rules)}"
    raise UsageError(f"there is no `{RULE_PREFIX}{name}`", hint=hint)


def _reward_rule(name: str, rule: RewardRule) -> str:
    def default(value: Any) -> str:
        return NEEDED_WORD if value == REQUIRED else f"default {as_yaml(value)}"

    values = {option: default(value) for option, value in rule.options.items()}
    width = max(map(len, values.values()), default=0)
    options = [(option, f"{value:<{width}}  {' - '.join(rule.words[option])}") for option, value in values.items()]
    alike = [key.pattern for key in keys() if key.name == name]
    rows = [("is", f"a reward rule, as in `rewards: {{default: [{{rule: {name}}}]}}`")]
    rows += [("not", f"the key of that name: {', '.join(f'`rft explain {pattern}`' for pattern in alike)}")] if alike else []
    page = _page(name, f"{rule.summary[0].upper()}{rule.summary[1:]}.", rows, options)
    notes = rule_notes(name)
    return page + ("\n" + "\n".join(f"  {line}".rstrip() for line in notes.splitlines()) + "\n" if notes else "")


def _page(title: str, text: str, rows: list[tuple[str, str]], members: list[tuple[str, str]]) -> str:
    blocks = [title, f"  {text}"]
    for table in (rows, members):
        width = max((len(name) for name, _ in table), default=0)
        if table:
            blocks.append("\n".join(f"  {name:<{width}}  {value}" for name, value in table))
    return "\n\n".join(blocks) + "\n"


def _metric(given: str, metrics: Metrics) -> str | None:
    """The page of a metric, also of what is inside it: `seconds.rollout`, `step.kl`, `pass@8`. None: there is none of that name."""
    name = given.removeprefix("step.").replace("/", ".").partition(".")[0]
    word, at, _ = name.partition("@")
    found = next((known for known in metrics if known == name or (at and known.startswith(f"{word}@"))), None)
    if found is None:
        return None
    text, rows = metrics[found]
    alike = [key.pattern for key in keys() if key.name == found and len(key.pieces) > 1][:MOST_MEANT]
    keyed = [("key", f"of that name: {', '.join(f'`rft explain {pattern}`' for pattern in alike)}")] if alike else []
    return _page(f"metric {found}", text, [*rows, *keyed], [])


def _unknown(given: str, pattern: tuple[str, ...], rules: Mapping[str, RewardRule], others: Sequence[str]) -> UsageError:
    """`others`: names of warnings and metrics."""
    word = pattern[-1]
    pages = [*named(given), *OTHER_NAMES.get(given, ()), *([f"{PREFIX}{given}"] if given in preset_names(shipped_recipes()) else [])]
    if given in FAMILIES:
        known = ", ".join(FAMILIES[given].names)
        hint = f"did you mean a key such as {either(_keys_with(word, ())[:MOST_MEANT])}, or `{given}:NAME` with one of {known}?"
        return UsageError(f"there is no key and no rule `{given}`", hint=hint)
    if pages:
        return UsageError(f"there is no key and no rule `{given}`", hint=f"did you mean {either(pages)}?")
    beside = {key.name: key.pattern for key in keys() if key.pieces[:-1] == pattern[:-1]}
    alike = closest(word, {key.name for key in keys()}, SURE)
    found = (
        _keys_with(word, pattern[:-1])
        or closest(given, [*RULES, *CODES, *rules, *others], SURE)
        or [beside[name] for name in closest(word, beside)]
        or [key.pattern for key in keys() if key.name in alike]
        or closest(given, [*RULES, *rules, *(key.pattern for key in keys())])
    )
    hint = f"did you mean {either(found[:MOST_MEANT])}?" if found else "`rft explain` lists the sections, `rft explain rollout` a section's keys"
    return UsageError(f"there is no key and no rule `{given}`", hint=hint)


def _keys_with(word: str, section: tuple[str, ...]) -> list[str]:
    """Keys whose name is `word`, or else starts with it or has it between underscores; those of the section that was named, if there are any."""
    same = [key for key in keys() if key.name == word]
    found = same or [key for key in keys() if word in key.name.split("_") or (len(word) > 2 and key.name.startswith(word))]
    near = [key for key in found if key.pieces[:-1] == section] if section else []
    return [key.pattern for key in near or found]

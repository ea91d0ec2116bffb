"""Pages of `rft explain` about what a recipe names by kind: `advantage:grpo`, `loss:gspo`, `correction:mask`, `kl:k3`, `scorer:classifier`.

The words are those of the documentation, which ships with the package; knobs, defaults and their meaning are those of the sections. Leaves out
presets (`presets`) and reward rules, whose table another room has.

How to add one: its page or section in `docs/`, and its keys where the rules have them; a new family is a row of FAMILIES.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rftcli.errors import UsageError
from rftcli.recipe.estimator_rules import OWN_KEYS
from rftcli.recipe.kinds import ANY_KEY, fields_of
from rftcli.recipe.names import closest, either
from rftcli.recipe.schema import as_yaml, default_of
from rftcli.recipe.scorer_rules import KEYS, NEEDED
from rftcli.recipe.sections import Correction, Loss, ScorerModel
from rftcli.recipe.sections.algorithm import Advantage, Kl
from rftcli.recipe.sections.loss import KIND_DEFAULTS, LOSS_OPTIONS, NAMED_OPTIONS, OPTION_MEANINGS

NEEDED_WORD = "needed"

SHARED_KEYS = {
    "grpo": ("normalise_std", "std", "min_std"), "gdpo": ("min_std",), "grpo_passk": ("min_std",), "gae": ("gamma", "lam"), "reinforce": ("gamma",),
    "distill": ("distill_coefficient",),
}  # fmt: skip
"""Estimator -> keys of `algorithm.advantage` that it reads, besides those of `OWN_KEYS` and those that all of them have."""
CORRECTION_KEYS = {"truncate": ("cap", "level", "batch_normalise"), "mask": ("band", "gate", "bound", "level", "batch_normalise"), "reject": ()}
"""Correction -> keys that it alone reads, or shares with some; the others go with any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    key: str
    default: str
    """As a recipe would write it, or `needed`."""
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What stands behind one prefix."""

    names: tuple[str, ...]
    words: Callable[[str], tuple[Path, str]]
    """Name -> (file of the documentation, what it says)."""
    knobs: Callable[[str], list[Knob]]
    use: Callable[[str], str]
    """Name -> how a recipe writes it."""


def shipped_pages() -> Path:
    """The documentation that comes with the package: inside it when installed, beside it in a checkout."""
    inside = Path(__file__).resolve().parents[1] / "pages"
    return inside if inside.is_dir() else inside.parents[1] / "docs"


def method_page(prefix: str, name: str) -> str:
    """The page of `rft explain PREFIX:NAME`. Raises UsageError with the nearest names if there is no such kind."""
    family = FAMILIES[prefix]
    if name not in family.names:
        raise unknown_name(f"{prefix}:{name}")
    file, words = family.words(name)
    knobs = family.knobs(name)
    key, default = (max((len(getattr(knob, column)) for knob in knobs), default=0) for column in ("key", "default"))
    text = "\n".join(f"  {line}".rstrip() for line in words.splitlines())
    table = "\n".join(f"  {knob.key:<{key}}  {knob.default:<{default}}  {knob.meaning}" for knob in knobs)
    use = f"  used  {family.use(name)}\n  page  {file}"
    return "\n\n".join(part for part in (f"{prefix}:{name}", text, table and f"  Knobs, with their defaults:\n\n{table}", use) if part) + "\n"


def rule_notes(name: str) -> str:
    """What the documentation says of a reward rule beyond its options; empty where that is nothing."""
    text = (shipped_pages() / "rewards.md").read_text(encoding="utf-8")
    return "\n\n".join(part for part in text.split("\n\n") if part.startswith(f"`{name}`"))


def named(name: str) -> list[str]:
    """Topics of that name: `cpgd` is an estimator, and nothing else here."""
    return [f"{prefix}:{name}" for prefix, family in FAMILIES.items() if name in family.names]


PAGES_OF_VALUES = {
    ("algorithm", "advantage", "kind"): "advantage", ("algorithm", "loss", "kind"): "loss", ("algorithm", "loss", "correction", "kind"): "correction",
    ("algorithm", "kl", "estimator"): "kl", ("models", "scorers", ANY_KEY, "kind"): "scorer",
}  # fmt: skip
"""Key -> the prefix of the pages about its values."""


def family_of(pattern: tuple[str, ...]) -> str | None:
    """The prefix of the pages about a key's values; None where there are none."""
    return PAGES_OF_VALUES.get(pattern)


def unknown_name(topic: str) -> UsageError:
    """Of a topic `prefix:name`."""
    prefix, _, name = topic.partition(":")
    known = FAMILIES[prefix].names if prefix in FAMILIES else ()
    meant = named(name) or [f"{prefix}:{item}" for item in closest(name, known)]
    hint = f"did you mean {either(meant)}?" if meant else f"{prefix}: {', '.join(known)}" if known else f"there are {', '.join(FAMILIES)}"
    return UsageError(f"there is no `{topic}`", hint=hint)


def estimator_keys(kind: str) -> tuple[str, ...]:
    """Keys of `algorithm.advantage` that an estimator reads."""
    return (*(key for key, (names, _) in OWN_KEYS.items() if kind in names), *SHARED_KEYS.get(kind, ()), "whiten", "clip")


def loss_keys(kind: str) -> tuple[str, ...]:
    """Keys of `algorithm.loss` that a loss reads, its options as `options.NAME`."""
    own = ("python", "options") if kind == "python" else ()
    return (*own, *NAMED_OPTIONS[kind], *(f"options.{name}" for name in LOSS_OPTIONS[kind]), "aggregate", "old", "correction")


def _advantage_knobs(kind: str) -> list[Knob]:
    needed = ("python",) if kind == "python" else ()
    return [_knob(Advantage, "algorithm.advantage", key, needed=needed) for key in estimator_keys(kind)]


def _loss_knobs(kind: str) -> list[Knob]:
    found = []
    needed = {"cispo": ("clip_high",), "python": ("python",)}.get(kind, ())
    for key in loss_keys(kind):
        option = key.removeprefix("options.")
        if option != key:
            default = as_yaml(LOSS_OPTIONS[kind][option])
            found.append(Knob(key=f"algorithm.loss.{key}", default=default, meaning=OPTION_MEANINGS[kind][option]))
        else:
            found.append(_knob(Loss, "algorithm.loss", key, needed=needed, own=KIND_DEFAULTS.get(kind, {})))
    return found


def _correction_keys(kind: str) -> tuple[str, ...]:
    others = {key for keys in CORRECTION_KEYS.values() for key in keys} - set(CORRECTION_KEYS[kind])
    return tuple(key for key in fields_of(Correction) if key != "kind" and key not in others)


def _scorer_knobs(kind: str) -> list[Knob]:
    return [_knob(ScorerModel, "models.scorers.NAME", key, needed=NEEDED[kind]) for key in fields_of(ScorerModel) if key in KEYS[kind]]


def _knob(section: type[BaseModel], place: str, key: str, *, needed: tuple[str, ...] = (), own: Mapping[str, Any] | None = None) -> Knob:
    """`own`: defaults of a kind that are not the section's."""
    info = section.model_fields[key]
    default = NEEDED_WORD if key in needed else _default(own[key] if own and key in own else default_of(info))
    return Knob(key=f"{place}.{key}", default=default, meaning=str(info.description))


def _default(value: Any) -> str:
    return "a section" if isinstance(value, BaseModel) else as_yaml(value)


def _whole(name: str) -> tuple[Path, str]:
    """A page of its own, without its title."""
    file = shipped_pages() / "algorithms" / f"{name}.md"
    return file, file.read_text(encoding="utf-8").partition("\n")[2].strip()


def _part(page: str, heading: Callable[[str, str], bool]) -> Callable[[str], tuple[Path, str]]:
    """The section of a page whose heading fits a name."""

    def read(name: str) -> tuple[Path, str]:
        file = shipped_pages() / page
        for part in file.read_text(encoding="utf-8").split("\n## ")[1:]:
            title, _, body = part.partition("\n")
            if heading(title, name):
                return file, body.strip()
        raise AssertionError(f"{page} has no section about {name}")

    return read


def _words_have(title: str, name: str) -> bool:
    return name in re.findall(r"\w+", title)


JUDGES = {"beside": "engine: vllm", "server": "placement: {server: URL}", "started": "placement: {gpus: 2}"}
"""Judges by where they run, and what says so."""


def _judge(title: str, name: str) -> bool:
    return title == f"kind: {'generative' if name in JUDGES else name}"


def _scorer_use(kind: str) -> str:
    written = f"generative, {JUDGES[kind]}" if kind in JUDGES else kind
    return f"models: {{scorers: {{helpful: {{kind: {written}, ...}}}}}}, then a part {{model: helpful}}"


FAMILIES: dict[str, Family] = {
    "advantage": Family(
        names=fields_of(Advantage)["kind"].choices,
        words=_whole,
        knobs=_advantage_knobs,
        use=lambda kind: f"algorithm: {{advantage: {{kind: {kind}}}}}",
    ),
    "loss": Family(
        names=tuple(LOSS_OPTIONS),
        words=_part("algorithms/losses.md", _words_have),
        knobs=_loss_knobs,
        use=lambda kind: f"algorithm: {{loss: {{kind: {kind}}}}}",
    ),
    "correction": Family(
        names=tuple(CORRECTION_KEYS),
        words=_part("algorithms/losses.md", lambda title, name: "`correction`" in title),
        knobs=lambda kind: [_knob(Correction, "algorithm.loss.correction", key) for key in _correction_keys(kind)],
        use=lambda kind: f"algorithm: {{loss: {{correction: {{kind: {kind}}}}}}}",
    ),
    "kl": Family(
        names=fields_of(Kl)["estimator"].choices,
        words=_part("algorithms/losses.md", lambda title, name: title == "KL in the loss"),
        knobs=lambda kind: [_knob(Kl, "algorithm.kl", key) for key in fields_of(Kl) if key != "estimator"],
        use=lambda kind: f"algorithm: {{kl: {{coefficient: 0.01, estimator: {kind}}}}}",
    ),
    "scorer": Family(
        names=tuple(KEYS), words=_part("reward-models.md", _judge), knobs=_scorer_knobs, use=_scorer_use
    ),
}
"""Prefix -> what it leads to."""

"""What a rule across keys finds. Apart from the rules, so that they can be spread over files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rftcli.recipe.paths import KeyPath

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

KnownRules = Mapping[str, Collection[str]]
"""Name of a reward rule -> names of its options."""


class RewardRule(Protocol):
    """What pages and schemas say of a reward rule, whose table another room has."""

    @property
    def summary(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]:
        """Name -> default; a needed one has the text REQUIRED."""
        ...

    @property
    def words(self) -> Mapping[str, tuple[str, str]]:
        """Name of an option -> (what it may be, what it means)."""
        ...


REQUIRED = "(required)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One breach of a rule. `path` is where it is shown."""

    path: KeyPath
    message: str
    reason: str | None = None
    hint: str | None = None
    allowed: tuple[str, ...] = ()
    reads: tuple[KeyPath, ...] = ()
    """Further keys it rests on; with `at_key`, the only ones. Nothing is said about keys whose value another problem has made unknown."""
    at_key: bool = False
    """The caret goes under the key: something is missing in a section, or the key should not be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`about`: patterns of the keys it concerns. `text`: the rule in one sentence."""

    about: tuple[str, ...]
    text: str
    check: Callable[[Recipe, KnownRules | None], Iterator[Finding]]

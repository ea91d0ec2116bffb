"""The door to this room: a recipe file, with `--set` and the environment, to a checked `Recipe` that knows where every key was written.

    loaded = load_recipe("recipes/gsm8k.yaml", sets=["train.steps=10"], known_rules=RULE_OPTIONS)
    loaded.recipe.train.steps, str(loaded.origin("train.steps"))        # 10, "--set 1:1:13"

All problems of a recipe are raised at once as `RecipeError`. Relative paths in keys that name files start from the file that wrote them, in a
`--set` from the working directory; there is no second place to look. What is left out: whatever needs the machine, the model or the rows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rftcli.errors import MachineError
from rftcli.recipe.expand import Unexpanded
from rftcli.recipe.finding import KnownRules
from rftcli.recipe.kinds import topic
from rftcli.recipe.layers import Layers, near, reason, shipped_recipes
from rftcli.recipe.merge import DEFAULT, single_source_as_list
from rftcli.recipe.overrides import apply_set
from rftcli.recipe.paths import KeyPath, format_path, parse_path, related
from rftcli.recipe.problems import Place, Problem, Source, raise_problems
from rftcli.recipe.read import Reader
from rftcli.recipe.rules import RULES, check
from rftcli.recipe.sections import Recipe
from rftcli.recipe.tree import Mapping, Scalar, YamlFault, find, read_source
from rftcli.recipe.validate import validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value comes from.

    >>> str(Origin()), str(Origin(file="a.yaml", line=3, column=9))
    ('default', 'a.yaml:3:9')
    """

    file: str | None = None
    """File as shown, or `--set N`; None: the default."""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return "default" if self.file is None else f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe:
    """A recipe without problems, and how it was written."""

    shown: str
    """The path as it was given."""
    path: Path | None
    """Where the file lies; None for a text without a file."""
    recipe: Recipe
    raw: dict[str, Any]
    """The merged keys that were written, with `${VAR}` unexpanded; `extends` is gone, since it is merged in."""
    origins: dict[str, Origin]
    """Dotted path of every written value -> where. What is not here has its default (`origin`)."""
    unexpanded: AnyMapping[KeyPath, Unexpanded] = field(repr=False)
    tree: Mapping = field(repr=False)

    def origin(self, dotted_path: str) -> Origin:
        """Where the value at a path was written, or the default."""
        return self.origins.get(dotted_path, Origin())

    def problem(
        self,
        dotted_path: str,
        message: str,
        reason: str | None = None,
        hint: str | None = None,
        *,
        code: str = "recipe",
        allowed: tuple[str, ...] = (),
        at_key: bool = False,
    ) -> Problem:
        """A problem at a key of this recipe, for whoever finds one later (the plan, a scan of the data).

        `reason` stands behind the caret. The caret is under the value, or under the key with `at_key` and for sections; a key that was not
        written is shown at the nearest section that was.
        """
        return _problem_at(self.tree, parse_path(dotted_path), message, reason=reason, hint=hint, code=code, allowed=allowed, at_key=at_key)

    def raise_problems(self, problems: Sequence[Problem]) -> None:
        """Raise RecipeError with all `problems`, in the order of the recipe; do nothing if there are none."""
        raise_problems(self.shown, problems)


Further = Callable[[LoadedRecipe, frozenset[str]], Sequence[Problem]]
"""Looks at a recipe for problems beyond its rules, such as functions that are not there, and is told which rules are broken. MachineError where this
machine cannot look."""
UNSOUND = frozenset({"part-source", "unknown-rule", "unknown-option", "eval-rewards", "data-source", "no-data", "no-reward", "structured-form"})
"""Rules without which nobody can look any further: it is not known what a part, a set or a form is."""


def load_recipe(
    path: str | Path,
    sets: Sequence[str] = (),
    env: AnyMapping[str, str] | None = None,
    known_rules: KnownRules | None = None,
    shipped: Path | None = None,
    text: str | None = None,
    further: Further | None = None,
) -> LoadedRecipe:
    """Read, merge and check the recipe in the file `path`, or `text` as if it stood there.

    `sets`: `dotted.path=value` texts, laid on top in order. `env`: for `${VAR}`, the process's own by default. `known_rules`: name of each reward
    rule -> names of its options; without it they are not checked. `shipped`: folder that `presets/` lies in. `further`: asked for more where rules
    are broken and every value can be read, so that all is told at once. Raises RecipeError.
    """
    shown = str(path)
    try:
        real = Path(path).resolve()
        source = read_source(Path(path), shown) if text is None else Source(shown, text, str(real.parent))
    except YamlFault as fault:
        raise_problems(shown, [fault.problem])
        raise
    except (OSError, ValueError) as error:
        problem = Problem(code="no-recipe", path="", message="cannot be read", label=reason(error), hint=near(shown))
        raise_problems(shown, [problem])
        raise
    return _load(source, real, sets, env, known_rules, shipped, further)


def load_text(
    text: str, sets: Sequence[str] = (), env: AnyMapping[str, str] | None = None, known_rules: KnownRules | None = None, base: Path | None = None
) -> LoadedRecipe:
    """The same for a recipe that is no file: paths in it start from `base`, by default the working directory. Raises RecipeError."""
    return _load(Source("recipe", text, str((base or Path.cwd()).absolute())), None, sets, env, known_rules, None)


def _load(
    source: Source,
    path: Path | None,
    sets: Sequence[str],
    env: AnyMapping[str, str] | None,
    known_rules: KnownRules | None,
    shipped: Path | None,
    further: Further | None = None,
) -> LoadedRecipe:
    env = os.environ if env is None else env
    problems: list[Problem] = []
    root = Layers(env, shipped or shipped_recipes(), problems).read(source, () if path is None else (path,))
    if root is None:
        raise_problems(source.name, problems)
    assert root is not None, "a recipe without a tree has a problem"
    for number, text in enumerate(sets, start=1):
        root = apply_set(root, number, text, str(Path.cwd()), problems)
    root = single_source_as_list(root)
    reader = Reader(env, problems, known_rules)
    if any(item.code in ("bad-extends", "bad-set", "yaml") for item in problems):
        reader.doubtful.add(())  # part of the recipe is unknown: say nothing about what is missing from it
    values = reader.section(Recipe, root, ())
    raw = _unexpanded(values, reader.unexpanded, ())
    recipe = validate(values, root, reader)
    loaded = None
    if recipe is not None:
        problems += _breaches(recipe, known_rules, root, reader)
        raw.pop("extends", None)
        loaded = LoadedRecipe(
            shown=source.name,
            path=path,
            recipe=recipe,
            raw=raw,
            origins=_origins(root),
            unexpanded=reader.unexpanded,
            tree=root,
        )
        broken = frozenset(problem.code for problem in problems)
        if further is not None and broken and broken <= set(RULES) - UNSOUND:
            with contextlib.suppress(MachineError):  # the recipe is told of first
                problems += further(loaded, broken)
    raise_problems(source.name, problems)
    assert loaded is not None, "a recipe that cannot be built has a problem"
    return loaded


def _breaches(recipe: Recipe, known_rules: KnownRules | None, root: Mapping, reader: Reader) -> list[Problem]:
    """Breaches of rules, without those that rest on a value which is not known."""
    found: list[Problem] = []
    for code, item in check(recipe, known_rules):
        reads = item.reads if item.at_key and item.reads else (item.path, *item.reads)
        if any(related(path, other) for path in reads for other in reader.doubtful):
            continue
        hint = item.hint or f"`rft explain {topic(item.path)}`"
        found.append(_problem_at(root, item.path, item.message, reason=item.reason, hint=hint, code=code, allowed=item.allowed, at_key=item.at_key))
    return found


def _problem_at(
    root: Mapping,
    path: KeyPath,
    message: str,
    *,
    reason: str | None,
    hint: str | None,
    code: str,
    allowed: tuple[str, ...],
    at_key: bool,
) -> Problem:
    used, key, node = find(root, path)
    of_value = isinstance(node, Scalar) and used == len(path) and not at_key and node.place.length > 0
    place = node.place if of_value else key
    return Problem(code=code, path=format_path(path), message=message, place=place, label=reason, allowed=allowed, hint=hint)


def _origins(root: Mapping) -> dict[str, Origin]:
    """Every scalar of the tree, and every list and mapping that is empty."""
    found: dict[str, Origin] = {}

    def walk(node: Any, path: KeyPath, key: Place) -> None:
        if isinstance(node, Mapping) and node.entries:
            for name, entry in node.entries.items():
                walk(entry.value, (*path, name), entry.key)
        elif not isinstance(node, (Mapping, Scalar)) and node.items:
            for index, item in enumerate(node.items):
                walk(item, (*path, index), item.place)
        else:
            place = node.place if node.place.length else key
            if node.place.source is DEFAULT:
                return
            found[format_path(path)] = Origin(file=place.source.name, line=place.line, column=place.column)

    walk(root, (), root.place)
    return found


def _unexpanded(value: Any, unexpanded: AnyMapping[KeyPath, Unexpanded], path: KeyPath) -> Any:
    """`value` as plain lists and dicts, with the references of its texts."""
    if path in unexpanded:
        return unexpanded[path].text
    if isinstance(value, dict):
        return {name: _unexpanded(item, unexpanded, (*path, name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_unexpanded(item, unexpanded, (*path, index)) for index, item in enumerate(value)]
    return value

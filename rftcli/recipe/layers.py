"""`extends`: a recipe's file and all files it builds on, as one tree.

What is left out: how layers are laid on each other (`merge`), single values from the command line (`overrides`), the meaning of keys (`read`).
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping as AnyMapping
from pathlib import Path

from rftcli.recipe.expand import ExpansionError, expand
from rftcli.recipe.merge import as_list, long_rewards, merge, without
from rftcli.recipe.names import closest, did_you_mean, either
from rftcli.recipe.problems import Place, Problem, Source
from rftcli.recipe.tree import Mapping, Node, Scalar, Sequence, YamlFault, compose, read_source

MOST_FILES = 50
"""Files that `extends` may bring in; more is a mistake or an attack."""
PRESETS = "presets/"


def shipped_recipes() -> Path:
    """The folder of recipes that come with the package: inside it when installed, beside it in a checkout."""
    inside = Path(__file__).resolve().parents[1] / "recipes"
    return inside if inside.is_dir() else inside.parents[1] / "recipes"


def shipped_names(folder: Path) -> list[str]:
    """What `rft train NAME` and `extends: NAME` find in the folder of shipped recipes."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def preset_names(folder: Path) -> list[str]:
    """What stands behind `presets/` in `extends`, of the folder of shipped recipes."""
    return shipped_names(folder / PRESETS)


class Layers:
    """Reads the files of one recipe. One use."""

    def __init__(self, env: AnyMapping[str, str], shipped: Path, problems: list[Problem]) -> None:
        self.env = env
        self.shipped = shipped
        self.problems = problems
        self.files = 0

    def read(self, source: Source, chain: tuple[Path, ...]) -> Mapping | None:
        """The tree of `source` laid on those it extends; None if its text cannot be read. `chain`: the files that led here, itself included."""
        try:
            node = compose(source, self.problems)
        except YamlFault as fault:
            self.problems.append(fault.problem)
            return None
        if not isinstance(node, Mapping):
            self._refuse_root(node, source)
            return None
        layer = long_rewards(node)
        parents = self._parents(layer)
        merged = Mapping({}, layer.place)
        for item in parents or ():
            parent = self._parent(item, chain)
            if parent is not None:
                merged = merge(merged, parent, (), self.problems)
        merged = merge(without(merged, "extends"), layer, (), self.problems)
        return as_list(merged, "extends") if parents else without(merged, "extends")

    def _refuse_root(self, node: Node | None, source: Source) -> None:
        empty = node is None or (isinstance(node, Scalar) and node.is_null)
        message = "the recipe is empty" if empty else "a recipe is a mapping of keys to values"
        got = None if empty else "this is a list" if isinstance(node, Sequence) else "this is a single value"
        place = node.place if node is not None and not empty else Place(source=source, line=1, column=1, length=0)
        hint = f"shipped recipes to start from, as in `rft train quickstart`: {', '.join(shipped_names(self.shipped))}"
        self.problems.append(Problem(code="yaml", path="", message=message, place=place, label=got, hint=hint))

    def _parents(self, layer: Mapping) -> list[Scalar] | None:
        """What `extends` lists, one path or several; None if something in it is no text, which is a problem."""
        if "extends" not in layer.entries:
            return []
        value = layer.entries["extends"].value
        if isinstance(value, Scalar) and value.is_null:
            return []
        items = value.items if isinstance(value, Sequence) else (value,)
        wrong = [item for item in items if not isinstance(item, Scalar) or item.is_null or not item.text]
        for item in wrong:
            self._refuse(item, "must be the path of a recipe")
        return None if wrong else [item for item in items if isinstance(item, Scalar)]

    def _parent(self, item: Scalar, chain: tuple[Path, ...]) -> Mapping | None:
        shown = item.text
        self.files += 1
        try:
            shown, path = self._locate(expand(item.text, self.env), item.place.source)
            real = path.resolve()
            if real in chain:
                links = " -> ".join(link.name for link in (*chain[chain.index(real) :], real))
                return self._refuse(item, f"the recipe extends itself: {links}")
            if self.files > MOST_FILES:
                return self._refuse(item, f"more than {MOST_FILES} files are extended") if self.files == MOST_FILES + 1 else None
            source = read_source(path, shown)
        except ExpansionError as error:
            return self._refuse(item, str(error), hint=error.hint)
        except YamlFault as fault:
            self.problems.append(fault.problem)
            return None
        except (OSError, ValueError) as error:
            return self._refuse(item, f"cannot read `{shown}`", label=reason(error), hint=self._near(item.text, shown))
        return self.read(source, (*chain, real))

    def _locate(self, text: str, source: Source) -> tuple[str, Path]:
        """(as shown, where it lies) of an extended file. `.yaml` may be left out. A bare name that is no file beside the recipe is a shipped one."""
        if text.startswith(PRESETS):
            path = self.shipped / text
        elif text.startswith("~/"):
            path = Path(self.env.get("HOME") or Path.home()) / text[2:]
        else:
            path = Path(source.base) / text
        if path.suffix not in (".yaml", ".yml"):
            path = path.with_name(f"{path.name}.yaml")
        beside = not text.startswith((PRESETS, "~", "/"))
        if _bare(text) and not path.is_file() and text in shipped_names(self.shipped):
            path, beside = self.shipped / f"{text}.yaml", False
        shown = Path(source.name).parent / path.relative_to(source.base) if beside else path
        return os.path.normpath(shown), Path(os.path.normpath(path))

    def _near(self, text: str, shown: str) -> str | None:
        """For a preset or a bare name the nearest one, or all that are shipped; for a path the nearest file."""
        presets = preset_names(self.shipped)
        if text.startswith(PRESETS):
            found = [f"{PRESETS}{name}" for name in closest(Path(text).stem, presets)]
            return f"did you mean {either(found)}?" if found else f"presets: {', '.join(presets)}"
        if text in presets:
            return f"did you mean `{PRESETS}{text}`?"
        shipped = shipped_names(self.shipped)
        if not _bare(text) or not shipped:
            return near(shown)
        beside = [Path(name).stem for name in names_beside(shown)]
        return did_you_mean(text, {*beside, *shipped}) or f"shipped recipes: {', '.join(shipped)}"

    def _refuse(self, item: Node, message: str, *, label: str | None = None, hint: str | None = None) -> None:
        self.problems.append(Problem(code="bad-extends", path="extends", message=message, place=item.place, label=label, hint=hint))


def _bare(text: str) -> bool:
    """A name, neither a path nor a file name."""
    return "/" not in text and not text.startswith("~") and not Path(text).suffix


def near(shown: str) -> str | None:
    """A file of a similar name in the same folder."""
    return did_you_mean(Path(shown).name, names_beside(shown))


def names_beside(shown: str) -> list[str]:
    """Recipe files in the folder of a file; none if it cannot be read."""
    try:
        return sorted(item.name for item in Path(shown).parent.iterdir() if item.suffix in (".yaml", ".yml") and item.is_file())
    except (OSError, ValueError):
        return []


def reason(error: OSError | ValueError) -> str:
    """Why a file could not be read, in a few words."""
    return error.strerror or str(error) if isinstance(error, OSError) else "not a file name"

"""From files and `--set` texts to one tree: `extends`, merging, and single values on top, each node keeping the place it was written at.

Mappings merge, lists replace, null removes what a parent wrote. Two shorthands become their long form here: a list in the place of a reward entry,
and one mapping in the place of the list `data.train`. What is left out: the meaning of keys (`read`).
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping as AnyMapping
from pathlib import Path

from rftcli.recipe.expand import ExpansionError, expand
from rftcli.recipe.names import did_you_mean
from rftcli.recipe.paths import KeyPath, format_path, parse_pieces
from rftcli.recipe.problems import Place, Problem, Source
from rftcli.recipe.tree import MAX_DEPTH, Entry, Mapping, Node, Scalar, Sequence, YamlFault, compose, read_source

MOST_FILES = 50
"""Files that `extends` may bring in; more is a mistake or an attack."""
PRESETS = "presets/"


def shipped_recipes() -> Path:
    """The folder of recipes that come with the package: beside the package in a checkout, inside it when installed."""
    inside = Path(__file__).resolve().parents[1] / "recipes"
    return inside if inside.is_dir() else inside.parents[1] / "recipes"


class Layers:
    """Collects the layers of one recipe. One use."""

    def __init__(self, env: AnyMapping[str, str], presets: Path, problems: list[Problem]) -> None:
        self.env = env
        self.presets = presets
        self.problems = problems
        self.files = 0

    def root(self, source: Source, path: Path | None) -> Mapping | None:
        """The merged tree of a recipe with everything it extends; None if the text itself cannot be read. `path`: None for a text without a file."""
        return self._layer(source, () if path is None else (path,))

    def _layer(self, source: Source, chain: tuple[Path, ...]) -> Mapping | None:
        try:
            node = compose(source, self.problems)
        except YamlFault as fault:
            self.problems.append(fault.problem)
            return None
        if not isinstance(node, Mapping):
            self._refuse_root(node, source)
            return None
        layer = _long_rewards(node)
        merged = Mapping({}, layer.place)
        for item in self._parents(layer):
            parent = self._parent(item, chain)
            if parent is not None:
                merged = self.merge(merged, parent, ())
        merged = self.merge(_without(merged, "extends"), layer, ())
        return _as_list(merged, "extends") if "extends" in layer.entries else merged

    def _refuse_root(self, node: Node | None, source: Source) -> None:
        empty = node is None or (isinstance(node, Scalar) and node.is_null)
        message = "the recipe is empty" if empty else "a recipe is a mapping of keys to values"
        got = None if empty else "a list" if isinstance(node, Sequence) else "a single value"
        place = node.place if node is not None and not empty else Place(source=source, line=1, column=1, length=0)
        hint = "`rft recipes ls` shows recipes to start from"
        self.problems.append(Problem(code="yaml", path="", message=message, place=place, label=got and f"this is {got}", hint=hint))

    def _parents(self, layer: Mapping) -> list[Scalar]:
        """What `extends` lists, one path or several. Whatever is no text is a problem."""
        if "extends" not in layer.entries:
            return []
        value = layer.entries["extends"].value
        items = value.items if isinstance(value, Sequence) else () if isinstance(value, Scalar) and value.is_null else (value,)
        texts = [item for item in items if isinstance(item, Scalar) and not item.is_null]
        for item in items:
            if item not in texts:
                self._refuse(item, "must be the path of a recipe")
        return texts

    def _parent(self, item: Scalar, chain: tuple[Path, ...]) -> Mapping | None:
        shown = item.text
        self.files += 1
        try:
            text = expand(item.text, self.env)
            shown, path = self._locate(text, item.place.source)
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
            return self._refuse(item, f"cannot read `{shown}`", label=_reason(error), hint=_near(shown))
        return self._layer(source, (*chain, real))

    def _locate(self, text: str, source: Source) -> tuple[str, Path]:
        """(as shown, where it lies) of an extended file."""
        if text.startswith(PRESETS):
            path = self.presets / text
        elif text.startswith("~/"):
            path = Path(self.env.get("HOME") or Path.home()) / text[2:]
        else:
            path = Path(source.base) / text
        if path.suffix not in (".yaml", ".yml"):
            path = path.with_name(f"{path.name}.yaml")
        beside = not text.startswith((PRESETS, "~", "/"))
        shown = Path(source.name).parent / path.relative_to(source.base) if beside else path
        return os.path.normpath(shown), Path(os.path.normpath(path))

    def _refuse(self, item: Node, message: str, *, label: str | None = None, hint: str | None = None) -> None:
        self.problems.append(Problem(code="extends", path="extends", message=message, place=item.place, label=label, hint=hint))

    def merge(self, base: Mapping, over: Mapping, path: KeyPath) -> Mapping:
        """`over` laid on `base`."""
        entries = dict(base.entries)
        for name, entry in over.entries.items():
            below = entries.get(name)
            if below is None:
                entries[name] = entry
            elif isinstance(entry.value, Scalar) and entry.value.is_null:
                self._refuse_empty(entry, below, (*path, name))
                del entries[name]
            elif isinstance(below.value, Mapping) and isinstance(entry.value, Mapping):
                entries[name] = Entry(entry.key, self.merge(below.value, entry.value, (*path, name)))
            else:
                entries[name] = entry
        return Mapping(entries, over.place)

    def _refuse_empty(self, entry: Entry, below: Entry, path: KeyPath) -> None:
        """A bare `rollout:` over an inherited section is more likely an unfinished edit than a wish to remove it."""
        inherits = not (isinstance(below.value, Scalar) and below.value.is_null)
        if isinstance(entry.value, Scalar) and not entry.value.text and inherits:
            label = f"{below.key} wrote a value"
            hint = "write `null` to remove that, or delete this line"
            self.problems.append(
                Problem(code="empty-value", path=format_path(path), message="nothing stands here", place=entry.key, label=label, hint=hint)
            )

    def put(self, root: Mapping, number: int, text: str, base: str) -> Mapping:
        """`root` with one `--set PATH=VALUE` laid on top. `number`: which `--set` it is, from 1. `base`: the working directory."""
        source = Source(f"--set {number}", text, base)
        whole = Place(source=source, line=1, column=1, length=len(text))
        try:
            pieces, value = self._read_set(source, whole)
        except YamlFault as fault:
            self.problems.append(fault.problem)
            return root
        names = [piece for piece, _ in pieces]
        if names[0] == "extends":
            problem = Problem(code="set", path="extends", message="`extends` is read from files only", place=pieces[0][1], hint="extend in a recipe")
            self.problems.append(problem)
            return root
        if names[0] == "rewards" and len(names) > 2 and str(names[2]).isdecimal():  # the shorthand of an entry
            pieces.insert(2, ("parts", pieces[2][1]))
        found = self._put(root, pieces, value, ())
        return _long_rewards(found) if isinstance(found, Mapping) else root

    def _read_set(self, source: Source, whole: Place) -> tuple[list[tuple[str | int, Place]], Node]:
        def fault(message: str, place: Place = whole, hint: str | None = None) -> YamlFault:
            return YamlFault(Problem(code="set", path="", message=message, place=place, hint=hint))

        head, equals = _split(source.text)
        if not equals:
            raise fault("no `=`: expected PATH=VALUE", hint="for example `--set rollout.temperature=0.7`")
        try:
            pieces = [(piece, Place(source=source, line=1, column=at + 1, length=length)) for piece, at, length in parse_pieces(head)]
            if len(pieces) > MAX_DEPTH:
                raise fault(f"a path of more than {MAX_DEPTH} keys")
        except ValueError as error:
            message, at = error.args
            raise fault(message, Place(source=source, line=1, column=at + 1, length=1)) from error
        value = compose(source, self.problems, start=len(head) + 1)
        if value is None or (isinstance(value, Scalar) and value.plain and not value.text):
            raise fault("no value after `=`", hint='write `null` to take the key out, "" for empty text')
        return pieces, value

    def _put(self, node: Node | None, pieces: list[tuple[str | int, Place]], value: Node, path: KeyPath) -> Node | None:
        """`node` with `value` at `pieces` below it."""
        piece, key = pieces[0]
        here = (*path, piece)
        rest = pieces[1:]
        if isinstance(node, Sequence):
            index = int(piece) if str(piece).isdecimal() else len(node.items)
            if index >= len(node.items):
                self._refuse_index(node, piece, key, path)
                return node
            item = self._put(node.items[index], rest, value, here) if rest else value
            assert item is not None
            return Sequence((*node.items[:index], item, *node.items[index + 1 :]), node.place)
        if path == ("data", "train") and str(piece) == "0":  # the shorthand of one training set
            return self._put(node, rest, value, path) if rest else value
        under = node if isinstance(node, Mapping) else Mapping({}, key)
        name = str(piece)
        below = under.entries.get(name)
        if not rest:
            return self.merge(under, Mapping({name: Entry(key, value)}, under.place), path)
        inner = self._put(below.value if below is not None else None, rest, value, here)
        assert inner is not None
        owner = key if below is None or isinstance(below.value, Scalar) else below.key
        return Mapping({**under.entries, name: Entry(owner, inner)}, under.place)

    def _refuse_index(self, node: Sequence, piece: str | int, key: Place, path: KeyPath) -> None:
        count = len(node.items)
        message = f"has {count} {'entry' if count == 1 else 'entries'}" + (f", no entry `{piece}`" if str(piece).isdecimal() else "")
        hint = f"indexes are 0 to {count - 1}, as in `{format_path((*path, 0))}`" if count else "set the whole list"
        self.problems.append(Problem(code="set", path=format_path(path), message=message, place=key, hint=hint))


def single_source_as_list(root: Mapping) -> Mapping:
    """One mapping in the place of the list `data.train`; after merging, so that a child can change one key of its parent's only set."""
    data = root.entries.get("data")
    if data is None or not isinstance(data.value, Mapping) or "train" not in data.value.entries:
        return root
    if not isinstance(data.value.entries["train"].value, Mapping):
        return root
    return Mapping({**root.entries, "data": Entry(data.key, _as_list(data.value, "train"))}, root.place)


def _split(text: str) -> tuple[str, bool]:
    """(what stands before the first `=` outside quotes, whether there is one)."""
    quote = ""
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "=":
            return text[:at], True
    return text, False


def _near(shown: str) -> str | None:
    """A file of a similar name in the same folder."""
    path = Path(shown)
    try:
        names = [item.name for item in path.parent.iterdir() if item.suffix in (".yaml", ".yml")]
    except (OSError, ValueError):
        return None
    return did_you_mean(path.name, sorted(names))


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "not a file name"


def _as_list(mapping: Mapping, name: str) -> Mapping:
    entry = mapping.entries[name]
    if isinstance(entry.value, Sequence) or (isinstance(entry.value, Scalar) and entry.value.is_null):
        return mapping
    return Mapping({**mapping.entries, name: Entry(entry.key, Sequence((entry.value,), entry.key))}, mapping.place)


def _without(mapping: Mapping, name: str) -> Mapping:
    return Mapping({key: entry for key, entry in mapping.entries.items() if key != name}, mapping.place)


def _long_rewards(root: Mapping) -> Mapping:
    """A list in the place of a reward entry is {combine: sum, parts: [...]}."""
    rewards = root.entries.get("rewards")
    if rewards is None or not isinstance(rewards.value, Mapping):
        return root
    entries: dict[str, Entry] = {}
    for label, entry in rewards.value.entries.items():
        if isinstance(entry.value, Sequence):
            combine = Entry(entry.key, Scalar("sum", True, entry.key))
            entry = Entry(entry.key, Mapping({"combine": combine, "parts": Entry(entry.key, entry.value)}, entry.value.place))
        entries[label] = entry
    return Mapping({**root.entries, "rewards": Entry(rewards.key, Mapping(entries, rewards.value.place))}, root.place)

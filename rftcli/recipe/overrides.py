"""`--set dotted.path=value`: one value laid on a recipe's tree, with places in the text of the `--set`, so that it is checked like the file. As with
`extends`, a mapping is merged into what is written, a list takes its place, and null takes it out; a scalar never takes the place of a section.

What is left out: the meaning of keys (`read`), and merging itself (`merge`).
"""

from __future__ import annotations

from rftcli.recipe.kinds import Kind, is_mapping, key_table, pattern_of, sub_keys
from rftcli.recipe.merge import long_rewards, merge
from rftcli.recipe.paths import KeyPath, format_path, parse_pieces
from rftcli.recipe.problems import Place, Problem, Source
from rftcli.recipe.read import to_write
from rftcli.recipe.tree import MAX_DEPTH, Entry, Mapping, Node, Scalar, Sequence, YamlFault, compose

Pieces = list[tuple[str | int, Place]]


def apply_set(root: Mapping, number: int, text: str, base: str, problems: list[Problem]) -> Mapping:
    """`root` with one `--set` laid on top; `root` itself if that is impossible, with the reason added to `problems`.

    `number`: which `--set` it is, from 1. `base`: absolute working directory, which relative paths in the value start from.
    """
    try:
        pieces, value = _read(Source(f"--set {number}", text, base), problems)
    except YamlFault as fault:
        problems.append(fault.problem)
        return root
    names = [piece for piece, _ in pieces]
    if names[0] == "extends":
        message, hint = "`extends` is read from files only", "write a recipe that extends this one"
        problems.append(Problem(code="bad-set", path="extends", message=message, place=pieces[0][1], hint=hint))
        return root
    if names[0] == "rewards" and len(names) > 2 and str(names[2]).isdecimal():  # an entry in its short form
        pieces.insert(2, ("parts", pieces[2][1]))
    if names[:2] == ["eval", "rewards"] and len(names) > 3 and str(names[3]).isdecimal():
        pieces.insert(3, ("parts", pieces[3][1]))
    found = _put(root, pieces, value, (), problems)
    return long_rewards(found) if isinstance(found, Mapping) else root


def _read(source: Source, problems: list[Problem]) -> tuple[Pieces, Node]:
    """(pieces of the path with their places, value) of a `--set`. Raises YamlFault."""
    whole = Place(source=source, line=1, column=1, length=len(source.lines[0]))

    def fault(message: str, place: Place = whole, hint: str | None = None) -> YamlFault:
        return YamlFault(Problem(code="bad-set", path="", message=message, place=place, hint=hint))

    head = _before_equals(source.text)
    if head is None:
        raise fault("no `=`: expected PATH=VALUE", hint="for example `--set rollout.temperature=0.7`")
    try:
        pieces: Pieces = [(piece, Place(source=source, line=1, column=at + 1, length=length)) for piece, at, length in parse_pieces(head)]
    except ValueError as error:
        message, at = error.args
        raise fault(message, Place(source=source, line=1, column=at + 1, length=1)) from error
    if len(pieces) > MAX_DEPTH:
        raise fault(f"a path of more than {MAX_DEPTH} keys")
    value = compose(source, problems, start=len(head) + 1, path=tuple(piece for piece, _ in pieces))
    if value is None or (isinstance(value, Scalar) and value.plain and not value.text):
        raise fault("no value after `=`", hint='write `null` to take the key out, "" for empty text')
    return pieces, value


def _before_equals(text: str) -> str | None:
    """What stands before the first `=` outside quotes; None if there is none."""
    quote = ""
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "=":
            return text[:at]
    return None


def _put(node: Node | None, pieces: Pieces, value: Node, path: KeyPath, problems: list[Problem]) -> Node:
    """`node`, which stands at `path`, with `value` at `pieces` below it."""
    (piece, key), rest = pieces[0], pieces[1:]
    here = (*path, piece)
    if isinstance(node, Sequence):
        index = int(piece) if str(piece).isdecimal() else len(node.items)
        if index >= len(node.items):
            _refuse_index(node, piece, key, path, problems)
            return node
        item = _put(node.items[index], rest, value, here, problems) if rest else value
        return Sequence((*node.items[:index], item, *node.items[index + 1 :]), node.place)
    if path == ("data", "train") and str(piece) == "0":  # a single training set written as a mapping
        return _put(node, rest, value, path, problems) if rest else value
    under = node if isinstance(node, Mapping) else Mapping({}, key)
    below = under.entries.get(str(piece))
    if not rest and _covers(value, None if below is None else below.value, here, problems):
        return node if node is not None else under
    if not rest:
        return merge(under, Mapping({str(piece): Entry(key, value)}, under.place), path, problems)
    if below is not None and _covers(below.value, None, here, problems):  # an earlier --set wrote it
        below = None
    inner = _put(None if below is None else below.value, rest, value, here, problems)
    owner = key if below is None or isinstance(below.value, Scalar) else below.key
    return Mapping({**under.entries, str(piece): Entry(owner, inner)}, under.place)


def _covers(value: Node, below: Node | None, path: KeyPath, problems: list[Problem]) -> bool:
    """Whether a scalar stands, or would come to stand, where a mapping belongs: then it is a problem. `below`: what it would take the place of."""
    kind = _kind_at(path)
    if not isinstance(value, Scalar) or value.is_null or kind is None or not is_mapping(kind):
        return False
    allowed = sub_keys(kind)
    written = list(below.entries) if isinstance(below, Mapping) else []
    message = f"must be {kind.words()}, got `{value.text}`"
    if written:
        message += f", which would take the place of {', '.join(f'`{name}`' for name in written)}"
    one = format_path((*path, (*written, *allowed, "NAME")[0]))
    hint = f"set one of its keys, as in `--set {one}=...`, or a mapping, which is merged into what is written"
    label = to_write(value, kind)
    problems.append(
        Problem(code="wrong-value", path=format_path(path), message=message, place=value.place, label=label, allowed=allowed, hint=hint)
    )
    return True


def _kind_at(path: KeyPath) -> Kind | None:
    """What a key takes; None for one that is not known. A chosen name has the kind of those beside it."""
    pattern = pattern_of(path)
    if pattern in key_table():
        return key_table()[pattern].kind
    above = key_table().get(pattern[:-1])
    return None if above is None else above.kind.values


def _refuse_index(node: Sequence, piece: str | int, key: Place, path: KeyPath, problems: list[Problem]) -> None:
    count = len(node.items)
    message = f"has {count} {'entry' if count == 1 else 'entries'}" + (f", no entry `{piece}`" if str(piece).isdecimal() else "")
    hint = f"indexes are 0 to {count - 1}, as in `{format_path((*path, 0))}`" if count else "set the whole list"
    problems.append(Problem(code="bad-set", path=format_path(path), message=message, place=key, hint=hint))

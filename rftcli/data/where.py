"""`where`: a row filter as a small expression over the row's columns, such as `level >= 3 and subject == 'algebra'`.

It is parsed into a tree and walked; nothing is ever handed to Python's own `eval`. There are comparisons (also chained, `in`, `not in`), `and`,
`or`, `not`, `+ - * / %`, constants (`true`, `false`, `null` too), lists of them, the functions of FUNCTIONS, and columns by name: dotted for nested
objects, `row['any name']` for a name that is no word. A column that a row lacks is an error of the row, never a silent no.
"""

from __future__ import annotations

import ast
import difflib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rftcli.errors import UsageError

CONSTANTS = {"true": True, "false": False, "null": None}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"len": len, "int": int, "float": float, "str": str, "lower": str.lower}
"""What an expression may call. To add one: a function of one value without side effects."""
MOST_CHARACTERS = 2000

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Mod: operator.mod,
}  # fmt: skip


class RowProblem(Exception):
    """The expression has no answer for a row; `args[1]` is a hint or None."""

    def __init__(self, problem: str, hint: str | None = None) -> None:
        super().__init__(problem, hint)


@dataclass(frozen=True, slots=True)
class Where:
    """A checked expression.

    >>> where = Where.parse("level >= 3 and kind in ['a', 'b']")
    >>> where.keeps({"level": 4, "kind": "a"}), where.keeps({"level": 2, "kind": "a"})
    (True, False)
    """

    text: str
    tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Where:
        """UsageError for what is no such expression."""
        hint = "for example: level >= 3 and subject == 'algebra'"
        if len(text) > MOST_CHARACTERS:
            raise UsageError(f"a row filter has at most {MOST_CHARACTERS} characters, got {len(text)}")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            _check(tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            what = error.msg if isinstance(error, SyntaxError) else error
            raise UsageError(f"`{text}` is no row filter: {what}", hint=hint) from error
        return cls(text, tree)

    def keeps(self, columns: Mapping[str, Any]) -> bool:
        """Whether a row passes. RowProblem for a column it lacks, and for values that cannot be compared."""
        try:
            answer = _value(self.tree, columns)
        except (TypeError, ValueError, ArithmeticError) as error:
            hint = "CSV holds text only: write `int(level) >= 3`" if "not supported between" in str(error) else None
            raise RowProblem(f"`where: {self.text}` cannot be answered: {error}", hint) from error
        if not isinstance(answer, bool):
            raise RowProblem(f"`where: {self.text}` gives {answer!r}, not true or false", "compare it with something")
        return answer


def _check(node: ast.expr) -> None:
    """ValueError for anything that is not in the language."""
    match node:
        case ast.BoolOp() | ast.List() | ast.Tuple():
            for item in node.values if isinstance(node, ast.BoolOp) else node.elts:
                _check(item)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            _check(operand)
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            _check(node.left)
            _check(node.right)
        case ast.Compare():
            for item in (node.left, *node.comparators):
                _check(item)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            _check(argument)
        case ast.Call():
            raise ValueError(f"it may call {', '.join(FUNCTIONS)} with one value, nothing else")
        case ast.Constant(value=str() | int() | float() | bool() | None):
            pass
        case ast.Name() | ast.Attribute() | ast.Subscript():
            _name(node)
        case _:
            raise ValueError(f"`{ast.unparse(node)}` is not allowed here")


def _name(node: ast.expr) -> list[str]:
    """The pieces of a column's name."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Subscript(value=ast.Name(id="row"), slice=ast.Constant(value=str(name))):
            return [name]
        case ast.Attribute(value=value, attr=name):
            return [*_name(value), name]
    raise ValueError(f"`{ast.unparse(node)}` names no column; write `row['any name']` for one that is no word")


def _value(node: ast.expr, columns: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, columns) for item in items]
        case ast.BoolOp(op=op, values=values):
            wanted = isinstance(op, ast.Or)
            return next((wanted for item in values if _truth(_value(item, columns)) is wanted), not wanted)
        case ast.UnaryOp(op=op, operand=operand):
            value = _value(operand, columns)
            return not _truth(value) if isinstance(op, ast.Not) else -value
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _value(left, columns), _value(right, columns)
            if not all(isinstance(item, (int, float)) for item in (one, other)):
                raise TypeError(f"arithmetic with {one!r} and {other!r}")
            return _ARITHMETIC[type(op)](one, other)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            one = _value(left, columns)
            for op, item in zip(ops, comparators, strict=True):
                other = _value(item, columns)
                if not _COMPARISONS[type(op)](one, other):
                    return False
                one = other
            return True
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return FUNCTIONS[name](_value(argument, columns))
    return _column(_name(node), columns)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _column(pieces: list[str], columns: Mapping[str, Any]) -> Any:
    whole = ".".join(pieces)
    if whole in columns:
        return columns[whole]
    if len(pieces) == 1 and whole in CONSTANTS:
        return CONSTANTS[whole]
    value: Any = columns
    for depth, piece in enumerate(pieces):
        if not isinstance(value, Mapping) or piece not in value:
            there = [".".join([*pieces[:depth], str(key)]) for key in value] if isinstance(value, Mapping) else []
            close = difflib.get_close_matches(whole, there, n=1)
            known = f"it has: {', '.join(there)}" if there else f"`{'.'.join(pieces[:depth])}` is no object"
            raise RowProblem(f"`where` asks for a column `{whole}`; {known}", f"did you mean `{close[0]}`?" if close else None)
        value = value[piece]
    return value

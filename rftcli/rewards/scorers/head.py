"""Which outputs of a reward model make its score: an index, or arithmetic over heads such as `0.5*h[0] - h[2]`.

Only numbers, `h[i]`, parentheses and + - * / are read; nothing is evaluated as Python.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

from rftcli.errors import UsageError

Node = Callable[[Sequence[float]], float]
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
LONGEST = 500
"""Characters of an expression."""


class Head:
    """A checked expression; call it with the heads of one text. UsageError for anything else than the arithmetic above.

    >>> Head("0.5*h[0] - h[2]")([4.0, 9.0, 1.0]), Head("1")([4.0, 9.0])
    (1.0, 9.0)
    """

    def __init__(self, text: str) -> None:
        self.indices: set[int] = set()
        if text.strip().isdecimal():
            text = f"h[{text.strip()}]"
        try:
            tree = ast.parse(text.strip(), mode="eval") if len(text) <= LONGEST else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            tree = None
        if tree is None:
            raise _wrong(text)
        self._text = text
        self._score = self._read(tree.body)
        if not self.indices:
            raise UsageError(f"`{text}` reads no head", hint="heads are `h[0]`, `h[1]`, ...")

    def __call__(self, heads: Sequence[float]) -> float:
        return float(self._score(heads))

    def fits(self, num_heads: int) -> None:
        """UsageError where a model has fewer heads than are read."""
        if max(self.indices) >= num_heads:
            known = "the one head h[0]" if num_heads == 1 else f"heads h[0] to h[{num_heads - 1}]"
            raise UsageError(f"head `{self._text}` reads h[{max(self.indices)}], and the model has {known}")

    def _read(self, node: ast.AST) -> Node:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return lambda heads: value
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                one, other, apply = self._read(left), self._read(right), _BINARY[type(op)]
                return lambda heads: apply(one(heads), other(heads))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                inner, sign = self._read(operand), _UNARY[type(op)]
                return lambda heads: sign(inner(heads))
            case ast.Subscript(value=ast.Name(id="h"), slice=ast.Constant(value=int() as index)) if not isinstance(index, bool):
                self.indices.add(index)
                return lambda heads: heads[index]
        raise _wrong(ast.unparse(node))


def _wrong(text: str) -> UsageError:
    return UsageError(f"`{text[:60]}` is no expression of heads", hint="numbers, h[0], h[1], ..., + - * / and parentheses: `0.5*h[0] - h[2]`")

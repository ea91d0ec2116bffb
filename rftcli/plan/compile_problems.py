"""What is wrong between a recipe and the facts, each at its recipe key."""

from __future__ import annotations

from dataclasses import dataclass

from rftcli.errors import RftError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    path: str
    """Dotted path of the recipe key."""
    message: str
    reason: str | None = None
    hint: str | None = None


class CompileError(RftError):
    """The recipe and the facts do not fit together."""

    exit_code = 2

    def __init__(self, problems: list[PlanProblem]) -> None:
        super().__init__("\n".join(f"{p.path}  {p.message}" for p in problems))
        self.problems = problems

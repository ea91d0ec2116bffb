"""One error tree. Every error that a person can cause or fix is one of these, has an exit code and may carry a hint.

    RftError                1   the run failed
    |-- UsageError          2   a command was called wrongly
    |   `-- RecipeError     2   problems in a recipe, all of them at once
    |-- MachineError        3   this machine cannot run it; the hint holds the command that would help
    |-- ResumeError         4   the run cannot be resumed as asked
    `-- HeldUpError         1   asked to stop, and a reward function or a server does not come; the command ends as on a second request (130, 75 or 1)

A run that stopped on request with a committed checkpoint (75; a scheduler may start it again) or was interrupted (130) is no error: the command reads
it from the run's state.

Our own mistakes are plain `assert`s and show a traceback. Errors of user code inside a reward are values, never raised (see `types.PartScore`).
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MACHINE = 3
EXIT_RESUME = 4
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130


class RftError(Exception):
    """The run failed. `hint` is one sentence or command that helps, shown on its own line."""

    exit_code: int = EXIT_FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class UsageError(RftError):
    """A command was called with arguments that do not fit together."""

    exit_code = EXIT_USAGE


class MachineError(RftError):
    """What was asked for cannot run on this machine: a missing package, too few GPUs, too little memory."""

    exit_code = EXIT_MACHINE


class ResumeError(RftError):
    """A run directory or checkpoint cannot be continued as asked."""

    exit_code = EXIT_RESUME


class HeldUpError(RftError):
    """A run that was asked to stop cannot finish its step, because a reward function without a time limit does not return, or has no step to finish,
    because a server that it needs is not there."""


class RecipeError(UsageError):
    """Problems found in a recipe; `rendered` is the finished text for a terminal, all problems at once."""

    def __init__(self, rendered: str, problems: tuple[object, ...] = ()) -> None:
        super().__init__(rendered)
        self.problems = problems


def words(error: BaseException) -> str:
    """The text of an exception of somebody's code, which may fail to make one."""
    try:
        return str(error)
    except Exception as failure:
        return f"its text cannot be made ({type(failure).__name__})"

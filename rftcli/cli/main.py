"""`rft`: finds the command and runs it. Help, version and mistyped commands are answered from one table before typer is imported.

Each command is one file with one typer app; this file imports none of them until it is asked for.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from importlib import import_module
from pathlib import Path

from rftcli import __version__
from rftcli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, RftError

# How to add one: write `cli/<file>.py` with a typer app of one command called `app`, and add its row.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("rftcli.cli.train", "Train from a recipe: validate, plan, launch the ranks, watch."),
    "resume": ("rftcli.cli.resume", "Go on with a run from its last whole checkpoint."),
    "eval": ("rftcli.cli.evaluate", "Score a checkpoint, a run or an untrained recipe on the evaluation sets."),
    "validate-recipe": ("rftcli.cli.validate", "Check recipes and show every problem with its line."),
    "plan": ("rftcli.cli.plan", "Show what a recipe would do on this machine."),
    "show": ("rftcli.cli.show", "Print a recipe with everything resolved, and where each value comes from."),
    "explain": ("rftcli.cli.explain", "Say what a recipe key, an estimator, a loss, a rule, a metric or a code means."),
    "schema": ("rftcli.cli.schema", "Print the JSON schema of recipes, for editors."),
    "rewards": ("rftcli.cli.rewards", "Score completions with a recipe's rewards before anything is trained: rft rewards try RECIPE."),
    "samples": ("rftcli.cli.samples", "Show completions of a run with their rewards."),
    "export": ("rftcli.cli.export", "Write a run's policy to a directory that from_pretrained loads."),
    "clean": ("rftcli.cli.clean", "Remove what a killed run left half written, and old checkpoints if asked."),
    "status": ("rftcli.cli.status", "Say how a run stands."),
}
OWN_CODE = ("train", "resume", "eval", "rewards")
"""Commands that run what a person has written, here or in processes that they start: it may want plugins of pydantic."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `rft` script; always leaves through SystemExit. A reader that has gone (`| head`) is no failure."""
    code = EXIT_OK
    gc.set_threshold(100_000, 50, 50)  # what imports make stays: looking for rubbish in it, again and again, costs a tenth of a quick command
    try:
        open_streams()
        code = answer(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be written vanishes, also what Python writes when it ends
    except KeyboardInterrupt:  # before a command was found that knows what to do about it
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    gc.freeze()  # nor is it looked through at the end
    raise SystemExit(code)


def open_streams() -> None:
    """Standard streams that any text can be written to. Closed ones (`>&-`) lead nowhere, before a file of ours gets their numbers; a terminal that
    lacks a character shows its escape; data in a file or pipe is UTF-8, whatever the locale says, because it is YAML and JSON."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding=None if sys.stdout.isatty() else "utf-8", errors="backslashreplace")


def answer(given: list[str]) -> int:
    """Do what the command line asks for; the exit code."""
    if not given or given[0] in ("--help", "-h", "help"):
        print(help_text())
        return EXIT_OK if given else EXIT_USAGE
    if given[0] in ("--version", "-V"):
        print(f"rft {__version__}")
        return EXIT_OK
    name, rest = given[0], given[1:]
    return run(name, rest) if name in COMMANDS else _unknown(name)


def run(name: str, arguments: list[str]) -> int:
    """Run one command; the exit code. Errors that a person can fix are shown without a traceback."""
    if name not in OWN_CODE:
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for some reads the metadata of every package that is installed
    import typer
    import typer.main
    # Some versions of typer bring a click of their own; its errors are found through the one that typer exports.
    click_exception = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

    command = typer.main.get_command(import_module(COMMANDS[name][0]).app)
    try:
        Path.cwd()  # a directory that is gone is an error here, and not of some library later
        code = command.main(arguments, prog_name=f"rft {name}", standalone_mode=False)
    except typer.Exit as leave:
        return leave.exit_code
    except typer.Abort:
        return EXIT_INTERRUPTED
    except click_exception as error:
        error.show()
        return EXIT_USAGE
    except RftError as error:
        from rftcli.cli.talk import show_error

        show_error(error)
        return error.exit_code
    except SystemExit as leave:
        if isinstance(leave.__context__, BrokenPipeError):  # click would call it a failure
            raise leave.__context__ from None
        raise
    except OSError as error:
        from rftcli.cli.talk import show_full_disk, show_unusable

        if not show_full_disk(error) and not show_unusable(error):
            raise
        return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_OK


def help_text() -> str:
    from rftcli.observe.text import columns_of, wrapped

    width = max(map(len, COMMANDS))
    lines = [wrapped(f"  {name:<{width}}  {summary}", columns_of(sys.stdout), width + 4) for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rft COMMAND ...",
            "",
            "Reinforcement fine-tuning from one YAML file.",
            "",
            *lines,
            "",
            "`rft COMMAND --help` shows a command's options. Start with: rft train",
        ]
    )


def _unknown(name: str) -> int:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    meant = f" did you mean `{close[0]}`?" if close else ""
    print(f"error: there is no command `{name}`.{meant}\nhint: `rft --help` lists the commands", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    main()

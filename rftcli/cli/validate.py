"""`rft validate-recipe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rftcli.cli import talk
from rftcli.errors import RecipeError, RftError

app = typer.Typer(add_completion=False)


@app.command()
def validate_recipe(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes (YAML).", show_default=False)],
    sets: talk.Sets = [],  # noqa: B006 - typer copies it
    ranks: talk.Ranks = None,
    gpus: talk.Gpus = None,
    as_json: talk.Json = False,
) -> int:
    """Check recipes and show every problem with its line. With --ranks or --gpus the batch is checked for that many."""
    from rftcli.runtime import prepare

    worst, reports = 0, []
    for path in recipes:
        report: dict[str, Any] = {"recipe": str(path), "ok": True, "problems": [], "warnings": []}
        try:
            checked = prepare.validate(path, sets, ranks=ranks, gpus=gpus)
            report["warnings"] = list(checked.warnings)
            for text in checked.warnings:
                talk.say(f"warning: {path}: {text}")
            talk.say(f"ok: {path}  {checked.summary}")
        except RftError as error:
            talk.show_error(error)
            found = [problem.to_json() for problem in error.problems] if isinstance(error, RecipeError) else []
            report.update(ok=False, problems=found or [{"message": error.message, "hint": error.hint}])
            worst = max(worst, error.exit_code)
        reports.append(report)
    if as_json:
        talk.data(reports)
    return worst

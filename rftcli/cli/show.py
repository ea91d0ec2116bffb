"""`rft show`."""

from __future__ import annotations

from typing import Annotated

import typer

from rftcli.cli import talk

app = typer.Typer(add_completion=False)


@app.command()
def show(
    recipe: talk.RecipeArgument,
    sets: talk.Sets = [],  # noqa: B006 - typer copies it
    origins: Annotated[bool, typer.Option("--origins", help="Say where each value comes from.")] = False,
    as_json: talk.Json = False,
) -> int:
    """Print a recipe with everything resolved, and where each value comes from."""
    from rftcli.recipe.schema import resolved_yaml
    from rftcli.recipe.written import written_values
    from rftcli.runtime import prepare

    loaded = prepare.load(recipe, sets)
    if as_json:
        talk.data(written_values(loaded))
    else:
        print(resolved_yaml(loaded, origins=origins), end="")
    return 0

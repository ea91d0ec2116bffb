"""`rft schema`."""

from __future__ import annotations

import typer

from rftcli.cli import talk

app = typer.Typer(add_completion=False)


@app.command()
def schema() -> int:
    """Print the JSON schema of recipes, for editors."""
    from rftcli.recipe.schema import json_schema
    from rftcli.rewards.rules import RULES

    talk.data(json_schema(RULES))
    return 0

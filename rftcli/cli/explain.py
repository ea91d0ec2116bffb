"""`rft explain`."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def explain(topic: Annotated[str, typer.Argument(help="A recipe key (rollout.temperature) or a problem's code.", show_default=False)]) -> int:
    """Say what a recipe key or a problem code means."""
    from rftcli.recipe.explain import explain as explained

    print(explained(topic))
    return 0

"""`rft explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from rftcli.errors import UsageError

app = typer.Typer(add_completion=False)


@app.command()
def explain(
    topic: Annotated[
        str | None,
        typer.Argument(
            help="A recipe key (rollout.temperature), a kind (advantage:grpo, loss:gspo, correction:mask, kl:k3, scorer:http), a rule (rule:exact), "
            "a preset (preset:dapo), a metric of a run (mfu) or its word in a step's line (nosig), or the code of a problem or of a run's warning; "
            "none: what there is.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Say what a recipe key, an estimator, a loss, a reward rule, a metric, a problem's or a warning's code means."""
    from rftcli.observe.metrics import pages
    from rftcli.observe.warning_codes import WARNINGS
    from rftcli.recipe.explain import explain as explained
    from rftcli.rewards.rules import RULES

    try:
        text = explained(topic, rules=RULES, warnings=WARNINGS, metrics=pages())
    except UsageError:
        metric = _metric_of(topic)
        if metric is None:
            raise
        text = explained(metric, metrics=pages())
    print(text, end="")
    return 0


def _metric_of(word: str | None) -> str | None:
    """What a word of a step's line stands for."""
    from rftcli.observe.plain import FIELDS

    return next((metric for label, metric, _, _ in FIELDS if label == word), None)

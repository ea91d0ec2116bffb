"""What a recipe says wrongly about scorers, found before anything is loaded: heads, templates, classes, paths, secrets that are not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rftcli.errors import UsageError
from rftcli.plan.facts import ModelFacts, ScorerFacts
from rftcli.plan.specs import unused_text, used_scorers
from rftcli.probe.model import model_facts
from rftcli.recipe.load import LoadedRecipe
from rftcli.recipe.problems import Problem
from rftcli.recipe.scorer_rules import variant
from rftcli.recipe.sections import ScorerModel
from rftcli.recipe.written import escaped
from rftcli.runtime.environment import resolved_model


def scorer_problems(loaded: LoadedRecipe, folder: Path) -> list[Problem]:
    """Heads and templates that cannot be read, classes that cannot be imported."""
    if not loaded.recipe.models.scorers:
        return []
    from rftcli.rewards.scorers.head import Head
    from rftcli.rewards.scorers.own import scorer_class
    from rftcli.rewards.scorers.template import judge_template

    problems: list[Problem] = []

    def check(key: str, look: Callable[[], object]) -> None:
        try:
            look()
        except UsageError as error:
            problems.append(loaded.problem(key, error.message, hint=error.hint))

    for name, scorer in loaded.recipe.models.scorers.items():
        here = f"models.scorers.{name}"
        if scorer.kind == "classifier":
            check(f"{here}.head", lambda scorer=scorer: Head(str(scorer.head)))
        if scorer.prompt is not None:
            check(f"{here}.prompt", lambda scorer=scorer: judge_template(_text(str(scorer.prompt))))
        if scorer.template is not None:
            check(f"{here}.template", lambda scorer=scorer: _text(str(scorer.template)))
        if scorer.python is not None:
            check(f"{here}.python", lambda scorer=scorer: scorer_class(str(scorer.python), [folder]))
    return problems


def scorer_facts(loaded: LoadedRecipe, problems: list[Problem], environ: Mapping[str, str], *, hub: bool = True) -> dict[str, ScorerFacts]:
    """What the compiler needs to know of every scorer that is used. Paths without a model and variables that are not set are problems. Not `hub`:
    nothing that needs a network, and no secrets. MachineError where the hub cannot be reached."""
    used, found = used_scorers(loaded.recipe), {}
    for name, scorer in loaded.recipe.models.scorers.items():
        if name not in used:
            continue
        here = f"models.scorers.{name}"
        model = None
        if variant(scorer) in ("classifier", "generative", "started", "beside") and (hub or str(scorer.path).startswith(("/", "builtin:"))):
            model = _model(loaded, name, scorer, problems)
        for header, variable in scorer.headers_env.items() if hub else ():
            if not environ.get(variable):
                message = f"the environment variable `{variable}` is not set"
                problems.append(loaded.problem(f"{here}.headers_env.{header}", message, hint=f"export {variable}=... before the run"))
        found[name] = ScorerFacts(model=model, prompt=_from_file(scorer.prompt), template=_from_file(scorer.template))
    return found


def scorer_warnings(loaded: LoadedRecipe) -> list[str]:
    unused = [name for name in loaded.recipe.models.scorers if name not in used_scorers(loaded.recipe)]
    return [unused_text(unused)] if unused else []


def _model(loaded: LoadedRecipe, name: str, scorer: ScorerModel, problems: list[Problem]) -> ModelFacts | None:
    key = ("models", "scorers", name, "path")
    try:
        facts = model_facts(resolved_model(str(scorer.path)), scorer.revision)
    except UsageError as error:
        problems.append(loaded.problem(f"models.scorers.{name}.path", error.message, hint=error.hint))
        return None
    kept = loaded.unexpanded.get(key)
    return replace(facts, path=escaped(facts.path) if kept is None else kept.text)


def _text(given: str) -> str:
    """A template's text: what is given, or the file that it names. UsageError for a file that cannot be read."""
    if "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{given} cannot be read: {error}", hint="a file, or Jinja text with `{{ ... }}`") from error


def _from_file(given: str | None) -> str | None:
    """The text for a plan, which keeps `${VAR}`; None where the recipe has it itself."""
    return None if given is None or "{" in given else escaped(_text(given))

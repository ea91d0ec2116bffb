"""Options of engines against the release that is installed: what it has no argument for is told before anything heavy loads. No torch.

Where that release cannot be read, or another one runs (servers at addresses, a `command` of the recipe), nothing is said here: the engine refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from rftcli.plan.specs import used_scorers
from rftcli.probe.engine_arguments import Declared, sglang_arguments, vllm_arguments
from rftcli.recipe import estimator_rules, judge_rules, server_rules, sglang_rules, vllm_rules
from rftcli.recipe.load import LoadedRecipe
from rftcli.recipe.names import OTHER_NAMES, SURE, closest, did_you_mean, either
from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.problems import Problem
from rftcli.recipe.scorer_rules import variant
from rftcli.recipe.sections import Recipe

ENGINES = {
    "vllm": ("vLLM", partial(vllm_arguments, serve=False)),
    "vllm serve": ("`vllm serve`", partial(vllm_arguments, serve=True)),
    "sglang": ("SGLang", sglang_arguments),
}
"""What takes arguments -> (its name, what reads theirs)."""


class Given(NamedTuple):
    """Options of one section. `owned`: argument -> the key that decides it, `fixed`: argument -> why it is not to be chosen; rules tell of both."""

    where: KeyPath
    options: Mapping[str, Any]
    engine: str
    owned: Mapping[str, str]
    fixed: Mapping[str, str] = {}


def option_problems(loaded: LoadedRecipe) -> list[Problem]:
    """One for every option that the installed engine has no argument for."""
    found, declared = [], dict[str, Declared | None]()
    for given in _given(loaded.recipe):
        if given.engine not in declared:
            declared[given.engine] = ENGINES[given.engine][1]()
        known = declared[given.engine]
        for name in () if known is None else given.options:
            argument, told = _argument(name, given.engine), name.replace("-", "_") in given.owned.keys() | given.fixed.keys()
            if known is not None and argument not in known.names and not told:
                message = f"this version of {ENGINES[given.engine][0]} has no argument `{name}`"
                reason, hint = _meant(argument, given, known), f"its arguments are declared in {known.file}"
                path = format_path((*given.where, name))
                found.append(loaded.problem(path, message, reason=reason, hint=hint, code="engine-option", at_key=True))
    return found


def _given(recipe: Recipe) -> Iterator[Given]:
    """Every section whose options an engine of this Python takes."""
    rollout, vllm = recipe.rollout, recipe.rollout.vllm
    server = vllm.server
    command = server is not None and (server.start is None or bool(server.start.command))
    if vllm.options and rollout.engine in ("auto", "vllm") and not command:
        serve = server is not None or vllm.process == "beside"
        fixed = vllm_rules.FIXED | (server_rules.APART if serve else {})
        yield Given(("rollout", "vllm", "options"), vllm.options, "vllm serve" if serve else "vllm", vllm_rules.OWNED, fixed)
    if rollout.sglang.options and rollout.engine == "sglang":
        yield Given(("rollout", "sglang", "options"), rollout.sglang.options, "sglang", sglang_rules.OWNED, sglang_rules.FIXED)
    for name in sorted(used_scorers(recipe) & recipe.models.scorers.keys()):
        scorer, here = recipe.models.scorers[name], ("models", "scorers", name)
        place, kind = scorer.placement, variant(scorer)
        beside = judge_rules.BESIDE if kind == "beside" else {}
        owned = {argument: f"models.scorers.{name}.{key}" for argument, key in (judge_rules.OWNED | beside).items()}
        if kind == "beside" and scorer.options:
            yield Given((*here, "options"), scorer.options, "vllm serve", owned, judge_rules.FIXED)
        elif kind == "started" and place != "shared" and place.options and not place.command:
            yield Given((*here, "placement", "options"), place.options, "vllm serve", owned, judge_rules.FIXED)
    teacher = recipe.models.teacher
    if teacher is not None and teacher.placement is not None and teacher.placement.options and not teacher.placement.command:
        owned = {argument: f"models.teacher.{key}" for argument, key in estimator_rules.OWNED.items()}
        yield Given(("models", "teacher", "placement", "options"), teacher.placement.options, "vllm serve", owned, judge_rules.FIXED)


def _argument(name: str, engine: str) -> str:
    """A command line takes `-` for `_`, `no-` before a switch, and `.key` behind one that takes a mapping."""
    if engine != "vllm serve":
        return name
    return name.replace("-", "_").partition(".")[0].removeprefix("no_")


def _meant(argument: str, given: Given, known: Declared) -> str | None:
    """A key of ours that another tool calls so, or that decides the nearest argument; else the nearest argument."""
    keys = OTHER_NAMES.get(argument, ()) if given.where[0] == "rollout" else ()
    if not keys:
        near = closest(argument, known.names | given.owned.keys(), SURE)
        keys = tuple({given.owned[name]: None for name in near if name in given.owned})
    return f"did you mean {either(keys)}?" if keys else did_you_mean(argument, known.names)

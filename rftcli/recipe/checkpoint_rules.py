"""Rules across keys that concern checkpoints; `rules.RULES` lists them."""

from __future__ import annotations

from collections.abc import Iterator

from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.sections import Recipe

_BEST = ("checkpoint", "keep_best", "metric")


def best_metric(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    best = recipe.checkpoint.keep_best
    if best is None:
        return
    if not recipe.data.eval:
        yield Finding(path=_BEST, message="needs an evaluation set", reason="`data.eval` has no set", reads=(("data", "eval"),))
        return
    name, _, metric = best.metric.removeprefix("eval.").rpartition(".")
    if not best.metric.startswith("eval.") or name not in recipe.data.eval or not metric:
        known = ", ".join(f"`eval.{name}.mean@{item.samples_per_prompt}`" for name, item in recipe.data.eval.items())
        message = f"`{best.metric}` is no metric of an evaluation set"
        yield Finding(path=_BEST, message=message, reason="it is `eval.<set>.<metric>`", hint=f"for example {known}", reads=(("data", "eval"),))


def something_to_save(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if not recipe.checkpoint.trainer_state and not recipe.checkpoint.save_hf:
        yield Finding(
            path=("checkpoint", "trainer_state"),
            message="and `save_hf` are both false: a checkpoint would hold no weights",
            reason="keep one of the two",
            reads=(("checkpoint", "save_hf"),),
        )

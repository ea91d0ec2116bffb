"""Rules across keys of fused kernels. `rules.RULES` holds them with the others; what the machine decides is in `plan.compile_kernels`."""

from __future__ import annotations

from collections.abc import Iterator

from rftcli.recipe.finding import Finding, KnownRules, Rule
from rftcli.recipe.sections import Recipe


def kernels_compiled(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if recipe.train.kernels == "liger" and recipe.train.compile:
        yield Finding(
            path=("train", "kernels"),
            message="cannot be liger while `compile` is true",
            reason="torch.compile fuses the same operations itself, and does not look into kernels that are there already",
            hint="keep one of the two",
            reads=(("train", "compile"),),
        )


# How to add one: a row with the keys that it is about, a sentence, and a function that yields findings.
RULES: dict[str, Rule] = {
    "kernels-compiled": Rule(
        about=("train.kernels", "train.compile"),
        text="The same operations are fused once: by kernels or by torch.compile.",
        check=kernels_compiled,
    ),
}
"""Name -> rule."""

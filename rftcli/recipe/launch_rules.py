"""Rules of `launch` and `profile`. They see a `Recipe` and no file."""

from __future__ import annotations

from collections.abc import Iterator

from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.sections import Recipe
from rftcli.redact import is_secret_name

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
"""What a launcher tells each rank: one value for all of them would be wrong."""


def environment(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for name in recipe.launch.env:
        path = ("launch", "env", name)
        if is_secret_name(name):
            why = "a recipe and its plan lie on disk, readable to others"
            hint = "log in on every node, or set it in the shell there"
            yield Finding(path=path, message=f"`{name}` looks like a secret", reason=why, hint=hint, at_key=True)
        elif name in OURS:
            yield Finding(path=path, message=f"`{name}` is set by the launcher for each rank", reason="one value for all ranks is wrong", at_key=True)


def traced_steps(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    last = recipe.train.steps
    beyond = [step for step in recipe.profile.steps if last is not None and step > last]
    if beyond:
        yield Finding(
            path=("profile", "steps"),
            message=f"step {beyond[0]} is never reached: `train.steps` is {last}",
            reason="nothing would be traced",
            reads=(("train", "steps"),),
        )

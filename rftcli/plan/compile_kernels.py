"""Fused kernels against the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan.compile_problems import PlanProblem

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


def check_kernels(recipe: Recipe, device: str, problems: list[PlanProblem]) -> None:
    kernels = recipe.train.kernels
    if kernels != "none" and device == "cpu":
        problems.append(
            PlanProblem(
                path="train.kernels",
                message=f"`{kernels}` needs a GPU, and this run is on a CPU",
                reason="its kernels are written in Triton, which compiles them for GPUs",
                hint="leave `train.kernels` out here, or plan for another machine with `rft plan --machine 8xH100`",
            )
        )

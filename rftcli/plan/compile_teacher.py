"""The teacher of a plan, and what a person should know about an estimator and the loss it is meant for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rftcli.plan.facts import ModelFacts
from rftcli.plan.plan import ModelPlan, TeacherPlan, WorldPlan
from rftcli.plan.plan_models import ServerPlan

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe
    from rftcli.recipe.sections.teacher import TeacherModel

MEANT_FOR = {
    "cpgd": ("cpg", "its drift term takes the place of the clipped ratio"),
    "gpg": ("reinforce", "its gradient is that of the log-prob times the advantage, without ratio and clip"),
}
"""Estimator -> the policy loss of its formula, and why."""


def teacher_plan(
    recipe: Recipe, world: WorldPlan, policy: ModelPlan, teacher: ModelFacts | None, notes: list[str]
) -> TeacherPlan | None:
    """`teacher`: facts of a teacher that is loaded here."""
    section = recipe.models.teacher
    if section is None:
        return None
    server = None
    if section.server is not None or section.placement is not None:
        server = ServerPlan(
            url=section.server or "",
            api=section.api,
            model=section.served_model,
            timeout_seconds=section.timeout_seconds,
            retries=section.retries,
            concurrency=section.concurrency,
            headers_env=dict(section.headers_env),
        )
    if section.server is not None:
        return TeacherPlan(model=None, offload=False, server=server)
    assert section.path is not None, "a teacher has a path or a server"
    own = ModelFacts(path=section.path, revision=section.revision) if teacher is None else teacher
    # loaded whole and never trained: what makes the policy trainable is not the teacher's
    model = replace(
        policy,
        path=own.path, given=section.path, parameters=own.parameters, revision=own.revision or section.revision,
        dtype=policy.dtype if section.dtype == "auto" else section.dtype,
        dropout=0.0, gradient_checkpointing=False, options={}, tokenizer=None, tokenizer_revision=None, tokenizer_options={}, add_tokens=(),
        freeze=(), lora=None, quantise=None, ema=None, kernels="none",
    )  # fmt: skip
    if server is not None:
        return TeacherPlan(model=model, offload=False, server=server)
    return TeacherPlan(model=model, offload=_offload(section, world, notes), server=None)


def _offload(section: TeacherModel, world: WorldPlan, notes: list[str]) -> bool:
    """Whether the teacher waits in CPU memory, by the rule of references."""
    if world.device == "cpu":
        if section.offload is True:
            notes.append("models.teacher.offload has no effect: everything is on the CPU anyway")
        return False
    return section.offload is True  # `auto` has a value by now


def estimator_notes(recipe: Recipe) -> list[str]:
    """Where an estimator is used in another way than its source does."""
    kind, loss, kl = recipe.algorithm.advantage.kind, recipe.algorithm.loss.kind, recipe.algorithm.kl
    notes = []
    if kind in MEANT_FOR and loss != MEANT_FOR[kind][0]:
        meant, why = MEANT_FOR[kind]
        notes.append(f"algorithm.advantage.kind: `{kind}` is meant for `algorithm.loss.kind: {meant}`, and the loss is `{loss}`: {why}")
    if kind == "reinforce_pp_baseline" and kl.coefficient > 0 and (kl.place, kl.estimator) != ("loss", "k2"):
        notes.append(f"algorithm.kl: `{kind}` is published with `place: loss` and `estimator: k2`; here it is {kl.estimator} in the {kl.place}")
    if kind == "reinforce_pp" and kl.coefficient > 0 and kl.place == "loss":
        notes.append(f"algorithm.kl: `{kind}` is published with `place: reward`, for each token; here the KL term is in the loss")
    return notes

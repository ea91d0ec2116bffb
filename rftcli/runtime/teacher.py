"""The teacher of a plan made real on one rank: a model of its own beside the policy, or one behind a server, which the run may start.

What it leaves out: what its log-probs are for (`stages.distill`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from rftcli.errors import RftError, UsageError
from rftcli.models.policy import CausalPolicy
from rftcli.models.probe import agreement
from rftcli.models.vocabularies import check_same_ids, check_same_texts
from rftcli.plan.plan import Plan
from rftcli.plan.plan_models import ServerPlan
from rftcli.protocols import Reference, World
from rftcli.runtime.models import load_model, make_tokenizer
from rftcli.runtime.reference import ModelReference

if TYPE_CHECKING:
    from rftcli.models.remote_teacher import RemoteTeacher
    from rftcli.runtime.teacher_server import Served

PROBE_TEXT = "The quick brown fox jumps over 13 lazy dogs: 3.14159 = pi?"
"""Whose ids a server is asked about before any model is loaded."""


def check_teacher(plan: Plan, tokenizer: Any, world: World) -> None:
    """Before anything heavy loads: the teacher means the same tokens by the policy's ids, and a server answers. RftError on every rank alike."""
    if plan.teacher is None:
        return
    answer: tuple[str, str | None, bool] | None = None
    if world.rank == 0:
        try:
            _check(plan, tokenizer)
        except RftError as error:
            answer = (error.message, error.hint, isinstance(error, UsageError))
    found = world.gather(answer)[0]
    if found is not None:
        message, hint, usage = found
        raise (UsageError if usage else RftError)(message, hint=hint)


def _check(plan: Plan, tokenizer: Any) -> None:
    assert plan.teacher is not None
    if plan.teacher.model is not None:
        check_same_ids(tokenizer.get_vocab(), make_tokenizer(plan.teacher.model).get_vocab())
        return
    assert plan.teacher.server is not None
    teacher = remote(plan.teacher.server)
    try:
        ids = tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids
        texts = [text for _, text in teacher.ask(ids)]
        check_same_texts([tokenizer.decode([number]) for number in ids], texts)
    finally:
        teacher.close()


def remote(plan: ServerPlan, served: Served | None = None) -> RemoteTeacher:
    """`served`: the server that the run has started. UsageError when a header's environment variable is not set."""
    from rftcli.models.remote_teacher import RemoteTeacher

    headers = {}
    for header, variable in plan.headers_env.items():
        if variable not in os.environ:
            raise UsageError(f"models.teacher.headers_env.{header}: the environment variable {variable} is not set", hint=f"export {variable}=...")
        headers[header] = os.environ[variable]
    own = {} if served is None else {"gone": served.gone, "on_close": served.stop}
    return RemoteTeacher(
        plan.url if served is None else served.url,
        api=plan.api,
        model=plan.model if served is None else served.model,
        timeout_seconds=plan.timeout_seconds,
        retries=plan.retries,
        concurrency=plan.concurrency,
        headers=headers,
        **own,
    )


def make_teacher(plan: Plan, device: torch.device, world: World, served: Served | None = None) -> Reference | None:
    """The plan's teacher; None where it has none. `served`: its server, where the run has started one. RftError when its log-probs are not those of
    its plain forward."""
    if plan.teacher is None:
        return None
    if plan.teacher.server is not None:
        return remote(plan.teacher.server, served)
    assert plan.teacher.model is not None
    model = load_model(plan.teacher.model, device)
    policy = CausalPolicy(model)
    probe = agreement(policy, temperature=plan.rollout.temperature, shares_prompts=plan.batch.share_prompts)
    if plan.batch.form not in probe.layouts:
        raise RftError(
            f"the teacher's log-probs differ from its plain forward by {getattr(probe, plan.batch.form):.2g} nats on average in the "
            f"{plan.batch.form} layout (at most {probe.tolerance:g} is accepted)",
            hint="try models.teacher.dtype: float32, or another batch.layout",
        )
    policy.head = probe.head
    if plan.teacher.offload:
        model.to("cpu")
    return ModelReference(policy, device, offload=plan.teacher.offload, refresh_every=0, mix=1.0, writes=world.rank == 0)


def close_teacher(teacher: Reference | None) -> None:
    """Connections of a teacher behind a server end."""
    if teacher is None:
        return
    from rftcli.models.remote_teacher import RemoteTeacher

    if isinstance(teacher, RemoteTeacher):
        teacher.close()

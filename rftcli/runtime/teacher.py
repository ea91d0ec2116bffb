"""The teacher of a plan made real on one rank: a model of its own beside the policy, or one behind a server, which the run may start.

What it leaves out: what its log-probs are for (`stages.distill`).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from rftcli.errors import RftError, UsageError
from rftcli.models.policy import CausalPolicy
from rftcli.models.probe import agreement
from rftcli.models.remote_teacher import RemoteTeacher
from rftcli.models.vocabularies import check_same_ids, check_same_texts
from rftcli.plan.plan import Plan
from rftcli.plan.plan_models import ServerPlan
from rftcli.protocols import Reference, World
from rftcli.rewards.scorers.spec import StartSpec
from rftcli.runtime.agreed import agreed
from rftcli.runtime.engine_process import stop_all
from rftcli.runtime.judge_servers import JudgeServers, Starter
from rftcli.runtime.judges import GONE_SECONDS, LOOK_SECONDS
from rftcli.runtime.models import load_model, make_tokenizer
from rftcli.runtime.reference import ModelReference
from rftcli.runtime.rundir import AttemptDir

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


@dataclass(slots=True, kw_only=True)
class Served:
    """The teacher's server as one rank sees it."""

    url: str
    model: str
    own: JudgeServers | None
    """Of the rank that has started it."""

    def gone(self) -> str | None:
        """Why it has ended. The other ranks are told by the end of the first one."""
        end = time.monotonic() + (0.0 if self.own is None else GONE_SECONDS)
        while True:
            words = None if self.own is None else self.own.last_words()
            if words is not None or time.monotonic() >= end:
                return words
            time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        if self.own is not None:
            stop_all(self.own.processes)


def begin_teacher(plan: Plan, world: World, attempt: AttemptDir, by: Starter) -> Served | None:
    """The server that the run starts for its teacher, on its way; `await_teacher` waits for it. Collective where there is one."""
    start = None if plan.teacher is None else plan.teacher.start
    if start is None:
        return None
    own = agreed(world, lambda: _started(start, attempt, by) if world.rank == 0 else None)
    url, model = world.gather(None if own is None else (own.urls[0], own.model))[0]
    return Served(url=url, model=model, own=own)


def _started(start: StartSpec, attempt: AttemptDir, by: Starter) -> JudgeServers:
    try:
        return JudgeServers("", start, attempt.logs, by, teacher=True)
    except OSError as error:
        raise RftError(f"the teacher's server cannot be started: {error}") from error


def await_teacher(served: Served | None, world: World) -> None:
    """Until it is ready; RftError on every rank alike. Collective where there is one."""
    if served is None:
        return
    try:
        agreed(world, lambda: None if served.own is None else served.own.wait())
    except BaseException:
        served.stop()
        raise


def remote(plan: ServerPlan, served: Served | None = None) -> RemoteTeacher:
    """`served`: the server that the run has started. UsageError when a header's environment variable is not set."""
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
    probe = agreement(policy, temperature=plan.rollout.temperature)
    if plan.batch.layout not in probe.layouts:
        raise RftError(
            f"the teacher's log-probs differ from its plain forward by {getattr(probe, plan.batch.layout):.2g} nats on average in the "
            f"{plan.batch.layout} layout (at most {probe.tolerance:g} is accepted)",
            hint="try models.teacher.dtype: float32, or another batch.layout",
        )
    policy.head = probe.head
    if plan.teacher.offload:
        model.to("cpu")
    return ModelReference(policy, device, offload=plan.teacher.offload, refresh_every=0, mix=1.0, writes=world.rank == 0)


def close_teacher(teacher: Reference | None) -> None:
    """Connections of a teacher behind a server end."""
    if isinstance(teacher, RemoteTeacher):
        teacher.close()

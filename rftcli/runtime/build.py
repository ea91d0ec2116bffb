"""A plan made real on one rank: models, engine, rewards, data. The one place that knows every room; the loop only uses what stands here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from rftcli.data.prompts import PromptBuilder
from rftcli.data.source import PromptSource
from rftcli.engines.shaping import rules_of
from rftcli.engines.table import sampler_class
from rftcli.errors import RftError
from rftcli.models.export import hf_writer
from rftcli.models.load import eos_ids, num_parameters, pad_id, special_tokens
from rftcli.models.policy import CausalPolicy
from rftcli.models.probe import TOLERANCE_8_BITS, Agreement, agreement
from rftcli.observe.lessons import LessonState, lessons
from rftcli.plan.plan import Plan, plan_from_json
from rftcli.protocols import Roles, Sampler, Stateful, World
from rftcli.rewards.answers import Answers
from rftcli.rewards.failures import ErrorWindow
from rftcli.rewards.literals import hidden_literals
from rftcli.rewards.table import RewardTable
from rftcli.runtime import engine_probe
from rftcli.runtime.behind import Behind
from rftcli.runtime.card import Latest, card
from rftcli.runtime.clock import Stopwatch
from rftcli.runtime.critic import CRITIC_FOLDER, Trained, export_critic, make_critic, saved_critic
from rftcli.runtime.deadline import Boundary, TimeLimits
from rftcli.runtime.early_stop import EarlyStop
from rftcli.runtime.emit import Emitter
from rftcli.runtime.engine_folder import make_own_engine
from rftcli.runtime.entropy_control import EntropyControl
from rftcli.runtime.hf_proof import prove_hf
from rftcli.runtime.inputs import bound_loss, make_answers, make_desk, make_eval_scorer, make_eval_sets, make_scorer, make_source, search_paths
from rftcli.runtime.kl_control import KlControl
from rftcli.runtime.learner import DeepSpeedLearner
from rftcli.runtime.memory import make_memory, remembered
from rftcli.runtime.models import fused_scores, keep_mean, load_whole, make_policy, make_reference, make_tokenizer, start_device
from rftcli.runtime.own_estimator import load_estimator
from rftcli.runtime.profiler import StepProfiler
from rftcli.runtime.rundir import AttemptDir, RunDir
from rftcli.runtime.scorers import fill_desk
from rftcli.runtime.started_servers import await_servers, begin_servers
from rftcli.runtime.supervised import make_supervised
from rftcli.runtime.teacher import check_teacher, close_teacher, make_teacher
from rftcli.runtime.tell import lesson_state
from rftcli.runtime.trackers import TrackerIds, Trackers
from rftcli.runtime.writes import Later
from rftcli.stages.beside import Beside
from rftcli.stages.collect import settings_of
from rftcli.stages.drawing import NOTHING, Memory
from rftcli.stages.estimator_inputs import Estimator
from rftcli.stages.evaluate import EvalSet
from rftcli.stages.shape import RunningNorm
from rftcli.stages.supervised import SupervisedStream


@dataclass(slots=True)
class Totals:
    """Counters over the whole run. Part of every checkpoint."""

    tokens: int = 0

    def state_dict(self) -> Mapping[str, Any]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tokens = int(state["tokens"])


@dataclass(slots=True, kw_only=True)
class Job:
    """Everything the loop touches on one rank."""

    plan: Plan
    written: Plan
    """The same as it goes to disk: with `${VAR}` in its texts."""
    run: RunDir
    attempt: AttemptDir
    world: World
    device: torch.device
    emit: Emitter
    watch: Stopwatch
    roles: Roles
    sampler: Sampler
    source: PromptSource
    scorer: RewardTable
    eval_scorer: RewardTable
    """The same one where evaluation has no rewards of its own."""
    answers: Answers
    early_stop: EarlyStop
    latest: Latest
    eval_sets: list[EvalSet]
    totals: Totals
    lessons: LessonState
    errors: ErrorWindow
    running_norm: RunningNorm
    trackers: Trackers | None
    profiler: StepProfiler
    tokenizer: Any
    tokenizer_to_write: Any
    """The same, or its copy: a thread may not write the one that encodes."""
    model: Any
    """The policy in Hugging Face form, for its configuration; its weights may be sharded."""
    pad_id: int
    eos_ids: tuple[int, ...]
    registry: dict[str, Stateful]
    trained: Trained
    kl: KlControl | None
    entropy: EntropyControl | None
    own_loss: Callable[..., Any] | None
    supervised: SupervisedStream | None
    estimator: Estimator | None
    """The user's own, where the plan has one."""
    info: dict[str, Any]
    limits: TimeLimits
    behind: Behind | None = None
    """What writes checkpoints behind the next steps; None: they are written before."""
    memory: Memory = NOTHING
    first_step: int = 1

    def export(self, directory: Path, of: str = "live", later: Later | None = None) -> None:
        """Write the policy so that from_pretrained loads it; `of` ema: its running mean. Collective: rank 0 keeps what the others help to gather."""
        state: dict[str, torch.Tensor] = {}
        for name, tensor in self.roles.policy.weights(of):
            if self.world.rank == 0:
                state[name] = tensor.to("cpu", copy=True)
        adapter = self.roles.policy.adapter
        plain = None if adapter is None else adapter.plain()
        shown = card(self.plan, self.latest)
        write = _nothing
        if self.world.rank == 0:
            write = hf_writer(self.model, self.tokenizer_to_write, state, directory, eos_ids=self.eos_ids, card=shown, plain=plain)
        self._write(directory, write, later)

    def export_checkpoint(self, directory: Path, later: Later | None = None) -> None:
        """The policy, with what belongs beside it: `adapter/` where one is trained, `ema/` where the running mean is used, `critic/` where there is
        one. Collective."""
        self.export(directory, later=later)
        learner, ema = self.roles.policy, self.plan.policy.ema
        if learner.adapter is not None:
            state: dict[str, torch.Tensor] = {}
            for name, parameter in learner.trained().items():
                with learner.present([parameter]):
                    if self.world.rank == 0:
                        state[name] = parameter.data.to("cpu", copy=True)
            beside = directory.with_name("adapter")
            self._write(beside, lambda: learner.adapter.save(beside, state), later)
        if ema is not None and (ema.export or ema.evaluate or self.plan.eval.weights == "ema"):
            self.export(directory.with_name("ema"), "ema", later)
        if self.roles.critic is not None:
            export_critic(self.roles.critic, self.tokenizer_to_write, directory.with_name(CRITIC_FOLDER), self.world, later)

    def export_final(self) -> None:
        """What the run was for: the live weights, or their running mean. Collective."""
        ema = self.plan.policy.ema
        self.export(self.run.final, "ema" if ema is not None and ema.export else "live")

    def follow(self, step: int) -> None:
        """The reference takes over from the policy what the plan says. Collective."""
        if self.roles.reference is not None:
            self.roles.reference.follow(step, self.roles.policy)

    def prove_engine(self) -> None:
        """Engine and trainer agree, where they are two models; the hf engine finds out how it decodes. Collective."""
        if self.plan.rollout.own_engine is not None:
            engine_probe.prove(self)
        if self.plan.rollout.engine == "hf":
            prove_hf(self.sampler, self.world, self.emit)

    def rest(self) -> None:
        """Nothing is sampled until the next push: the engine gives back what the plan says."""
        if self.plan.rollout.own_engine is not None:
            self.sampler.sleep()

    def _write(self, directory: Path, action: Callable[[], None], later: Later | None = None) -> None:
        """Rank 0 writes; RftError on every rank alike when it could not. `later`: where what is written behind the next step is kept."""
        if later is not None:
            if self.world.rank == 0:
                later.call(action)
            return
        problem = None
        if self.world.rank == 0:
            try:
                action()
            except (OSError, SafetensorError) as error:  # the second is how safetensors tells of a full disk
                problem = f"{type(error).__name__}: {error}"
        failed = next((text for text in self.world.gather(problem) if text is not None), None)
        if failed is not None:
            raise RftError(
                f"the policy could not be written to {directory}: {failed}", hint=f"free space (`df -h {directory.parent}`), then `rft resume`"
            )

    def beside(self, step: int) -> Beside:
        """What takes part in the updates of `step` beside the policy's own loss."""
        return Beside(
            critic=self.roles.critic,
            supervised=self.supervised,
            kl_coefficient=self.kl_coefficient,
            entropy=self.entropy,
            own_loss=self.own_loss,
            policy_learns=self.plan.trains_policy(step),
        )

    @property
    def kl_coefficient(self) -> float | None:
        """In force now; None without a KL term."""
        return None if self.kl is None else self.kl.coefficient

    def news(self, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Warnings after a step: what the metrics teach, and trackers that failed."""
        return [*lessons(metrics, self.lessons), *(self.trackers.news() if self.trackers is not None else [])]

    def close(self) -> None:
        """End worker processes and the engine."""
        if self.behind is not None:
            self.behind.close()
        self.profiler.close()
        self.scorer.close()
        self.source.close()
        self.eval_scorer.close()
        self.sampler.close()
        close_teacher(self.roles.teacher)

    @property
    def last_step(self) -> int:
        """Where the loop ends: the plan's last step, or before its first where the run had ended early when its checkpoint was written."""
        return 0 if self.early_stop.reached else self.plan.steps

    def step_over(self) -> Boundary:
        """Does the run save, does it stop? Agreed over ranks: what rank 0 sees counts for all."""
        return self.world.gather(self.limits.step_over(self.attempt.stop_reason()) if self.world.rank == 0 else None)[0]


def _nothing() -> None: ...


def device_of(plan: Plan, local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if plan.world.device == "cuda" else torch.device("cpu")


def peak_gib(device: torch.device) -> float:
    """The most memory in tensors since the last call."""
    peak = torch.cuda.max_memory_allocated(device) / 1024**3
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def make_sampler(plan: Plan, model: Any, tokenizer: Any, ends: tuple[int, ...], pad_id: int, device: torch.device, *, owns_weights: bool) -> Sampler:
    """The plan's engine around `model` (which it shares with the trainer, or owns)."""
    cls: Any = sampler_class(plan.rollout.engine)
    if plan.rollout.engine == "fake":
        return cls(tokenizer.decode, vocab_size=model.config.get_text_config().vocab_size, eos_ids=ends)
    rollout = plan.rollout
    rows = {"batch_rows": rollout.most_rows or rollout.batch_rows, "fixed_rows": rollout.batch_rows}
    sizes = {**rows, "batch_tokens": rollout.batch_tokens, "continuous": rollout.continuous}
    return cls(model, tokenizer, ends, pad_id=pad_id, device=device, owns_weights=owns_weights, **sizes)


def proved(policy: CausalPolicy, plan: Plan, emit: Emitter) -> Agreement:
    """Refuse to train on log-probs that are not the model's own; the policy then uses the head that was found. Raises RftError with what to change.
    Collective where weights are sharded."""
    rough = plan.policy.quantise is not None and plan.policy.quantise.bits == 8
    rounding = TOLERANCE_8_BITS if rough else None
    still = plan.policy.dropout == 0 and (plan.policy.lora is None or plan.policy.lora.dropout == 0)
    probe = agreement(
        policy, temperature=plan.rollout.temperature, tolerance=rounding, shares_prompts=plan.batch.share_prompts, in_training=still
    )
    form = plan.batch.form
    if probe.training is not None and not probe.training <= probe.tolerance:
        raise RftError(
            f"in training mode the model's log-probs are others than in evaluation, by {probe.training:.2g} nats on average: it draws numbers",
            hint="switch that off in the model's configuration (`models.policy.options` sets its keys); a router that samples cannot be trained",
        )
    if form not in probe.layouts:
        other = "; or batch.share_prompts: false" if form == "shared" else f"; batch.layout: {probe.layouts[0]} agrees" if probe.layouts else ""
        raise RftError(
            f"the trainer's log-probs differ from the model's plain forward by {getattr(probe, form):.2g} nats on average over "
            f"{probe.positions} positions in the {form} layout (at most {probe.tolerance:g} is accepted)",
            hint=f"try models.policy.attention: eager or dtype: float32{other}",
        )
    if probe.head == "model":
        emit.log("the output head is more than a matrix: log-probs go through the model's own forward, which needs more memory")
    policy.head = probe.head
    return probe


def build(
    plan: Plan, run: RunDir, attempt: AttemptDir, world: World, device: torch.device, emit: Emitter, *, first_step: int, limits: TimeLimits,
    weights: Path | None = None,
) -> Job:  # fmt: skip
    """Everything, on this rank. Cheap things first: a bad data set or reward is found before a model is loaded. `weights`: a policy to go on from
    instead of the plan's (a checkpoint without the trainer's state)."""
    watch = Stopwatch(peak_gib=partial(peak_gib, device) if device.type == "cuda" else None)
    disable_progress_bar()
    paths = search_paths(plan)
    desk = make_desk(plan)
    scorer = make_scorer(plan, paths, desk, attempt.stop_asked)
    eval_scorer = scorer if plan.eval.rewards is None else make_eval_scorer(plan, paths, desk, attempt.stop_asked)
    own_loss = bound_loss(plan, paths)
    tokenizer = make_tokenizer(plan.policy)
    for text in hidden_literals(plan.rewards.labels, special_tokens(tokenizer)):
        emit.warn("special_token_literal", text)
    if plan.rollout.engine == "hf":
        rules_of(settings_of(plan.rollout, plan.seed), frozenset(), tokenizer, device)  # words and forms that the tokenizer cannot spell
    check_teacher(plan, tokenizer, world)
    if plan.rollout.vllm is not None:
        from rftcli.runtime.vllm_apart import check_servers

        check_servers(plan, world, emit.log, attempt.stop_asked)
    servers = begin_servers(plan, world, attempt, device)
    estimator = None if plan.advantage.python is None else load_estimator(plan.advantage.python, plan.advantage.options, paths)
    builder = PromptBuilder(tokenizer, plan.data.chat, plan.data.max_prompt_tokens, plan.data.overlong_prompt, paths)
    source = make_source(plan, builder, paths)
    eval_sets = make_eval_sets(plan, builder, paths)
    for name, counts in source.counts.items():
        if counts.overlong:
            longer = f"{counts.overlong} of {counts.rows} prompts are longer than {plan.data.max_prompt_tokens} tokens"
            emit.warn("overlong_prompts", f"data set `{name}`: {longer} ({plan.data.overlong_prompt})")

    torch.manual_seed(plan.seed)  # dropout, if any; sampling and order have keys of their own
    model, adapter = make_policy(plan.policy, start_device(plan.learner, device), tokenizer, emit, weights)
    ends = eos_ids(model.config, model.generation_config, tokenizer)
    pad = pad_id(tokenizer)
    checkpointing, balance = plan.policy.gradient_checkpointing, plan.loss.router_coefficient > 0
    fused = fused_scores(world, device, emit)
    policy = CausalPolicy(
        model, gradient_checkpointing=checkpointing, balance=balance, compiled=plan.learner.compile, entropy_gradient=plan.loss.entropy_in_loss,
        fused=fused,
    )  # fmt: skip
    probe = None if plan.learner.from_host else proved(policy, plan, emit)
    if plan.rollout.engine == "hf" and not plan.rollout.shares_weights:
        sampler = make_sampler(plan, load_whole(plan.policy, device, tokenizer).eval(), tokenizer, ends, pad, device, owns_weights=True)
    elif plan.rollout.own_engine is None:
        sampler = make_sampler(plan, model, tokenizer, ends, pad, device, owns_weights=False)
    parameters = num_parameters(model)
    learner = DeepSpeedLearner(policy, plan.learner, world, device, temperature=plan.rollout.temperature, adapter=adapter)
    probe = probe or proved(policy, plan, emit)  # by the parts that all ranks hold
    keep_mean(plan.policy, learner, world)
    reference = make_reference(plan, learner, world, device, tokenizer, head=probe.head, fused=fused)
    teacher = make_teacher(plan, device, world, servers.teacher)
    critic = None if plan.critic is None else make_critic(saved_critic(plan.critic, weights), world, device, tokenizer)
    fill_desk(desk, plan, world, device, run.scores, paths, tokenizer, emit.warn, servers.judges)
    if plan.rollout.own_engine is not None:  # it looks at what memory the others have left
        sampler = make_own_engine(plan, model, tokenizer, ends, world, device, emit, attempt, first_step=first_step, newest=lambda: learner.version)
    await_servers(servers, plan, world)
    kl = None if plan.kl is None else KlControl(plan.kl)
    entropy = EntropyControl(plan.loss) if plan.loss.entropy_in_loss else None
    supervised = make_supervised(plan, tokenizer, ends, paths, emit)
    totals, window, running_norm = Totals(), ErrorWindow(plan.rewards.max_error_rate), RunningNorm()
    taught = lesson_state(plan)
    early_stop, latest = EarlyStop(plan=plan.early_stop, world=world, max_tokens=plan.max_tokens), Latest()
    registry: dict[str, Stateful] = {"source": source, "learner": learner, "totals": totals, "errors": window, "lessons": taught}
    kept: dict[str, Any] = {"critic": critic, "kl": None if plan.kl is None or plan.kl.controller == "fixed" else kl, "supervised": supervised}
    kept["running_norm"] = None if plan.shaping.running_norm == "off" else running_norm
    kept["entropy"] = None if plan.loss.entropy_controller is None else entropy
    registry |= {name: item for name, item in kept.items() if item is not None}
    registry |= {"early_stop": early_stop, "latest": latest}
    memory = make_memory(plan, source, paths, world, newest=lambda: learner.version)
    registry |= remembered(memory)
    registry["trackers"] = TrackerIds(run, writes=world.rank == 0)
    info = {
        "name": plan.name, "steps": plan.steps, "ranks": world.size, "device": plan.world.device, "engine": plan.rollout.engine,
        "model": plan.policy.given, "parameters": parameters, "zero_stage": plan.learner.zero_stage, "batch": plan.batch.equation,
        "logprob_probe": probe.worst,
    }  # fmt: skip
    return Job(
        plan=plan, written=plan_from_json(attempt.plan.read_text(encoding="utf-8")), run=run, attempt=attempt, world=world, device=device,
        emit=emit, watch=watch,
        roles=Roles(policy=learner, reference=reference, critic=critic, teacher=teacher), estimator=estimator,
        trained=Trained(learner, critic), kl=kl, supervised=supervised, entropy=entropy, own_loss=own_loss,
        sampler=sampler, source=source, scorer=scorer, errors=window, running_norm=running_norm,
        eval_scorer=eval_scorer, answers=make_answers(plan), early_stop=early_stop, latest=latest,
        eval_sets=eval_sets, totals=totals, lessons=taught, trackers=Trackers(attempt, plan.track) if world.rank == 0 else None,
        tokenizer=tokenizer, tokenizer_to_write=deepcopy(tokenizer) if plan.checkpoint.background else tokenizer,
        model=model, pad_id=pad, eos_ids=ends, registry=registry, info=info, limits=limits, memory=memory, first_step=first_step,
        profiler=StepProfiler(plan.profile, attempt, emit, world.rank), behind=Behind(world) if plan.checkpoint.background else None,
    )  # fmt: skip

"""`rft eval` on the ranks: a policy from a checkpoint or from the recipe, the plan's evaluation sets, and nothing of training."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rftcli.data.prompts import PromptBuilder
from rftcli.events import EvalDone, RunEnded, RunStarted
from rftcli.models.load import eos_ids, load_tokenizer, num_parameters, pad_id
from rftcli.plan.plan import Plan
from rftcli.protocols import World
from rftcli.runtime.build import device_of, make_sampler
from rftcli.runtime.emit import Emitter
from rftcli.runtime.engine_folder import make_own_engine, whole_weights
from rftcli.runtime.hf_proof import prove_hf
from rftcli.runtime.inputs import make_answers, make_desk, make_eval_scorer, make_eval_sets, search_paths
from rftcli.runtime.models import load_model, make_policy, make_tokenizer, start_device
from rftcli.runtime.parts import PartFile
from rftcli.runtime.rundir import AttemptDir, RunDir, step_name, write_json
from rftcli.runtime.scorers import fill_desk
from rftcli.runtime.started_servers import await_servers, begin_servers
from rftcli.stages.evaluate import evaluate


def evaluate_only(plan: Plan, run: RunDir, attempt: AttemptDir, world: World, emit: Emitter, *, checkpoint: str | None) -> None:
    """`checkpoint`: a checkpoint folder; None evaluates the model that the plan would train. Collective."""
    folder = None if checkpoint is None else Path(checkpoint)
    path = plan.policy.path if folder is None else str(folder / _weights(plan))
    shown = plan.policy.given if folder is None else path
    device = device_of(plan, int(os.environ.get("LOCAL_RANK", "0")))
    paths = search_paths(plan, folder)
    # a checkpoint holds what was made of it: adapter merged, vocabulary grown, weights unpacked
    if folder is None:
        tokenizer = make_tokenizer(plan.policy)
    else:
        tokenizer = load_tokenizer(path, trust_remote_code=plan.policy.trust_remote_code, options=plan.policy.tokenizer_options)
    builder = PromptBuilder(tokenizer, plan.data.chat, plan.data.max_prompt_tokens, plan.data.overlong_prompt, paths)
    sets = make_eval_sets(plan, builder, paths)
    desk = make_desk(plan)
    scorer = make_eval_scorer(plan, paths, desk, attempt.stop_asked)
    if plan.rollout.vllm is not None:
        from rftcli.runtime.vllm_apart import check_servers

        check_servers(plan, world, emit.log, attempt.stop_asked)
    servers = begin_servers(plan, world, attempt, device, learns=False)
    # an engine with a model of its own takes weights from wherever they are
    place = device if plan.rollout.own_engine is None else start_device(plan.learner, device)
    model, adapter = make_policy(plan.policy, place, tokenizer, emit) if folder is None else (load_model(plan.policy, place, path), None)
    model.eval()
    ends = eos_ids(model.config, model.generation_config, tokenizer)
    fill_desk(desk, plan, world, device, run.scores, paths, tokenizer, emit.warn, servers.judges)
    if plan.rollout.own_engine is None:
        sampler = make_sampler(plan, model, tokenizer, ends, pad_id(tokenizer), device, owns_weights=False)
    else:
        sampler = make_own_engine(plan, model, tokenizer, ends, world, device, emit, attempt, first_step=0)
        sampler.load(whole_weights(model, adapter), 0)
    await_servers(servers, plan, world)
    info = {"name": plan.name, "ranks": world.size, "device": plan.world.device, "model": shown, "parameters": num_parameters(model)}
    emit.emit(RunStarted(time=time.time(), attempt=attempt.number, step=emit.step, info=info))
    if plan.rollout.engine == "hf":
        prove_hf(sampler, world, emit)
    start = time.perf_counter()
    scorer.step = emit.step
    samples = PartFile(world, run.evals / f"{step_name(emit.step)}.samples.jsonl")
    answers = make_answers(plan)
    found = evaluate(sets, sampler, scorer, plan, world, step=emit.step, tick=emit.progress, write=samples.write, answers=answers)
    seconds = time.perf_counter() - start
    samples.merge()
    scorer.close()
    sampler.close()
    if world.rank == 0:
        write_json(run.evals / f"{step_name(emit.step)}.json", {"step": emit.step, "model": shown, "sets": found})
    emit.emit(EvalDone(time=time.time(), attempt=attempt.number, step=emit.step, sets=found, seconds=seconds))
    emit.state("done", step=emit.step)
    emit.emit(RunEnded(time=time.time(), attempt=attempt.number, step=emit.step, status="done"))


def _weights(plan: Plan) -> str:
    """The folder of a checkpoint that is evaluated."""
    return "ema" if plan.eval.weights == "ema" else "policy"

"""Engine against trainer, before the first rollout of an attempt: a few tokens are sampled without any filter, and their log-probs compared.

Later steps compare those of real completions (`sampler_logprob_gap`), but only where the recipe samples from the model's own distribution; this one
does not depend on it, and stops a run that would sample from other weights before anything was learnt from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rftcli.algo.align import Row, padded
from rftcli.algo.keyed import key64
from rftcli.errors import RftError
from rftcli.types import Batch, Denominators, Prompt, Request, SamplingSettings

if TYPE_CHECKING:
    from rftcli.runtime.build import Job

PROMPT_TOKENS = (24, 3, 17, 9)
"""Of the keyed prompts; cut where the engine has less room."""
NEW_TOKENS = 16
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.12}
"""Largest accepted mean difference, in nats a token: after nonsense, tokens are unlikely, and their log-probs coarse in bfloat16."""


@torch.no_grad()
def prove(job: Job) -> float:
    """The mean difference over all ranks, in nats a token. Collective. RftError on every rank alike where it is too large."""
    plan, vocabulary = job.plan, job.model.config.get_text_config().vocab_size
    engine = plan.rollout.own_engine
    assert engine is not None
    new = max(1, min(NEW_TOKENS, engine.max_model_tokens - 1))
    lengths = [min(length, engine.max_model_tokens - new) for length in PROMPT_TOKENS]
    requests = [Request(prompt=_prompt(number, length, vocabulary), samples=(0,)) for number, length in enumerate(lengths)]
    settings = SamplingSettings(max_new_tokens=new, seed=plan.seed, temperature=plan.rollout.temperature, ignore_eos=True, logprobs=True)
    made = sorted(job.sampler.generate(requests, settings), key=lambda one: one.prompt.draw)
    told = torch.tensor([value for one in made for value in one.trace.logprobs or ()], dtype=torch.float64)
    rows = [
        Row(torch.tensor((*one.prompt.token_ids, *one.trace.ids)), len(one.prompt.token_ids), torch.ones(len(one.trace.ids), dtype=torch.bool))
        for one in made
    ]
    own, _ = job.roles.policy.logprobs(_batch(rows, job), plan.rollout.temperature)
    differences = (own.double().cpu() - told).abs()
    total, count = job.world.sum([float(differences.sum()), float(differences.numel())])
    gap, allowed = total / count, TOLERANCE["bfloat16" if plan.policy.quantise is not None else plan.policy.dtype]
    if not gap <= allowed:
        raise RftError(
            f"the engine's log-probs differ from the trainer's by {gap:.3g} nats a token on average (at most {allowed:g} is accepted)",
            hint=f"`rollout.{plan.rollout.engine}.check_weights: true` tells other weights; models.policy.dtype: float32 whether it is rounding",
        )
    job.emit.log(f"engine against trainer: log-probs differ by {gap:.2g} nats on average over {count:.0f} tokens")
    return gap


def _prompt(number: int, length: int, vocabulary: int) -> Prompt:
    ids = tuple(key64("engine probe", number, place) % vocabulary for place in range(length))
    return Prompt(draw=number, row=number, row_id=f"probe:{number}", source="probe", label="probe", text="", token_ids=ids)


def _batch(rows: list[Row], job: Job) -> Batch:
    inputs = padded(rows, pad_id=job.pad_id)
    count = int(inputs.select.numel())
    return Batch(
        input_ids=inputs.input_ids.to(job.device),
        position_ids=inputs.position_ids.to(job.device),
        attention_mask=None if inputs.attention_mask is None else inputs.attention_mask.to(job.device),
        select=inputs.select.to(job.device),
        target_ids=inputs.target_ids.to(job.device),
        sequence=inputs.sequence.to(job.device),
        num_sequences=len(rows),
        advantages=torch.zeros(count, device=job.device),
        old_logprobs=None, reference_logprobs=None, sampler_logprobs=None, values=None, returns=None,
        denominators=Denominators(tokens=count, sequences=len(rows)),
        most_tokens=count,
    )  # fmt: skip

"""Score a policy on held-out prompts: every row of every set, each set with its own samples, and nothing of the training run touched.

Draws of an evaluation are row numbers under a key of their own, so the same weights give the same answers at any step and on any rank count. A
completion is handed on as soon as it is scored: what stays of it is a small record. What the metrics mean is in `held_out_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rftcli.algo.keyed import key64
from rftcli.errors import RftError
from rftcli.plan.plan import Plan
from rftcli.protocols import Sampler, Scorer, World
from rftcli.stages.collect import Tick, settings_of
from rftcli.stages.held_out_metrics import summarise
from rftcli.stages.records import record, sample_line
from rftcli.types import Completion, Prompt, Request, SamplingSettings, ScoredSample

Write = Callable[[Mapping[str, Any]], None]
"""Takes one line of the samples file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    name: str
    prompts: Sequence[Prompt]
    """All prompts of the set, on every rank; `draw` is the row number."""
    samples_per_prompt: int


class AnswerReader(Protocol):
    """What a completion answers, for votes (`rewards.answers.Answers`)."""

    def votes(self, label: str) -> bool: ...

    def read(self, completion: Completion) -> str | None: ...


def evaluate(
    sets: Sequence[EvalSet],
    sampler: Sampler,
    scorer: Scorer,
    plan: Plan,
    world: World,
    *,
    step: int,
    tick: Tick,
    write: Write,
    answers: AnswerReader | None = None,
) -> dict[str, Mapping[str, Any]]:
    """The sets of the eval event, the same on every rank. `write` gets this rank's samples; `answers` are read where the plan has votes."""
    results: dict[str, Mapping[str, Any]] = {}
    reader = answers if plan.eval.vote_k else None
    for item in sets:
        mine = [prompt for index, prompt in enumerate(item.prompts) if index % world.size == world.rank]
        requests = [Request(prompt=prompt, samples=tuple(range(item.samples_per_prompt))) for prompt in mine]
        total = len(mine) * item.samples_per_prompt
        completions = _told(sampler.generate(requests, settings_of_set(plan, item.name)), total, tick)
        records = []
        for sample in _each_once(scorer.score(completions), requests):
            votes = reader is not None and reader.votes(sample.completion.prompt.label)
            answer = reader.read(sample.completion) if reader is not None and votes else None
            records.append(record(sample, answer=answer, votes=votes))
            line = {"set": item.name, **sample_line(sample, step=step, advantage=None)}
            write({**line, "answer": answer} if votes else line)
        gathered = [entry for part in world.gather(records) for entry in part]
        gathered.sort(key=lambda entry: (entry.draw, entry.sample))
        results[item.name] = summarise(gathered, plan.eval_rewards, item.samples_per_prompt, plan.eval.pass_k, plan.eval.vote_k)
    return results


def settings_of_set(plan: Plan, name: str) -> SamplingSettings:
    """The rollout's settings under a key of the set's own, with what the plan says about the set."""
    own = plan.eval.sampling[name]
    return replace(
        settings_of(plan.rollout, key64(plan.seed, "eval", name)),
        temperature=own.temperature,
        top_p=own.top_p,
        top_k=own.top_k,
        min_p=own.min_p,
        max_new_tokens=own.max_new_tokens,
        min_new_tokens=own.min_new_tokens,
    )


def _told(completions: Iterable[Completion], total: int, tick: Tick) -> Iterator[Completion]:
    for done, completion in enumerate(completions, start=1):
        tick("eval", done, total)
        yield completion


def _each_once(scored: Iterable[ScoredSample], requests: Sequence[Request]) -> Iterator[ScoredSample]:
    """The samples as they come. Raises RftError if the engine or the scorer lost or doubled one, or made one up."""
    missing = {(request.prompt.draw, sample) for request in requests for sample in request.samples}
    for sample in scored:
        key = (sample.completion.prompt.draw, sample.completion.sample)
        if key not in missing:
            raise RftError(f"the engine returned sample {key[1]} of draw {key[0]}, which was not asked for or came twice")
        missing.remove(key)
        yield sample
    if missing:
        draw, index = min(missing)
        raise RftError(f"the engine returned no sample {index} of draw {draw}, and {len(missing) - 1} others are missing")

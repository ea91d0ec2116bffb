"""Nine ways to run that the protocols must carry without a new method, each walked through with what ships: the fake engine and plain records."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.algo.groups import groups_with_spread
from rftcli.engines.fake import FakeSampler
from rftcli.plan.plan import AdvantagePlan, BatchPlan, RolloutPlan
from rftcli.protocols import Roles, StepOutcome
from rftcli.runtime.world import SoloWorld
from rftcli.stages import batches
from rftcli.stages.collect import collect, group_up
from rftcli.stages.credit import step_advantages
from rftcli.types import (
    Batch,
    Completion,
    Denominators,
    Experience,
    FinishReason,
    Group,
    PartScore,
    Prompt,
    Request,
    SamplingSettings,
    ScoredSample,
    TokenTrace,
)

SETTINGS = SamplingSettings(max_new_tokens=4, seed=0)


class Numbers:
    """A source whose draw d asks for d."""

    def __init__(self) -> None:
        self.next_draw = 0

    def draw(self, first: int, count: int) -> Sequence[Prompt]:
        return [
            Prompt(draw=d, row=d, row_id=f"n:{d}", source="n", label="default", text=f"{d}?", token_ids=(d % 7 + 1,), reference=str(d))
            for d in range(first, first + count)
        ]  # fmt: skip

    def state_dict(self) -> Mapping[str, Any]:
        return {"next_draw": self.next_draw}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next_draw = state["next_draw"]


class LengthScorer:
    """Scores with a function of the completion, from another thread and out of order, as a judge on other GPUs would."""

    def __init__(self, value: Any, delay: float = 0.0) -> None:
        self.value, self.delay = value, delay

    def score(self, completions: Iterable[Completion]) -> Iterator[ScoredSample]:
        found: list[ScoredSample] = []

        def work(completion: Completion) -> None:
            time.sleep(self.delay * (completion.sample == 0))
            reward = self.value(completion)
            found.append(ScoredSample(completion=completion, parts=(PartScore(name="x", value=reward, weight=1.0, seconds=0.0),), reward=reward))

        threads = []
        for completion in completions:
            threads.append(threading.Thread(target=work, args=(completion,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        yield from reversed(found)

    def close(self) -> None: ...


def sampler(respond: Any = None) -> FakeSampler:
    return FakeSampler(lambda ids, skip_special_tokens=True: " ".join(map(str, ids)), respond, vocab_size=11, eos_ids=(0,))


def plan(groups: int = 4, samples: int = 2, updates: int = 1) -> Any:
    batch = BatchPlan(
        prompts_per_step=groups, samples_per_prompt=samples, updates_per_step=updates, epochs=1, micro_batch_size=8, layout="padded",
        equation="", needs_prepass=None,
    )  # fmt: skip
    rollout = RolloutPlan(
        engine="fake", shares_weights=True, batch_rows=8, samples_per_prompt=samples, max_new_tokens=4, min_new_tokens=0, temperature=1.0, top_p=1.0,
        top_k=0, min_p=0.0, stop=(), stop_token_ids=(), ignore_eos=False,
    )  # fmt: skip
    return SimpleNamespace(batch=batch, rollout=rollout, seed=0, probes=lambda step: False)


def gather(source: Any, scorer: Any, step: int, engine: Any = None, **shape: int) -> Any:
    return collect(source, engine or sampler(), scorer, plan(**shape), SoloWorld(), step=step, clock=time.perf_counter, tick=lambda *_: None)


def rewards_of(groups: Iterable[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [(sample.reward, group.prompt.draw) for group in groups for sample in group.samples]
    return torch.tensor([reward for reward, _ in pairs]), torch.tensor([draw for _, draw in pairs])


def test_refill_of_groups_without_signal() -> None:
    """Draw on until the quota of groups with spread is met; every group keeps the identity of its own draw."""
    source = Numbers()
    scorer = LengthScorer(lambda c: float(c.sample == 0 and c.prompt.draw % 3 == 0))
    kept: dict[int, Group] = {}
    for extra in range(5):
        collected = gather(source, scorer, step=1 + extra)
        with_signal = set(groups_with_spread(*rewards_of(collected.groups)).tolist())
        kept |= {group.prompt.draw: group for group in collected.groups if group.prompt.draw in with_signal}
        if len(kept) >= 4:
            break
    assert sorted(kept) == [0, 3, 6, 9] and source.next_draw == 12


def test_partial_answers_go_on_under_newer_weights() -> None:
    engine = sampler()
    prompt = Numbers().draw(5, 1)[0]
    whole = replace(SETTINGS, ignore_eos=True)
    (cut,) = engine.generate([Request(prompt=prompt, samples=(1,))], replace(whole, max_new_tokens=2))
    assert cut.finish is FinishReason.LENGTH
    engine.load([], version=3)
    (done,) = engine.generate([Request(prompt=prompt, samples=(1,), partial={1: cut.trace})], whole)
    assert done.trace.ids[:2] == cut.trace.ids and len(done.trace.ids) == 4
    assert done.trace.segments == ((0, 0), (2, 3)) and done.policy_version == 3


def test_ppo_with_a_critic() -> None:
    """Values and returns are fields of an experience and arrive in the batch at the trained tokens, where a critic's own loss reads them."""

    class Critic:
        def values(self, batch: Batch) -> torch.Tensor:
            return batch.target_ids.float() / 10

    experience = experience_of([3, 4, 5, 6], prompt=2, values=torch.tensor([0.5, 0.6]), returns=torch.tensor([1.0, 1.0]))
    batch = batches.make_batch([experience], plan().batch, Denominators(tokens=2, sequences=1), pad_id=0, device=torch.device("cpu"))
    roles = Roles(policy=None, critic=Critic())
    assert roles.critic.values(batch).tolist() == pytest.approx([0.5, 0.6])
    assert batch.values is not None and batch.values.tolist() == pytest.approx([0.5, 0.6]) and batch.returns is not None


def test_remax_greedy_twin_is_scored_and_not_trained_on() -> None:
    engine, prompt = sampler(), Numbers().draw(0, 1)[0]
    greedy = list(engine.generate([Request(prompt=prompt, samples=(-1,))], replace(SETTINGS, temperature=0.0)))
    sampled = list(engine.generate([Request(prompt=prompt, samples=(0, 1))], SETTINGS))
    group = group_up(LengthScorer(lambda c: float(len(c.trace.ids))).score([*sampled, *greedy]), [0], 3)[0]
    twin = group.greedy
    assert twin is not None and twin.reward is not None and twin.completion.sample == -1
    assert [sample.completion.sample for sample in group.samples] == [0, 1]
    assert twin.completion.trace.ids == next(iter(engine.generate([Request(prompt=prompt, samples=(-1,))], SETTINGS))).trace.ids


def test_a_supervised_stream_beside_the_update() -> None:
    """Two batches with two losses in one update: `backward` takes the loss with the batch."""
    weight = torch.zeros((), requires_grad=True)

    class Line:
        version, lr = 0, 0.1

        def backward(self, batch: Any, loss: Any, last: bool) -> Mapping[str, torch.Tensor]:
            value, measured = loss(weight * batch, torch.zeros(()), batch)
            value.backward()
            return measured

        def step(self) -> StepOutcome:
            assert weight.grad is not None
            return StepOutcome(applied=True, grad_norm=float(weight.grad.abs()), lr=self.lr)

    learner = Line()
    learner.backward(torch.tensor(2.0), lambda new, entropy, batch: (-new, {}), last=False)
    learner.backward(torch.tensor(5.0), lambda new, entropy, batch: (-0.1 * new, {}), last=True)
    assert learner.step().grad_norm == pytest.approx(2.5)


def test_offline_groups_need_no_sampler() -> None:
    """Rows that were scored long ago enter as groups; credit never asks where they came from."""
    prompt = Numbers().draw(3, 1)[0]
    groups = [Group(prompt=prompt, samples=tuple(scored(prompt, index, reward) for index, reward in enumerate((1.0, 0.0, None, 0.0))))]
    advantages = step_advantages(groups, AdvantagePlan(kind="rloo", options={}), SoloWorld())
    assert advantages == {(3, 0): pytest.approx(1.0), (3, 1): pytest.approx(-0.5), (3, 3): pytest.approx(-0.5)}


def test_rollout_from_older_weights() -> None:
    class TwoVersions:
        def weights(self, of: str = "live") -> list[tuple[str, torch.Tensor]]:
            return [("w", torch.full((1,), {"live": 2.0, "old": 1.0}[of]))]

    class Keeps(FakeSampler):
        def load(self, weights: Any, version: int) -> None:
            super().load(weights, version)
            self.held = {name: float(tensor) for name, tensor in weights}

    engine = Keeps(lambda ids, skip_special_tokens=True: "", vocab_size=5)
    engine.load(TwoVersions().weights("old"), version=4)
    (completion,) = engine.generate([Request(prompt=Numbers().draw(0, 1)[0], samples=(0,))], SETTINGS)
    assert engine.held == {"w": 1.0} and completion.policy_version == 4


def test_a_judge_elsewhere_may_answer_late_and_out_of_order() -> None:
    collected = gather(Numbers(), LengthScorer(lambda c: float(c.sample), delay=0.02), step=1)
    assert len(collected.groups) == 4
    assert all([sample.completion.sample for sample in group.samples] == [0, 1] for group in collected.groups)
    assert all([sample.reward for sample in group.samples] == [0.0, 1.0] for group in collected.groups)


def test_resume_in_the_middle_of_a_collect() -> None:
    """What was drawn before a kill is drawn again: the state is the one of the last step boundary, and draws are pure."""
    source, scorer = Numbers(), LengthScorer(lambda c: float(c.trace.ids[0]))
    gather(source, scorer, step=1)
    saved = dict(source.state_dict())

    class Killed(FakeSampler):
        def generate(self, requests: Any, settings: Any) -> Iterator[Completion]:
            for number, completion in enumerate(super().generate(requests, settings)):
                if number == 3:
                    raise KeyboardInterrupt
                yield completion

    with pytest.raises(KeyboardInterrupt):
        gather(source, scorer, step=2, engine=Killed(lambda ids, skip_special_tokens=True: "", vocab_size=11, eos_ids=(0,)))
    straight = gather(source, scorer, step=2).groups
    again = Numbers()
    again.load_state_dict(saved)
    resumed = gather(again, scorer, step=2).groups
    assert [group.prompt.draw for group in resumed] == [group.prompt.draw for group in straight]
    assert [s.completion.trace for g in resumed for s in g.samples] == [s.completion.trace for g in straight for s in g.samples]


def experience_of(ids: list[int], prompt: int, **fields: Any) -> Experience:
    length = len(ids) - prompt
    return Experience(
        sample=None,  # type: ignore[arg-type]
        token_ids=torch.tensor(ids),
        prompt_tokens=prompt,
        mask=torch.ones(length, dtype=torch.bool),
        advantages=torch.zeros(length),
        **fields,
    )


def scored(prompt: Prompt, sample: int, reward: float | None) -> ScoredSample:
    completion = Completion(
        prompt=prompt, sample=sample, text="", text_with_special="", trace=TokenTrace(ids=(1,)), finish=FinishReason.STOP, policy_version=0
    )
    return ScoredSample(completion=completion, parts=(), reward=reward)

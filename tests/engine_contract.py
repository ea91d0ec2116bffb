"""What every engine of its own model keeps to, whichever it is: the same checks for a stand-in and for the real ones.

A `Kit` is a running sampler over some model with the trainer's copy of it. Checks are plain functions of a kit; a test calls them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from rftcli.types import Completion, FinishReason, Prompt, Request, SamplingSettings


@dataclass(slots=True, kw_only=True)
class Kit:
    """`end`: the model's end token; `word`: a text that comes often in samples."""

    model: Any
    tokenizer: Any
    sampler: Any
    question: tuple[int, ...]
    end: int
    word: str

    def weights(self, change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor) -> Iterator[Any]:
        return ((name, change(name, parameter.data)) for name, parameter in self.model.named_parameters())

    def sample(self, samples: int = 8, draw: int = 0, **changes: Any) -> list[Completion]:
        settings = SamplingSettings(**{"max_new_tokens": 24, "seed": 0, **changes})
        made = self.sampler.generate([self.request(samples, draw)], settings)
        return sorted(made, key=lambda one: one.sample)

    def request(self, samples: int = 8, draw: int = 0, **rest: Any) -> Request:
        prompt = Prompt(draw=draw, row=0, row_id="t:0", source="t", label="l", text="", token_ids=self.question)
        return Request(prompt=prompt, samples=tuple(range(samples)), **rest)

    def in_two(self, cut: int, samples: int, **changes: Any) -> list[Completion]:
        """Up to `cut`, and what has not ended on to its end in a second call."""
        first = self.sample(samples, max_new_tokens=cut, **changes)
        settings = SamplingSettings(**{"max_new_tokens": 24, "seed": 0, **changes})
        left = {made.sample: made.trace for made in first if made.finish is FinishReason.LENGTH}
        rest = self.sampler.generate([Request(prompt=first[0].prompt, samples=tuple(left), partial=left)], settings) if left else ()
        return sorted([*rest, *(made for made in first if made.sample not in left)], key=lambda made: made.sample)

    @torch.no_grad()
    def scores(self, ids: Sequence[int]) -> torch.Tensor:
        """(T, V) the trainer's, of the tokens behind the question."""
        whole = torch.tensor([[*self.question, *ids]])
        return self.model(input_ids=whole).logits[0, len(self.question) - 1 : -1].float()

    def logprobs(self, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """(T,) the trainer's."""
        return (self.scores(ids) / temperature).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def log_probs_are_the_trainers(kit: Kit) -> None:
    kit.sampler.load(kit.weights(), 1)
    for temperature in (1.0, 0.7):
        for made in kit.sample(logprobs=True, temperature=temperature):
            assert made.trace.logprobs is not None and made.policy_version == 1
            assert torch.allclose(torch.tensor(made.trace.logprobs), kit.logprobs(made.trace.ids, temperature), atol=1e-4)


def new_weights_change_what_is_sampled(kit: Kit) -> None:
    kit.sampler.load(kit.weights(), 1)
    before = kit.sample(1, temperature=0.0)[0].trace.ids
    kit.sampler.load(kit.weights(lambda name, tensor: tensor if tensor.ndim == 1 else tensor.flip(0)), 2)
    other = kit.sample(1, temperature=0.0)[0]
    assert other.trace.ids != before and other.policy_version == 2
    kit.sampler.load(kit.weights(), 3)
    assert kit.sample(1, temperature=0.0)[0].trace.ids == before


def completions_end_where_they_should(kit: Kit) -> None:
    kit.sampler.load(kit.weights(), 1)
    for made in kit.sample(16):
        ended = made.trace.ids[-1] == kit.end
        assert made.finish is (FinishReason.STOP if ended else FinishReason.LENGTH) and kit.end not in made.trace.ids[:-1]
    assert all(len(made.trace.ids) == 12 and made.finish is FinishReason.LENGTH for made in kit.sample(ignore_eos=True, max_new_tokens=12))
    assert all(kit.end not in made.trace.ids[:10] for made in kit.sample(min_new_tokens=10))
    stopped = [made for made in kit.sample(16, stop=(kit.word,)) if made.finish is FinishReason.STOP]
    assert stopped and all(made.text.endswith(kit.word) or made.trace.ids[-1] == kit.end for made in stopped)
    assert any(made.text.endswith(kit.word) for made in stopped)
    wanted = kit.sample(1, temperature=0.0)[0].trace.ids
    at = kit.sample(1, temperature=0.0, stop_token_ids=(wanted[1],))[0]
    assert at.finish is FinishReason.STOP and at.trace.ids == wanted[: wanted.index(wanted[1]) + 1]


def greedy_is_the_trainers_argmax(kit: Kit) -> None:
    kit.sampler.load(kit.weights(), 1)
    made = kit.sample(1, temperature=0.0, logprobs=True)[0]
    assert tuple(kit.scores(made.trace.ids).argmax(-1).tolist()) == made.trace.ids and set(made.trace.logprobs or ()) == {0.0}


def filters_and_penalties_shape_the_samples(kit: Kit) -> None:
    kit.sampler.load(kit.weights(), 1)
    likely = {"logit_bias": {"40": 100.0}}
    assert all(made.trace.ids[0] == 40 for made in kit.sample(**likely))
    assert len({made.trace.ids for made in kit.sample(top_k=1)}) == 1 == len({made.trace.ids for made in kit.sample(min_p=0.999)})
    assert len({made.trace.ids for made in kit.sample(top_p=1e-6)}) == 1
    again = kit.sample(1, temperature=0.0, ignore_eos=True, logit_bias={"40": 100.0})[0].trace.ids
    assert set(again) == {40} and set(kit.sample(1, temperature=0.0, ignore_eos=True, presence_penalty=2.0, **likely)[0].trace.ids) == {40}
    pushed = kit.sample(1, temperature=0.0, ignore_eos=True, logit_bias={"40": 3.0, "41": 2.0}, frequency_penalty=2.0)[0].trace.ids
    assert pushed != kit.sample(1, temperature=0.0, ignore_eos=True, logit_bias={"40": 3.0, "41": 2.0})[0].trace.ids


def a_caller_that_leaves_early_leaves_an_engine_that_works(kit: Kit) -> None:
    kit.sampler.load(kit.weights(), 1)
    made = kit.sampler.generate([kit.request(16)], SamplingSettings(max_new_tokens=24, seed=0, ignore_eos=True))
    next(made)
    made.close()
    assert len(kit.sample(8)) == 8
    kit.sampler.load(kit.weights(), 2)


def an_interrupted_answer_goes_on(kit: Kit) -> None:
    """Greedy, it is the one that was not interrupted, stop strings across the cut included; sampled, its log-probs are the trainer's."""
    kit.sampler.load(kit.weights(), 1)
    (whole,) = kit.sample(1, temperature=0.0, ignore_eos=True)
    pieces = [kit.tokenizer.decode([token]) for token in whole.trace.ids]
    stop = next(left[-1] + right[0] for left, right in pairwise(pieces[2:]) if left and right)
    stopped = kit.sample(1, temperature=0.0, ignore_eos=True, stop=(stop,))[0]
    assert stopped.finish is FinishReason.STOP
    for cut in range(1, len(stopped.trace.ids) + 1):
        assert kit.in_two(cut, 1, temperature=0.0, ignore_eos=True)[0].trace.ids == whole.trace.ids
        again = kit.in_two(cut, 1, temperature=0.0, ignore_eos=True, stop=(stop,))[0]
        assert (again.trace.ids, again.finish) == (stopped.trace.ids, FinishReason.STOP)
    for made in kit.in_two(5, 16, logprobs=True):
        assert made.trace.logprobs is not None
        assert torch.allclose(torch.tensor(made.trace.logprobs), kit.logprobs(made.trace.ids), atol=1e-4)


def requests_have_limits_of_their_own(kit: Kit) -> None:
    kit.sampler.load(kit.weights(), 1)
    prompt = kit.request().prompt
    requests = [Request(prompt=prompt, samples=(0,), limit=3), Request(prompt=prompt, samples=(1,), limit=9), Request(prompt=prompt, samples=(2,))]
    settings = SamplingSettings(max_new_tokens=12, min_new_tokens=6, seed=0, ignore_eos=True)
    assert {made.sample: len(made.trace.ids) for made in kit.sampler.generate(requests, settings)} == {0: 3, 1: 9, 2: 12}


CHECKS: tuple[Callable[[Kit], None], ...] = (
    log_probs_are_the_trainers, new_weights_change_what_is_sampled, completions_end_where_they_should, greedy_is_the_trainers_argmax,
    filters_and_penalties_shape_the_samples, a_caller_that_leaves_early_leaves_an_engine_that_works,
    an_interrupted_answer_goes_on, requests_have_limits_of_their_own,
)  # fmt: skip

"""The records that flow through a run, in the order in which they are made. No torch at run time.

Notation in the docstrings: P prompts, G completions per prompt, T sampled tokens of one completion, N trained tokens of a micro-batch,
B rows of a micro-batch, S positions of a row. All records are frozen, slotted and keyword-only.

What they leave out: configuration (that is the plan's) and behaviour (stages are functions over these).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Message = Mapping[str, Any]
"""One chat turn: {"role": "user", "content": "..."}."""


class FinishReason(StrEnum):
    """Why a completion ended. STOP: an end token or stop string; LENGTH: `max_new_tokens` was reached; ABORT: the engine gave it up."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One drawn prompt, ready for an engine.

    >>> Prompt(draw=7, row=3, row_id="train:3", source="train", label="math", text="2+2=", token_ids=(5, 9, 5, 11), reference="4").draw
    7
    """

    draw: int
    """Global index of the draw, counted from the start of the run. It is the identity of the group: one row drawn twice is two groups."""
    row: int
    """Index of the row in its data set."""
    row_id: str
    """The row's own id (`columns.id`), or `<source>:<row>`."""
    source: str
    """Name of the data set the row comes from."""
    label: str
    """Which entry of the reward table scores it."""
    text: str
    """The prompt as the model reads it, special tokens included."""
    token_ids: tuple[int, ...]
    """The prompt's ids, exactly as they go to the engine and into the update."""
    messages: tuple[Message, ...] = ()
    """The chat turns the text was rendered from; empty for a plain prompt."""
    prefill: str = ""
    """The beginning of the answer that the prompt already contains (it ends `text`); scored with the completion if the plan says so."""
    reference: Any = None
    """The reference answer, or None if the row has none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row, for rewards and samples."""
    media: tuple[str, ...] = ()
    """References to images and videos, never decoded pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTrace:
    """What an engine sampled for one completion, token for token.

    >>> TokenTrace(ids=(5, 6), logprobs=(-0.1, -2.0), mask=(True, True), segments=((0, 12),)).ids
    (5, 6)
    """

    ids: tuple[int, ...]
    """(T,) sampled ids, the end token included if it was sampled. Never re-tokenised, never altered."""
    logprobs: tuple[float, ...] | None = None
    """(T,) log-probabilities, in nats, of the distribution that was sampled from; None if the engine was not asked."""
    mask: tuple[bool, ...] | None = None
    """(T,) which ids are trained on; None means all (tool output is False)."""
    segments: tuple[tuple[int, int], ...] = ()
    """((first token, policy version), ...): which weights sampled which part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer of one prompt."""

    prompt: Prompt
    sample: int
    """Index within the group, 0..G-1; -1 is a greedy twin that is scored and never trained on."""
    text: str
    """The answer without special tokens and without the prompt (the engine's decoding of `trace.ids`)."""
    text_with_special: str
    """The answer with special tokens kept."""
    trace: TokenTrace
    finish: FinishReason
    policy_version: int
    """Version of the newest weights that took part; an older first segment is in `trace.segments`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartScore:
    """What one part of the reward table said about one completion. `value` None and `error` None: the part abstained.

    >>> PartScore(name="math_answer", value=1.0, weight=0.9, seconds=0.002).error is None
    True
    """

    name: str
    value: float | None
    weight: float
    seconds: float
    error: str | None = None
    """What went wrong, as text for a person. A failure never becomes a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaped:
    """What shaping did to one reward, in this order: penalties, running normalisation, clip.

    >>> Shaped(combined=1.0, penalty=-0.5).masked
    False
    """

    combined: float
    """The reward of the parts, before shaping."""
    penalty: float = 0.0
    """What was added to it for length and ending; never above 0."""
    overlong: float = 0.0
    """The share of `penalty` that is for length alone."""
    clipped: bool = False
    masked: bool = False
    """Truncated and left out: of baselines, losses and denominators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSample:
    """A completion with its reward. `reward` None: it could not be scored or is masked, and takes no part in any baseline, loss or denominator."""

    completion: Completion
    parts: tuple[PartScore, ...]
    reward: float | None
    error: str | None = None
    """Why the parts could not be combined into a reward; errors of the parts themselves are theirs."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What reward functions logged about it, for the samples file."""
    metrics: tuple[tuple[str, float], ...] = ()
    """(name, value) of what reward functions measured."""
    shaped: Shaped | None = None
    """None: nothing was shaped, `reward` is that of the parts."""

    @property
    def combined(self) -> float | None:
        """The reward of the parts, before shaping."""
        return self.reward if self.shaped is None else self.shaped.combined


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All scored completions of one draw, ordered by sample index. A group is whole wherever advantages are computed."""

    prompt: Prompt
    samples: tuple[ScoredSample, ...]
    greedy: ScoredSample | None = None
    """The greedy twin (ReMax): scored, a baseline, never trained on, and none of `samples`."""


@dataclass(slots=True, kw_only=True)
class Experience:
    """One scored completion with everything the update needs. Tensors are float32 on the CPU, one entry per sampled token (T,)."""

    sample: ScoredSample
    token_ids: torch.Tensor
    """(prompt + T,) int64."""
    prompt_tokens: int
    mask: torch.Tensor
    """(T,) bool: trained tokens. All False for a sample without a reward."""
    advantages: torch.Tensor
    """(T,)"""
    old_logprobs: torch.Tensor | None = None
    """(T,) log-probs of the policy at rollout time, recomputed by the trainer; None: old = sg(new) in the only update."""
    reference_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    value_after: float = 0.0
    """The critic's value behind the last token, for an answer that was cut; 0 where it ended, or is taken to have."""
    returns: torch.Tensor | None = None
    sampler_logprobs: torch.Tensor | None = None
    """(T,) as the engine reported them."""
    temperatures: torch.Tensor | None = None
    """(T,) that each token was sampled at; None: all at the rollout's."""
    stale: torch.Tensor | None = None
    """(T,) bool: tokens that older weights sampled; None: there are none in this run."""
    entropies: torch.Tensor | None = None
    """(T,) of the pass before the updates, where something reads them."""
    correction: torch.Tensor | None = None
    """(T,) weight of the policy term for the difference between sampler and trainer; None: 1."""
    kept: torch.Tensor | None = None
    """(T,) bool: tokens whose policy term counts in this update; None: all."""
    chosen: torch.Tensor | None = None
    """(T,) bool: tokens that the loss treats apart in this update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts over one optimizer update: all ranks and all micro-batches. Summed once, passed to every micro-batch."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Sequences with at least one trained token."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """One micro-batch of one rank: B rows of S positions, and the N trained tokens in them as flat vectors, sorted by sequence.

    Padded layout: one row per sequence, `attention_mask` given. Packed layout: B = 1, sequences one after another, `position_ids` restart at 0
    at each of them and `attention_mask` is None. Where a prompt is shared it stands once, and its completions follow: the positions of each go on
    from the prompt's length.
    """

    input_ids: torch.Tensor
    """(B, S) int64"""
    position_ids: torch.Tensor
    """(B, S) int64. In the packed layout they stay on the CPU, where the borders of the sequences are read."""
    attention_mask: torch.Tensor | None
    """(B, S) int64, 1 = real token; None in the packed layout."""
    select: torch.Tensor
    """(N,) flat index into B*S of the position that *predicts* each trained token."""
    target_ids: torch.Tensor
    """(N,) the trained token ids."""
    sequence: torch.Tensor
    """(N,) which sequence of the micro-batch a token belongs to, 0..num_sequences-1."""
    num_sequences: int
    advantages: torch.Tensor
    """(N,)"""
    old_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None
    sampler_logprobs: torch.Tensor | None
    values: torch.Tensor | None
    returns: torch.Tensor | None
    denominators: Denominators
    ends: torch.Tensor | None = None
    """(num_sequences,) flat index into B*S of each sequence's last token."""
    most_tokens: int = 0
    """The largest N of any rank in this micro-step; 0 where the ranks need not agree."""
    temperatures: torch.Tensor | None = None
    """(N,) that log-probs are taken at; None: one for all."""
    stale: torch.Tensor | None = None
    """(N,) bool: sampled by older weights; None: none is."""
    router_losses: torch.Tensor | None = None
    """(num_sequences,) how unevenly each sequence used the experts; set by a learner whose model measures it."""
    correction: torch.Tensor | None = None
    """(N,), as the next two, from the fields of `Experience` of the same names."""
    kept: torch.Tensor | None = None
    chosen: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer update did; plain numbers, already reduced over ranks."""

    applied: bool
    """False: skipped, because a gradient was not finite or no token was trained."""
    policy_version: int
    lr: float
    grad_norm: float | None
    metrics: Mapping[str, float]
    """loss and policy_loss over the update's denominators; means over the tokens that passed: kl_update, entropy, clip fractions, ratios, ..."""
    tokens: int
    """Trained tokens of the update, all ranks."""
    passed: int | None = None
    """Those of them that went through the model and were measured; None: all."""
    role: str = "policy"
    """Whose update it was: "policy" or "critic"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How to sample, for one call of an engine. Nothing here has a hidden default elsewhere: off means off.

    >>> SamplingSettings(max_new_tokens=16, seed=0).temperature
    1.0
    """

    max_new_tokens: int
    seed: int
    """Key of the noise: sample s of draw d reads the stream (seed, d, s), on any rank, in any batch."""
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0.0 is greedy."""
    first_token_temperature: float | None = None
    """Of the first token of a completion alone (FIRE, 2410.21236); None: as all others."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Stop strings; kept in the ids and in the text."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end tokens."""
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    """Over prompt and completion; 1.0 is off."""
    presence_penalty: float = 0.0
    """Over the completion, as the next."""
    frequency_penalty: float = 0.0
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    """Token id in digits, or a text that is one token -> what is added to its score."""
    bad_words: tuple[str, ...] = ()
    """Token sequences that are never completed."""
    structured: Mapping[str, Any] | None = None
    """{"regex": pattern} or {"json_schema": schema}: the form of every completion."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the engine, by the names it gives them; what is off is absent."""
    logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One group to generate: which samples of which prompt."""

    prompt: Prompt
    samples: tuple[int, ...]
    partial: Mapping[int, TokenTrace] = field(default_factory=dict)
    """Sample index -> what an earlier rollout already sampled of it; the engine goes on from there."""
    limit: int | None = None
    """Tokens at which its answers are cut in this call, those of earlier rollouts included; None: the `max_new_tokens` of the settings."""

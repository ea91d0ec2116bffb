"""How completions become updates, of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    prompts_per_step: int
    samples_per_prompt: int
    updates_per_step: int
    epochs: int
    micro_batch_size: int
    """Rows of one backward pass of one rank; the last one of an update may be smaller. Under a token budget: the longest rows that fit into it."""
    layout: str
    """padded or packed"""
    equation: str
    needs_prepass: str | None
    """Why old log-probs are computed in a pass of their own before the first update; None: old = sg(new)."""
    tokens_per_micro_batch: int | None = None
    """Positions of one pass of one rank, padding included; a longer row goes alone. None: `micro_batch_size` cuts."""
    rollouts_per_update: int = 1
    """Rollouts that the step's prompts are generated in, one after another, before the update."""
    share_prompts: bool = False
    """In a packed row the prompt of a group stands once, and the group's completions attend to it."""
    balance: bool = False
    """Completions are shared out to ranks anew before they pass through a model."""
    attention_cost: float = 0.0
    """Attention's work between two tokens, in parts of all other work on one: L tokens cost L + attention_cost x L^2."""
    pass_cost: int = 0
    """What a pass costs by itself, in positions: padded rows are cut so that passes and padding together cost least, groups that share prompts so
    that passes and prompts computed again do. 0: into as few passes as the budget allows, and between groups."""
    skip_zero_advantage: bool = False
    """Completions whose advantage is 0 do not pass through the model in the policy's update."""

    @property
    def form(self) -> str:
        """What the start of a run proves: padded, packed or shared."""
        return "shared" if self.share_prompts else self.layout

    @property
    def optimizer_updates_per_step(self) -> int:
        return self.updates_per_step * self.epochs

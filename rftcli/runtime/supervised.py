"""The supervised stream made real: its rows read and tokenised as the policy's prompts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rftcli.data.prompts import PromptBuilder
from rftcli.data.rows import read_rows
from rftcli.data.supervised import encode_answers
from rftcli.errors import UsageError
from rftcli.plan.plan import Plan
from rftcli.runtime.emit import Emitter
from rftcli.stages.supervised import SupervisedStream


def make_supervised(plan: Plan, tokenizer: Any, end_ids: Sequence[int], paths: Sequence[Path], emit: Emitter) -> SupervisedStream | None:
    """None where the plan has no stream. A prefill is no part of it: the answers are whole."""
    if plan.supervised is None:
        return None
    chat = replace(plan.data.chat, prefill=None)
    builder = PromptBuilder(tokenizer, chat, plan.data.max_prompt_tokens, plan.data.overlong_prompt, paths)
    rows = read_rows(plan.supervised.data, paths)
    if plan.data.overlong_prompt == "drop":
        rows = [row for row in rows if builder.num_tokens(row) <= plan.data.max_prompt_tokens]
    if not rows:
        problem = f"train.supervised: all prompts need more than {plan.data.max_prompt_tokens} tokens"
        raise UsageError(problem, hint="raise `rollout.max_prompt_tokens`")
    answered = encode_answers(rows, builder, tokenizer, end_ids, plan.supervised.max_answer_tokens)
    cut = sum(item.cut for item in answered)
    if cut:
        longer = f"{cut} of {len(answered)} answers are longer than rollout.max_new_tokens {plan.supervised.max_answer_tokens} and are cut there"
        emit.warn("overlong_answers", f"train.supervised: {longer}")
    return SupervisedStream([(item.token_ids, item.prompt_tokens) for item in answered], plan.supervised, plan.seed)

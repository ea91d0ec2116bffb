"""Every warning that a run can give: its code -> what it says and what helps. No torch.

The texts of lessons are theirs (`lessons.LESSONS`), with the names of metrics where a run has their numbers.
"""

from __future__ import annotations

import re

from rftcli.observe.lessons import LESSONS

_PLACE = re.compile(r"\{(\w+)[^}]*\}")
# To add one: a code that something gives to `emit.warn`, and what it means.
_OTHERS: dict[str, str] = {
    "part_abstained": "A part of the rewards has returned None for every completion of its first steps: a forgotten return? Look at `rewards`.",
    "part_failed": "A part of the rewards failed on every completion that it was asked for, several steps in a row: it takes no part in the reward. "
    "The errors stand in `samples/`; look at `rewards` and its `on_error`.",
    "part_uneven": "A part scored some answers of a prompt and abstained on others: rewards that are sums of different parts are compared with each "
    "other. Let it return 0, or abstain on all; or set `rewards.LABEL.renormalise`.",
    "overlong_prompts": "Prompts of a data set are longer than `rollout.max_prompt_tokens`, and are dropped or cut as `data.overlong_prompt` says.",
    "overlong_answers": "Answers of `train.supervised` are longer than its rows may be, and are dropped or cut.",
    "special_token_literal": "A text that a reward rule looks for is a special token, which the decoded text of a completion does not show. Look at "
    "the rule's `text`.",
    "scorer_cut": "Texts were longer than a reward model takes, and lost their beginning. See `models.scorers.NAME.max_tokens` and its `overlong`.",
    "plain_scores": "The head's scores are read by plain torch, because the kernels do not run here; the update takes longer, its numbers are right.",
    "weights_by_files": "Weights cannot be broadcast to the vLLM servers and go through files, which takes longer. Look at "
    "`rollout.vllm.server.weights` and at the servers' own logs.",
    "weights_through_memory": "Weights cannot be handed to the engine beside the rank on the GPU; they go through the host's memory, more slowly.",
    "profile_not_written": "The trace of a step could not be written; the run goes on. Look at the disk that holds the run directory.",
    "starts_anew": "The checkpoint does not remember a part of this plan, or cannot give it back: it starts anew. `rft resume` says which.",
    "left_behind": "The checkpoint remembers a part that this plan does not have.",
    "no_deadline": "`checkpoint.before_deadline` is on, and the batch system has not said when the job ends: the run does not stop before. "
    "Look at `max_hours`.",
    "observer_failed": "The screen, or something else that only watches, failed; the run is not touched by it.",
    "changed_on_resume": "The recipe that the run goes on with differs in this from the one that it was started with.",
    "tracker_offline": "A tracker cannot reach its service: what it would send is kept on disk.",
    "tracker_failed": "A tracker (wandb, tensorboard) could not be started, or ended; the run goes on, and its events are on disk. Look at "
    "`logs/trackers.log` of the attempt.",
}
WARNINGS: dict[str, str] = {lesson.code: _PLACE.sub(r"<\1>", lesson.text) for lesson in LESSONS} | _OTHERS

"""Tasks of the reasoning-gym package as a data source: `python: rftcli.data.gym:rows` with `options: {task: leg_counting, size: 100, seed: 1}`.

Left out: scoring. The rule that scores these rows finds the task's own record in the column `entry`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from rftcli.errors import MachineError, UsageError

SLOT = "{question}"


def rows(task: str, size: int, seed: int, *, template: str = SLOT, chat: bool = False, **config: Any) -> Iterator[dict[str, Any]]:
    """`size` rows {"prompt", "answer", "entry"} of a task; the same ones for the same arguments.

    `template`: the prompt, with `{question}` where the question goes. `chat`: the prompt is a list with one user message. `config`: the task's
    own settings. `answer` is None for tasks without a single right answer. MachineError without the package, UsageError for an unknown task.
    """
    if SLOT not in template:
        raise UsageError(f"the template has no {SLOT}: {template!r}")
    try:
        gym = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise MachineError(f"tasks of reasoning-gym need the package `{error.name}`", hint="pip install 'rftcli[gym]'") from error
    try:
        dataset = gym.create_dataset(task, size=size, seed=seed, **config)
    except (ValueError, TypeError, AssertionError) as error:  # unknown task, unknown setting, setting out of range
        raise UsageError(f"reasoning-gym refuses task `{task}`: {error}") from error
    for entry in dataset:
        text = template.replace(SLOT, entry["question"])
        yield {
            "prompt": [{"role": "user", "content": text}] if chat else text,
            "answer": entry["answer"],
            "entry": {name: entry[name] for name in ("question", "answer", "metadata")},
        }

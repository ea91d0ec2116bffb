"""Tasks of the reasoning-gym package as a data source: `python: rftcli.data.gym:rows` with `options: {task: leg_counting, size: 100, seed: 1}`.

Left out: scoring. The rule that scores these rows finds the task's own record in the column `entry`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from rftcli.errors import MachineError, UsageError

SLOT = "{question}"
APART, SEEDS = 2_654_435_761, 2**31
"""reasoning-gym makes row i from seed + i, so that sets of neighbouring seeds are nearly the same rows. Multiplied with this prime (Knuth, The Art of
Computer Programming 3, 6.4) seeds are far from each other."""
MOST_TRIES = 100
"""Rows that are looked at for one that another set has not."""


def rows(
    task: str, size: int, seed: int, *, template: str = SLOT, chat: bool = False, without: Mapping[str, int] | None = None, **config: Any
) -> Iterator[dict[str, Any]]:
    """`size` rows {"prompt", "answer", "entry"} of a task; the same ones for the same arguments, and others for another `seed`.

    `template`: the prompt, with `{question}` where the question goes. `chat`: the prompt is a list with one user message. `without: {seed, size}`:
    another set of the same task, none of whose questions is taken. `config`: the task's own settings. `answer` is None for tasks without a single
    right answer. MachineError without the package, UsageError for an unknown task, and where it has too few other questions.
    """
    if SLOT not in template:
        raise UsageError(f"the template has no {SLOT}: {template!r}")
    if without is not None and set(without) != {"seed", "size"}:
        raise UsageError(f"`without` needs the keys seed and size of the other set, and has {sorted(without)}")
    try:
        gym = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise MachineError(f"tasks of reasoning-gym need the package `{error.name}`", hint="pip install 'rftcli[gym]'") from error

    def entries(seed: int, size: int) -> Iterator[dict[str, Any]]:
        try:
            yield from gym.create_dataset(task, size=size, seed=seed * APART % SEEDS, **config)
        except (ValueError, TypeError, AssertionError) as error:  # unknown task, unknown setting, setting out of range
            raise UsageError(f"reasoning-gym refuses task `{task}`: {error}") from error

    taken = set() if without is None else {entry["question"] for entry in entries(without["seed"], without["size"])}
    others = (entry for entry in entries(seed, size if without is None else MOST_TRIES * size) if entry["question"] not in taken)
    made = 0
    for entry in islice(others, size):
        made += 1
        text = template.replace(SLOT, entry["question"])
        yield {
            "prompt": [{"role": "user", "content": text}] if chat else text,
            "answer": entry["answer"],
            "entry": {name: entry[name] for name in ("question", "answer", "metadata")},
        }
    if made < size:
        raise UsageError(
            f"task `{task}` has {made} questions that are not in the other set, of {size}",
            hint="lower `size` of either set, or widen the task's settings",
        )

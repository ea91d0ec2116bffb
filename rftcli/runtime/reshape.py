"""The trainer's state for another number of ranks: weights, master weights and moments, moved from the old partition to the new one.

ZeRO 0 writes the same file for any number of ranks. ZeRO 1 to 3 go through DeepSpeed's universal checkpoint: one file for each parameter and
moment, written beside the run's attempt once and loaded by every rank. Leaves out everything that is not the trainer's (it is whole anyhow).
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
from pathlib import Path
from typing import Any

from rftcli.errors import RftError
from rftcli.protocols import World


class UnreadableError(RftError):
    """The trainer's files cannot be turned into the new partition."""


def load_trainer(folder: Path, learner: Any, world: World, *, written_by: int) -> None:
    """Load what `written_by` ranks have saved into a Learner under DeepSpeed, or into several saved as one. Collective."""
    if written_by == world.size:
        learner.load(folder)
        return
    common = folder.parent.with_name(f".universal_{folder.parent.name}_{world.size}")
    for role, saved in learner.roles(folder):
        if role.zero_stage == 0:
            role.load(saved)
        else:
            _load_cut_anew(saved, common, role, world)


def _load_cut_anew(folder: Path, common: Path, learner: Any, world: World) -> None:
    problem = None
    if world.rank == 0:
        try:
            to_universal(folder, common)
        except Exception as error:  # whatever DeepSpeed's conversion says of files it cannot read: every rank has to hear of it
            problem = f"{type(error).__name__}: {error}"
    problem = world.gather(problem)[0]
    try:
        if problem is not None:
            raise UnreadableError(f"they cannot be turned into a partition for {world.size} ranks: {problem}")
        learner.load_universal(common)
    finally:
        world.barrier("universal checkpoint read")
        if world.rank == 0:
            shutil.rmtree(common, ignore_errors=True)


def to_universal(folder: Path, out: Path) -> None:
    """DeepSpeed's own conversion, in this process. `folder` is a checkpoint's trainer/."""
    from deepspeed.checkpoint import ds_to_universal

    from rftcli.runtime.learner import TAG

    shutil.rmtree(out, ignore_errors=True)
    (out / TAG).mkdir(parents=True)
    arguments: dict[str, Any] = {
        "input_folder": str(folder / TAG),
        "output_folder": str(out / TAG),
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": True,
        "inject_missing_state": True,
    }
    with contextlib.redirect_stdout(None):
        ds_to_universal.main(argparse.Namespace(**arguments))

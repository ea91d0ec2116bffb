"""An engine with a model of its own for a rank, and what it is given of the trainer's: a folder to read its configuration from, and whole weights.

It is started with random weights, so that nothing is read twice, and GGUF files, adapters, quantised weights and grown vocabularies need no special
way: what the trainer holds is pushed before the first rollout. Leaves out sampling and pushing (`engines`).
"""

from __future__ import annotations

import copy
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from rftcli.errors import MachineError
from rftcli.models.load import DTYPES
from rftcli.models.lora import AdaptedWeights, Adapter
from rftcli.plan.plan import Plan
from rftcli.probe.cache import user_cache_dir
from rftcli.protocols import Sampler, Weights, World
from rftcli.runtime.emit import Emitter
from rftcli.runtime.rundir import AttemptDir


def config_folder(model: Any, tokenizer: Any | None, dtype: str) -> Path:
    """A folder with the model's configuration, and the tokenizer if one is given, but no weights. It is named by what is in it: an engine may keep
    what it has compiled by the folder's name."""
    place = user_cache_dir().with_name("engines")
    try:
        place.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=place))
    except OSError as error:
        message = f"the engine's configuration cannot be written to {place}: {error.strerror}"
        raise MachineError(message, hint="`XDG_CACHE_HOME` names another folder for caches, of vLLM too") from error
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # what is pushed is unpacked
    config.architectures = [type(model).__name__]
    config.dtype = DTYPES[dtype]
    config.save_pretrained(fresh)
    if tokenizer is not None:
        tokenizer.save_pretrained(fresh)
    digest = hashlib.sha256()
    for path in sorted(fresh.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(fresh)}\0".encode() + path.read_bytes())
    target = place / digest.hexdigest()[:32]
    try:
        fresh.rename(target)
    except OSError:  # another rank, or an earlier run, was first
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def whole_weights(model: Any, adapter: Adapter | None) -> Weights:
    """The weights of a model that no trainer has sharded, with its adapter."""
    if adapter is not None:
        return AdaptedWeights(adapter, lambda parameters: nullcontext())
    return ((name, parameter.data) for name, parameter in model.named_parameters())


def make_own_engine(
    plan: Plan, model: Any, tokenizer: Any, ends: Sequence[int], world: World, device: torch.device, emit: Emitter, attempt: AttemptDir, *,
    first_step: int, newest: Callable[[], int] | None = None,
) -> Sampler:  # fmt: skip
    """The plan's engine of this rank, without weights yet. Collective where ranks share one, and where it is in another process. `newest`: the
    trainer's version; `first_step` of the attempt, so that an engine with a generator of its own does not repeat its noise."""
    make: Any = getattr(import_module(f"rftcli.runtime.{plan.rollout.engine}_engine"), f"make_{plan.rollout.engine}")
    return make(plan, model, tokenizer, ends, world, device, emit, attempt, first_step=first_step, newest=newest)

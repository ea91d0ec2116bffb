"""An adapter in a running vLLM engine: after the first push it alone travels, as a few files in memory, and vLLM computes with it beside the base.

vLLM's own door for adapters is a folder with peft's files; it lies where files are memory, if there is such a place. Each push has a number of its
own, because vLLM keeps what it has loaded by it.

The proof sums the bits of what the layers hold against the files: B is scaled when vLLM loads it, so it is scaled here too. What it leaves out: the
base (`vllm_weights`), and adapters that vLLM has no layers for (the recipe's rules, and vLLM's own words).
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from rftcli.engines.weights import Sums, compare
from rftcli.errors import UsageError
from rftcli.protocols import AdaptedWeights

MEMORY = Path("/dev/shm")
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM makes room for; an adapter of another rank takes the next one."""


def room_for(rank: int) -> int:
    """What to start the engine with for an adapter of this rank. UsageError where it is too large."""
    found = next((size for size in RANKS if size >= rank), None)
    if found is None:
        raise UsageError(f"vLLM has adapters of rank {RANKS[-1]} at most, this one has {rank}", hint="rollout.vllm.lora: merged")
    return found


class AdapterSlot:
    """The one adapter of an engine. `request` goes along with every prompt; None: the base alone answers."""

    def __init__(self, llm: Any, dtype: torch.dtype) -> None:
        self.request: Any = None
        self._llm, self._dtype = llm, dtype
        self._number = 0
        self._place = tempfile.TemporaryDirectory(prefix="rft-adapter-", dir=MEMORY if MEMORY.is_dir() else None)
        self._folder = Path(self._place.name)

    def put(self, weights: AdaptedWeights, *, check: bool) -> None:
        """The newest adapter in the place of the last. Collective. UsageError for what vLLM refuses; RftError where `check` finds other numbers."""
        from vllm.lora.request import LoRARequest

        self.request = None
        self._number += 1
        folder = self._folder / str(self._number)
        weights.save_adapter(folder)
        request = LoRARequest(lora_name=folder.name, lora_int_id=self._number, lora_path=str(folder))
        try:
            self._llm.llm_engine.add_lora(request)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise UsageError(f"vLLM does not take the adapter: {error}", hint="rollout.vllm.lora: merged takes every adapter") from error
        if check:
            compare(sent(folder, self._dtype), held_by(self._llm.apply_model(_itself)[0]), {})
        shutil.rmtree(self._folder / str(self._number - 1), ignore_errors=True)
        self.request = request

    def close(self) -> None:
        self._place.cleanup()


def sent(folder: Path, dtype: torch.dtype) -> Sums:
    """Of the files, as vLLM computes with them."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    found = Sums()
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        own = tensor.to(dtype)
        found.add(name, own * scale if ".lora_B." in name and scale != 1 else own)
    return found


@torch.no_grad()
def held_by(engine: nn.Module) -> Sums:
    """Of the places for adapters in the engine's layers, of which there is one each; what is not used of them is 0."""
    found = Sums()
    for name, module in engine.named_modules():
        for side in ("lora_a_stacked", "lora_b_stacked"):
            for tensor in vars(module).get(side, ()):
                found.add(f"{name}.{side}", tensor)
    return found


def _itself(model: nn.Module) -> nn.Module:
    return model

"""What a vLLM server needs to take weights: a class that vLLM mixes into its workers.

    VLLM_SERVER_DEV_MODE=1 python -m rftcli.engines.vllm_serve MODEL --worker-extension-cls rftcli.engines.vllm_worker.RftWorker

Its methods are called by name through the server's `/collective_rpc`, with JSON as text (nothing else passes there) and plain data back. An error is
an answer, so that its text reaches the trainer. It is imported in the server's process, where nothing else of this package is. Leaves out sampling.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rftcli.engines.vllm_settings import FREE_SEEDS
from rftcli.engines.vllm_stream import from_folder, from_group, from_socket, received
from rftcli.engines.vllm_weights import derives, fused_layers, held_by, quiet, take
from rftcli.errors import RftError

SHAPE = {"layers": "num_hidden_layers", "hidden": "hidden_size", "vocabulary": "vocab_size"}
"""Width of a model, as a plan's facts call it -> its name in a configuration."""


class RftWorker:
    """Names begin with `rft_`: vLLM refuses one that its own worker has. The state lives in attributes of the worker."""

    def rft_state(self) -> dict[str, Any]:
        """What this worker runs, and whose weights of which version it holds."""
        worker: Any = self
        config = worker.vllm_config
        model, parallel = config.model_config, config.parallel_config
        device = torch.device(worker.device).type
        free = type(worker.model_runner).__module__.startswith(FREE_SEEDS)
        ends_engine = device == "cpu" and bool(config.scheduler_config.enable_chunked_prefill)  # a prompt with a seed that is cut between two passes
        run, version = getattr(self, "rft_held", (None, None))
        return {
            "run": run,
            "version": version,
            "device": device,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": int(model.max_model_len),
            "logprobs_mode": str(getattr(model, "logprobs_mode", "")),
            "quantization": None if model.quantization is None else str(model.quantization),
            "tensor_parallel": int(parallel.tensor_parallel_size),
            "pipeline_parallel": int(parallel.pipeline_parallel_size),
            "data_parallel": int(parallel.data_parallel_size),
            "free_seeds": free and not ends_engine,
            "shape": {name: getattr(model.hf_text_config, key, None) for name, key in SHAPE.items()},
        }

    def rft_join(self, told: str) -> dict[str, Any]:
        """Become a member of the trainer's group for weights: {host, port, first, size, seconds}; `first`: the rank of this server's first worker."""
        from rftcli.engines.vllm_group import Group, find_store

        worker: Any = self
        asked = json.loads(told)

        def work() -> dict[str, Any]:
            store = find_store(asked["host"], asked["port"], asked["seconds"])
            worker.rft_group = Group(store, asked["first"] + worker.rank, asked["size"], torch.device(worker.device), asked["seconds"])
            worker.rft_group.prove()
            return {}

        return told_back(work)

    def rft_take(self, told: str) -> dict[str, Any]:
        """Load weights: {run, version, way, check, seconds} and where they are (`folder`, or `sockets`, one a worker). With `check`: the sums of the
        bits of what the engine holds then."""
        worker: Any = self
        asked = json.loads(told)

        def work() -> dict[str, Any]:
            worker.rft_held = (None, None)
            quiet()
            engine = worker.get_model()
            take(engine, self.rft_tensors(asked, derives(engine)), lambda tensors: worker.reload_weights(weights_iterator=tensors))
            if torch.device(worker.device).type == "cuda":
                torch.cuda.synchronize(worker.device)
            found: dict[str, Any] = {}
            if asked["check"]:
                sums = {name: str(value) for name, value in held_by(engine).by_name.items()}
                found = {"sums": sums, "fused": {name: list(parts) for name, parts in fused_layers(engine).items()}}
            worker.rft_held = (asked["run"], asked["version"])
            return found

        return told_back(work)

    def rft_tensors(self, asked: dict[str, Any], copies: bool) -> Iterable[tuple[str, torch.Tensor]]:
        worker: Any = self
        device = torch.device(worker.device)
        if asked["way"] == "files":
            return from_folder(Path(asked["folder"]), device)
        if asked["way"] == "group":
            return received(from_group(worker.rft_group), copies=copies)
        kept = worker.__dict__.setdefault("rft_buffer", {})
        return received(from_socket(asked["sockets"][worker.rank], device, kept, asked["seconds"]), copies=copies)


def told_back(work: Any) -> dict[str, Any]:
    """What `work` returns, or {error}: vLLM's server tells the caller nothing of an exception."""
    try:
        return dict(work())
    except Exception as error:  # of vLLM, torch or the system: whatever it is, the trainer has to hear it
        logging.getLogger("rft").exception("weights did not arrive")
        return {"error": error.message if isinstance(error, RftError) else f"{type(error).__name__}: {error}"}

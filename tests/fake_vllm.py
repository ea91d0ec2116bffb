"""A vLLM server for tests, in a thread: real HTTP, real `RftWorker` over a small module, answers that count on from the prompt's last id."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from torch import nn

from rftcli.engines.vllm_worker import RftWorker

TRAINED = {"q.weight": torch.arange(6.0).view(2, 3), "k.weight": -torch.ones(2, 3), "norm": torch.tensor([0.5, -0.0, 2.0])}
"""What the module below is loaded with."""


class Fused(nn.Module):
    """An engine's model: q and k of the trainer's in one parameter. `drops`: a weight that it leaves out; `spoils`: it changes what it loads."""

    packed_modules_mapping = {"qk": ["q", "k"]}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(3, 4, bias=False)
        self.norm = nn.Parameter(torch.zeros(3))
        self.drops: str | None = None
        self.spoils = False

    def load_weights(self, weights) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            if name == self.drops:
                continue
            if name == "norm":
                self.norm.data.copy_(tensor + 1.0 if self.spoils else tensor)
                loaded.add("norm")
            else:
                self.qk.weight.data[0 if name.startswith("q") else 2 :][:2].copy_(tensor)
                loaded.add("qk.weight")
        return loaded


class Runner:
    """One of those that draw with a seed a row at no cost, by where it comes from."""

    __module__ = "vllm.v1.worker.gpu.fake"


class FakeWorker(RftWorker):
    def __init__(self, rank: int, size: int, facts: dict[str, Any]) -> None:
        self.rank, self.device, self.model = rank, torch.device(facts.get("device", "cpu")), Fused()
        model = SimpleNamespace(
            dtype=facts.get("dtype", torch.float32), max_model_len=facts.get("max_model_len", 64), quantization=facts.get("quantization"),
            logprobs_mode=facts.get("logprobs_mode", "processed_logprobs"), hf_text_config=SimpleNamespace(**facts.get("config", {})),
        )  # fmt: skip
        parallel = SimpleNamespace(
            tensor_parallel_size=size, pipeline_parallel_size=1, data_parallel_size=facts.get("data_parallel", 1)
        )
        scheduler = SimpleNamespace(enable_chunked_prefill=facts.get("cuts_prompts", False))
        self.vllm_config = SimpleNamespace(model_config=model, parallel_config=parallel, scheduler_config=scheduler)
        self.model_runner = Runner()

    def get_model(self) -> Fused:
        return self.model


class FakeVLLM:
    """`script(body, number)` is asked before each completion: None lets it be answered, (status, text) refuses it, a number is seconds to wait
    first. `extension`, `dev`, `generates`: what the server offers."""

    def __init__(
        self, *, workers: int = 1, extension: bool = True, dev: bool = True, generates: bool = False, name: str = "fake", port: int = 0,
        script: Callable[[dict[str, Any], int], Any] | None = None, **facts: Any,
    ) -> None:  # fmt: skip
        self.workers = [FakeWorker(rank, workers, facts) for rank in range(workers)]
        self.asked: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.dropped = 0
        self.most_at_once = self._busy = 0
        self.resets_refused = 0
        self.silent = self.workers_silent = False
        """It takes requests and answers none; its workers do."""
        self._script, self._extension = script or (lambda body, number: None), extension
        app = FastAPI()
        app.get("/health")(lambda: {})
        app.get("/version")(lambda: {"version": "0.0.fake"})
        app.get("/v1/models")(lambda: {"data": [{"id": name}]})
        app.post("/v1/completions")(self._complete)
        if generates:
            app.post("/inference/v1/generate")(self._complete)
        if dev:
            app.post("/collective_rpc")(self._rpc)
            app.post("/reset_prefix_cache")(self._reset)
            for path in ("/sleep", "/wake_up"):
                app.post(path)(self._noted)

        async def unless_silent(scope: Any, receive: Any, send: Any) -> None:
            while self.silent or (self.workers_silent and scope.get("path") == "/collective_rpc"):
                await asyncio.sleep(0.02)
            await app(scope, receive, send)

        self._server = uvicorn.Server(uvicorn.Config(unless_silent, log_level="critical", timeout_graceful_shutdown=1, lifespan="off"))
        self._socket = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    @property
    def model(self) -> Fused:
        return self.workers[0].model

    def __enter__(self) -> FakeVLLM:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """As if the process were killed: nobody listens, open connections break."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=10)
        self._socket.close()

    def forget(self) -> None:
        """As if it had been started anew."""
        for worker in self.workers:
            worker.rft_held = (None, None)

    async def _complete(self, request: Request) -> Any:
        body = await request.json()
        self.asked.append(body)
        number = len(self.asked) - 1
        self._busy += 1
        self.most_at_once = max(self.most_at_once, self._busy)
        try:
            said = self._script(body, number)
            if isinstance(said, (int, float)):
                end = time.monotonic() + said
                while time.monotonic() < end:
                    await asyncio.sleep(0.02)
                    if await request.is_disconnected():
                        self.dropped += 1
                        return {}
            elif said is not None:
                return JSONResponse({"error": {"message": said[1]}}, status_code=said[0])
            await asyncio.sleep(0.005)
            return answer(body)
        finally:
            self._busy -= 1

    def _rpc(self, body: dict[str, Any]) -> Any:
        if not self._extension:
            raise HTTPException(500, "no such method")
        self.calls.append(body["method"])
        found: list[Any] = [None] * len(self.workers)

        def call(place: int) -> None:
            found[place] = getattr(self.workers[place], body["method"])(*body.get("args", ()))

        threads = [threading.Thread(target=call, args=(place,)) for place in range(len(self.workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"results": found}

    def _reset(self) -> Any:
        self.calls.append("reset")
        if self.resets_refused:
            self.resets_refused -= 1
            return {"success": False}
        return {"success": True}

    def _noted(self, request: Request) -> Any:
        self.calls.append(f"{request.url.path}?{request.url.query}")
        return {}


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """Ids that count on from the last one to the limit, or to a stop id; each has the log-prob -id / 8."""
    ids_alone = "token_ids" in body
    params = body["sampling_params"] if ids_alone else body
    last = (body["token_ids"] if ids_alone else body["prompt"])[-1]
    ids, reason = [], "length"
    for place in range(params["max_tokens"]):
        ids.append(last + 1 + place)
        if ids[-1] in params.get("stop_token_ids", ()):
            reason = "stop"
            break
    values = [-token / 8 for token in ids]
    logprobs: Any = {"content": [{"logprob": value} for value in values]} if ids_alone else {"token_logprobs": values}
    return {"choices": [{"token_ids": ids, "finish_reason": reason, "logprobs": logprobs if "logprobs" in params else None}]}

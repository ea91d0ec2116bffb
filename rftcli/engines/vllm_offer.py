"""What a vLLM server can do, asked before it is used: its version, model and room, how completions are asked for, how weights come in.

Nothing is concluded from version numbers. A server without a way for weights, or that would sample from another distribution than the recipe says, is
refused with the command that starts a right one. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from rftcli.engines.vllm_http import OTHER_PROGRAM, Server, Wire, answers, plain, refused
from rftcli.errors import HeldUpError, RftError, UsageError

EXTENSION = "rftcli.engines.vllm_worker.RftWorker"
PAUSE_SECONDS = 0.5
TOLD_AFTER_SECONDS = 5.0
"""Who waits longer for a server is told for what."""
NO_PLACE = (404, 405, 410)
FACTS = frozenset({"run", "version", "device", "dtype", "max_model_len", "logprobs_mode", "quantization", "data_parallel", "free_seeds", "shape"})
"""What a worker says of itself (`RftWorker.rft_state`), as far as this side reads it."""
HOW = (
    f"start it with `VLLM_SERVER_DEV_MODE=1 python -m rftcli.engines.vllm_serve MODEL --worker-extension-cls {EXTENSION} "
    "--logprobs-mode processed_logprobs --generation-config vllm`, in an environment that has rftcli; or leave it to `rollout.vllm.server.start`"
)
"""The way to start a server by hand."""


def wait_for(
    wire: Wire, server: Server, seconds: float, key: str = "rollout.vllm.server.ready_seconds", *,
    told: Callable[[str], None] = lambda text: None, tell_after_seconds: float = TOLD_AFTER_SECONDS, stop_asked: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Until it is healthy. RftError after `seconds`, which the recipe has at `key`, or at once where `last_words` says that it is gone, or where time
    will not help. `told`: gets one line where it takes more than a moment. HeldUpError once `stop_asked`: no step would come to stop after."""
    begin = time.monotonic()
    end, tell_at = begin + seconds, begin + tell_after_seconds
    while True:
        reply: httpx.Response | None = None
        try:
            reply = wire.call(server, "GET", "/health", seconds=min(seconds, 30.0))
            problem = f"status {reply.status_code}"
        except RftError as error:
            problem = error.message
        if reply is not None and reply.status_code == 200:
            return
        if reply is not None and reply.status_code in (401, 403):
            raise refused(server, "/health", reply)
        if reply is not None and reply.status_code in NO_PLACE:
            raise UsageError(f"{server.shown} has no /health (status {reply.status_code})", hint=OTHER_PROGRAM)
        words = server.last_words()
        if words is not None:
            raise RftError(f"{server.shown} did not start: {words}")
        if stop_asked():
            raise HeldUpError(f"asked to stop while {server.shown} was waited for: {problem}")
        if time.monotonic() > tell_at:
            tell_at = float("inf")
            told(f"waiting for {server.shown}, up to {seconds:g} s (`{key}`): {problem}")
        if time.monotonic() > end:
            hint = f"is a server running at that address? One that needs more time to start: a longer `{key}`"
            raise RftError(f"{server.shown} is not ready after {seconds:g} s: {problem}", hint=hint)
        time.sleep(PAUSE_SECONDS)


def look(wire: Wire, server: Server, *, wanted_name: str | None = None) -> str:
    """Fill in what the server offers; a line about it for the log. UsageError for one that cannot be used. `wanted_name`: of the model that this
    run has given it."""
    models = wire.call(server, "GET", "/v1/models")
    if models.status_code in (401, 403):
        raise refused(server, "/v1/models", models)
    if models.status_code != 200:
        raise UsageError(f"{server.shown} has no /v1/models (status {models.status_code})", hint="is it a vLLM server of version 0.22 or later?")
    listed = names_of(plain(server, "/v1/models", models))
    if wanted_name is not None and wanted_name not in listed:
        raise UsageError(f"{server.shown} serves {', '.join(listed) or 'no model'}, not {wanted_name}", hint="another server has taken its port")
    if not listed:
        raise UsageError(f"{server.shown} serves no model", hint=OTHER_PROGRAM)
    server.name = listed[0] if wanted_name is None else wanted_name
    version = wire.call(server, "GET", "/version")
    told = str(plain(server, "/version", version).get("version", "?")) if version.status_code == 200 else "?"
    paths = wire.call(server, "GET", "/openapi.json")
    offered = set(plain(server, "/openapi.json", paths).get("paths") or ()) if paths.status_code == 200 else set()
    server.generates = "/inference/v1/generate" in offered
    state = wire.call(server, "POST", "/collective_rpc", {"method": "rft_state"})
    if state.status_code in (404, 405):
        raise UsageError(f"{server.shown} has no /collective_rpc, so weights cannot reach it", hint=HOW)
    if state.status_code != 200:
        raise UsageError(f"{server.shown} has no way for this trainer's weights (vLLM {told}, no worker extension)", hint=HOW)
    found = answers(server, "rft_state", state)
    if not found[0].keys() >= FACTS:
        message = f"{server.shown} has an rftcli of another version: its workers say nothing of {', '.join(sorted(FACTS - found[0].keys()))}"
        raise UsageError(message, hint="install the same rftcli in its environment, and start it anew")
    server.facts, server.workers = found[0], len(found)
    how = "ids alone" if server.generates else "/v1/completions"
    return f"{server.shown}: vLLM {told}, {server.workers} {server.facts['device']} worker(s), {server.facts['max_model_len']} tokens, asked by {how}"


def names_of(models: Mapping[str, Any]) -> list[str]:
    """Of the models that a reply of /v1/models lists."""
    data = models.get("data")
    return [str(model["id"]) for model in data if isinstance(model, dict) and "id" in model] if isinstance(data, list) else []


def check(server: Server, *, tokens: int, dtype: str, checked: bool, shape: Mapping[str, int | None] | None = None) -> None:
    """UsageError for a server that runs the model in another way than the plan needs, or another model. `shape`: what is known of the policy's, by
    the names of `vllm_worker.SHAPE`."""
    facts = server.facts
    for name, wanted in (shape or {}).items():
        has = facts["shape"].get(name)
        if has is not None and wanted is not None and has != wanted:
            message = f"{server.shown} has another model than the policy ({server.name}): {name} {has}, not {wanted}"
            raise UsageError(message, hint="start it with the model that `models.policy.path` names")
    if facts["max_model_len"] < tokens:
        message = f"{server.shown} takes {facts['max_model_len']} tokens, the longest prompt and completion have {tokens}"
        raise UsageError(message, hint=f"start it with `--max-model-len {tokens}`, or lower the lengths in `rollout`")
    if facts["dtype"] != dtype:
        message = f"{server.shown} runs in {facts['dtype']}, the policy in {dtype}"
        raise UsageError(message, hint=f"start it with `--dtype {dtype}`, or set models.policy.dtype")
    if facts["logprobs_mode"] != "processed_logprobs":
        message = f"{server.shown} reports log-probs of another distribution than it samples from ({facts['logprobs_mode']})"
        raise UsageError(message, hint="start it with `--logprobs-mode processed_logprobs`")
    if facts["data_parallel"] > 1:
        message = f"{server.shown} has {facts['data_parallel']} engines behind one address (data parallel)"
        raise UsageError(message, hint="start a server for each, and name them all in `rollout.vllm.server.urls`")
    if checked and (server.workers > 1 or facts["quantization"] is not None):
        why = "several workers hold parts of the weights" if server.workers > 1 else f"its weights are quantised ({facts['quantization']})"
        raise UsageError(f"the weights of {server.shown} cannot be compared: {why}", hint="rollout.vllm.check_weights: false")

"""What a vLLM server can do, asked before it is used: its version, model and room, how completions are asked for, how weights come in.

Nothing is concluded from version numbers. A server without a way for weights, or that would sample from another distribution than the recipe says, is
refused with the command that starts a right one. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rftcli.engines.vllm_http import Server, Wire, answers
from rftcli.errors import RftError, UsageError

EXTENSION = "rftcli.engines.vllm_worker.RftWorker"
PAUSE_SECONDS = 0.5
HOW = (
    f"start it with `VLLM_SERVER_DEV_MODE=1 python -m rftcli.engines.vllm_serve MODEL --worker-extension-cls {EXTENSION} "
    "--logprobs-mode processed_logprobs --generation-config vllm`, in an environment that has rftcli; or leave it to `rollout.vllm.server.start`"
)
"""The way to start a server by hand."""


def wait_for(
    wire: Wire, server: Server, seconds: float, key: str = "rollout.vllm.server.ready_seconds", say: Callable[[str], None] | None = None
) -> None:
    """Until it is healthy. RftError after `seconds`, which the recipe has at `key`, or at once where `last_words` says that it is gone. `say`: told
    once why there is anything to wait for."""
    end = time.monotonic() + seconds
    while True:
        try:
            reply = wire.call(server, "GET", "/health", seconds=min(seconds, 30.0))
            if reply.status_code == 200:
                return
            problem = f"status {reply.status_code}"
        except RftError as error:
            problem = error.message
        words = server.last_words()
        if words is not None:
            raise RftError(f"{server.shown} did not start: {words}")
        if say is not None:
            say(f"waiting for {server.shown}, {seconds:g} s at most (`{key}`): {problem}")
            say = None
        if time.monotonic() > end:
            hint = f"is a server running at that address? One that needs more time to start: a longer `{key}`"
            raise RftError(f"{server.shown} is not ready after {seconds:g} s: {problem}", hint=hint)
        time.sleep(PAUSE_SECONDS)


def look(wire: Wire, server: Server, *, wanted_name: str | None = None) -> str:
    """Fill in what the server offers; a line about it for the log. UsageError for one that cannot be used. `wanted_name`: of the model that this
    run has given it."""
    models = wire.call(server, "GET", "/v1/models")
    if models.status_code != 200:
        raise UsageError(f"{server.shown} has no /v1/models (status {models.status_code})", hint="is it a vLLM server of version 0.22 or later?")
    listed = [str(model["id"]) for model in models.json().get("data", [])]
    if not listed or (wanted_name is not None and wanted_name not in listed):
        raise UsageError(f"{server.shown} serves {', '.join(listed) or 'no model'}, not {wanted_name}", hint="another server has taken its port")
    server.name = listed[0] if wanted_name is None else wanted_name
    version = wire.call(server, "GET", "/version")
    told = str(version.json().get("version", "?")) if version.status_code == 200 else "?"
    paths = wire.call(server, "GET", "/openapi.json")
    offered = set(paths.json().get("paths", {})) if paths.status_code == 200 else set()
    server.generates = "/inference/v1/generate" in offered
    state = wire.call(server, "POST", "/collective_rpc", {"method": "rft_state"})
    if state.status_code in (404, 405):
        raise UsageError(f"{server.shown} has no /collective_rpc, so weights cannot reach it", hint=HOW)
    if state.status_code != 200:
        raise UsageError(f"{server.shown} has no way for this trainer's weights (vLLM {told}, no worker extension)", hint=HOW)
    found = answers(server, "rft_state", state)
    server.facts, server.workers = found[0], len(found)
    how = "ids alone" if server.generates else "/v1/completions"
    return f"{server.shown}: vLLM {told}, {server.workers} {server.facts['device']} worker(s), {server.facts['max_model_len']} tokens, asked by {how}"


def check(server: Server, *, tokens: int, dtype: str, checked: bool) -> None:
    """UsageError for a server that runs the model in another way than the plan needs."""
    facts = server.facts
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

"""Rules of `rollout.vllm.server` and of engines beside the ranks: what only engines inside a rank have, and what a server needs to be found."""

from __future__ import annotations

from collections.abc import Iterator

from rftcli.recipe import addresses
from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.sections import Recipe

HERE = ("rollout", "vllm", "server")
OF_THE_START = ("memory_share", "options", "tensor_parallel")
"""Keys that say how an engine is started."""
APART: dict[str, str] = {
    "host": "the run finds its own servers", "port": "a free one is chosen and held", "uds": "a free port is chosen and held",
    "worker_extension_cls": "it takes the weights", "served_model_name": "the run knows its own servers by it",
    "api_server_count": "one process asks the engine",
    "root_path": "the run finds its own servers", "ssl_keyfile": "the run finds its own servers", "ssl_certfile": "the run finds its own servers",
    "api_key": "control calls would be refused",
}  # fmt: skip
"""Argument of `vllm serve` -> why it is not to be chosen."""


def one_kind_of_server(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    server = recipe.rollout.vllm.server
    if server is None:
        return
    if bool(server.urls) == (server.start is not None):
        message = "needs `urls` or `start`" if server.start is None else "`urls` and `start` exclude each other"
        yield Finding(path=HERE, message=message, reads=((*HERE, "urls"), (*HERE, "start")), at_key=True)
    bare = [url.rstrip("/").removesuffix("/v1") for url in server.urls]
    twice = next((server.urls[place] for place, url in enumerate(bare) if url in bare[:place]), None)
    if twice is not None:
        yield Finding(path=(*HERE, "urls"), message=f"names {twice} twice", reason="each server takes the weights once")
    if server.folder is not None and server.weights == "nccl":
        yield Finding(path=(*HERE, "folder"), message="is for `weights: files`", reads=((*HERE, "weights"),))


def started_gpus(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    section = recipe.rollout.vllm
    start = None if section.server is None else section.server.start
    if start is None or not start.gpus:
        return
    path, needed = (*HERE, "start", "gpus"), start.servers * section.tensor_parallel
    reads = ((*HERE, "start", "servers"), ("rollout", "vllm", "tensor_parallel"))
    if len(set(start.gpus)) != len(start.gpus):
        yield Finding(path=path, message="names a GPU twice")
    elif len(start.gpus) != needed:
        each, named = section.tensor_parallel, len(start.gpus)
        what = f"{_many(start.servers, 'server')} of {_many(each, 'GPU')}{' each' if start.servers > 1 else ''}"
        hint = f"`servers: {named // each}`, or name {needed}" if named % each == 0 else f"name {needed}"
        yield Finding(path=path, message=f"names {_many(named, 'GPU')}, {what} need{'s' * (start.servers == 1)} {needed}", hint=hint, reads=reads)


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def apart_from_the_ranks(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """Keys of engines on the ranks beside a server, and of engines inside a rank beside one that is not."""
    section = recipe.rollout.vllm
    server = section.server
    if server is None and section.process != "beside":
        return
    plain = type(section)()
    reads = (HERE,) if server is not None else (("rollout", "vllm", "process"),)
    if section.seeds == "engine":
        why = "several ranks would draw from one generator, in the order in which their requests arrive"
        yield Finding(path=("rollout", "vllm", "seeds"), message="`engine` needs an engine inside the rank", reason=why, reads=reads)
    for name in section.options:
        if name in APART:
            yield Finding(path=("rollout", "vllm", "options", name), message=f"`{name}` is not to be chosen", reason=APART[name], at_key=True)
    if server is None:
        return
    for name in ("process", "sleep"):
        if getattr(section, name) not in ("auto", 0):
            why = "a server shares no device with the training"
            yield Finding(path=("rollout", "vllm", name), message="excludes `server`", reason=why, reads=reads, at_key=True)
    for name in OF_THE_START if server.urls else ():
        if getattr(section, name) != getattr(plain, name):
            why = "the servers at `urls` run already"
            yield Finding(path=("rollout", "vllm", name), message="is for engines that the run starts", reason=why, reads=reads, at_key=True)


# How to add one: code -> (keys it is about, the rule as one sentence, function that yields a Finding for each breach).
ROWS = {
    "vllm-servers": (
        ("rollout.vllm.server", "rollout.vllm.server.urls", "rollout.vllm.server.start", "rollout.vllm.server.weights", "rollout.vllm.server.folder"),
        "Servers are named, or started by the run.",
        one_kind_of_server,
    ),
    "vllm-server-gpus": (
        ("rollout.vllm.server.start.gpus", "rollout.vllm.server.start.servers", "rollout.vllm.tensor_parallel"),
        "Every server that is started has GPUs of its own.",
        started_gpus,
    ),
    "vllm-apart": (
        ("rollout.vllm.server", "rollout.vllm.process", "rollout.vllm.seeds", "rollout.vllm.sleep", "rollout.vllm.options"),
        "An engine in another process has no key that only one inside a rank has.",
        apart_from_the_ranks,
    ),
    **addresses.ROWS,
}  # fmt: skip

"""Rules of `models.scorers.NAME.placement`: a judge at a server that is there, or at one that the run starts.

What is left out: how many GPUs there are, which needs the machine (`plan.compile_judges`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import Recipe, ScorerModel

OWNED = {
    "model": "path", "revision": "revision", "tokenizer": "tokenizer", "chat_template": "template", "dtype": "dtype",
    "trust_remote_code": "trust_remote_code", "max_model_len": "max_tokens", "tensor_parallel_size": "placement.tensor_parallel",
    "gpu_memory_utilization": "placement.memory_share",
}  # fmt: skip
"""Argument of `vllm serve` -> the scorer's key for it."""
FIXED = {
    "host": "the run finds its own servers", "port": "a free one is chosen and held", "uds": "a free port is chosen and held",
    "served_model_name": "the run knows its own servers by it", "api_key": "the run itself asks, without one",
    "root_path": "the run finds its own servers", "ssl_keyfile": "the run finds its own servers", "ssl_certfile": "the run finds its own servers",
    "pipeline_parallel_size": "`tensor_parallel` says how many GPUs share one copy",
    "data_parallel_size": "`gpus` with a smaller `tensor_parallel` starts several servers",
    "generation_config": "temperature and length are the recipe's",
}  # fmt: skip
"""Argument of `vllm serve` -> why it is not to be chosen."""
BESIDE = {"tensor_parallel_size": "placement", "gpu_memory_utilization": "batch_tokens", "kv_cache_memory_bytes": "batch_tokens"}
"""The same of a judge beside the ranks, which has the rank's one device."""
OF_THE_START = ("tensor_parallel", "memory_share", "ready_seconds", "command", "options")


def placement_form(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for name, scorer in recipe.models.scorers.items():
        place, here = scorer.placement, ("models", "scorers", name, "placement")
        if place == "shared":
            if scorer.engine == "vllm":
                yield from arguments(scorer.options, here[:-1], OWNED | BESIDE, here[:-1])
                yield from _template(scorer, here[:-1])
            continue
        reads: tuple[KeyPath, ...] = ((*here, "server"), (*here, "gpus"))
        if place.server is None and place.gpus is None:
            yield Finding(path=here, message="needs `gpus` or `server`", reads=reads, at_key=True)
        elif place.server is not None and place.gpus is not None:
            why = "a server that is there already has its GPUs"
            yield Finding(path=(*here, "gpus"), message="`server` and `gpus` exclude each other", reason=why, reads=reads)
        if place.server is not None:
            plain = type(place)()
            for key in OF_THE_START:
                if getattr(place, key) != getattr(plain, key):
                    message = "is for a server that the run starts, with `gpus`"
                    yield Finding(path=(*here, key), message=message, reads=reads, at_key=True)
        yield from _cut(place.gpus, place.tensor_parallel, here)
        yield from arguments(place.options, here, OWNED, here[:-1])
        if place.gpus is not None:
            yield from _template(scorer, here[:-1])


def _cut(gpus: int | None, each: int | str, here: KeyPath) -> Iterator[Finding]:
    """Do `tensor_parallel` GPUs a server divide `gpus`?"""
    if gpus is None or each == "auto" or gpus == 0 == int(each) - 1 or (gpus and gpus % int(each) == 0):
        return
    if gpus == 0:
        message, hint = "needs `gpus`", f"`gpus: {each}`"
    else:
        message, hint = f"{gpus} GPUs cannot be cut into servers of {each} each", f"`gpus: {-(-gpus // int(each)) * int(each)}`"
    yield Finding(path=(*here, "tensor_parallel"), message=message, hint=hint, reads=((*here, "gpus"),))


def arguments(options: dict[str, object], here: KeyPath, owned: dict[str, str], model: KeyPath) -> Iterator[Finding]:
    """Of `vllm serve`, which the section at `here` has. `owned`: argument -> key of the section at `model` for it."""
    shown = ".".join(map(str, model))
    for name in options:
        path, argument = (*here, "options", name), name.replace("-", "_")  # a command line takes both
        if argument in owned:
            yield Finding(path=path, message=f"has a key of its own: `{shown}.{owned[argument]}`", at_key=True)
        elif argument in FIXED:
            yield Finding(path=path, message=f"`{name}` is not to be chosen", reason=FIXED[argument], at_key=True)


def _template(scorer: ScorerModel, here: KeyPath) -> Iterator[Finding]:
    if scorer.template is not None and scorer.api == "completions":
        why = "that endpoint takes the text as it is"
        yield Finding(path=(*here, "template"), message="has no effect with `api: completions`", reason=why, reads=((*here, "api"),))


# To add a rule: a function above and a row here; `scorer_rules` takes them into its table.
ROWS: dict[str, tuple[tuple[str, ...], str, Callable[[Recipe, KnownRules | None], Iterator[Finding]]]] = {
    "judge-placement": (
        ("models.scorers.NAME.placement", "models.scorers.NAME.template"),
        "A judge apart from the ranks is at a server that is there, or the run starts one with arguments that are not its own.",
        placement_form,
    ),
}  # fmt: skip

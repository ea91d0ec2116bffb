"""Rules across keys of `models.scorers`, and of the reward parts that name one. Rows of the table are in `rules`.

What is left out: expressions of heads, templates and paths, which need other rooms (`runtime.scorer_checks`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from rftcli.recipe import judge_rules
from rftcli.recipe.addresses import wrong_with
from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.names import did_you_mean
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import JudgeScore, Recipe, ScorerModel

_SCORERS = ("models", "scorers")


def known_scorer(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    names = tuple(recipe.models.scorers)
    for label, reward in recipe.rewards.items():
        for index, part in enumerate(reward.parts):
            here = ("rewards", label, "parts", index)
            if part.model is None:
                continue
            if part.model not in names:
                yield Finding(
                    path=(*here, "model"),
                    message=f"no entry `{part.model}` in models.scorers",
                    reason=did_you_mean(part.model, names),
                    allowed=names,
                    hint=None if names else "`models: {scorers: {NAME: {kind: classifier, path: ...}}}`",
                    reads=(_SCORERS,),
                )
            for option in part.options:
                why = "what a scorer does stands in its entry of `models.scorers`"
                yield Finding(path=(*here, "options", option), message="a `model` part has no options", reason=why, at_key=True)


def variant(scorer: ScorerModel) -> str:
    """Which row of KEYS applies."""
    if scorer.kind != "generative":
        return scorer.kind
    if scorer.placement == "shared":
        return "beside" if scorer.engine == "vllm" else scorer.kind
    return "server" if scorer.placement.gpus is None else "started"


def keys_of_kind(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for name, scorer in recipe.models.scorers.items():
        here, kind = (*_SCORERS, name), variant(scorer)
        shown = SHOWN.get(kind, f"`{scorer.kind}`")
        reads: tuple[KeyPath, ...] = ((*here, "kind"), (*here, "placement"))
        for key in NEEDED[kind]:
            if not getattr(scorer, key):
                yield Finding(path=here, message=f"{shown} needs `{key}`", reads=(*reads, (*here, key)), at_key=True)
        given = scorer.model_fields_set & {key for key in type(scorer).model_fields if getattr(scorer, key) != type(scorer).model_fields[key].default}
        for key in sorted(given - KEYS[kind] - {"kind"}):
            yield Finding(
                path=(*here, key), message=f"`{key}` has no meaning for {shown}", allowed=tuple(sorted(KEYS[kind])), reads=reads, at_key=True
            )


def score_form(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for name, scorer in recipe.models.scorers.items():
        here, score = (*_SCORERS, name, "score"), scorer.score
        if score is None:
            continue
        given = [key for key, value in (("regex", score.regex), ("json", score.json_), ("token", score.token)) if value is not None]
        reads = tuple((*here, key) for key in ("regex", "json", "token"))
        if not given:
            yield Finding(path=here, message="needs `regex`, `json` or `token`", reads=reads, at_key=True)
        for other in given[1:]:
            yield Finding(path=(*here, other), message=f"`{given[0]}` and `{other}` exclude each other", reason="a reply is read in one way")
        yield from _pattern(score, here)
        yield from _words(score, here)
        path = (*_SCORERS, name, "samples")
        if scorer.samples > 1 and score.token is not None:
            yield Finding(path=path, message="has no effect with `score.token`", reason="a probability is not sampled", reads=reads)
        elif scorer.samples > 1 and scorer.temperature == 0:
            reads = ((*path[:-1], "temperature"),)
            yield Finding(path=path, message="needs a temperature above 0", reason="greedy replies are all the same", reads=reads)


def _pattern(score: JudgeScore, here: KeyPath) -> Iterator[Finding]:
    if score.regex is None:
        return
    try:
        groups = re.compile(score.regex).groups
    except (re.error, OverflowError, RecursionError) as error:
        yield Finding(path=(*here, "regex"), message=f"not a regular expression: {error}", hint="single quotes keep backslashes as they are")
        return
    if groups != 1:
        yield Finding(path=(*here, "regex"), message=f"needs one group in parentheses, has {groups}", reason="the number is what the group finds")


def _words(score: JudgeScore, here: KeyPath) -> Iterator[Finding]:
    if score.scale == 0:
        yield Finding(path=(*here, "scale"), message="must not be 0", reason="every answer would have the same score")
    if score.against and score.token is None:
        yield Finding(path=(*here, "against"), message="needs `token`", reads=((*here, "token"),), at_key=True)
    for index, word in enumerate(score.against):
        if word == score.token or word in score.against[:index]:
            yield Finding(path=(*here, "against", index), message=f"`{word}` is there twice", reads=((*here, "token"),))


def service_form(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for name, scorer in recipe.models.scorers.items():
        here = (*_SCORERS, name)
        urls: list[tuple[KeyPath, str]] = [((*here, "urls", index), url) for index, url in enumerate(scorer.urls)]
        if scorer.placement != "shared" and scorer.placement.server is not None:
            urls.append(((*here, "placement", "server"), scorer.placement.server))
        for path, url in urls:
            why = wrong_with(url)
            if why is not None:
                yield Finding(path=path, message=why)
        for header, variable in scorer.headers_env.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", variable):
                why = "secrets stay in the environment: the value names a variable"
                yield Finding(path=(*here, "headers_env", header), message="is no name of an environment variable", reason=why, at_key=True)


def weights_form(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for name, scorer in recipe.models.scorers.items():
        here = (*_SCORERS, name)
        if scorer.shard is True and scorer.kind == "generative" and (scorer.score is None or scorer.score.token is None):
            why = "every token of a reply would gather all weights anew"
            yield Finding(path=(*here, "shard"), message="goes with `score.token` alone", reason=why, reads=((*here, "score"),))
        if scorer.quantise is not None:
            for key in ("shard", "offload"):
                if getattr(scorer, key) is True:
                    why = "a weight of few bits stays whole, where it was loaded"
                    yield Finding(path=(*here, key), message="does not go with `quantise`", reason=why, reads=((*here, "quantise"),))
            for key in ("kind", "nested"):
                if scorer.quantise.bits == 8 and key in scorer.quantise.model_fields_set:
                    bits = (*here, "quantise", "bits")
                    yield Finding(path=(*here, "quantise", key), message="has no effect with 8 bits", reads=(bits,), at_key=True)
        for option in scorer.options if scorer.kind != "python" and variant(scorer) != "beside" else ():
            if option in OWN_KEYS:
                message = f"has a key of its own: `models.scorers.{name}.{OWN_KEYS[option]}`"
                yield Finding(path=(*here, "options", option), message=message, at_key=True)
        if scorer.shard is True and scorer.offload is True:
            yield Finding(path=(*here, "offload"), message="does not go with `shard`", reason="its part of the weights stays on every rank")
        if scorer.revision is not None and (scorer.path or "").startswith(("/", "builtin:")):
            yield Finding(path=(*here, "revision"), message=f"does not apply to {scorer.path}", reason="only a repository on the hub has revisions")


OWN_KEYS = {
    "revision": "revision", "trust_remote_code": "trust_remote_code", "dtype": "dtype", "torch_dtype": "dtype", "quantization_config": "quantise",
    "load_in_4bit": "quantise", "load_in_8bit": "quantise", "device_map": "offload", "num_labels": "head",
}  # fmt: skip
"""Argument of `from_pretrained` -> our key for it."""
_WEIGHTS = frozenset({
    "path", "revision", "tokenizer", "template", "dtype", "trust_remote_code", "quantise", "options", "max_tokens", "overlong", "batch_tokens",
    "offload", "shard", "cache",
})  # fmt: skip
_JUDGE = frozenset({"path", "prompt", "score", "max_new_tokens", "temperature", "samples", "placement", "cache"})
_SERVICE = frozenset({"timeout_seconds", "retries", "concurrency", "per_minute", "headers_env", "cache"})
_STARTED = frozenset({"revision", "tokenizer", "template", "dtype", "trust_remote_code", "max_tokens"})
_BESIDE = _STARTED | {"options", "batch_tokens", "offload", "engine", "api", "timeout_seconds", "retries", "concurrency"}
SHOWN = {"beside": "a judge beside the ranks (`engine: vllm`)", "server": "a judge at a server", "started": "a judge at a server that the run starts"}
# To add a kind: a row here, one in NEEDED, and its class in `runtime.scorers`.
KEYS: dict[str, frozenset[str]] = {
    "classifier": _WEIGHTS | {"head"},
    "generative": _WEIGHTS | _JUDGE | {"engine"},
    "beside": _JUDGE | _BESIDE,
    "server": _JUDGE | _SERVICE | {"api"},
    "started": _JUDGE | _STARTED | (_SERVICE - {"headers_env"}) | {"api"},
    "http": _SERVICE | {"preset", "urls", "score_field", "batch_size"},
    "python": frozenset({"python", "options", "memory_gib", "cache"}),
}
"""Kind, or of a judge `beside` the ranks, at a `server`, or at one that is `started` by the run -> keys that mean something."""
NEEDED: dict[str, tuple[str, ...]] = {
    "classifier": ("path",),
    "generative": ("path", "prompt", "score"),
    **{place: ("path", "prompt", "score") for place in ("beside", "server")},
    "started": ("path", "prompt", "score"),
    "http": ("urls",),
    "python": ("python",),
}
# To add a rule: a function above and a row here; `rules` takes them into its table.
ROWS: dict[str, tuple[tuple[str, ...], str, Callable[[Recipe, KnownRules | None], Iterator[Finding]]]] = {
    "unknown-scorer": (
        ("rewards.LABEL.parts[].model", "rewards.LABEL.parts[].options", "models.scorers"),
        "A part's `model` is an entry of `models.scorers`, and has no options of its own.",
        known_scorer,
    ),
    "scorer-keys": (("models.scorers.NAME.kind",), "A scorer has the keys that its kind needs, and no others.", keys_of_kind),
    "scorer-score": (
        ("models.scorers.NAME.score", "models.scorers.NAME.samples", "models.scorers.NAME.max_new_tokens"),
        "A judge's reply is read in exactly one way.",
        score_form,
    ),
    "scorer-service": (
        ("models.scorers.NAME.urls", "models.scorers.NAME.placement.server", "models.scorers.NAME.headers_env"),
        "Services have http addresses, and headers name variables of the environment.",
        service_form,
    ),
    "scorer-weights": (
        ("models.scorers.NAME.shard", "models.scorers.NAME.quantise", "models.scorers.NAME.offload", "models.scorers.NAME.options"),
        "Quantised weights stay whole and where they are, sharded ones are read in one pass, and what has a key of its own is not an option.",
        weights_form,
    ),
    **judge_rules.ROWS,
}
"""Code -> (keys it is about, the rule in one sentence, check)."""

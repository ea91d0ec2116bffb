"""How one device is divided between training and an engine that lives beside it, and whether they take turns.

Pure arithmetic over estimates: what is not known to a few per cent (activations, workspaces, fragmentation) has a named constant. Everything is in
bytes, of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from rftcli.plan.memory import GIB, SCORE_COPIES, USABLE_SHARE

ENGINE_WORKING_BYTES = 2 * GIB
"""Graphs, workspaces and activations of the engine at its default prefill budget, beside its scores."""
BLOCK_TOKENS = 128
"""Of a block of the cache on a CPU, the largest in use; a sequence takes whole blocks."""
CACHE_WORTH_HAVING = 0.25
"""Share of the wanted cache from which on staying awake beats taking turns: vLLM queues what does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What the engine wants."""

    weights: float
    working: float
    cache_per_token: float
    sequences: int
    tokens: int
    """Of one sequence."""

    @property
    def cache_wanted(self) -> float:
        """For all sequences at their longest, and one more: vLLM keeps a block for itself."""
        return self.cache_per_token * (self.sequences + 1) * self.tokens

    @property
    def cache_least(self) -> float:
        """For one sequence at its longest: with less the engine does not start."""
        return self.cache_per_token * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    sleeps: bool
    cache: float
    share: float
    """Of the device, for everything of the engine."""
    fits: bool
    """False: not even one sequence has room."""
    too_small: bool
    """The share that was asked for is why: there is more room."""
    least: float
    """The share that one sequence needs."""
    most: float
    """The share that is left to the engine, asleep while training where it may sleep."""
    text: str


def engine(
    *, parameters: int, number_bytes: int, layers: int, key_width: int, vocabulary: int, tensor_parallel: int, sequences: int, tokens: int
) -> Engine:
    """`tokens` are rounded up to whole blocks of the cache. `key_width`: heads of keys x width of a head; keys and values have the model's type."""
    return Engine(
        weights=number_bytes * parameters / tensor_parallel,
        working=ENGINE_WORKING_BYTES + SCORE_COPIES * 4 * sequences * vocabulary,
        cache_per_token=2 * layers * key_width * number_bytes / tensor_parallel,
        sequences=sequences,
        tokens=-(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS,
    )


def divide(device: float, training: float, working: float, wanted: Engine, *, share: float | None = None, sleeps: bool | None = None) -> Division:
    """`training`: state that stays on the device; `working`: what training needs only while it trains. `share` of the device for the engine and
    `sleeps` decide instead of the arithmetic where they are given."""
    usable = USABLE_SHARE["cuda"] * device
    fixed = wanted.weights + wanted.working
    together = usable - training - working - fixed
    in_turn = usable - training - fixed
    may_sleep = sleeps is None or sleeps
    if share is not None:
        cache = share * device - fixed
        sleeps = cache > together if sleeps is None else sleeps
    else:
        if sleeps is None:
            sleeps = together < max(wanted.cache_least, CACHE_WORTH_HAVING * wanted.cache_wanted)
        cache = min(wanted.cache_wanted, in_turn if sleeps else together)
    room = in_turn if sleeps else together
    fits = wanted.cache_least <= cache <= room
    too_small = share is not None and cache < wanted.cache_least <= room
    how = "they take turns" if sleeps else "all of it fits at once"
    text = (
        f"{_gib(training)} of training state and {_gib(working)} while it trains; engine {_gib(wanted.weights)} of weights, "
        f"{_gib(wanted.working)} to work in, {_gib(max(0.0, cache))} of cache ({_gib(wanted.cache_wanted)} would hold {wanted.sequences} sequences "
        f"of {wanted.tokens} tokens); {how if fits or too_small else 'that does not fit'} in {USABLE_SHARE['cuda']:.0%} of {_gib(device)}"
    )
    least, most = (fixed + wanted.cache_least) / device, (fixed + (in_turn if may_sleep else together)) / device
    return Division(sleeps=sleeps, cache=cache, share=(fixed + cache) / device, fits=fits, too_small=too_small, least=least, most=most, text=text)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"

"""What several steps for a turn of vLLM's scheduler leave to vLLM: engines, sequences and turns of a kind that is not known."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from imitated_vllm import Core, filled
from imitated_vllm_runner import Cached, Output, Sequence

from rftcli.engines.vllm_decode import (
    BUSY,
    NEEDED,
    NEEDED_OF_THE_CACHE,
    UNDER_WAY,
    UNKNOWN,
    UNKNOWN_OF_A_SEQUENCE,
    decodes_alone,
    quicken,
    quicken_engines_to_come,
)

LATER = pytest.mark.parametrize("later", [False, True], ids=["told at once", "told a step later"])


SEQUENCES: dict[str, Callable[[Sequence], Any]] = {
    **{name: lambda row, name=name: setattr(row, name, 1) for name in UNKNOWN_OF_A_SEQUENCE},
    "prompt_logprobs": lambda row: setattr(row.sampling_params, "prompt_logprobs", 0),
    "repetition_detection": lambda row: setattr(row.sampling_params, "repetition_detection", object()),
    "stop strings": lambda row: setattr(row.sampling_params, "stop", ["end"]),
}


@LATER
@pytest.mark.parametrize("kind", SEQUENCES)
def test_a_sequence_of_a_kind_that_is_not_known_leaves_all_to_vllm(later: bool, kind: str) -> None:
    """Also the pace: a step is sent while the one before it is read."""
    plain, core = (filled(Core(later=later), 4, stop_token_ids=(), ignore_eos=True) for _ in range(2))
    for one in (plain, core):
        SEQUENCES[kind](one.scheduler.requests["s2"])
    burst = quicken(core.llm)
    assert burst is not None
    while "s2" in core.scheduler.requests:
        (told, _), (expected, _) = core.step_fn(), plain.step_fn()
        assert told == expected and core.model_executor.unread == plain.model_executor.unread
    assert not burst.steps
    core.run()


def test_a_pooling_sequence_is_not_known() -> None:
    burst = quicken(Core(later=True).llm)
    assert burst is not None and not burst._is_known(SimpleNamespace(sampling_params=None))


STATES: dict[str, Callable[[Sequence], Any]] = {
    **{name: lambda row, name=name: setattr(row, name, 1) for name in UNDER_WAY},
    "a prompt that is not read to its end": lambda row: setattr(row, "num_computed_tokens", row.num_computed_tokens - 1),
    "no token more": lambda row: setattr(row, "max_tokens", row.num_output_tokens),
}


@LATER
@pytest.mark.parametrize("state", STATES)
def test_a_sequence_that_vllm_waits_for_leaves_the_step_to_vllm(later: bool, state: str) -> None:
    core = filled(Core(later=later), 4, stop_token_ids=(), ignore_eos=True)
    burst = quicken(core.llm)
    assert burst is not None
    while burst.turns < 1:
        core.step_fn()
    assert not core.batch_queue
    STATES[state](core.scheduler.running[-1])
    burst._own = lambda: ("vLLM's own", True)  # type: ignore[assignment, method-assign]
    free = len(core.scheduler.kv_cache_manager.free)
    assert burst() == ("vLLM's own", True)
    assert len(core.scheduler.kv_cache_manager.free) == free


def of_kind(thing: Any, name: str) -> None:
    """The same, by a class that is derived from its own and does something else."""
    thing.__class__ = type(name, (type(thing),), {})


def without(thing: Any, name: str) -> None:
    """It has no such thing, neither itself nor by its class."""
    kind = type(thing)

    def has(self: Any, asked: str) -> Any:
        if asked == name:
            raise AttributeError(asked)
        return kind.__getattribute__(self, asked)

    thing.__class__ = type(kind.__name__, (kind,), {"__getattribute__": has})


ODD: dict[str, Callable[[Core], Any]] = {
    "sliding window": lambda core: of_kind(core.scheduler.kv_cache_manager.coordinator.single_type_managers[0], "RSWAManager"),
    "two kinds of caches": lambda core: setattr(
        core.scheduler.kv_cache_manager.coordinator, "single_type_managers", core.scheduler.kv_cache_manager.coordinator.single_type_managers * 2
    ),
    "diffusion": lambda core: of_kind(core.scheduler, "DiffusionAsyncScheduler"),
    "a scheduler that is told later without a queue": lambda core: setattr(core, "batch_queue", None),
    "no queue": lambda core: delattr(core, "batch_queue"),
    "no aborts": lambda core: without(core, "_process_aborts_queue"),
    **{f"in use: {name}": lambda core, name=name: setattr(core.scheduler, name, True) for name in UNKNOWN},
    **{f"no {name}": lambda core, name=name: without(core.scheduler, name) for name in NEEDED},
    **{f"no {name} of the cache": lambda core, name=name: without(core.scheduler.kv_cache_manager, name) for name in NEEDED_OF_THE_CACHE},
}


@pytest.mark.parametrize("odd", ODD)
def test_an_engine_of_a_kind_that_is_not_known_is_left_alone(odd: str) -> None:
    core = Core(later=True)
    ODD[odd](core)
    own = core.step_fn
    assert quicken(core.llm) is None and core.step_fn == own


def test_an_engine_in_another_process_is_left_alone() -> None:
    assert quicken(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace()))) is None


TOLD_BESIDES: dict[str, Callable[[Output], Any]] = {
    **{name: lambda output, name=name: setattr(output, name, ["something"]) for name in BUSY},
    "a prompt": lambda output: output.num_scheduled_tokens.update(c=1) or setattr(output, "total_num_scheduled_tokens", 3),
    "part of a prompt": lambda output: setattr(output, "total_num_scheduled_tokens", 9),
    "one that comes back": lambda output: output.scheduled_cached_reqs.resumed_req_ids.add("a"),
    "tokens of another stage": lambda output: output.scheduled_cached_reqs.new_token_ids.append([1]),
    "drafts": lambda output: output.scheduled_spec_decode_tokens.update(a=[1]),
    "a picture": lambda output: output.scheduled_encoder_inputs.update(a=[0]),
    "nothing": lambda output: output.__init__([], Cached([]), {}, 0, set()),  # type: ignore[misc]
}


@pytest.mark.parametrize("besides", TOLD_BESIDES)
def test_a_turn_that_told_more_than_tokens_is_not_repeated(besides: str) -> None:
    """What a scheduler's output tells beside its tokens was done once: steps that are made from it would do it again."""
    output = Output([], Cached(["a", "b"]), {"a": 1, "b": 1}, 2, set())
    assert decodes_alone(output)
    TOLD_BESIDES[besides](output)
    assert not decodes_alone(output)


def there_is(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    """A module of vLLM's engine, with these names."""
    for name in ("vllm", "vllm.v1", "vllm.v1.engine", f"vllm.v1.engine.{module}"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[f"vllm.v1.engine.{module}"]).update(names)


@pytest.mark.parametrize("cuts", [False, True])
def test_a_stop_string_is_met_step_by_step_where_vllm_would_keep_what_is_behind_it(cuts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = type("OutputProcessor", (), {"_trim_surplus_tokens": None} if cuts else {})
    there_is(monkeypatch, "output_processor", OutputProcessor=processor)
    core = filled(Core(later=True), 4, stop=("end",))
    burst = quicken(core.llm)
    assert burst is not None
    core.run()
    assert bool(burst.steps) == cuts


@LATER
def test_engines_that_a_server_starts_later_do_it_too(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class EngineCoreProc(Core):
        def run_busy_loop(self) -> Any:
            return self.run()

    there_is(monkeypatch, "core", EngineCoreProc=EngineCoreProc)
    quicken_engines_to_come()
    plain, core = filled(Core(later=later), 8), filled(EngineCoreProc(later=later), 8)
    assert core.run_busy_loop() == plain.run() and core.scheduler.turns < plain.scheduler.turns / 2


def test_a_server_of_another_vllm_goes_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("EngineCoreProc", (), {})
    there_is(monkeypatch, "core", EngineCoreProc=kind)
    quicken_engines_to_come()
    assert not hasattr(kind, "run_busy_loop")

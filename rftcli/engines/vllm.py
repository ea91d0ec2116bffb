"""Generation by vLLM inside the training ranks: the engine that is fast on GPUs.

An engine lives in the trainer's process (or one in every few consecutive ranks, tensor parallel) and takes new weights in place. It is started with
random weights: the first push comes before the first rollout, always, and a push that did not end leaves an engine that refuses to sample.

Token ids go in and come out; text is the tokenizer's, as in the other engines. All samples of a group stand next to each other, so its prompt is
computed once and found in the prefix cache by the others.

Promise: the key (seed, draw, sample) decides the noise where rows have seeds of their own (`seeded`). The last bits of scores depend on what is
decoded together, so samples are not promised to repeat. What it leaves out: engines in other processes (`vllm_remote`), and starting
the engine (`start`) at the right moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from rftcli.engines import vllm_decode, vllm_settings, vllm_weights
from rftcli.engines.finish import StopRule, is_greedy, stop_rule
from rftcli.engines.separate import Row, completed, cut_at_stop, own_randomness, split, united, usable
from rftcli.engines.vllm_adapter import AdapterSlot
from rftcli.errors import MachineError, RftError, UsageError
from rftcli.protocols import AdaptedWeights, Weights, World
from rftcli.types import Completion, Request, SamplingSettings


class VLLMSampler:
    """`protocols.Sampler` over a running `vllm.LLM`.

    `model` is the trainer's, for names and buffers. `world` and `tensor_parallel`: which consecutive ranks share the engine. `seeded`: rows have
    seeds of their own. `adapters`: the engine has a place for an adapter, and after the base only that is pushed. `newest` tells the trainer's
    version: an engine that is behind refuses to sample. `check`: compare weights after every push; `checkable`: after the first.
    """

    def __init__(
        self,
        llm: Any,
        params: Callable[..., Any],
        fields: Sequence[str],
        model: Any,
        tokenizer: Any,
        eos_ids: Sequence[int],
        *,
        world: World,
        tensor_parallel: int = 1,
        seeded: bool,
        sleep: int = 0,
        check: bool = False,
        checkable: bool = True,
        adapters: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        newest: Callable[[], int] | None = None,
    ) -> None:
        self.version: int | None = None
        self._llm, self._params, self._fields = llm, params, fields
        self._model, self._tokenizer, self._eos_ids = model, tokenizer, tuple(eos_ids)
        self._decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._world, self._together = world, tensor_parallel
        self._seeded, self._level, self._check, self._unproved = seeded, sleep, check, checkable
        self._dtype, self._device, self._newest = dtype, device, newest
        self._slot = AdapterSlot(llm, dtype) if adapters else None
        self._has_base = False
        self._asleep: set[str] = set()
        self._numbers = count()

    # Sampler

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
        """Completions as they finish. Collective over the ranks of one engine, and all ranks have to call it equally often where engines are shared.

        Raises RftError for an engine without the trainer's newest weights, UsageError for an empty prompt and for what vLLM cannot do.
        """
        version = usable(self.version, self._newest)
        rule = stop_rule(settings, self._eos_ids, self._decode)
        mine, finished = split(requests, settings, rule)
        for row, finish in finished:
            yield completed(row, (), None, finish, settings, version, self._decode)
        rows = united(mine, self._world, self._together)
        if rows:
            self._wake()
            sampled = [*(row.draw for row in rows), *(row.done for row in rows if row.done)]  # what goes on has other noise than its beginning had
            with own_randomness(self._device, vllm_settings.rollout_seed(settings.seed, sampled)):
                yield from self._run(rows, settings, rule, version)

    def load(self, weights: Weights, version: int) -> None:
        """Take over weights in place. RftError where they do not arrive; the engine then has none."""
        self.version = None
        self._wake("weights")
        with own_randomness(self._device):
            self._push(weights, check=self._check or self._unproved)
        self._unproved = False
        self._llm.reset_prefix_cache()
        self.version = version

    def sleep(self) -> None:
        """As much as the plan says. Weights that were given up have to be pushed before the next `generate`."""
        if self._level and not self._asleep:
            self._llm.sleep(level=self._level)
            self._asleep = {"weights", "kv_cache"}
            if self._level == 2:
                self.version, self._has_base = None, False

    def close(self) -> None:
        """No more samples. The engine itself ends with its process: its own shutdown would destroy the process group, which is the trainer's too."""
        self.version = None
        if self._slot is not None:
            self._slot.close()

    # its parts

    def _push(self, weights: Weights, *, check: bool) -> None:
        """Everything; or the base once, and the adapter every time. Collective."""
        if self._slot is None or not isinstance(weights, AdaptedWeights):
            self._has_base = False
            vllm_weights.push(self._llm, weights, dtype=self._dtype, model=self._model, check=check, wrapped=self._slot is not None)
            if self._slot is not None:
                self._slot.request = None
            return
        if not self._has_base:
            base = weights.base()
            vllm_weights.push(self._llm, base, dtype=self._dtype, model=self._model, check=check, wrapped=True)
            self._has_base = True
        self._slot.put(weights, check=check)

    def _wake(self, *tags: str) -> None:
        """Weights alone for a push; everything before sampling."""
        due = sorted(self._asleep & set(tags)) if tags else sorted(self._asleep, reverse=True)  # weights before cache
        for tag in due:
            self._llm.wake_up(tags=[tag])
        self._asleep -= set(due)

    def _run(self, rows: Sequence[Row], settings: SamplingSettings, rule: StopRule, version: int) -> Iterator[Completion]:
        engine, waiting = self._llm.llm_engine, {}
        shared = vllm_settings.arguments(settings, self._eos_ids, self._tokenizer, self._fields)
        adapter = {} if self._slot is None else {"lora_request": self._slot.request}
        try:
            for row in rows:
                number = f"rft-{next(self._numbers)}"
                greedy = is_greedy(row.sample, settings)
                own = vllm_settings.of_row(
                    shared, settings, draw=row.draw, sample=row.sample, done=row.done, limit=row.limit, seeded=self._seeded, greedy=greedy
                )
                if settings.structured is not None:
                    own["structured_outputs"] = _form(settings.structured)
                try:
                    engine.add_request(number, {"prompt_token_ids": list(row.prefix)}, self._params(**own), **adapter)
                except (ValueError, NotImplementedError) as error:
                    raise UsageError(f"vLLM cannot sample so: {error}", hint="rollout.engine: hf can, with every key of `rollout`") from error
                waiting[number] = row
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if not output.finished:
                        continue
                    row = waiting.pop(output.request_id)
                    if row.request is None:
                        continue
                    (made,) = output.outputs
                    finish = vllm_settings.REASONS.get(made.finish_reason)
                    if finish is None:
                        raise RftError(f"vLLM ended a completion with `{made.finish_reason}`", hint="its log above says why")
                    logprobs = _sampled(made, greedy=is_greedy(row.sample, settings)) if settings.logprobs else None
                    finish, new, logprobs = cut_at_stop(rule, row, finish, tuple(made.token_ids), logprobs)
                    yield completed(row, new, logprobs, finish, settings, version, self._decode)
            if waiting:
                raise RftError(f"vLLM lost {len(waiting)} completions")
        finally:
            if waiting:
                engine.abort_request(list(waiting))


def start(folder: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, Callable[..., Any], tuple[str, ...], bool]:
    """(a running engine with random weights, its class of sampling parameters, the names of their fields, whether seeds of rows are free).

    `folder` holds the model's configuration; `arguments` are the plan's (`graphs_up_to`: decode steps of so many rows are captured), `options` the
    person's. What this vLLM does not know of the first is left out. Raises MachineError where vLLM is missing, UsageError for what it refuses.
    """
    try:
        from vllm import LLM, SamplingParams
        from vllm.config import CompilationConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind
    except (ImportError, OSError) as error:
        raise cannot_be_imported(error) from error
    known = set(EngineArgs.__dataclass_fields__)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(f"rollout.vllm.options: this version of vLLM has no argument `{unknown[0]}`")
    asked = {name: value for name, value in arguments.items() if name in known} | dict(options)
    if "graphs_up_to" in arguments:
        one_number = "max_cudagraph_capture_size" in CompilationConfig.__dataclass_fields__
        own = options.get("compilation_config", {})
        asked["compilation_config"] = vllm_settings.compilation(arguments["graphs_up_to"], own, one_number=one_number)
    with own_randomness(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")):
        try:
            llm = LLM(folder, **asked)
        except (ValueError, TypeError, NotImplementedError) as error:  # pydantic's errors are ValueErrors
            hint = "`rollout.engine: hf` runs everywhere; memory: `rollout.vllm.memory_share`, `max_sequences`, `max_model_tokens`"
            raise UsageError(f"vLLM does not start: {str(error).strip()}", hint=hint) from error
    vllm_weights.quiet()
    vllm_decode.quicken(llm)
    runner = llm.collective_rpc(_runner_module)[0]
    params = partial(SamplingParams, output_kind=RequestOutputKind.FINAL_ONLY)
    return llm, params, tuple(SamplingParams.__struct_fields__), runner.startswith(vllm_settings.FREE_SEEDS)


def cannot_be_imported(error: Exception) -> MachineError:
    """There is none, an older one, or one whose build does not fit torch or the machine."""
    hint = "pip install 'rftcli[vllm]', in an environment whose torch is the one that this vLLM was built for; rollout.engine: hf needs none"
    return MachineError(f"rollout.engine vllm needs the package `vllm`, which cannot be imported: {type(error).__name__}: {error}", hint=hint)


def _runner_module(worker: Any) -> str:
    return type(worker.model_runner).__module__


def _form(structured: Mapping[str, Any]) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(regex=structured.get("regex"), json=structured.get("json_schema"))


def _sampled(made: Any, *, greedy: bool) -> tuple[float, ...]:
    """(T,) log-probs of the sampled tokens; a greedy choice is certain."""
    if greedy:
        return (0.0,) * len(made.token_ids)
    found = made.logprobs
    if hasattr(found, "start_indices"):  # flat: one list for all positions, the sampled token first in each
        return tuple(found.logprobs[place] for place in found.start_indices)
    return tuple(entry[token].logprob for entry, token in zip(found, made.token_ids, strict=True))

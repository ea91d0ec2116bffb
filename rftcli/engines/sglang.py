"""Generation by SGLang's offline engine, one for every training rank, or one for every few consecutive ranks (tensor parallel).

The engine's model lives in processes of its own beside the trainer's, on the same GPUs. It is started with random weights: the first push comes
before the first rollout, always, and a push that did not end leaves an engine that refuses to sample.

Token ids go in and come out; text is the tokenizer's, as in the other engines. All samples of a group stand next to each other, so its prompt is
found in the prefix cache.

Promise: the key (seed, draw, sample) decides the noise where the engine is deterministic (`seeded`); else it has one generator, seeded when it
starts. The last bits of scores depend on what is decoded together, so samples are not promised to repeat. What it leaves out: servers, and starting
the engine (`sglang_start`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from rftcli.engines import sglang_settings, sglang_weights
from rftcli.engines.finish import is_greedy, stop_rule
from rftcli.engines.separate import Row, completed, cut_at_stop, first_of, own_randomness, split, united, usable
from rftcli.engines.sglang_start import EngineDied, Running
from rftcli.errors import RftError, UsageError
from rftcli.protocols import Weights, World
from rftcli.types import Completion, FinishReason, Request, SamplingSettings

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
NOT_A_NUMBER = "NaN happened"
"""SGLang's reason where scores were no numbers: it has then put an end token in the place of the sample."""
TAGS = ("weights", "kv_cache")

Made = tuple[tuple[int, ...], tuple[float, ...] | None, FinishReason]
"""(sampled ids, their log-probs if asked for, why it ended)"""


class SGLangSampler:
    """`protocols.Sampler` over a running `sglang.Engine`.

    `running` None: another rank of the same engine has it. `model` is the trainer's, for names and buffers. `world` and `tensor_parallel`: which
    consecutive ranks share the engine. `sleep`: 0 never, 1 weights stay in CPU memory where this SGLang can keep them, 2 they are given up. `newest`
    tells the trainer's version: an engine that is behind refuses to sample. `check`: compare weights after every push; `checkable`: after the first.
    """

    def __init__(
        self,
        running: Running | None,
        model: Any,
        tokenizer: Any,
        eos_ids: Sequence[int],
        *,
        world: World,
        tensor_parallel: int = 1,
        sleep: int = 0,
        check: bool = False,
        checkable: bool = True,
        dtype: torch.dtype,
        device: torch.device,
        newest: Callable[[], int] | None = None,
    ) -> None:
        self.version: int | None = None
        self._running = running
        self._model, self._tokenizer, self._eos_ids = model, tokenizer, tuple(eos_ids)
        self._decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._world, self._together = world, tensor_parallel
        self._level, self._check, self._unproved = sleep, check, checkable
        self._dtype, self._device, self._newest = dtype, device, newest
        self._asleep: set[str] = set()
        self._numbers = count()

    # Sampler

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
        """Completions as they finish. Collective over the ranks of one engine, and all ranks have to call it equally often where engines are shared.

        Raises RftError for an engine without the trainer's newest weights, UsageError for an empty prompt and for what SGLang cannot do.
        """
        version = usable(self.version, self._newest)
        rule = stop_rule(settings, self._eos_ids, self._decode)
        mine, finished = split(requests, settings, rule)
        for row, finish in finished:
            yield completed(row, (), None, finish, settings, version, self._decode)
        rows = united(mine, self._world, self._together)
        for number, (ids, logprobs, finish) in self._made(rows, settings) if self._together == 1 else self._shared(rows, settings):
            if rows[number].request is not None:
                finish, ids, logprobs = cut_at_stop(rule, rows[number], finish, ids, logprobs)
                yield completed(rows[number], ids, logprobs, finish, settings, version, self._decode)

    def load(self, weights: Weights, version: int) -> None:
        """Take over weights in place. RftError where they do not arrive; the engine then has none."""
        self.version = None
        self._wake("weights")
        if self._running is None:
            for _ in weights:  # gathering them is collective
                pass
        else:
            check = self._check or (self._unproved and self._running.checkable)
            with self._running.alive() as engine, own_randomness(self._device):
                sglang_weights.push(
                    engine, weights, dtype=self._dtype, device=self._device, model=self._model, check=check,
                    pack=self._running.pack, parts=self._together,
                )  # fmt: skip
                if not getattr(engine.flush_cache(), "success", True):
                    raise RftError("SGLang's prefix cache still holds what older weights computed: it could not be emptied")
        self._unproved = False
        self.version = version

    def sleep(self) -> None:
        """As much as the plan says. Weights that were given up have to be pushed before the next `generate`."""
        if not self._level or self._asleep:
            return
        if self._running is not None:
            with self._running.alive() as engine:
                engine.release_memory_occupation(tags=list(TAGS))
        self._asleep = set(TAGS)
        if self._level == 2 or (self._running is not None and not self._running.keeps_weights):
            self.version = None

    def close(self) -> None:
        """No more samples; the engine's processes end."""
        self.version = None
        if self._running is not None:
            self._running.end()
            self._running = None

    # its parts

    def _wake(self, *tags: str) -> None:
        """Weights alone for a push; everything before sampling."""
        due = [tag for tag in TAGS if tag in self._asleep and (not tags or tag in tags)]
        if due and self._running is not None:
            with self._running.alive() as engine:
                engine.resume_memory_occupation(tags=due)
        self._asleep -= set(due)

    def _shared(self, rows: Sequence[Row], settings: SamplingSettings) -> list[tuple[int, Made]]:
        """The first rank of an engine samples for all of them. Collective."""
        found: list[tuple[int, Made]] = []
        problem: RftError | None = None
        if self._running is not None:
            try:
                found = list(self._made(rows, settings))
            except RftError as error:
                problem = error
        told = None if problem is None else (isinstance(problem, UsageError), problem.message, problem.hint)
        found, told = self._world.gather((found, told))[first_of(self._world, self._together)]
        if told is not None:
            raise (UsageError if told[0] else RftError)(told[1], hint=told[2])
        return found

    def _made(self, rows: Sequence[Row], settings: SamplingSettings) -> Iterator[tuple[int, Made]]:
        """(place of a row, what was sampled of it), as they finish."""
        shared = sglang_settings.arguments(settings, self._eos_ids, self._tokenizer)
        running = self._running
        if not rows:
            return
        assert running is not None
        self._wake()
        with running.alive() as engine:
            loop = running.loop
        over: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

        async def ask(place: int, name: str) -> None:
            row = rows[place]
            greedy = is_greedy(row.sample, settings)
            own = sglang_settings.of_row(
                shared, settings, draw=row.draw, sample=row.sample, done=row.done, limit=row.limit, seeded=running.seeded, greedy=greedy
            )
            try:
                found = await engine.async_generate(input_ids=list(row.prefix), sampling_params=own, return_logprob=settings.logprobs, rid=name)
            except Exception as error:  # whatever it is belongs to this row, and is told by whoever reads it
                found = error
            over.put_nowait((place, found))

        names = [f"rft-{next(self._numbers)}" for _ in rows]
        tasks = [loop.create_task(ask(place, name)) for place, name in enumerate(names)]
        try:
            for _ in rows:
                waiting = loop.create_task(over.get())
                tasks.append(waiting)
                with running.alive():
                    place, found = loop.run_until_complete(waiting)
                tasks.pop()
                yield place, _answer(found, settings, rows[place])
        except (GeneratorExit, RftError) as left:
            for place, task in enumerate(tasks):
                if isinstance(left, EngineDied):  # nobody answers any more
                    task.cancel()
                elif not task.done():
                    engine.tokenizer_manager.abort_request(names[place])
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            raise


def _answer(found: Any, settings: SamplingSettings, row: Row) -> Made:
    """SGLang's answer to one row. UsageError for what it refuses, RftError for what went wrong."""
    if isinstance(found, ValueError):
        raise UsageError(f"SGLang cannot sample so: {found}", hint=sglang_settings.OTHER_ENGINES) from found
    if isinstance(found, Exception):
        raise RftError(f"SGLang failed at a completion: {type(found).__name__}: {found}", hint="its log above says why") from found
    (one,) = found if isinstance(found, list) else (found,)
    about = one["meta_info"]
    reason = about["finish_reason"] or {}
    finish = REASONS.get(reason.get("type"))
    if finish is None:
        raise RftError(f"SGLang gave a completion up: {reason.get('message') or reason.get('type')}", hint="its log above says why")
    if reason.get("matched") == NOT_A_NUMBER and NOT_A_NUMBER not in settings.stop:
        raise RftError("SGLang's scores were no numbers", hint="models.policy.dtype: float32 tells whether the weights are, or the arithmetic is")
    ids, room = tuple(one["output_ids"]), row.limit - row.done
    if finish is FinishReason.LENGTH and len(ids) < room:
        hint = "`rollout.sglang.max_model_tokens`, or more cache: `rollout.sglang.memory_share`"
        raise RftError(f"SGLang had room for {len(ids)} of the {room} tokens of a completion", hint=hint)
    if not settings.logprobs:
        return ids, None, finish
    if is_greedy(row.sample, settings):
        return ids, (0.0,) * len(ids), finish  # the choice was certain
    told = [(logprob, token) for logprob, token, *_ in about["output_token_logprobs"]]
    if [token for _, token in told] != list(ids):
        raise RftError(f"SGLang gave log-probs of {len(told)} tokens that are not the {len(ids)} it sampled")
    return ids, tuple(logprob for logprob, _ in told), finish

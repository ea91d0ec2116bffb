"""Generation by vLLM in other processes: servers on other GPUs, or an engine beside each rank.

Token ids go in and come out, with the key (seed, draw, sample) as each request's seed. All samples of a group go to one server, which computes their
prompt once. Before and after every rollout, and before a request is repeated, the server is asked whose weights of which version it holds; what it
answers must be what this run pushed last, which is the version that completions carry. Leaves out how requests and weights travel (`vllm_http`,
`vllm_send`), and starting and finding engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from safetensors import SafetensorError

from rftcli.engines import vllm_settings
from rftcli.engines.finish import is_greedy, stop_rule
from rftcli.engines.separate import Row, completed, cut_at_stop, split, usable
from rftcli.engines.vllm_http import Asked, Server, Wire, plain, refuse_stale, refused
from rftcli.engines.vllm_send import Push
from rftcli.engines.weights import Sums, compare, outgoing
from rftcli.errors import RftError
from rftcli.protocols import Weights, World
from rftcli.types import Completion, Request, SamplingSettings

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
RESET_TRIES = 5


class RemoteVLLMSampler:
    """`protocols.Sampler` over vLLM servers.

    `servers`: those that this rank asks. `push`: None where another rank sends the weights. `leads`: this rank speaks to the servers about more than
    completions. `run`: a word that no other run has. `together`: ranks that share an engine beside them. `newest`, `check`, `checkable` as in
    `VLLMSampler`. `on_close`: ends what was started.
    """

    def __init__(
        self,
        wire: Wire,
        servers: Sequence[Server],
        model: Any,
        tokenizer: Any,
        eos_ids: Sequence[int],
        *,
        push: Push | None,
        leads: bool,
        run: str,
        world: World,
        seeded: bool,
        at_once: int,
        together: int = 1,
        sleep: int = 0,
        check: bool = False,
        checkable: bool = True,
        dtype: torch.dtype,
        newest: Callable[[], int] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.version: int | None = None
        self._wire, self._servers, self._push, self._leads = wire, list(servers), push, leads
        self._model, self._tokenizer, self._eos_ids = model, tokenizer, tuple(eos_ids)
        self._decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._run, self._world, self._seeded, self._at_once, self._together = run, world, seeded, at_once, together
        self._level, self._check, self._unproved = sleep, check, checkable
        self._dtype, self._newest, self._on_close = dtype, newest, on_close
        self._asleep: set[str] = set()

    # Sampler

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
        """Completions as they finish. Raises RftError for a server without the trainer's newest weights, that hangs or is gone; UsageError for an
        empty prompt and for what the server cannot do; HeldUpError for one that says nothing when a stop is asked for. Collective where ranks share
        an engine beside them."""
        version = usable(self.version, self._newest)
        rule = stop_rule(settings, self._eos_ids, self._decode)
        mine, finished = split(requests, settings, rule)
        self._wake()
        for row, finish in finished:
            yield completed(row, (), None, finish, settings, version, self._decode)
        asked = self._dealt([list(rows) for _, rows in groupby(mine, key=lambda row: id(row.request))], settings)
        if not asked:
            return
        self._same_weights()
        for row, reply in self._wire.ask(asked, at_once=self._at_once):
            ids, logprobs, reason = read(reply, settings, greedy=is_greedy(row.sample, settings))
            finish = vllm_settings.REASONS.get(reason)
            if finish is None:
                raise RftError(f"vLLM ended a completion with `{reason}`", hint="the server's log says why")
            finish, ids, logprobs = cut_at_stop(rule, row, finish, ids, logprobs)
            yield completed(row, ids, logprobs, finish, settings, version, self._decode)
        self._same_weights()

    def load(self, weights: Weights, version: int) -> None:
        """Push weights. RftError on every rank alike where they do not arrive; the engines then have none. Collective."""
        self.version = None
        self._wake("weights")
        sums = Sums() if self._push is not None and (self._check or self._unproved) else None
        told = outgoing(self._model, weights, dtype=self._dtype, sums=sums)
        problem: tuple[type[RftError], str, str | None] | None = None
        try:
            if self._push is not None:
                self._pushed(self._push, told, sums, version)
            else:
                for _ in weights:
                    pass
        except (RftError, OSError, SafetensorError) as error:
            told_of = error if isinstance(error, RftError) else RftError(f"weights could not be handed over: {error}")
            problem = type(told_of), told_of.message, told_of.hint
            for _ in told:  # the other ranks gather with this one to the end
                pass
        failed = next((one for one in self._world.gather(problem) if one is not None), None)
        if failed is not None:
            raise failed[0](failed[1], hint=failed[2])
        for server in self._servers:
            server.held = (self._run, version)
        self._unproved = False
        self.version = version

    def sleep(self) -> None:
        """As much as the plan says, of an engine beside its ranks. Weights that were given up have to be pushed before the next `generate`."""
        if not self._level or self._asleep:
            return
        if self._leads:
            for server in self._servers:
                self._control(server, f"/sleep?level={self._level}")
        self._asleep = {"weights", "kv_cache"}
        if self._level == 2:
            self.version = None

    def close(self) -> None:
        """No more samples; engines that the run has started end."""
        self.version = None
        self._wire.close()
        if self._push is not None:
            self._push.close()
        self._on_close()

    # its parts

    def _same_weights(self) -> None:
        for server in self._servers:
            refuse_stale(server, self._wire.rpc(server, "rft_state"))

    def _pushed(self, push: Push, told: Iterator[tuple[str, torch.Tensor]], sums: Sums | None, version: int) -> None:
        asked = {"run": self._run, "version": version, "check": sums is not None, "seconds": self._wire.timeout_seconds}
        for found in push(told, asked):
            if sums is not None:
                (answer,) = found  # weights are compared where one worker holds them whole
                held = Sums({name: int(value) for name, value in answer["sums"].items()})
                compare(sums, held, answer["fused"])
        if self._leads:
            for server in self._servers:
                self._reset_cache(server)

    def _reset_cache(self, server: Server) -> None:
        """What was computed with older weights. Requests that were dropped a moment ago may still hold a part of it."""
        for _ in range(RESET_TRIES):
            reply = self._control(server, "/reset_prefix_cache")
            if not reply or reply.get("success", True):
                return
        raise RftError(f"{server.shown} could not empty its prefix cache", hint="does another client use it?")

    def _control(self, server: Server, path: str) -> Mapping[str, Any]:
        reply = self._wire.call(server, "POST", path)
        if reply.status_code != 200:
            raise refused(server, path, reply)
        return plain(server, path, reply) if reply.content else {}

    def _wake(self, *tags: str) -> None:
        """Weights alone for a push; everything before sampling."""
        due = sorted(self._asleep & set(tags)) if tags else sorted(self._asleep, reverse=True)  # weights before cache
        if not due:
            return
        if self._leads:
            for server in self._servers:
                for tag in due:
                    self._control(server, f"/wake_up?tags={tag}")
        if self._together > 1:
            self._world.barrier("engine awake")
        self._asleep -= set(due)

    def _dealt(self, groups: Sequence[Sequence[Row]], settings: SamplingSettings) -> list[Asked]:
        """Whole groups, each to the server that has the fewest rows so far; ranks begin with different ones."""
        shared = vllm_settings.arguments(settings, self._eos_ids, self._tokenizer, None)
        order = [self._servers[(self._world.rank + place) % len(self._servers)] for place in range(len(self._servers))]
        load = [0] * len(order)
        asked: list[Asked] = []
        for rows in groups:
            place = load.index(min(load))
            load[place] += len(rows)
            asked += [asking(order[place], row, shared, settings, seeded=self._seeded) for row in rows]
        return asked


def asking(server: Server, row: Row, shared: Mapping[str, Any], settings: SamplingSettings, *, seeded: bool) -> Asked:
    """One row as a request to `server`."""
    greedy = is_greedy(row.sample, settings)
    params = vllm_settings.of_row(shared, settings, draw=row.draw, sample=row.sample, done=row.done, limit=row.limit, seeded=seeded, greedy=greedy)
    if settings.structured is not None:
        names = {"regex": "regex", "json_schema": "json"}
        params["structured_outputs"] = {names[name]: value for name, value in settings.structured.items() if value is not None}
    params = {name: value for name, value in params.items() if value is not None}
    if server.generates:
        return Asked(server=server, path=GENERATE, body={"model": server.name, "token_ids": list(row.prefix), "sampling_params": params}, key=row)
    params.pop("detokenize", None)  # that endpoint writes text in any case
    body = {"model": server.name, "prompt": list(row.prefix), "return_token_ids": True, **params}
    return Asked(server=server, path=COMPLETIONS, body=body, key=row)


def read(reply: Any, settings: SamplingSettings, *, greedy: bool) -> tuple[tuple[int, ...], tuple[float, ...] | None, str]:
    """(ids (T,), their log-probs (T,) or None, why it ended) of a reply. RftError for one that has no ids; a greedy choice is certain."""
    try:
        (choice,) = reply["choices"]
        ids = tuple(int(token) for token in choice["token_ids"])
        reason = str(choice["finish_reason"])
        if not settings.logprobs:
            return ids, None, reason
        if greedy:
            return ids, (0.0,) * len(ids), reason
        told = choice["logprobs"]
        found = tuple(float(value) for value in (told["token_logprobs"] if "token_logprobs" in told else (one["logprob"] for one in told["content"])))
    except (KeyError, TypeError, ValueError) as error:
        message = f"a vLLM server's reply cannot be read: {type(error).__name__} {error}"
        raise RftError(message, hint="vLLM 0.22 and later return token ids") from error
    if len(found) != len(ids):
        raise RftError(f"a vLLM server told {len(found)} log-probs for {len(ids)} tokens")
    return ids, found, reason

"""A run that is asked to stop while a vLLM server is waited for: one that is silent is left within seconds, one that is slow finishes the step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import TRAINED, FakeVLLM
from torch import nn

from rftcli.engines.vllm_http import ANSWER_SECONDS, LOOK_SECONDS, Server, Wire
from rftcli.engines.vllm_offer import look, wait_for
from rftcli.engines.vllm_remote import RemoteVLLMSampler
from rftcli.engines.vllm_send import FilesPush
from rftcli.errors import HeldUpError
from rftcli.runtime.world import SoloWorld
from rftcli.types import SamplingSettings

LATEST_SECONDS = ANSWER_SECONDS + 2 * LOOK_SECONDS + 3.0
"""From the request to the error, on a machine that has other work too; the time limit of the server is ten minutes."""


class Stop:
    """The run's file that asks for a stop."""

    def __init__(self) -> None:
        self.at: float | None = None

    def ask(self) -> None:
        self.at = time.monotonic()

    def asked(self) -> bool:
        return self.at is not None

    def seconds_ago(self) -> float:
        assert self.at is not None
        return time.monotonic() - self.at


@contextmanager
def engine(kit: Any, folder: Path, stop: Stop, *fakes: FakeVLLM, workers_seconds: float = 60.0) -> Iterator[RemoteVLLMSampler]:
    """With weights of version 1."""
    wire = Wire(timeout_seconds=600.0, stop_asked=stop.asked, workers_seconds=workers_seconds)
    servers = [Server(url=fake.url) for fake in fakes]
    for server in servers:
        wait_for(wire, server, 10)
        look(wire, server)
    sampler = RemoteVLLMSampler(
        wire, servers, nn.Module(), kit.build_tokenizer(40), (kit.EOS,), push=FilesPush(wire, servers, folder / "weights"), leads=True, run="run-1",
        world=SoloWorld(), seeded=True, at_once=8, dtype=torch.float32,
    )  # fmt: skip
    sampler.load(TRAINED.items(), 1)
    try:
        yield sampler
    finally:
        for fake in fakes:
            fake.silent = fake.workers_silent = False
        sampler.close()


def generate(kit: Any, sampler: RemoteVLLMSampler, found: list[Any], draws: int = 1) -> None:
    for one in sampler.generate([kit.make_request(draw, [10], (0, 1)) for draw in range(draws)], SamplingSettings(max_new_tokens=3, seed=0)):
        found.append(one)


def test_a_server_that_is_silent_is_left_and_what_came_is_kept(kit, tmp_path) -> None:
    stop, found = Stop(), []
    with FakeVLLM(script=lambda body, number: 600.0 if number else None) as fake, engine(kit, tmp_path, stop, fake) as sampler:
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(generate, kit, sampler, found)
            while not found:
                time.sleep(0.01)
            fake.silent = True
            stop.ask()
            with pytest.raises(HeldUpError, match=rf"asked to stop, and vLLM server {fake.url} has not said anything for 2 s: the step is left"):
                work.result(timeout=60)
        assert stop.seconds_ago() < LATEST_SECONDS
        assert [one.trace.ids for one in found] == [(11, 12, 13)]


def test_a_server_that_is_slow_finishes_its_step(kit, tmp_path) -> None:
    stop, found = Stop(), []
    with FakeVLLM(script=lambda body, number: 3.0) as fake, engine(kit, tmp_path, stop, fake) as sampler:
        threading.Timer(0.1, stop.ask).start()
        generate(kit, sampler, found)
        assert len(found) == 2 and stop.seconds_ago() > 2.5
        assert fake.calls.count("rft_state") >= 3  # before, while the answers were waited for, and after


def test_one_silent_server_among_several_is_not_hidden_by_the_others(kit, tmp_path) -> None:
    stop, found, over = Stop(), [], threading.Event()
    with FakeVLLM() as quick, FakeVLLM() as silent, engine(kit, tmp_path, stop, quick, silent) as sampler, ThreadPoolExecutor(1) as pool:
        quick._script = lambda body, number: 0.02 if over.is_set() else 0.2
        silent._script = lambda body, number: 600.0
        work = pool.submit(generate, kit, sampler, found, 400)
        while not found:
            time.sleep(0.01)
        silent.silent = True
        stop.ask()
        with pytest.raises(HeldUpError, match=silent.url):
            work.result(timeout=60)
        assert stop.seconds_ago() < LATEST_SECONDS
        assert len(found) < 400  # the other had much left to do
        over.set()


def test_workers_that_hang_behind_a_server_that_answers(kit, tmp_path) -> None:
    stop = Stop()
    with FakeVLLM(script=lambda body, number: 600.0) as fake, engine(kit, tmp_path, stop, fake, workers_seconds=1.0) as sampler:
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(generate, kit, sampler, [])
            while len(fake.asked) < 2:
                time.sleep(0.01)
            fake.workers_silent = True
            stop.ask()
            with pytest.raises(HeldUpError, match="has not said anything for 1 s"):
                work.result(timeout=60)
        assert stop.seconds_ago() < 1.0 + LATEST_SECONDS


@pytest.mark.parametrize("act", ["before a rollout", "new weights"])
def test_control_calls_are_left_too(kit, tmp_path, act) -> None:
    stop = Stop()
    with FakeVLLM() as fake, engine(kit, tmp_path, stop, fake) as sampler:
        fake.silent = True
        stop.ask()
        with pytest.raises(HeldUpError, match=fake.url):
            if act == "new weights":
                sampler.load(TRAINED.items(), 2)
            else:
                generate(kit, sampler, [])
        assert stop.seconds_ago() < LATEST_SECONDS


def test_new_weights_that_take_long_arrive(kit, tmp_path) -> None:
    """A server answers /health beside its work."""
    stop = Stop()
    with FakeVLLM() as fake, engine(kit, tmp_path, stop, fake) as sampler:
        fake.workers_silent = True
        stop.ask()
        threading.Timer(3.5, lambda: setattr(fake, "workers_silent", False)).start()
        sampler.load(TRAINED.items(), 2)
        assert sampler.version == 2 and stop.seconds_ago() > 3.0

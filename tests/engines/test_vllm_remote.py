"""Engines in other processes: what they are asked, what becomes of their answers, weights by every way, and every way to fail, told by name.

The server is a small one in a thread, with real HTTP and the real worker extension; runs with the real vLLM are in `tests/with_vllm`.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from fake_vllm import TRAINED, FakeVLLM
from rank_threads import on_ranks
from torch import nn

from rftcli.engines.vllm_http import Server, Wire, host_of, is_local
from rftcli.engines.vllm_offer import check, look, wait_for
from rftcli.engines.vllm_remote import RemoteVLLMSampler, read
from rftcli.engines.vllm_send import FilesPush, GroupPush, SocketPush
from rftcli.engines.vllm_stream import SocketWay
from rftcli.errors import RftError, UsageError
from rftcli.runtime.world import SoloWorld
from rftcli.types import FinishReason, SamplingSettings, TokenTrace

CPU = torch.device("cpu")


def settings(**changes) -> SamplingSettings:
    return SamplingSettings(**{"max_new_tokens": 3, "seed": 0, **changes})


@contextmanager
def engine(kit, tmp_path, *fakes: FakeVLLM, way: str = "files", timeout: float = 20.0, retries: int = 2, **changes):
    """A sampler over servers that have been looked at."""
    wire = Wire(timeout_seconds=timeout, retries=retries, pause_seconds=0.01)
    servers = [Server(url=fake.url) for fake in fakes]
    told = []
    for server in servers:
        wait_for(wire, server, 10)
        told.append(look(wire, server))
    if way == "files":
        push = FilesPush(wire, servers, tmp_path / "weights")
    elif way == "group":
        push = GroupPush(wire, servers, "127.0.0.1", CPU)
    else:
        socket = SocketWay(CPU, timeout, told.append)
        push = SocketPush(wire, servers[0], socket, [socket.path], leads=True)
    sampler = RemoteVLLMSampler(
        wire, servers, nn.Module(), kit.build_tokenizer(40), (kit.EOS,),
        **{"push": push, "leads": True, "run": "run-1", "world": SoloWorld(), "seeded": True, "at_once": 4, "dtype": torch.float32, **changes},
    )  # fmt: skip
    sampler.told = told
    try:
        yield sampler
    finally:
        sampler.close()


@pytest.mark.parametrize("generates", [False, True], ids=["completions", "ids-alone"])
@pytest.mark.parametrize("way", ["files", "group", "socket"])
def test_weights_arrive_and_every_sample_comes_once_with_their_version(kit, tmp_path, way, generates) -> None:
    with FakeVLLM(generates=generates) as fake, engine(kit, tmp_path, fake, way=way, check=True) as sampler:
        sampler.load(TRAINED.items(), 3)
        assert torch.equal(fake.model.qk.weight, torch.cat([TRAINED["q.weight"], TRAINED["k.weight"]]))
        assert torch.equal(fake.model.norm, TRAINED["norm"]) and fake.calls[-1] == "reset"
        requests = [kit.make_request(draw, [5, 10 + draw], (0, 1, 2)) for draw in range(3)]
        made = {(one.prompt.draw, one.sample): one for one in sampler.generate(requests, settings(logprobs=True))}
        assert set(made) == {(draw, number) for draw in range(3) for number in range(3)}
        for (draw, _), one in made.items():
            ids = (11 + draw, 12 + draw, 13 + draw)
            assert one.trace.ids == ids and one.trace.logprobs == tuple(-token / 8 for token in ids)
            assert one.policy_version == 3 and one.trace.segments == ((0, 3),) and one.finish is FinishReason.LENGTH
        params = [body["sampling_params"] if generates else body for body in fake.asked]
        assert len({one["seed"] for one in params}) == 9 and ("detokenize" in params[0]) is generates
        sampler.load(((name, tensor * 2) for name, tensor in TRAINED.items()), 4)
        assert torch.equal(fake.model.norm, TRAINED["norm"] * 2) and not list((tmp_path / "weights").glob("*"))


def test_ends_partial_answers_and_greedy_rows(kit, tmp_path) -> None:
    with FakeVLLM() as fake, engine(kit, tmp_path, fake) as sampler:
        sampler.load(TRAINED.items(), 1)
        (stopped,) = sampler.generate([kit.make_request(0, [10], (0,))], settings(stop_token_ids=(12,)))
        assert stopped.trace.ids == (11, 12) and stopped.finish is FinishReason.STOP
        earlier = TokenTrace(ids=(21,), logprobs=(-1.0,), segments=((0, 0),))
        (going_on,) = sampler.generate([kit.make_request(0, [10], (0,), partial={0: earlier})], settings(logprobs=True))
        assert going_on.trace.ids == (21, 22, 23) and going_on.trace.segments == ((0, 0), (1, 1)) and fake.asked[-1]["max_tokens"] == 2
        assert going_on.trace.logprobs == (-1.0, -22 / 8, -23 / 8)
        (greedy,) = sampler.generate([kit.make_request(0, [10], (-1,))], settings(logprobs=True))
        assert greedy.trace.logprobs == (0.0,) * 3 and fake.asked[-1]["temperature"] == 0.0 and "seed" not in fake.asked[-1]
        before = len(fake.asked)
        (whole,) = sampler.generate([kit.make_request(0, [10], (0,), partial={0: TokenTrace(ids=(3, kit.EOS))})], settings())
        assert whole.finish is FinishReason.STOP and len(fake.asked) == before
        with pytest.raises(UsageError, match="has no tokens"):
            list(sampler.generate([kit.make_request(0, [], (0,))], settings()))
        assert "structured_outputs" not in fake.asked[-1]
        list(sampler.generate([kit.make_request(0, [10], (0,))], settings(structured={"regex": "a+"})))
        assert fake.asked[-1]["structured_outputs"] == {"regex": "a+"}


def test_groups_stay_whole_and_are_dealt_over_servers(kit, tmp_path) -> None:
    with FakeVLLM() as one, FakeVLLM() as two, engine(kit, tmp_path, one, two, way="group", check=True) as sampler:
        sampler.load(TRAINED.items(), 1)
        assert torch.equal(one.model.norm, two.model.norm)
        sizes = (4, 1, 1, 2, 2)
        made = list(sampler.generate([kit.make_request(draw, [draw + 20], range(size)) for draw, size in enumerate(sizes)], settings()))
        assert len(made) == 10 and max(one.most_at_once, two.most_at_once) <= 4
        prompts = [{body["prompt"][0] for body in fake.asked} for fake in (one, two)]
        assert not prompts[0] & prompts[1] and [len(one.asked), len(two.asked)] == [6, 4]


def test_several_workers_of_a_server_take_what_is_broadcast(kit, tmp_path) -> None:
    with FakeVLLM(workers=2) as fake, engine(kit, tmp_path, fake, way="group", checkable=False) as sampler:
        sampler.load(TRAINED.items(), 1)
        assert all(torch.equal(worker.model.norm, TRAINED["norm"]) for worker in fake.workers)
        assert len(list(sampler.generate([kit.make_request(0, [10])], settings()))) == 4


def test_a_stale_engine_is_an_error(kit, tmp_path) -> None:
    newest = [0]
    with FakeVLLM() as fake, engine(kit, tmp_path, fake, newest=lambda: newest[0]) as sampler:
        with pytest.raises(RftError, match="no weights yet"):
            list(sampler.generate([kit.make_request(0, [10])], settings()))
        sampler.load(TRAINED.items(), 0)
        newest[0] = 1
        with pytest.raises(RftError, match="version 0, the trainer is at 1"):
            list(sampler.generate([kit.make_request(0, [10])], settings()))
        newest[0] = 0
        fake.forget()
        with pytest.raises(RftError, match=r"127\.0\.0\.1:\d+ has no weights of this run"):
            list(sampler.generate([kit.make_request(0, [10])], settings()))
        fake.workers[0].rft_held = ("run-1", 7)
        with pytest.raises(RftError, match="has the weights of version 7, not of version 0"):
            list(sampler.generate([kit.make_request(0, [10])], settings()))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_versions_are_asked_for_before_and_after_every_rollout(kit, tmp_path, when) -> None:
    """Before: nothing is sampled from other weights. Meanwhile: what was sampled is no rollout."""

    def swap(body, number):
        if when == "meanwhile":
            fake.workers[0].rft_held = ("run-1", 7)

    with FakeVLLM(script=swap) as fake, engine(kit, tmp_path, fake) as sampler:
        sampler.load(TRAINED.items(), 0)
        if when == "before":
            fake.workers[0].rft_held = ("run-1", 7)
        with pytest.raises(RftError, match="has the weights of version 7, not of version 0"):
            list(sampler.generate([kit.make_request(0, [10], (0,))], settings()))
        assert len(fake.asked) == (0 if when == "before" else 1)


def test_a_level_1_engine_beside_its_rank_wakes_weights_first(kit, tmp_path) -> None:
    with FakeVLLM() as fake, engine(kit, tmp_path, fake, way="socket", sleep=1) as sampler:
        sampler.load(TRAINED.items(), 1)
        sampler.sleep()
        list(sampler.generate([kit.make_request(0, [10], (0,))], settings()))
        told = [call for call in fake.calls if call.startswith("/")]
        assert told == ["/sleep?level=1", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]


@pytest.mark.parametrize("way", ["files", "group", "socket"])
def test_a_push_that_fails_is_told_and_leaves_an_engine_without_weights(kit, tmp_path, way) -> None:
    with FakeVLLM() as fake, engine(kit, tmp_path, fake, way=way, check=True, timeout=5.0) as sampler:
        fake.model.drops = "norm"
        with pytest.raises(RftError, match=rf"{fake.url}: .*1 weights did not arrive.*`norm`"):
            sampler.load(TRAINED.items(), 1)
        fake.model.drops, fake.model.spoils = None, True
        with pytest.raises(RftError, match="does not hold the trainer's weights: 1 weights differ, the first is `norm`"):
            sampler.load(TRAINED.items(), 1)
        with pytest.raises(RftError, match="no weights yet"):
            list(sampler.generate([kit.make_request(0, [10])], settings()))
        fake.model.spoils = False
        sampler.load(TRAINED.items(), 1)
        assert len(list(sampler.generate([kit.make_request(0, [10])], settings()))) == 4
        fake.model.drops = "norm"
        with pytest.raises(RftError, match="did not arrive"):
            sampler.load(TRAINED.items(), 2)
        assert fake.workers[0].rft_held == (None, None)  # neither the old ones nor the new


def test_all_ranks_hear_of_a_push_that_failed_and_gather_to_its_end(kit, tmp_path) -> None:
    taken = {0: 0, 1: 0}

    def weights(rank):
        for item in TRAINED.items():
            taken[rank] += 1
            yield item

    with FakeVLLM() as fake:
        fake.stop()

        def work(world):
            wire = Wire(timeout_seconds=2.0)
            server = Server(url=fake.url)
            push = FilesPush(wire, [server], tmp_path / "weights") if world.rank == 0 else None
            sampler = RemoteVLLMSampler(
                wire, [server], nn.Module(), kit.build_tokenizer(40), (kit.EOS,), push=push, leads=world.rank == 0, run="r", world=world,
                seeded=True, at_once=4, dtype=torch.float32,
            )  # fmt: skip
            try:
                with pytest.raises(RftError, match="cannot be reached") as caught:
                    sampler.load(weights(world.rank), 1)
                assert "start it again as it was, and `rft resume` goes on" in str(caught.value.hint)
            finally:
                sampler.close()

        on_ranks(2, work)
    assert taken == {0: 3, 1: 3}


def test_what_may_pass_is_asked_again_and_what_may_not_is_not(kit, tmp_path) -> None:
    def script(body, number):
        return (503, "busy") if number < 2 else None

    with FakeVLLM(script=script) as fake, engine(kit, tmp_path, fake) as sampler:
        sampler.load(TRAINED.items(), 1)
        assert len(list(sampler.generate([kit.make_request(0, [10], (0,))], settings()))) == 1 and len(fake.asked) == 3
    for status, kind, text in ((400, UsageError, "top_k of 13"), (500, RftError, "engine core died")):
        with FakeVLLM(script=lambda body, number, status=status, text=text: (status, text)) as fake, engine(kit, tmp_path, fake) as sampler:
            sampler.load(TRAINED.items(), 1)
            with pytest.raises(kind, match=rf"{fake.url} .*{status}.*{text}"):
                list(sampler.generate([kit.make_request(0, [10], (0,))], settings()))
            assert len(fake.asked) == 1
    with FakeVLLM(script=lambda body, number: (429, "slow down")) as fake, engine(kit, tmp_path, fake, retries=1) as sampler:
        sampler.load(TRAINED.items(), 1)
        with pytest.raises(RftError, match="status 429: slow down"):
            list(sampler.generate([kit.make_request(0, [10], (0,))], settings()))
        assert len(fake.asked) == 2


def test_a_request_is_not_repeated_to_a_server_that_was_started_anew(kit, tmp_path) -> None:
    with FakeVLLM() as fake, engine(kit, tmp_path, fake) as sampler:
        sampler.load(TRAINED.items(), 1)

        def script(body, number):
            fake.forget()
            return 503, "starting"

        fake._script = script
        with pytest.raises(RftError, match="no weights of this run"):
            list(sampler.generate([kit.make_request(0, [10], (0,))], settings()))
        assert len(fake.asked) == 1


def test_a_server_that_hangs_or_dies_is_told_by_name(kit, tmp_path) -> None:
    with FakeVLLM(script=lambda body, number: 30.0 if number else None) as fake, engine(kit, tmp_path, fake, timeout=0.6) as sampler:
        sampler.load(TRAINED.items(), 1)
        start = time.monotonic()
        with pytest.raises(RftError, match=rf"{fake.url} has finished nothing for 0.6 s"):
            list(sampler.generate([kit.make_request(0, [10])], settings()))
        assert time.monotonic() - start < 20
    with FakeVLLM(script=lambda body, number: 30.0) as fake, engine(kit, tmp_path, fake) as sampler, ThreadPoolExecutor() as pool:
        sampler.load(TRAINED.items(), 1)
        sampler._servers[0].last_words = lambda: "it ended with signal 9"
        work = pool.submit(lambda: list(sampler.generate([kit.make_request(0, [10])], settings())))
        while not fake.asked:
            time.sleep(0.01)
        fake.stop()
        with pytest.raises(RftError, match=rf"{fake.url} (cannot be reached|failed at) .*; it ended with signal 9"):
            work.result(timeout=60)


def test_a_rollout_that_is_broken_off_ends_its_requests(kit, tmp_path) -> None:
    with FakeVLLM(script=lambda body, number: 100.0 if number else None) as fake, engine(kit, tmp_path, fake) as sampler:
        sampler.load(TRAINED.items(), 1)
        made = sampler.generate([kit.make_request(0, [10])], settings())
        next(made)
        made.close()
        end = time.monotonic() + 60
        while fake.dropped < 3 and time.monotonic() < end:
            time.sleep(0.02)
        assert fake.dropped == 3
        fake.resets_refused = 1  # what was dropped still holds blocks
        sampler.load(TRAINED.items(), 2)
        fake.resets_refused = 99
        with pytest.raises(RftError, match="could not empty its prefix cache"):
            sampler.load(TRAINED.items(), 3)


def test_an_engine_beside_its_rank_sleeps_and_wakes_in_order(kit, tmp_path) -> None:
    with FakeVLLM() as fake, engine(kit, tmp_path, fake, way="socket", sleep=2) as sampler:
        sampler.load(TRAINED.items(), 1)
        list(sampler.generate([kit.make_request(0, [10], (0,))], settings()))
        sampler.sleep()
        sampler.sleep()
        with pytest.raises(RftError, match="no weights yet"):
            list(sampler.generate([kit.make_request(0, [10], (0,))], settings()))
        sampler.load(TRAINED.items(), 2)
        list(sampler.generate([kit.make_request(0, [10], (0,))], settings()))
        told = [call for call in fake.calls if call.startswith(("/", "rft_take"))]
        assert told == ["rft_take", "/sleep?level=2", "/wake_up?tags=weights", "rft_take", "/wake_up?tags=kv_cache"]


def test_what_a_server_offers_is_looked_up(kit, tmp_path) -> None:
    with FakeVLLM(generates=True, name="m") as fake, engine(kit, tmp_path, fake) as sampler:
        assert sampler.told == [f"vLLM server {fake.url}: vLLM 0.0.fake, 1 cpu worker(s), 64 tokens, asked by ids alone"]
        assert sampler._servers[0].name == "m"
    for fake, text in (
        (FakeVLLM(dev=False), "has no /collective_rpc"),
        (FakeVLLM(extension=False), "no way for this trainer's weights"),
        (FakeVLLM(), "serves fake, not mine"),
    ):
        with fake, pytest.raises(UsageError, match=text):
            wire = Wire(timeout_seconds=5)
            try:
                look(wire, Server(url=fake.url), wanted_name="mine" if "mine" in text else None)
            finally:
                wire.close()


@pytest.mark.parametrize(("device", "cuts", "free"), [("cpu", False, True), ("cpu", True, False), ("cuda", True, True)])
def test_seeds_are_free_where_a_prompt_that_is_cut_does_not_end_the_engine(device: str, cuts: bool, free: bool) -> None:
    with FakeVLLM(device=device, cuts_prompts=cuts) as fake:
        wire, server = Wire(timeout_seconds=5), Server(url=fake.url)
        try:
            look(wire, server)
        finally:
            wire.close()
    assert server.facts["free_seeds"] is free


def test_a_server_that_runs_the_model_otherwise_is_refused() -> None:
    facts = {"max_model_len": 64, "dtype": "float32", "logprobs_mode": "processed_logprobs", "data_parallel": 1, "quantization": None}
    server = Server(url="http://h:1", facts=facts)
    check(server, tokens=64, dtype="float32", checked=True)
    for changes, text in (
        ({"max_model_len": 63}, "takes 63 tokens, the longest prompt and completion have 64"), ({"dtype": "bfloat16"}, "runs in bfloat16"),
        ({"logprobs_mode": "raw_logprobs"}, "another distribution"), ({"data_parallel": 2}, "2 engines behind one address"),
        ({"quantization": "fp8"}, "quantised"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=text):
            check(Server(url="http://h:1", facts={**facts, **changes}), tokens=64, dtype="float32", checked=True)


def test_waiting_for_a_server_ends(tmp_path) -> None:
    wire = Wire(timeout_seconds=1)
    try:
        said: list[str] = []
        with pytest.raises(RftError, match=r"not ready after 0\.2 s") as caught:
            wait_for(wire, Server(url="http://127.0.0.1:9"), 0.2, told=said.append, tell_after_seconds=0.0)
        assert str(caught.value.hint).startswith("is a server running at that address?")
        (line,) = said
        assert line.startswith("waiting for vLLM server http://127.0.0.1:9, up to 0.2 s") and "cannot be reached" in line
        with pytest.raises(RftError, match="did not start: it ended with code 1"):
            wait_for(wire, Server(url="http://127.0.0.1:9", last_words=lambda: "it ended with code 1"), 60)
    finally:
        wire.close()


def talking(answers):
    """A server, by hand: path -> (status, body), as a context that gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

        def do_GET(self) -> None:
            status, body = answers.get(self.path, answers["*"])
            self.rfile_read()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def rfile_read(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))

    @contextmanager
    def up():
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()

    return up()


OK = {"/health": (200, ""), "/v1/models": (200, '{"data": [{"id": "m"}]}'), "/version": (200, "{}"), "/openapi.json": (200, "{}")}
PAGE = (200, "<html>another program</html>")


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ({"*": PAGE}, "something else than a JSON object to /v1/models: <html>another program</html>"),
        ({"*": (404, "none")}, r"has no /health \(status 404\)"),
        ({"*": (401, "who are you?")}, "refuses /health with status 401: who are you"),
        ({**OK, "/v1/models": (401, "{}"), "*": PAGE}, "refuses /v1/models with status 401"),
        *(({**OK, "/v1/models": (200, body), "*": PAGE}, "serves no model") for body in ('{"data": null}', '{"data": []}', '{"data": ["m"]}')),
        ({**OK, "/v1/models": (200, "[1]"), "*": PAGE}, "something else than a JSON object to /v1/models"),
        ({**OK, "/version": PAGE, "*": PAGE}, "something else than a JSON object to /version"),
        ({**OK, "/openapi.json": (200, '{"paths": null}'), "*": (404, "")}, "has no /collective_rpc"),
        *(
            ({**OK, "*": (200, body)}, "something else than its workers' results to rft_state")
            for body in ("{}", '{"results": []}', '{"results": ["a"]}')
        ),
        ({**OK, "*": PAGE}, "something else than a JSON object to /collective_rpc rft_state"),
        ({**OK, "*": (200, '{"results": [{"run": null, "version": null}]}')}, "an rftcli of another version: its workers say nothing of data_par"),
    ],
)  # fmt: skip
def test_whatever_else_is_at_an_address_is_told_with_it(answers, text: str) -> None:
    """Other programs, proxies, another rftcli: never an error of Python, and no wait for what will not change."""
    wire = Wire(timeout_seconds=5)
    try:
        with talking(answers) as url, pytest.raises(RftError, match=f"vLLM server {url} .*{text}") as caught:
            server = Server(url=url)
            wait_for(wire, server, 60)
            look(wire, server)
        assert caught.value.hint
    finally:
        wire.close()


def test_a_completion_that_is_no_json_is_told_by_name(kit, tmp_path) -> None:
    with FakeVLLM() as fake, engine(kit, tmp_path, fake) as sampler:
        sampler.load(TRAINED.items(), 1)
        states = {"results": [{"run": "run-1", "version": 1}]}
        with talking({"*": PAGE, "/collective_rpc": (200, json.dumps(states))}) as url:
            sampler._servers[0].url = url
            with pytest.raises(RftError, match=f"{url} answered something else than a JSON object to /v1/completions"):
                list(sampler.generate([kit.make_request(0, [10], (0,))], settings()))


def test_weights_that_cannot_be_written_are_told_with_the_folder(kit, tmp_path) -> None:
    (tmp_path / "weights").touch()  # a file, where the folder would be
    with FakeVLLM() as fake, engine(kit, tmp_path, fake) as sampler:
        with pytest.raises(RftError, match=f"weights could not be written to {tmp_path / 'weights'} .*: Not a directory") as caught:
            sampler.load(TRAINED.items(), 1)
        assert "rollout.vllm.server.folder" in str(caught.value.hint) and sampler.version is None


def test_who_waits_for_a_server_is_told_for_what() -> None:
    told: list[str] = []
    wire = Wire(timeout_seconds=1)
    try:
        with pytest.raises(RftError, match="not ready after"):
            wait_for(wire, Server(url="http://127.0.0.1:9"), 0.3, key="some.key", told=told.append, tell_after_seconds=0.05)
    finally:
        wire.close()
    assert len(told) == 1 and "waiting for vLLM server http://127.0.0.1:9, up to 0.3 s (`some.key`): " in told[0] and "cannot be reached" in told[0]


@pytest.mark.parametrize(
    ("url", "host", "local"),
    [
        ("http://localhost:8000", "localhost", True), ("http://127.0.0.1:1", "127.0.0.1", True), ("http://[::1]:1/x", "::1", True),
        ("http://localhost.example.org:8000", "localhost.example.org", False), ("http://127.0.0.11", "127.0.0.11", False),
        ("http://user:word@far:8000", "far", False), ("http://[fe80::2]:8000", "fe80::2", False), ("http://[::1", "", False),
    ],
)  # fmt: skip
def test_the_host_of_an_address(url: str, host: str, local: bool) -> None:
    assert (host_of(url), is_local(url)) == (host, local)


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": [{"token_ids": None, "finish_reason": "stop"}]}])
def test_a_reply_that_is_none(reply) -> None:
    with pytest.raises(RftError, match="cannot be read"):
        read(reply, settings(), greedy=False)
    short = {"choices": [{"token_ids": [1, 2], "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0]}}]}
    with pytest.raises(RftError, match="1 log-probs for 2 tokens"):
        read(short, settings(logprobs=True), greedy=False)


def test_answers_of_a_worker_are_plain_data() -> None:
    from rftcli.engines.vllm_worker import told_back

    def fails():
        raise RuntimeError("out of memory")

    assert told_back(fails) == {"error": "RuntimeError: out of memory"} and told_back(lambda: {"a": 1}) == {"a": 1}


def test_a_server_that_cannot_join_the_group_is_told_by_name() -> None:
    with FakeVLLM() as fake:
        wire = Wire(timeout_seconds=2.0)
        fake.workers[0].rank = 5  # of a group of two
        try:
            with pytest.raises(RftError, match=rf"{fake.url}"):
                GroupPush(wire, [Server(url=fake.url)], "127.0.0.1", CPU)
        finally:
            wire.close()

"""Weights on their way to another process: tensors of all kinds arrive as they were, by every way, in buckets of any size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rftcli.engines.vllm_group import Group, find_store, open_store
from rftcli.engines.vllm_stream import GroupWay, SocketWay, from_folder, from_group, from_socket, received, send, write_folder
from rftcli.errors import RftError

CPU = torch.device("cpu")
NO_GPU = (torch.Tensor, (1,), (1,), 0, torch.UntypedStorage, torch.uint8, 0, b"", 8, 0, False, b"", 0, b"", False)
"""What describes a buffer on a GPU, of one that is not there."""


def mixed() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "half": torch.randn(3, 5).to(torch.bfloat16), "scalar": torch.tensor(2.5), "ids": torch.arange(7), "flags": torch.tensor([True, False, True]),
        "big": torch.randn(40, 40), "turned": torch.randn(4, 6).T, "none": torch.empty(0, 3), "last": torch.randn(9),
    }  # fmt: skip


def same(found: dict[str, torch.Tensor]) -> None:
    sent = mixed()
    assert set(found) == set(sent)
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("limit", [32, 700, 1 << 20])
def test_tensors_of_all_kinds_travel_in_buckets_of_any_size(tmp_path, limit) -> None:
    """Over a group of two, and through a folder; a bucket is used again, so what is kept is copied."""
    store = open_store("127.0.0.1", 10)
    with ThreadPoolExecutor() as pool:

        def receive():
            group = Group(find_store("127.0.0.1", store.port, 10), 1, 2, CPU, 10)
            return dict(received(from_group(group), copies=False))

        reading = pool.submit(receive)
        send(mixed().items(), GroupWay(Group(store, 0, 2, CPU, 10), lambda: None), limit)
        same(reading.result(timeout=60))
    write_folder(mixed().items(), tmp_path / "v", limit)
    same(dict(from_folder(tmp_path / "v", CPU)))
    assert [item.name for item in tmp_path.iterdir()] == ["v"]


@pytest.mark.parametrize("limit", [32, 1 << 20])
def test_a_mapped_buffer_is_filled_again_and_leaves_no_file(limit) -> None:
    told = []
    way = SocketWay(CPU, 10, told.append)
    kept: dict = {}
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            reading = pool.submit(lambda: dict(received(from_socket(way.path, CPU, kept, 10), copies=True)))
            way.meet(lambda: None)
            send(mixed().items(), way, limit)
            same(reading.result(timeout=60))
    way.close()
    assert not told and way._file is None


def test_where_the_other_side_cannot_open_a_gpu_buffer_weights_go_through_memory() -> None:
    """The handle of a buffer that is no GPU's: refused by the receiver, and the same bucket comes again as a file."""
    told = []
    way = SocketWay(CPU, 10, told.append)
    way._ipc = True
    way._flat, way._handle = torch.empty(1 << 20, dtype=torch.uint8), ("ipc", NO_GPU)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(lambda: dict(received(from_socket(way.path, CPU, {}, 10), copies=True)))
        way.meet(lambda: None)
        send(mixed().items(), way, 1 << 20)
        same(reading.result(timeout=60))
    way.close()
    assert len(told) == 1 and "CUDA IPC is not available" in told[0]


def test_a_folder_that_is_not_seen_from_there(tmp_path) -> None:
    with pytest.raises(RftError, match="is not seen from"):
        list(from_folder(tmp_path / "nowhere", CPU))


def test_a_member_that_does_not_come_is_no_hang() -> None:
    with pytest.raises((RuntimeError, RftError), match=r"(?i)time"):
        Group(open_store("127.0.0.1", 1), 0, 2, CPU, 1.0).prove()

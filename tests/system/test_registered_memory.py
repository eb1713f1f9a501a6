"""Memory that CUDA would pin: kept mapped while it is registered, and one warning where it cannot be.

Here the kernel's own mlock takes the place of CUDA's calls: it, too, refuses memory that is not mapped.
"""

from __future__ import annotations

import ctypes
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mrl.system import mapped_file, registered_memory
from mrl.system.mapped_file import map_file, map_registered_file
from mrl.system.shared_memory import SharedBuffer, SharedMemory
from mrl.weight_sync.staging import Staging

LIBC = ctypes.CDLL(None, use_errno=True)
SIZE = 3 * 4096 + 100
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """The addresses that are locked now."""
    with warnings.catch_warnings():  # of what earlier tests left to the garbage collector
        warnings.simplefilter("ignore")
        gc.collect()
    sizes: dict[int, int] = {}

    def pin(address: int, num_bytes: int) -> None:
        if LIBC.mlock(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)):
            raise RuntimeError(os.strerror(ctypes.get_errno()))
        sizes[address] = num_bytes
        held.add(address)

    def unpin(address: int) -> None:
        if LIBC.munlock(ctypes.c_void_p(address), ctypes.c_size_t(sizes[address])):
            raise RuntimeError(os.strerror(ctypes.get_errno()))
        held.remove(address)

    held: set[int] = set()
    monkeypatch.setattr(registered_memory, "_pin", pin)
    monkeypatch.setattr(registered_memory, "_unpin", unpin)
    monkeypatch.setattr(torch.cuda, "device", torch.device)
    monkeypatch.setattr(mapped_file, "_mappings", {})
    yield held
    gc.collect()
    for mapping in mapped_file._mappings.values():
        mapping.close()
    assert held == set()


def test_a_buffer_is_registered_as_long_as_it_is_mapped(locked: set[int]) -> None:
    memory = SharedMemory(CPU)
    buffer = memory.take(SIZE)
    assert locked == {buffer.tensor.data_ptr()}
    assert memory.take(100) is buffer
    view = buffer.tensor[5:]
    del buffer
    larger = memory.take(2 * SIZE)
    gc.collect()
    assert locked == {larger.tensor.data_ptr()}  # though the view keeps the old mapping
    view.fill_(1)
    del memory, larger
    gc.collect()
    assert locked == set()
    SharedBuffer(SIZE)
    assert locked == set()


def test_a_reader_keeps_its_mapping_until_another_file_is_there(
    locked: set[int], tmp_path: Path
) -> None:
    path = tmp_path / "bucket"
    os.symlink(SharedBuffer(1).path, tmp_path / "other")  # gone at once
    owner = SharedBuffer(SIZE)
    os.symlink(owner.path, path)
    owner.tensor[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    seen = map_registered_file(str(path), 100)
    assert (len(seen), seen[:4].tolist()) == (100, [1, 2, 3, 4])
    assert locked == {seen.data_ptr()}
    owner.tensor[:4] = 7
    again = map_registered_file(str(path), SIZE)
    assert again.data_ptr() == seen.data_ptr()
    assert again[:4].tolist() == [7] * 4

    successor = SharedBuffer(2 * SIZE)
    os.replace(_link(tmp_path / "next", successor.path), path)
    third = map_registered_file(str(path), 2 * SIZE)
    assert locked == {third.data_ptr()}
    assert seen[:4].tolist() == [7] * 4  # still mapped in the hands of its reader
    second = SharedBuffer(SIZE)
    path.unlink()
    fourth = map_registered_file(second.path, SIZE)
    assert locked == {fourth.data_ptr()}  # what has no file any more is let go of


def _link(link: Path, target: str) -> Path:
    os.symlink(target, link)
    return link


@pytest.mark.parametrize(("device", "function"), [(CPU, map_registered_file), (None, map_file)])
def test_a_bucket_from_nccl_is_registered_on_both_sides(
    locked: set[int], device: torch.device | None, function: Callable[[str, int], Tensor]
) -> None:
    staging = Staging(2, device)
    staging.begin(3, None)
    header = {"tensors": [["w", [5], "float32"]], "num_bytes": 20, "digest": None, "digest_s": 0}
    room = staging.room(header | {"is_last": True})
    room.copy_(torch.arange(5.0).view(torch.uint8))
    assert locked == ({room.data_ptr()} if device else set())
    staging.finish()
    (bucket,) = staging.buckets()
    assert bucket.handles is not None
    opened = [open_bucket(*arguments) for open_bucket, arguments in bucket.handles]
    assert [tensor.view(torch.float32).tolist() for tensor in opened] == [[0, 1, 2, 3, 4]] * 2
    assert {open_bucket for open_bucket, _ in bucket.handles} == {function}
    assert len(locked) == (2 if device else 0)  # the ranks of a test are one process


def test_a_refusal_is_one_warning_and_the_memory_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """This torch has no CUDA: its own refusal."""
    monkeypatch.setattr(mapped_file, "_mappings", {})
    if torch.cuda.is_available():
        pytest.skip("CUDA takes it")
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()
        buffers = [SharedBuffer(SIZE, torch.device("cuda", 0)) for _ in range(3)]
        buffers[1].tensor.fill_(5)
        seen = map_registered_file(buffers[1].path, SIZE)
        map_registered_file(buffers[0].path, SIZE)
    assert seen.tolist() == [5] * SIZE
    texts = [str(each.message) for each in found]
    assert len(texts) == 2, texts  # in this process both sides, each once
    assert all(
        text.startswith("shared memory could not be registered with CUDA, so copies")
        for text in texts
    )
    assert all(each.category is RuntimeWarning for each in found)

"""The collectives of a rank are noted in its page, whoever calls them, and nothing else changes."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from mrl.system import heartbeat
from mrl.system.heartbeat import Collective, read_collective
from mrl.watch.collectives import METHODS, noting_collectives

all_gather_into_tensor = dist.all_gather_into_tensor  # as Megatron keeps it


@pytest.fixture
def page() -> Iterator[mmap.mmap]:
    descriptor = os.open(heartbeat.open_page(), os.O_RDONLY)
    yield mmap.mmap(descriptor, heartbeat.SIZE, access=mmap.ACCESS_READ)
    os.close(descriptor)
    heartbeat.close_page()


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup | None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0], group_desc="EXPERT_GROUP")
    dist.destroy_process_group()


def test_the_last_collective_is_in_the_page(page: mmap.mmap, group: dist.ProcessGroup) -> None:
    assert read_collective(page).text() == ""
    with noting_collectives():
        dist.all_reduce(torch.ones(2), group=group)
        assert read_collective(page).text() == (
            "all_reduce over EXPERT_GROUP of 1 ranks (number 1, over)"
        )
        out = torch.zeros(2)
        all_gather_into_tensor(out, torch.ones(2), group=group)
        assert out.tolist() == [1, 1]
        assert read_collective(page).name == "all_gather"
        work = dist.broadcast(torch.ones(2), 0, async_op=True)
        assert work is not None
        assert read_collective(page) == Collective("broadcast", "default_pg of 1 ranks", 3, False)
        work.wait()
        assert read_collective(page).is_over
    dist.barrier()
    assert read_collective(page).name == "broadcast"


def test_a_thread_that_begins_no_collective_ends_none(
    page: mmap.mmap, group: dist.ProcessGroup
) -> None:
    """Weights are sent by threads of their own, while the main thread waits in a collective."""
    with noting_collectives():
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        assert work is not None
        sender = threading.Thread(target=work.wait)
        sender.start()
        sender.join()
        assert not read_collective(page).is_over
        work.wait()
        assert read_collective(page).is_over


def test_every_collective_of_torch_has_a_name() -> None:
    """What a new version of torch adds is missed otherwise."""
    others = {
        *(
            "abort",
            "shutdown",
            "bound_device_id",
            "boxed",
            "unbox",
            "get_group_store",
            "group_desc",
        ),
        *("group_name", "merge_remote_group", "name", "rank", "set_timeout", "size", "split_group"),
        *("use_pg_for_symm_mem_rendezvous", "BackendType", "_allgather_base"),
    }
    public = {n for n in dir(c10d.ProcessGroup) if not n.startswith("_") and not n.isupper()}
    assert public - others <= {method for methods in METHODS.values() for method in methods}


def test_long_names_are_cut(page: mmap.mmap) -> None:
    heartbeat.note_collective(b"n" * 100, b"g" * 1000)
    found = read_collective(page)
    assert (len(found.name), len(found.group), found.is_over) == (16, 64, False)
    heartbeat.note_collective_end()
    assert read_collective(page).is_over


def test_what_a_gpu_has_still_to_do_is_not_over(page: mmap.mmap) -> None:
    heartbeat.note_collective(b"all_reduce", b"tp of 2 ranks")
    heartbeat.note_collective_end(is_queued=True)
    found = read_collective(page)
    assert found == Collective("all_reduce", "tp of 2 ranks", 1, is_over=False, is_queued=True)
    assert found.text() == "all_reduce over tp of 2 ranks (number 1, queued on the GPU)"
    heartbeat.note_collective(b"all_reduce", b"tp of 2 ranks")
    assert read_collective(page) == Collective("all_reduce", "tp of 2 ranks", 2, is_over=False)

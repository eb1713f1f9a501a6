"""Collectives over bytes of different lengths, without pickle or padding.

Sizes are exchanged first, one number for each of the W ranks. A rank then needs memory for the sum
of all messages. With `all_gather_object`, it would need memory for W times the largest message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import InputError, RunFailed


def share_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of every rank, in rank order, on all ranks.

    A collective. Each rank that has any bytes broadcasts them.
    """
    sizes = _sizes(len(data))
    rank = dist.get_rank()
    buffers = {i: _buffer(data) if i == rank else _empty(n) for i, n in enumerate(sizes) if n}
    if len(sizes) > 1:
        works = [dist.broadcast(buffer, src=i, async_op=True) for i, buffer in buffers.items()]
        for work in works:
            assert work is not None
            work.wait()
    return [buffers[i].numpy().tobytes() if i in buffers else b"" for i in range(len(sizes))]


def gather_bytes(data: bytes) -> list[bytes] | None:
    """Return the bytes of every rank, in rank order, on rank 0; None on other ranks. A collective."""
    sizes = _sizes(len(data))
    if dist.get_rank():
        if data:
            dist.send(_buffer(data), 0)
        return None
    buffers = {i: _empty(n) for i, n in enumerate(sizes) if n and i}
    works = [dist.irecv(buffer, i) for i, buffer in buffers.items()]
    for work in works:
        assert work is not None
        work.wait()
    return [
        data if i == 0 else buffers[i].numpy().tobytes() if n else b"" for i, n in enumerate(sizes)
    ]


def gather_lines(local: Mapping[int, bytes], num_parts: int) -> list[bytes] | None:
    """Return the parts 0 to `num_parts - 1` of a text, in this order, on rank 0.

    A collective. `local` has the parts of this rank by number. Returns None on the other ranks.
    Raises RuntimeError on rank 0 if a part is missing or comes from two ranks.
    """
    index = np.array([[number, len(part)] for number, part in local.items()], dtype="<i8")
    data = (
        np.array([len(local)], dtype="<i8").tobytes() + index.tobytes() + b"".join(local.values())
    )
    packages = gather_bytes(data if local else b"")
    if packages is None:
        return None
    parts: dict[int, bytes] = {}
    for package in filter(None, packages):
        (count,) = np.frombuffer(package, dtype="<i8", count=1)
        index = np.frombuffer(package, dtype="<i8", offset=8, count=2 * count).reshape(-1, 2)
        start = 8 + 16 * int(count)
        for number, size in index.tolist():
            if number in parts:
                raise RuntimeError(f"part {number} of a text came from two ranks")
            parts[number] = package[start : start + size]
            start += size
    missing = [number for number in range(num_parts) if number not in parts]
    if missing:
        raise RuntimeError(f"no rank has parts {missing[:10]} of a text of {num_parts}")
    return [parts[number] for number in range(num_parts)]


def sum_over_ranks(number: int | bool) -> int:
    """Return the sum of the ranks' numbers. A collective."""
    total = torch.tensor(int(number))
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return int(total)


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise on every rank if the block raises on any rank.

    If the block raised on a rank, this rank raises its own error. All other ranks raise InputError
    or RunFailed, with the message of the first rank that failed; otherwise they would wait for that
    rank in their next collective. The end of the block is a collective. The block itself must
    contain no collective.
    """
    own: Exception | SystemExit | None = None
    try:
        yield
    except (Exception, SystemExit) as error:
        own = error
    # The message of these two can be understood without the type.
    is_worded = own is None or isinstance(own, InputError | RunFailed)
    text = str(own or "") if is_worded else f"{type(own).__name__}: {own}"
    kind = "input" if isinstance(own, InputError) else "failure"
    messages = share_bytes(f"{kind} {text}".encode(errors="backslashreplace") if own else b"")
    if own is not None:
        raise own
    for rank, each in enumerate(messages):
        if each:
            kind, _, text = each.decode().partition(" ")
            raise (InputError if kind == "input" else RunFailed)(f"rank {rank}: {text}")


def _sizes(size: int) -> list[int]:
    """Return the `size` of each rank, in rank order. A collective."""
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = size
    if len(sizes) > 1:
        dist.all_reduce(sizes)
    return sizes.tolist()


def _buffer(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


def _empty(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)

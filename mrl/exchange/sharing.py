"""This module sends bytes of some ranks to all ranks, or to one, without pickle and padding.

A rank needs memory for the sum of what the others send, and not for the number of ranks times the
largest message, as `all_gather_object` does. Sizes travel first, as one number a rank.

W ranks.
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
    """Return what every rank gave, by rank, on every rank.

    A collective: a broadcast from each rank that has any bytes. The others send only their size.
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


def gather_bytes(data: bytes, reader: int = 0) -> list[bytes] | None:
    """Return what every rank gave, by rank, on the rank `reader`; None on the others. A collective."""
    sizes = _sizes(len(data))
    rank = dist.get_rank()
    if rank != reader:
        if data:
            dist.send(_buffer(data), reader)
        return None
    buffers = {i: _empty(n) for i, n in enumerate(sizes) if n and i != reader}
    works = [dist.irecv(buffer, i) for i, buffer in buffers.items()]
    for work in works:
        assert work is not None
        work.wait()
    return [
        data if i == reader else buffers[i].numpy().tobytes() if n else b""
        for i, n in enumerate(sizes)
    ]


def gather_lines(local: Mapping[int, bytes], num_parts: int) -> list[bytes] | None:
    """Return on rank 0 all parts of a text in the order of their numbers, 0 to `num_parts` - 1.

    A collective; every rank gives the parts that it has. Returns None on the other ranks. Raises
    RuntimeError on rank 0 where a part is missing, or given twice.
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
    """Return the sum of what every rank gives. A collective."""
    total = torch.tensor(int(number))
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return int(total)


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise on every rank if the block raises on any: there its own error, and on the others an
    InputError or RunFailed that names the first such rank. A collective, and the block holds none:
    ranks that went on would wait for the failed one in their next collective."""
    own: Exception | SystemExit | None = None
    try:
        yield
    except (Exception, SystemExit) as error:
        own = error
    text = f"{type(own).__name__}: {own}" if own and not _is_worded(own) else str(own or "")
    kind = "input" if isinstance(own, InputError) else "failure"
    said = share_bytes(f"{kind} {text}".encode(errors="backslashreplace") if own else b"")
    if own is not None:
        raise own
    for rank, each in enumerate(said):
        if each:
            kind, _, text = each.decode().partition(" ")
            raise (InputError if kind == "input" else RunFailed)(f"rank {rank}: {text}")


def _is_worded(error: BaseException) -> bool:
    """Whether the message of an error is whole without its type."""
    return isinstance(error, InputError | RunFailed)


def _sizes(size: int) -> list[int]:
    """Return i64[W]: how many bytes each rank gives."""
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = size
    if len(sizes) > 1:
        dist.all_reduce(sizes)
    return sizes.tolist()


def _buffer(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


def _empty(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)

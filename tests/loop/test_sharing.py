"""Bytes from some ranks to all ranks, or to one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mrl.config import ParallelConfig
from mrl.errors import InputError, RunFailed
from mrl.exchange.sharing import (
    failing_together,
    gather_bytes,
    gather_lines,
    share_bytes,
    sum_over_ranks,
)
from parallel.dims import ParallelDims
from parallel.mesh import init_mesh
from tests.ranks import run_ranks

GIVEN = [b"abc", b"", b"defgh" * 1000]


def moved() -> dict[str, Any]:
    rank = init_mesh(ParallelDims.create(ParallelConfig(), 3), 0).rank
    lines = {0: {1: b"one\n", 3: b""}, 1: {}, 2: {2: b"two\n", 0: b"zero\n"}}[rank]
    try:
        twice = gather_lines({0: b"x"} if rank else {}, 1)
    except RuntimeError as error:
        twice = str(error)
    return {
        "shared": share_bytes(GIVEN[rank]) == GIVEN,
        "none": share_bytes(b"") == [b"", b"", b""],
        "gathered": gather_bytes(GIVEN[rank]) == (GIVEN if rank == 0 else None),
        "lines": [line.decode() for line in gather_lines(lines, 4) or []],
        "twice": twice,
        "sum": [sum_over_ranks(rank == 1), sum_over_ranks(True)],
        "world": dist.get_world_size(),
    }


def test_every_rank_gets_the_bytes_of_all_and_one_rank_the_lines(tmp_path: Path) -> None:
    ranks = run_ranks(3, moved, folder=tmp_path)
    assert all(rank["shared"] and rank["none"] and rank["gathered"] for rank in ranks)
    assert ranks[0]["lines"] == ["zero\n", "one\n", "two\n", ""]
    assert [rank["lines"] for rank in ranks[1:]] == [[], []]
    assert ranks[0]["twice"] == "part 0 of a text came from two ranks"
    assert all(rank["sum"] == [1, 3] for rank in ranks)


def failed(kind: type[Exception]) -> str:
    init_mesh(ParallelDims.create(ParallelConfig(), 3), 0)
    with failing_together():
        pass
    try:
        with failing_together():
            if dist.get_rank() == 1:
                raise kind("it cannot be read \udc80")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (InputError, "InputError: rank 1: it"),
        (RunFailed, "RunFailed: rank 1: it"),
        (KeyError, "RunFailed: rank 1: KeyError: 'it"),
    ],
)
def test_all_ranks_fail_if_one_does(kind: type[Exception], others: str, tmp_path: Path) -> None:
    ranks = run_ranks(3, failed, kind, folder=tmp_path)
    assert ranks[1].startswith(kind.__name__)
    assert ranks[0] == ranks[2]
    assert ranks[0].startswith(others)


def alone() -> dict[str, Any]:
    init_mesh(ParallelDims.create(ParallelConfig(), 1), 0)
    try:
        gather_lines({0: b"a"}, 2)
        missed = ""
    except RuntimeError as error:
        missed = str(error)
    one = share_bytes(b"x") == [b"x"] and gather_lines({1: b"b", 0: b"a"}, 2) == [b"a", b"b"]
    return {"right": one, "missed": missed}


def test_a_part_that_nobody_has_is_missed(tmp_path: Path) -> None:
    (found,) = run_ranks(1, alone, folder=tmp_path)
    assert found == {"right": True, "missed": "no rank has parts [1] of a text of 2"}

"""`mrl::zero_empty_groups_`: groups without rows become zero, and no other bit changes."""

from __future__ import annotations

import pytest
import torch
from emulator import ORDERS
from torch import Tensor

from mrl.kernels import zero_empty_groups_

CASES = [[5, 0, 7, 1], [0, 0, 13, 0], [0, 0, 0, 0], [3, 1], [0], []]
SHAPES = [(64, 32), (3, 5), (1,), (40_000,), (0, 4)]
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0, dtype=torch.int32)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values of any bits, NaN among them."""
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    found = torch.randint(
        0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    return found.view(dtype)


def check(values: Tensor, sizes: list[int]) -> None:
    """Compare the bytes with those of a loop over groups."""
    before = values.view(torch.uint8).clone()
    assert zero_empty_groups_(values, ends_of(sizes)) is values
    for group, size in enumerate(sizes):
        wanted = before[group] if size else torch.zeros_like(before[group])
        assert torch.equal(values.view(torch.uint8)[group], wanted), group


@pytest.mark.parametrize("sizes", CASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_groups_without_rows_are_written(sizes: list[int], shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        check(random_bytes((len(sizes), *shape), dtype), sizes)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", CASES[:3], ids=str)
def test_the_gpu_kernel_does_the_same(emulated_cuda, sizes: list[int], order: str) -> None:
    """(3, 5) is written byte by byte, (64, 32) 16 bytes at a time."""
    for shape in ((64, 32), (3, 5)):
        for dtype in DTYPES[:2]:
            values = random_bytes((len(sizes), *shape), dtype)
            with emulated_cuda(order):
                check(values, sizes)


def test_a_group_that_takes_the_gpu_kernel_two_rounds(emulated_cuda) -> None:
    """64 blocks of 256 threads, each of which writes a byte at a time."""
    values = random_bytes((2, 64 * 256 + 999), torch.uint8)
    with emulated_cuda("shuffled"):
        check(values, [0, 3])


def test_a_group_that_starts_at_an_odd_address(emulated_cuda) -> None:
    whole = random_bytes((1 + 4 * 32,), torch.uint8)
    first, values = whole[0].clone(), whole[1:].view(4, 32)
    with emulated_cuda("forward"):
        check(values, [0, 3, 0, 2])
    assert torch.equal(whole[0], first)


@pytest.mark.parametrize(
    ("values", "ends", "says"),
    [
        (torch.zeros(4, 6)[:, :3], torch.zeros(4, dtype=torch.int32), "values: .* contiguous"),
        (torch.zeros(()), torch.zeros(0, dtype=torch.int32), "values: got shape"),
        (torch.zeros(4, 6), torch.zeros(3, dtype=torch.int32), r"ends: got shape \[3\], .* \[4\]"),
        (torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64), "ends: got dtype torch.int64"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(values: Tensor, ends: Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        zero_empty_groups_(values, ends)

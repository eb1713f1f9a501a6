"""Rotary embeddings of a packed batch: Megatron's numbers in fp32, better ones in bf16."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from torch import Tensor

from parallel import prepare
from parallel.context import ContextSlice, blocks_of_rank
from parallel.layers.attention import packed_sequences
from parallel.layers.rotary import Rotation

prepare()

HEADS, SIZE = 3, 8


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def angles(length: int) -> Tensor:
    frequency = 1.0 / (50000.0 ** (torch.arange(0, SIZE, 2).float() / SIZE))
    half = torch.outer(torch.arange(length).float(), frequency)
    return torch.cat((half, half), dim=-1)[:, None, None, :]


def positions(bounds: list[int], rank: int, size: int) -> Tensor:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    blocks = blocks_of_rank(bounds, rank, size)
    own = torch.cat([block.packed for block in blocks])
    places = None if size == 1 else torch.arange(bounds[-1])
    context = ContextSlice(group(rank, size), blocks, own, places)
    found = packed_sequences(cu_seqlens, context, torch.device("cpu")).positions
    assert found is not None
    return found


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_it_is_megatrons_in_fp32(interleaved: bool, rank: int, size: int) -> None:
    """Equal bits, with and without context parallelism, and in DeepSeek's layout of pairs."""
    bounds = [0, 8, 12, 24, 28]
    scale = 1.25
    x = torch.randn(28 // size, HEADS, SIZE)
    theirs = _apply_rotary_pos_emb_thd(
        x,
        torch.tensor(bounds, dtype=torch.int32),
        angles(12),
        multi_latent_attention=interleaved,
        mscale=scale,
        cp_group=group(rank, size),
    )
    rotation = Rotation.at(angles(12), positions(bounds, rank, size), scale)
    assert torch.equal(rotation.rotate(x, interleaved), theirs)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient(interleaved: bool) -> None:
    rotation = Rotation.at(angles(5), torch.tensor([0, 1, 4, 2]))
    double = Rotation(rotation.cos.double(), rotation.sin.double())
    x = torch.randn(4, HEADS, SIZE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: double.rotate(x, interleaved), (x,))


def test_dimensions_beyond_the_rotated_ones_stay() -> None:
    rotation = Rotation.at(angles(5), torch.tensor([4, 2]))
    x = torch.randn(2, HEADS, SIZE + 4, requires_grad=True)
    out = rotation.rotate(x)
    assert torch.equal(out[..., SIZE:], x[..., SIZE:])
    assert torch.equal(out[..., :SIZE], rotation.rotate(x[..., :SIZE]))
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[..., SIZE:], torch.ones(2, HEADS, 4))


def test_bf16_is_rounded_once() -> None:
    """Megatron's unfused form rounds cosines, sines and every product."""
    x = torch.randn(400, HEADS, SIZE).bfloat16()
    rotation = Rotation.at(angles(400), torch.arange(400))
    exact = rotation.rotate(x.double())
    ours = rotation.rotate(x)
    assert ours.dtype is torch.bfloat16
    assert torch.equal(ours, rotation.rotate(x.float()).bfloat16())
    bounds = torch.tensor([0, 400], dtype=torch.int32)
    theirs = _apply_rotary_pos_emb_thd(x, bounds, angles(400), cp_group=group(0, 1))
    assert (ours - exact).abs().mean() < 0.7 * (theirs - exact).abs().mean()

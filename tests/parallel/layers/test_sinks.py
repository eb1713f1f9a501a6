"""Attention with sinks and windows beside the formula, one sequence at a time, in fp64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mrl.shared_prefixes
import parallel.context
from mrl.shared_prefixes import SharedPrefixes
from parallel import prepare
from parallel.context import context_slice
from parallel.layers.attention import PackedSequences, packed_sequences
from parallel.layers.buckets import Bucket
from parallel.layers.sinks import SinkAttention, window_mask

prepare()

HEADS, GROUPS, SIZE = 4, 2, 8
LENGTHS = [[5, 1, 9, 5, 16, 2], [4, 4, 4], [7]]
WINDOWS = [None, 1, 3, 100]


def packed(lengths: list[int], shared: SharedPrefixes | None = None) -> PackedSequences:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    context = context_slice(bounds, group, torch.device("cpu"), shared)
    return packed_sequences(bounds, context, torch.device("cpu"))


def module(window: int | None, layer_number: int = 1) -> SinkAttention:
    config = SimpleNamespace(
        attention_dropout=0.0,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=1,
        params_dtype=torch.float64,
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=[1, 0],
    )
    made = SinkAttention(config, layer_number, None, "self")
    torch.nn.init.normal_(made.softmax_offset)
    return made


def inputs(num_tokens: int) -> list[Tensor]:
    sizes = (HEADS, SIZE), (GROUPS, SIZE), (GROUPS, SIZE)
    return [
        torch.randn(num_tokens, *size, dtype=torch.float64, requires_grad=True) for size in sizes
    ]


def by_formula(qkv: list[Tensor], lengths: list[int], sinks: Tensor, window: int | None) -> Tensor:
    """Softmax over the keys in the window and the sink, whose value is 0."""
    outputs = []
    heads = [x.repeat_interleave(HEADS // x.shape[1], dim=1).split(lengths) for x in qkv]
    for q, k, v in zip(*heads, strict=True):
        exponentials = (torch.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5).exp()
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (distance >= 0) & (distance < (window or len(q)))
        exponentials = exponentials * seen
        total = exponentials.sum(-1, keepdim=True) + sinks.exp()[:, None, None]
        outputs.append(torch.einsum("hqk,khd->qhd", exponentials / total, v))
    return torch.cat(outputs).flatten(1)


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    assert torch.allclose(ours, theirs, atol=1e-12)
    grad = torch.randn_like(ours)
    mine, others = (torch.autograd.grad(x, inputs, grad) for x in (ours, theirs))
    for a, b in zip(mine, others, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
def test_each_packed_sequence_has_its_own_sinks_and_window(
    lengths: list[int], window: int | None
) -> None:
    qkv, attention = inputs(sum(lengths)), module(window)
    ours = attention(*qkv, packed_seq_params=packed(lengths))
    theirs = by_formula(qkv, lengths, attention.softmax_offset, window)
    assert_same(ours, theirs, [*qkv, attention.softmax_offset])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("least", [256, 2])
def test_shared_prefixes_change_neither(
    window: int | None, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, shared = [9, 7, 12, 4], SharedPrefixes((0, 0, 1, 3), (0, 5, 6, 0))
    monkeypatch.setattr(mrl.shared_prefixes, "MIN_QUERIES", least)
    monkeypatch.setattr(parallel.context, "gather_from_sequence_parallel_region", lambda x, **_: x)
    batch = packed(lengths, shared)
    assert batch.context is not None
    places = batch.context.places
    assert places is not None
    rows, attention = inputs(sum(lengths) - shared.total), module(window)
    ours = attention(*rows, packed_seq_params=batch)[places]
    theirs = by_formula([x[places] for x in rows], lengths, attention.softmax_offset, window)
    assert_same(ours, theirs, [*rows, attention.softmax_offset])


def test_only_the_layers_of_the_pattern_have_a_window() -> None:
    assert [module(3, number).window for number in (1, 2)] == [3, None]


def test_layers_share_the_mask_of_a_window() -> None:
    bucket = Bucket((2, 6), None, None)
    mask, device = window_mask(bucket, 3, torch.device("cpu")), torch.device("cpu")
    assert mask is not None
    assert mask[0, 0].sum(1).tolist() == [1, 2, 3, 3, 3, 3]
    assert window_mask(bucket, 3, device) is mask
    assert window_mask(bucket, 6, device) is None  # it hides nothing

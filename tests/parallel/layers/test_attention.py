"""Packed attention beside one call a sequence, in buckets and by torch's packed FlashAttention.

The latter runs on GPUs only: here its arguments are bound to its real signature, checked by its own
shape function, and computed by a loop over sequences that follows its documentation.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

import mrl.shared_prefixes
import parallel.context
from mrl.shared_prefixes import SharedPrefixes
from parallel import prepare
from parallel.context import ContextSlice, context_slice
from parallel.layers import attention
from parallel.layers.attention import PackedAttention, PackedSequences, packed_sequences

prepare()

HEADS, GROUPS, SIZE = 4, 2, 8
LENGTHS = [
    [5, 1, 9, 5, 16, 2],  # buckets with and without padding, moved tokens
    [4, 4, 4],  # one bucket, nothing padded, nothing moved
    [7],
]


def packed(lengths: list[int]) -> PackedSequences:
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    context = context_slice(torch.tensor(bounds), group, torch.device("cpu"))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return packed_sequences(cu_seqlens, context, torch.device("cpu"))


def one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float | None) -> Tensor:
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([
        F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in part), is_causal=True, scale=scale, enable_gqa=True
        ).transpose(0, 1)
        for part in parts
    ])  # fmt: skip


def module(scale: float | None = None) -> PackedAttention:
    config = SimpleNamespace(attention_dropout=0.0)
    return PackedAttention(config, 1, None, "self", softmax_scale=scale)


def inputs(num_tokens: int, value_size: int = SIZE) -> list[Tensor]:
    sizes = (HEADS, SIZE), (GROUPS, SIZE), (GROUPS, value_size)
    return [torch.randn(num_tokens, *size, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("value_size", "scale"), [(SIZE, None), (12, 0.3)])
def test_buckets(lengths: list[int], value_size: int, scale: float | None) -> None:
    q, k, v = inputs(sum(lengths), value_size)
    ours = module(scale)(q, k, v, packed_seq_params=packed(lengths))
    theirs = one_by_one(q, k, v, lengths, scale).flatten(1)
    assert torch.allclose(ours, theirs, atol=1e-6)
    grad = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, (q, k, v), grad),
        torch.autograd.grad(theirs, (q, k, v), grad),
        strict=True,
    ):
        assert torch.allclose(mine, other, atol=1e-5)


def test_nothing_is_copied_where_all_sequences_have_one_length() -> None:
    even, mixed = packed([4, 4, 4]).layout, packed([5, 1, 9]).layout
    assert even is not None
    assert mixed is not None
    x = torch.randn(12, 1, 1)
    assert even.lay_out(x) is x
    assert not mixed.is_identity


@pytest.mark.parametrize(("least", "num_blocks"), [(256, 4), (2, 6)])
def test_a_shared_prefix_gets_the_sum_of_the_gradients_of_its_sequences(
    least: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of a prefix belong to several sequences, and its rows attend once."""
    lengths, shared = [9, 7, 12, 4], SharedPrefixes((0, 0, 1, 3), (0, 5, 6, 0))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    monkeypatch.setattr(mrl.shared_prefixes, "MIN_QUERIES", least)
    context = context_slice(bounds, group, torch.device("cpu"), shared)
    monkeypatch.setattr(parallel.context, "gather_from_sequence_parallel_region", lambda x, **_: x)
    assert len(context.blocks) == num_blocks
    places = context.places
    assert places is not None
    rows = inputs(sum(lengths) - shared.total)
    batch = packed_sequences(bounds, context, torch.device("cpu"))
    ours = module()(*rows, packed_seq_params=batch)[places]
    q, k, v = (x[places] for x in rows)
    theirs = one_by_one(q, k, v, lengths, None).flatten(1)
    assert torch.allclose(ours, theirs, atol=1e-6)
    grad = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, rows, grad), torch.autograd.grad(theirs, rows, grad), strict=True
    ):
        assert torch.allclose(mine, other, atol=1e-5)


def by_documentation(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
    given = inspect.signature(varlen_attn).bind(query, key, value, *rest, **named).arguments
    assert given["window_size"] == (-1, 0)
    assert given["enable_gqa"]
    assert torch.equal(given["cu_seq_q"], given["cu_seq_k"])
    assert given["cu_seq_q"].dtype is torch.int32
    lengths = given["cu_seq_q"].diff().tolist()
    assert given["max_q"] == given["max_k"] == max(lengths)
    assert isinstance(given["max_q"], int)
    return one_by_one(query, key, value, lengths, given["scale"])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_varlen_gets_what_it_documents(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(sum(lengths))
    buckets = module(0.3)(q, k, v, packed_seq_params=packed(lengths))
    monkeypatch.setattr(attention, "takes_varlen", lambda *a: True)
    monkeypatch.setattr(attention, "VARLEN", by_documentation)
    ours = module(0.3)(q, k, v, packed_seq_params=packed(lengths))
    assert torch.allclose(ours, buckets, atol=1e-6)


def test_varlen_accepts_the_shapes_and_has_a_gradient() -> None:
    assert attention.VARLEN is varlen_attn
    batch = packed([5, 1, 9])
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (x.detach().bfloat16().requires_grad_() for x in inputs(15))
        out = attention.varlen_attention(q, k, v, batch, None)
        assert out.shape == q.shape
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert [g.shape for g in grads] == [x.shape for x in (q, k, v)]


def test_when_varlen_is_taken() -> None:
    def tensor(size: int = 64, dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> Any:
        return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(15, HEADS, size))

    whole = packed([5, 1, 9])
    takes = attention.takes_varlen
    assert takes(tensor(), tensor(), whole)
    assert not takes(tensor(is_cuda=False), tensor(), whole)
    assert not takes(tensor(dtype=torch.float32), tensor(), whole)
    assert not takes(tensor(192), tensor(128), whole)  # latent attention
    assert not takes(tensor(512), tensor(512), whole)
    assert not takes(tensor(12), tensor(12), whole)
    assert whole.context is not None
    parallel = ContextSlice(whole.context.group, whole.context.blocks, places=torch.arange(15))
    cut = PackedSequences(context=parallel)
    assert not takes(tensor(), tensor(), cut)


def test_masked_grouped_heads_are_repeated_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's fused kernels take no mask with grouped heads; nothing else changes."""
    half = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    single = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    mask: Any = torch.ones(1, dtype=torch.bool)
    takes: Any = attention.takes_grouped_heads
    assert [takes(half, None), takes(half, mask), takes(single, None)] == [True, False, False]
    assert takes(torch.zeros(1), mask)

    found, lengths = [], LENGTHS[0]
    for answer in (True, False):
        monkeypatch.setattr(attention, "takes_grouped_heads", lambda *a, answer=answer: answer)
        torch.manual_seed(0)
        own = inputs(sum(lengths))
        out = module()(*own, packed_seq_params=packed(lengths))
        found.append((out, *torch.autograd.grad(out.square().sum(), own)))
    for grouped, repeated in zip(*found, strict=True):
        torch.testing.assert_close(grouped, repeated)

"""The gated delta rule in chunks beside the recurrence token by token, transformers and Megatron."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from parallel import prepare
from parallel.layers import delta_rule
from parallel.layers.delta_rule import CHUNK, gated_delta_rule

prepare()

LENGTHS = [1, 5, CHUNK, CHUNK + 1, 2 * CHUNK + 3]


def inputs(length: int, dtype: torch.dtype = torch.float64, batch: int = 2) -> list[Tensor]:
    """Query and key [b, s, h, d], value [b, s, h, e], log decay and beta [b, s, h]."""
    torch.manual_seed(length)
    heads, keys, values = 3, 5, 4
    shapes = [(heads, keys), (heads, keys), (heads, values), (heads,), (heads,)]
    found = [torch.randn(batch, length, *shape, dtype=dtype) for shape in shapes]
    found[3], found[4] = -torch.nn.functional.softplus(found[3]), found[4].sigmoid()
    return [x.detach().requires_grad_() for x in found]


def token_by_token(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The formula of the module's docstring."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state = query.new_zeros(*query.shape[:1], *query.shape[2:], value.shape[-1])
    outputs = []
    for t in range(query.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        old = torch.einsum("bhd,bhde->bhe", key[:, t], state)
        new = (value[:, t] - old) * beta[:, t, :, None]
        state = state + torch.einsum("bhd,bhe->bhde", key[:, t], new)
        outputs.append(torch.einsum("bhd,bhde->bhe", query[:, t], state))
    return torch.stack(outputs, 1) * query.shape[-1] ** -0.5


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_the_recurrence_and_its_gradients(length: int) -> None:
    given = inputs(length)
    ours, expected = gated_delta_rule(*given), token_by_token(*given)
    assert ours.dtype == torch.float64
    assert (ours - expected).abs().max() < 1e-12
    towards = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, given, towards),
        torch.autograd.grad(expected, given, towards),
        strict=True,
    ):
        assert (mine - other).abs().max() <= 1e-10 * max(1.0, other.abs().max())


def test_gradients_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "CHUNK", 3)
    assert torch.autograd.gradcheck(gated_delta_rule, inputs(7, batch=1))


@pytest.mark.parametrize("length", LENGTHS)
def test_transformers_and_megatron_compute_the_same_in_fp32(length: int) -> None:
    query, key, value, g, beta = inputs(length, torch.float32)
    ours = gated_delta_rule(query, key, value, g, beta)
    other, _ = theirs.torch_chunk_gated_delta_rule(
        query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True
    )
    assert (ours - other).abs().max() < 2e-6
    megatron = importlib.import_module("megatron.core.ssm.gated_delta_net")
    unit = [theirs.l2norm(x) for x in (query, key)]
    other, _ = megatron.torch_chunk_gated_delta_rule(*unit, value, g=g, beta=beta)
    assert (ours - other).abs().max() < 2e-6


def test_what_comes_later_changes_nothing_before() -> None:
    given = [x.detach() for x in inputs(2 * CHUNK)]
    ours = gated_delta_rule(*given)
    for x in given:
        x[:, CHUNK + 7 :] = 0.5
    assert torch.equal(gated_delta_rule(*given)[:, : CHUNK + 7], ours[:, : CHUNK + 7])
    shorter = gated_delta_rule(*(x[:, : CHUNK + 7] for x in given))
    assert (shorter - ours[:, : CHUNK + 7]).abs().max() < 1e-12


def test_strong_decays_stay_finite() -> None:
    query, key, value, g, beta = inputs(2 * CHUNK, torch.float32)
    given = [query, key, value, 60 * g, beta]
    ours = gated_delta_rule(*given)
    assert ours.isfinite().all()
    for gradient in torch.autograd.grad(ours.sum(), [*given[:3], beta, g]):
        assert gradient.isfinite().all()

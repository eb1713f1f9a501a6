"""Convert routes to rows of bytes, one row per token, and back. Ranks exchange routes in this form.

A row holds the K expert ids of each layer, one layer after the other. If gate weights were
captured, they follow after all ids, as float32. Ids are uint8 up to 256 experts and uint16 above.

Dimensions: R rows, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.types import TokenRoutes

MAX_EXPERTS = 65536


def id_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype of expert ids: uint8 up to 256 experts, uint16 above. Raises ValueError
    unless `num_experts` is between 1 and MAX_EXPERTS."""
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts: got {num_experts}, expected 1 to {MAX_EXPERTS}")
    return torch.uint8 if num_experts <= 256 else torch.uint16


def route_bytes(num_experts: int, topk: int) -> int:
    """Return the size in bytes of the K = `topk` expert ids of one token in one layer."""
    return topk * id_dtype(num_experts).itemsize


def row_bytes(num_layers: int, num_experts: int, topk: int, *, with_weights: bool = False) -> int:
    """Return the size in bytes of the row of one token: the expert ids of all layers, and with
    `with_weights` also their gate weights of 4 bytes each."""
    return num_layers * (route_bytes(num_experts, topk) + 4 * topk * with_weights)


def to_rows(routes: TokenRoutes) -> Tensor:
    """Return the routes as rows of bytes, u8[R, row_bytes]. Every row must have a captured route,
    because the bytes do not contain `routes.captured`."""
    ids = routes.expert_ids.contiguous().view(torch.uint8).flatten(1)
    if routes.weights is None:
        return ids
    return torch.cat([ids, routes.weights.contiguous().view(torch.uint8).flatten(1)], dim=1)


def from_rows(
    rows: Tensor,
    layer_numbers: Sequence[int],
    num_experts: int,
    topk: int,
    *,
    with_weights: bool = False,
) -> TokenRoutes:
    """Convert `rows`, u8[R, row_bytes] from `to_rows`, back to routes. Raises ValueError if the rows
    do not have `row_bytes` bytes each."""
    num_rows, num_layers = len(rows), len(layer_numbers)
    width = row_bytes(num_layers, num_experts, topk, with_weights=with_weights)
    if rows.shape != (num_rows, width):
        raise ValueError(
            f"rows of routes: expected {width} bytes a row for {num_layers} layers x top-{topk} of "
            f"{num_experts} experts{' with weights' * with_weights}, got shape {list(rows.shape)}"
        )
    shape = (num_rows, num_layers, topk)
    weights = None
    if with_weights:
        tail_bytes = 4 * num_layers * topk
        rows, tail = rows.split([width - tail_bytes, tail_bytes], dim=1)
        # Not contiguous(): it returns a single row as the slice itself, which may be unaligned for f32.
        tail = tail.clone(memory_format=torch.contiguous_format)
        weights = tail.view(torch.float32).reshape(shape)
    ids = rows.reshape(-1).view(id_dtype(num_experts)).reshape(shape)
    captured = torch.ones(num_rows, dtype=torch.bool)
    return TokenRoutes(ids, captured, tuple(layer_numbers), num_experts, weights)

"""This module lays packed routes out as rows of bytes, one row per token, to move between ranks.

A row is the packed form of the kernels (`mrl.kernels.routes`), one layer after the other; gate weights,
where they were captured, follow the ids of their row.

R rows, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.kernels.routes import route_row_bytes
from mrl.types import PackedRoutes


def row_bytes(num_layers: int, num_experts: int, topk: int, *, with_weights: bool = False) -> int:
    """Return the bytes of one token: L times those of a layer, and with weights 4 * L * K more."""
    return num_layers * (route_row_bytes(num_experts, topk) + 4 * topk * with_weights)


def to_rows(routes: PackedRoutes) -> Tensor:
    """Return u8[R, row_bytes]."""
    if routes.weights is None:
        return routes.packed.flatten(1)
    weights = routes.weights.contiguous().view(torch.uint8).flatten(1)
    return torch.cat([routes.packed.flatten(1), weights], dim=1)


def from_rows(
    rows: Tensor,
    layer_numbers: Sequence[int],
    num_experts: int,
    topk: int,
    *,
    with_weights: bool = False,
) -> PackedRoutes:
    """Return the routes that `to_rows` was given. Raises ValueError for rows of another size."""
    num_rows, num_layers = len(rows), len(layer_numbers)
    width = row_bytes(num_layers, num_experts, topk, with_weights=with_weights)
    if rows.shape != (num_rows, width):
        raise ValueError(
            f"rows of routes: expected {width} bytes a row for {num_layers} layers x top-{topk} of "
            f"{num_experts} experts{' with weights' * with_weights}, got shape {list(rows.shape)}"
        )
    weights = None
    if with_weights:
        tail_bytes = 4 * num_layers * topk
        rows, tail = rows.split([width - tail_bytes, tail_bytes], dim=1)
        # Not contiguous(): of a single row that is the slice itself, at an offset no float may have.
        tail = tail.clone(memory_format=torch.contiguous_format)
        weights = tail.view(torch.float32).reshape(num_rows, num_layers, topk)
    packed = rows.reshape(num_rows, num_layers, route_row_bytes(num_experts, topk))
    return PackedRoutes(packed, tuple(layer_numbers), num_experts, topk, weights)

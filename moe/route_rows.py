"""Expert ids of one or two bytes, and their transport between ranks as one row of bytes per token.

A row holds the K ids of each layer, one layer after the other. If gate weights were captured, they
come after all ids. Ids are uint8 up to 256 experts and uint16 above.

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
    unless there are 1 to MAX_EXPERTS experts."""
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts: got {num_experts}, expected 1 to {MAX_EXPERTS}")
    return torch.uint8 if num_experts <= 256 else torch.uint16


def route_bytes(num_experts: int, topk: int) -> int:
    """Return the number of bytes of one token's route in one layer, without gate weights."""
    return topk * id_dtype(num_experts).itemsize


def row_bytes(num_layers: int, num_experts: int, topk: int, *, with_weights: bool = False) -> int:
    """Return the number of bytes of one token's row. The row holds the token's routes in L layers,
    and `with_weights` also L K gate weights of 4 bytes."""
    return num_layers * (route_bytes(num_experts, topk) + 4 * topk * with_weights)


def to_rows(routes: TokenRoutes) -> Tensor:
    """Return the routes as rows of bytes, u8[R, row_bytes]. Every row must have a captured
    route."""
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
    """Return the routes from which `to_rows` made `rows`. Raises ValueError if the rows do not have
    `row_bytes` bytes."""
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

"""Routes between ranks: the bits of a token's layers end to end, rounded up to bytes once a row.

The kernels' form (`mrl.kernels.routes`) starts every layer on a byte, so that a router finds its own.
That is the same form where K ids fill whole bytes (128 experts, top 8: 7 bytes); elsewhere (8 experts,
top 2: 6 bits) the unused bits of each layer are left out here. Gate weights, where they were captured,
follow the ids of their row: 4 L K bytes.

R rows, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mrl.kernels.routes import route_row_bits, route_row_bytes
from mrl.types import PackedRoutes

ROWS_AT_ONCE = 4096
"""Bits take a byte each while they are moved: this bounds the memory."""


def wire_row_bytes(
    num_layers: int, num_experts: int, topk: int, *, with_weights: bool = False
) -> int:
    """Count the bytes of one token: ceil(L * K * bits / 8), bits as in `mrl.kernels.routes`;
    with weights 4 * L * K more."""
    ids = -(-num_layers * route_row_bits(num_experts, topk) // 8)
    return ids + 4 * num_layers * topk * with_weights


def to_wire(routes: PackedRoutes) -> Tensor:
    """Encode rows as u8[R, wire_row_bytes]."""
    ids = _ids_to_wire(routes)
    if routes.weights is None:
        return ids
    weights = routes.weights.contiguous().view(torch.uint8).flatten(1)
    return torch.cat([ids, weights], dim=1)


def from_wire(
    wire: Tensor,
    layer_numbers: Sequence[int],
    num_experts: int,
    topk: int,
    *,
    with_weights: bool = False,
) -> PackedRoutes:
    """Decode what `to_wire` encoded. Raises ValueError where the rows have another size than theirs."""
    num_rows, num_layers = len(wire), len(layer_numbers)
    width = wire_row_bytes(num_layers, num_experts, topk, with_weights=with_weights)
    if wire.shape != (num_rows, width):
        raise ValueError(
            f"routes on the wire: expected {width} bytes a row for {num_layers} layers x top-{topk} of "
            f"{num_experts} experts{' with weights' * with_weights}, got shape {list(wire.shape)}"
        )
    weights = None
    if with_weights:
        wire, tail = wire.split([width - 4 * num_layers * topk, 4 * num_layers * topk], dim=1)
        # Not contiguous(): of a single row that is the slice itself, at an offset no float may have.
        tail = tail.clone(memory_format=torch.contiguous_format)
        weights = tail.view(torch.float32).reshape(num_rows, num_layers, topk)
    packed = _ids_from_wire(wire, num_layers, num_experts, topk)
    return PackedRoutes(packed, tuple(layer_numbers), num_experts, topk, weights)


def _ids_to_wire(routes: PackedRoutes) -> Tensor:
    packed, used = routes.packed, route_row_bits(routes.num_experts, routes.topk)
    num_rows, num_layers, size = packed.shape
    if used == 8 * size:
        return packed.flatten(1)
    width = wire_row_bytes(num_layers, routes.num_experts, routes.topk)
    wire = np.empty((num_rows, width), dtype=np.uint8)
    for start in range(0, num_rows, ROWS_AT_ONCE):
        part = packed[start : start + ROWS_AT_ONCE].numpy()
        bits = np.unpackbits(part, axis=-1, count=used, bitorder="little")
        wire[start : start + ROWS_AT_ONCE] = np.packbits(
            bits.reshape(len(part), -1), axis=-1, bitorder="little"
        )
    return torch.from_numpy(wire)


def _ids_from_wire(wire: Tensor, num_layers: int, num_experts: int, topk: int) -> Tensor:
    """u8[R, L, route_row_bytes]."""
    used, size = route_row_bits(num_experts, topk), route_row_bytes(num_experts, topk)
    num_rows = len(wire)
    if used == 8 * size:
        return wire.reshape(num_rows, num_layers, size)
    packed = np.empty((num_rows, num_layers, size), dtype=np.uint8)
    for start in range(0, num_rows, ROWS_AT_ONCE):
        part = wire[start : start + ROWS_AT_ONCE].numpy()
        bits = np.unpackbits(part, axis=-1, count=num_layers * used, bitorder="little")
        packed[start : start + ROWS_AT_ONCE] = np.packbits(
            bits.reshape(len(part), num_layers, used), axis=-1, bitorder="little"
        )
    return torch.from_numpy(packed)

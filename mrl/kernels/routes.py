"""Two torch ops hold expert ids in a compact form: `mrl::pack_routes` and `mrl::unpack_routes`.

Dimensions: T or N rows (tokens), L MoE layers, K experts per token, E experts.

A (row, layer) holds K codes of `bits` = ceil(log2(E)) bits (at least 1) in little-endian bit order, in
`row_bytes` = ceil(K * bits / 8) bytes. The code of an expert is its id. A row without a captured route
is all zeros where K >= 2, because a row never repeats an id otherwise; where K == 1 it is the code E,
and `bits` has room for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.kernels import backend
from mrl.types import NATIVE_ROUTE

MAX_EXPERTS = 65535
_ID_TYPES = (torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64)  # as csrc's IdType


def route_row_bits(num_experts: int, topk: int) -> int:
    """Return the bits of one (row, layer) that hold codes. Raises ValueError where E or K cannot be."""
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts: got {num_experts}, expected 1 to {MAX_EXPERTS}")
    if not 1 <= topk <= num_experts:
        raise ValueError(f"topk: got {topk}, expected 1 to {num_experts}, the number of experts")
    num_codes = num_experts + (topk == 1)
    return topk * max(1, (num_codes - 1).bit_length())


def route_row_bytes(num_experts: int, topk: int) -> int:
    """Return the bytes of one (row, layer). Raises ValueError where E or K cannot be."""
    return -(-route_row_bits(num_experts, topk) // 8)


def pack_routes(expert_ids: Tensor, num_experts: int, out: Tensor | None = None) -> Tensor:
    """Pack expert ids [T, L, K] into u8[T, L, row_bytes]. The order of a row's ids is kept.

    Args:
        expert_ids: u8, u16, i16, i32 or i64. A row of K times NATIVE_ROUTE has no captured route.
        out: contiguous u8[T, L, row_bytes] to write to and return, e.g. rows of a larger buffer.

    Raises:
        ValueError: a bad shape, type or size; on CPUs also the first row with an id out of range, a
            repeated id or only some ids native, by row and layer. GPUs stop with a message there.
    """
    if out is None:
        _check_ids(expert_ids, num_experts)
        rows, layers, topk = expert_ids.shape
        out = expert_ids.new_empty(
            (rows, layers, route_row_bytes(num_experts, topk)), dtype=torch.uint8
        )
    torch.ops.mrl.pack_routes(expert_ids, num_experts, out)
    return out


def native_routes(num_rows: int, num_layers: int, num_experts: int, topk: int) -> Tensor:
    """Return u8[num_rows, L, row_bytes] on the CPU without any captured route."""
    if topk > 1:
        size = route_row_bytes(num_experts, topk)
        return torch.zeros((num_rows, num_layers, size), dtype=torch.uint8)
    row = pack_routes(torch.full((1, 1, 1), NATIVE_ROUTE), num_experts)
    return row.repeat(num_rows, num_layers, 1)


def unpack_routes(
    packed: Tensor, *, num_experts: int, topk: int, layers: Sequence[int], start: int, stop: int
) -> Tensor:
    """Unpack rows [start, stop) of the wanted layers into expert ids i64[len(layers), stop - start, K].

    Args:
        packed: u8[N, L, row_bytes], as `pack_routes` wrote it.
        layers: indices into L, in the order wanted: a pipeline stage's own.
        start, stop: 0 <= start <= stop <= N: a sequence-parallel rank's own rows.

    Rows without a captured route are NATIVE_ROUTE K times. The bytes are trusted to come from
    `pack_routes` with the same experts; they are not checked again. Raises ValueError for a bad shape,
    type or index.
    """
    return torch.ops.mrl.unpack_routes(packed, num_experts, topk, list(layers), start, stop)


def _check_ids(expert_ids: Tensor, num_experts: int) -> None:
    if expert_ids.dim() != 3:
        raise ValueError(f"expert_ids: got shape {list(expert_ids.shape)}, expected [T, L, K]")
    if expert_ids.dtype not in _ID_TYPES:
        wanted = ", ".join(str(dtype) for dtype in _ID_TYPES)
        raise ValueError(f"expert_ids: got dtype {expert_ids.dtype}, expected one of {wanted}")
    route_row_bytes(num_experts, expert_ids.shape[2])


def _check_pack(expert_ids: Tensor, num_experts: int, out: Tensor) -> None:
    _check_ids(expert_ids, num_experts)
    rows, layers, topk = expert_ids.shape
    shape = (rows, layers, route_row_bytes(num_experts, topk))
    legend = f"T = {rows} rows, L = {layers} layers, K = {topk} of {num_experts} experts"
    backend.check_tensor("out", out, shape, (torch.uint8,), expert_ids.device, legend)
    if not out.is_contiguous():
        raise ValueError(f"out: got strides {list(out.stride())}, expected a contiguous tensor")


def _check_unpack(
    packed: Tensor, num_experts: int, topk: int, layers: Sequence[int], start: int, stop: int
) -> None:
    size = route_row_bytes(num_experts, topk)
    if packed.dim() != 3:
        raise ValueError(f"packed: got shape {list(packed.shape)}, expected [N, L, {size}]")
    rows, num_layers, _ = packed.shape
    legend = f"N = {rows} rows, L = {num_layers} layers, K = {topk} of {num_experts} experts"
    shape = (rows, num_layers, size)
    backend.check_tensor("packed", packed, shape, (torch.uint8,), packed.device, legend)
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise ValueError(f"layers: got {layer}, expected 0 to {num_layers - 1}")
    if not 0 <= start <= rows:
        raise ValueError(f"start: got {start}, expected 0 to {rows}, the number of rows")
    if not start <= stop <= rows:
        raise ValueError(f"stop: got {stop}, expected {start} (start) to {rows}, the rows")


torch.library.define(
    "mrl::pack_routes", "(Tensor expert_ids, int num_experts, Tensor(a!) out) -> ()"
)
torch.library.define(
    "mrl::unpack_routes",
    "(Tensor packed, int num_experts, int topk, int[] layers, SymInt start, SymInt stop) -> Tensor",
)


@torch.library.impl("mrl::pack_routes", ("cpu", "cuda"))
def _pack_routes(expert_ids: Tensor, num_experts: int, out: Tensor) -> None:
    _check_pack(expert_ids, num_experts, out)
    rows, layers, topk = expert_ids.shape
    backend.run(
        "pack_routes",
        expert_ids.device,
        expert_ids=expert_ids.contiguous(),
        id_type=_ID_TYPES.index(expert_ids.dtype),
        num_rows=rows,
        num_layers=layers,
        num_experts=num_experts,
        topk=topk,
        out=out,
    )


@torch.library.register_fake("mrl::pack_routes")
def _pack_routes_fake(expert_ids: Tensor, num_experts: int, out: Tensor) -> None:
    _check_pack(expert_ids, num_experts, out)


@torch.library.impl("mrl::unpack_routes", ("cpu", "cuda"))
def _unpack_routes(
    packed: Tensor, num_experts: int, topk: int, layers: list[int], start: int, stop: int
) -> Tensor:
    _check_unpack(packed, num_experts, topk, layers, start, stop)
    shape = (len(layers), stop - start, topk)
    expert_ids = torch.empty(shape, dtype=torch.int64, device=packed.device)
    backend.run(
        "unpack_routes",
        packed.device,
        packed=packed.contiguous(),
        num_rows=packed.shape[0],
        num_layers=packed.shape[1],
        num_experts=num_experts,
        topk=topk,
        layers=torch.tensor(layers, dtype=torch.int64),  # read on the host
        num_wanted=len(layers),
        start=start,
        stop=stop,
        expert_ids=expert_ids,
    )
    return expert_ids


@torch.library.register_fake("mrl::unpack_routes")
def _unpack_routes_fake(
    packed: Tensor, num_experts: int, topk: int, layers: list[int], start: int, stop: int
) -> Tensor:
    _check_unpack(packed, num_experts, topk, layers, start, stop)
    return packed.new_empty((len(layers), stop - start, topk), dtype=torch.int64)

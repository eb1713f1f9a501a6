"""Plain references take one bit at a time, as integers: `mrl::pack_routes`, `mrl::unpack_routes`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NATIVE = -1


def code_bits(num_experts: int, topk: int) -> int:
    """Return the fewest bits, at least 1, that tell all experts apart, and the native row where
    K == 1."""
    num_codes = num_experts + (1 if topk == 1 else 0)
    return next(bits for bits in range(1, 64) if 2**bits >= num_codes)


def pack_routes(expert_ids: Tensor, num_experts: int) -> Tensor:
    """[T, L, K] -> u8[T, L, row_bytes]; each row is one big little-endian integer of K codes."""
    num_rows, num_layers, topk = expert_ids.shape
    bits = code_bits(num_experts, topk)
    size = (topk * bits + 7) // 8
    data = bytearray()
    for row in expert_ids.tolist():
        for ids in row:
            native = num_experts if topk == 1 else 0
            codes = [native if expert == NATIVE else expert for expert in ids]
            number = sum(code << (k * bits) for k, code in enumerate(codes))
            data += number.to_bytes(size, "little")
    return torch.tensor(list(data), dtype=torch.uint8).reshape(num_rows, num_layers, size)


def unpack_routes(
    packed: Tensor, *, num_experts: int, topk: int, layers: Sequence[int], start: int, stop: int
) -> Tensor:
    """Return i64[len(layers), stop - start, K], from the arguments of `mrl.kernels.unpack_routes`."""
    bits = code_bits(num_experts, topk)
    rows = packed.tolist()
    out = torch.empty((len(layers), stop - start, topk), dtype=torch.int64)
    for i, layer in enumerate(layers):
        for n in range(start, stop):
            number = int.from_bytes(bytes(rows[n][layer]), "little")
            codes = [(number >> (k * bits)) % 2**bits for k in range(topk)]
            native = codes == [num_experts] if topk == 1 else number == 0
            out[i, n - start] = torch.tensor([NATIVE] * topk if native else codes)
    return out

"""A digest of weights that two sides of a sync can compare without knowing each other's layout.

For each place of the model, the sum modulo 2^64 of a bijective mix of every element's float32 bits
(csrc/weight_digest.h). bfloat16 and float16 are widened exactly, zeros count nothing. So it does not
depend on how tensors are fused, ordered, sharded or padded. One changed element is always seen,
several are missed with probability 2^-32 or less; what moves within its place is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mrl.kernels import backend

MODULUS = 2**64
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""WeightType of csrc/weight_digest.h."""
CHUNK = 1 << 24
"""Elements that the torch form takes at a time: it needs 12 bytes for each."""
LAYER = re.compile(r"^(?P<layer>.*?\.?layers\.\d+)\.(?:.*\.experts\.(?P<expert>\d+)\.)?")


def weight_digest(weights: Tensor, num_groups: int = 1) -> list[int]:
    """One digest in [0, 2^64) for each of `num_groups` equal parts of `weights`, in memory order.

    Raises ValueError for another dtype than float32, bfloat16 and float16, or parts that are unequal.
    """
    if weights.dtype not in TYPES:
        raise ValueError(
            f"weights: got {weights.dtype}, expected float32, bfloat16 or float16: the digest of "
            "quantised weights says nothing about those that were sent"
        )
    if num_groups < 1 or weights.numel() % num_groups:
        raise ValueError(
            f"num_groups: got {num_groups}, expected a divisor of {weights.numel()} elements"
        )
    flat = weights.detach().contiguous().view(num_groups, -1)
    if flat.device.type != "cpu":
        return [digest % MODULUS for digest in digest_in_torch(flat).tolist()]
    sums = torch.zeros(num_groups, dtype=torch.int64)
    backend.run(
        "weight_digest",
        flat.device,
        weights=flat,
        type=TYPES[flat.dtype],
        num_groups=num_groups,
        group_size=flat.shape[1],
        sums=sums,
    )
    return [digest % MODULUS for digest in sums.tolist()]


def digest_in_torch(rows: Tensor) -> Tensor:
    """The same sums i64[R] of `rows` [R, N], on any device, in bounded memory."""
    num_rows, size = rows.shape
    sums = torch.zeros(num_rows, dtype=torch.int64, device=rows.device)
    height = max(1, CHUNK // max(size, 1))
    for top in range(0, num_rows, height):
        for part in rows[top : top + height].split(CHUNK, dim=1):
            # Products wrap modulo 2^32; >> keeps the sign, so what it brings in is masked out.
            x = part.to(torch.float32, copy=True).view(torch.int32)
            x ^= (x >> 16) & 0xFFFF
            x *= 0x85EBCA6B - 2**32
            x ^= (x >> 13) & 0x7FFFF
            x *= 0xC2B2AE35 - 2**32
            x ^= (x >> 16) & 0xFFFF
            sums[top : top + height] += x.sum(dim=1, dtype=torch.int64)
    return sums


def digest_place(name: str) -> str:
    """Where a Hugging Face weight (or an engine's parameter) is counted.

    `model.layers.3.mlp.experts.7.up_proj.weight` in `model.layers.3.experts.7`, everything else of a
    layer in `model.layers.3`, the rest in its own module, e.g. `lm_head`.
    """
    if found := LAYER.match(name):
        layer, expert = found["layer"], found["expert"]
        return layer if expert is None else f"{layer}.experts.{expert}"
    return name.rpartition(".")[0] or name


def add_digests(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The digest of each place from those of its parts."""
    total: dict[str, int] = {}
    for place, digest in parts:
        total[place] = (total.get(place, 0) + digest) % MODULUS
    return total


def digests_of(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, int]]:
    """(place, digest) of each named weight."""
    for name, tensor in tensors:
        yield digest_place(name), weight_digest(tensor)[0]

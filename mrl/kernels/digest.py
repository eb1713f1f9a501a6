"""A weight digest that trainer and engine can compare even if they lay out weights differently.

The digest of a module is a sum over all elements of its weights, modulo 2^64. Each summand is a
bijective mix of the element's float32 bits (csrc/weight_digest.h). bfloat16 and float16 are widened
exactly, and zeros add 0, so the digest does not depend on how tensors are fused, ordered, sharded
or padded. A change of a single element always changes the digest. A change of several elements is
missed with probability 2^-32 or less. Elements that move within their module are not detected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mrl.kernels import backend
from mrl.system.torch_names import TORCH

foreach_copy_ = TORCH.take("_foreach_copy_")
MODULUS = 2**64
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The code of each dtype in `WeightType` of csrc/weight_digest.h."""
QUANTIZED = (torch.float8_e4m3fn, torch.int8)
"""Dtypes of quantised weights. They are converted to bfloat16, without rounding, and then digested."""
CHUNK = 1 << 24
"""The number of elements that `digest_in_torch` processes at a time. Each needs 12 bytes of memory."""
LAYER = re.compile(r"^(?P<layer>.*?\.?layers\.\d+)\.(?:.*\.experts\.(?P<expert>\d+)\.)?")


def weight_digest(weights: Tensor, num_groups: int = 1) -> list[int]:
    """Split `weights` into `num_groups` equal parts, in memory order, and return the parts' digests.

    Each digest is in [0, 2^64). Raises ValueError for a dtype other than float32, bfloat16 and
    float16, or if `num_groups` does not divide the number of elements.
    """
    return [number % MODULUS for number in weight_sums([(weights, num_groups)]).tolist()]


def weight_sums(parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Return the results of `weight_digest` for all pairs (weights, num_groups), in one tensor.

    The result is i64[sum of all num_groups]; a digest of 2^63 or more appears as a negative number.
    All weights must be on one device. The call does not wait for the device; copy the whole result
    to the CPU at once rather than number by number. Raises ValueError in the same cases as
    `weight_digest`.
    """
    rows = [_rows(weights, num_groups) for weights, num_groups in parts]
    if not rows:
        return torch.zeros(0, dtype=torch.int64)
    if rows[0].device.type != "cpu":
        return digest_in_torch(rows)
    sums = torch.zeros(sum(row.shape[0] for row in rows), dtype=torch.int64)
    for row, part in zip(rows, sums.split([row.shape[0] for row in rows]), strict=True):
        backend.run(
            "weight_digest",
            row.device,
            weights=row,
            type=TYPES[row.dtype],
            num_groups=row.shape[0],
            group_size=row.shape[1],
            sums=part,
        )
    return sums


def _rows(weights: Tensor, num_groups: int) -> Tensor:
    """Return `weights` as [num_groups, N], in memory order."""
    if weights.dtype in QUANTIZED:
        weights = weights.to(torch.bfloat16)
    if weights.dtype not in TYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in (*TYPES, *QUANTIZED))
        raise ValueError(f"weights: got {weights.dtype}, expected one of {known}")
    if num_groups < 1 or weights.numel() % num_groups:
        raise ValueError(
            f"num_groups: got {num_groups}, expected a divisor of {weights.numel()} elements"
        )
    return weights.detach().contiguous().view(num_groups, -1)


def digest_in_torch(rows: Sequence[Tensor]) -> Tensor:
    """Compute `weight_sums` with torch's ops, on any device and in bounded memory.

    rows: tensors [R_i, N_i] in float32, bfloat16 or float16. Each of their rows gets its own sum.
    Returns i64[sum of all R_i].

    The rows are processed in chunks of CHUNK elements, each with as many rows as fit. A chunk takes
    about 25 kernel launches, however many tensors it spans. The sum of a row is the difference of
    two running sums, which is right even if the running sums overflow, because they wrap modulo
    2^64.
    """
    flat = [row for block in rows for row in block.unbind(0)]
    device = rows[0].device
    sums = torch.zeros(len(flat), dtype=torch.int64, device=device)
    scratch = torch.empty(
        min(CHUNK, sum(row.numel() for row in flat)), dtype=torch.float32, device=device
    )
    for pieces in _chunks(flat):
        sizes = [part.numel() for _, part in pieces]
        whole = scratch[: sum(sizes)]
        views = whole.split(sizes)
        for dtype in {part.dtype for _, part in pieces}:  # the fast path needs a single dtype
            same = [i for i, (_, part) in enumerate(pieces) if part.dtype == dtype]
            foreach_copy_([views[i] for i in same], [pieces[i][1] for i in same])
        bits = whole.view(torch.int32)
        _mix(bits)
        ends = torch.tensor(sizes).cumsum(0).sub_(1).to(device)
        totals = bits.cumsum(0, dtype=torch.int64)[ends]
        totals[1:] -= totals[:-1].clone()
        sums.index_add_(0, torch.tensor([row for row, _ in pieces]).to(device), totals)
    return sums


def _chunks(flat: Sequence[Tensor]) -> Iterator[list[tuple[int, Tensor]]]:
    """Split the rows into chunks: yield lists of (row number, slice of the row), in order.

    The slices of a list have at most CHUNK elements in total.
    """
    pieces: list[tuple[int, Tensor]] = []
    room = CHUNK
    for number, row in enumerate(flat):
        start = 0
        while start < row.numel():
            size = min(room, row.numel() - start)
            pieces.append((number, row[start : start + size]))
            start, room = start + size, room - size
            if not room:
                yield pieces
                pieces, room = [], CHUNK
    if pieces:
        yield pieces


def _mix(x: Tensor) -> None:
    """Apply MixBits of csrc/weight_digest.h to each element of `x`, i32[N], in place.

    Products wrap modulo 2^32. torch's >> is an arithmetic shift, so the sign bits that it shifts in
    are masked out.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= 0x85EBCA6B - 2**32
    x ^= (x >> 13) & 0x7FFFF
    x *= 0xC2B2AE35 - 2**32
    x ^= (x >> 16) & 0xFFFF


def digest_place(name: str) -> str:
    """Return the name of the module whose digest includes the weight `name`.

    `name` is the weight's name in Hugging Face's format or in the engine.
    `model.layers.3.mlp.experts.7.up_proj.weight` belongs to `model.layers.3.experts.7`, and the
    other weights of that layer to `model.layers.3`. A weight outside of layers belongs to its own
    module, such as `lm_head`.
    """
    if found := LAYER.match(name):
        layer, expert = found["layer"], found["expert"]
        return layer if expert is None else f"{layer}.experts.{expert}"
    return name.rpartition(".")[0] or name


def add_digests(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Add up the digests of each module, modulo 2^64.

    parts: pairs (module, digest). Returns the sums by module.
    """
    total: dict[str, int] = {}
    for module, digest in parts:
        total[module] = (total.get(module, 0) + digest) % MODULUS
    return total


def digests_of(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, int]]:
    """Yield (module, digest of the weight) for each pair (weight name, weight)."""
    for name, tensor in tensors:
        yield digest_place(name), weight_digest(tensor)[0]

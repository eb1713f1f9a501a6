"""A digest of weights that two sides of a sync can compare without knowing each other's layout.

For each place of the model, the sum modulo 2^64 of a bijective mix of every element's float32 bits
(csrc/weight_digest.h). bfloat16 and float16 are widened exactly, zeros count nothing. So it does not
depend on how tensors are fused, ordered, sharded or padded. One changed element is always seen,
several are missed with probability 2^-32 or less; what moves within its place is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mrl.kernels import backend

MODULUS = 2**64
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""WeightType of csrc/weight_digest.h."""
CHUNK = 1 << 24
"""Elements that the torch form mixes at a time: it needs 12 bytes for each."""
LAYER = re.compile(r"^(?P<layer>.*?\.?layers\.\d+)\.(?:.*\.experts\.(?P<expert>\d+)\.)?")


def weight_digest(weights: Tensor, num_groups: int = 1) -> list[int]:
    """Compute one digest in [0, 2^64) for each of `num_groups` equal parts of `weights`, in
    memory order.

    Raises ValueError for another dtype than float32, bfloat16 and float16, or parts that are unequal.
    """
    return [number % MODULUS for number in weight_sums([(weights, num_groups)]).tolist()]


def weight_sums(parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Return i64[sum of num_groups]: `weight_digest` of each (weights, num_groups), modulo 2^64,
    signed.

    All on one device, and nothing waits for it: read the whole answer in one copy. Raises as
    `weight_digest` does.
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
    """[num_groups, N] of `weights`, in memory order."""
    if weights.dtype not in TYPES:
        raise ValueError(
            f"weights: got {weights.dtype}, expected float32, bfloat16 or float16: the digest of "
            "quantised weights says nothing about those that were sent"
        )
    if num_groups < 1 or weights.numel() % num_groups:
        raise ValueError(
            f"num_groups: got {num_groups}, expected a divisor of {weights.numel()} elements"
        )
    return weights.detach().contiguous().view(num_groups, -1)


def digest_in_torch(rows: Sequence[Tensor]) -> Tensor:
    """The same sums i64[R] of all rows of `rows` [R_i, N_i], on any device, in bounded memory.

    Works on CHUNK elements of as many rows as fit: about 25 launches for each chunk, whatever the
    number of parameters. Integer sums wrap modulo 2^64, so a row is the difference of running sums.
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
        for dtype in {part.dtype for _, part in pieces}:  # the fast path takes one type at a time
            same = [i for i, (_, part) in enumerate(pieces) if part.dtype == dtype]
            torch._foreach_copy_([views[i] for i in same], [pieces[i][1] for i in same])
        bits = whole.view(torch.int32)
        _mix(bits)
        ends = torch.tensor(sizes).cumsum(0).sub_(1).to(device)
        totals = bits.cumsum(0, dtype=torch.int64)[ends]
        totals[1:] -= totals[:-1].clone()
        sums.index_add_(0, torch.tensor([row for row, _ in pieces]).to(device), totals)
    return sums


def _chunks(flat: Sequence[Tensor]) -> Iterator[list[tuple[int, Tensor]]]:
    """(row, part of it), all elements once and in order, up to CHUNK elements at a time."""
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
    """MixBits of csrc/weight_digest.h on i32[N], in place.

    Products wrap modulo 2^32; >> keeps the sign, so what it brings in is masked out.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= 0x85EBCA6B - 2**32
    x ^= (x >> 13) & 0x7FFFF
    x *= 0xC2B2AE35 - 2**32
    x ^= (x >> 16) & 0xFFFF


def digest_place(name: str) -> str:
    """Return the module under which a Hugging Face weight (or an engine's parameter) is counted.

    `model.layers.3.mlp.experts.7.up_proj.weight` in `model.layers.3.experts.7`, everything else of a
    layer in `model.layers.3`, the rest in its own module, e.g. `lm_head`.
    """
    if found := LAYER.match(name):
        layer, expert = found["layer"], found["expert"]
        return layer if expert is None else f"{layer}.experts.{expert}"
    return name.rpartition(".")[0] or name


def add_digests(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Add up the digest of each place from those of its parts."""
    total: dict[str, int] = {}
    for place, digest in parts:
        total[place] = (total.get(place, 0) + digest) % MODULUS
    return total


def digests_of(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, int]]:
    """(place, digest) of each named weight."""
    for name, tensor in tensors:
        yield digest_place(name), weight_digest(tensor)[0]

"""Element-wise deltas between two versions of the same weights, as bytes.

A delta holds the elements whose bits changed, and their positions. It is lossless and independent of
the dtype, because elements are compared, sent and written as bits. csrc/weight_delta.h has the format
of the positions.

Dimensions: N elements of s bytes each, K chunks of CHUNK elements, n changed elements. The bytes of a
delta, one part after the other:

    changed         u32[K], how many elements of each chunk changed
    position_bytes  u32[K], the number of bytes of each chunk's positions
    values          n elements of s bytes
    positions       u8[sum of position_bytes]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mrl.kernels import backend

CHUNK = 1 << 16
"""Number of elements of a chunk: `kDeltaChunk` of csrc/weight_delta.h."""
LONG_GAP = 255
TORCH_PIECE = 64 * CHUNK
"""Number of elements that `encode_in_torch` compares at a time."""
PIECE_BYTES = 64
"""The memory that `encode_in_torch` needs if most elements changed, in bytes for each of the
TORCH_PIECE elements."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Maps the size of an element in bytes to the integer dtype in which elements are compared."""


class Encoded(NamedTuple):
    """A delta, and the number of elements that it changes."""

    payload: Tensor | None
    """u8[num_bytes] on the CPU; None if it would be larger than allowed."""
    num_changed: int


def encode(previous: Tensor, current: Tensor, element_size: int, max_bytes: int) -> Encoded:
    """Return the delta that turns `previous` into `current`, if it has at most `max_bytes` bytes.

    previous: u8[N * element_size] on the CPU. current: the same number of bytes, on the CPU or on a
    GPU. If `current` is on a GPU, the comparison runs there. Raises ValueError if the two sizes
    differ, or if `element_size` is not 1, 2, 4 or 8 or does not divide the size.
    """
    num_elements = _num_elements(previous, element_size)
    if current.numel() != previous.numel():
        raise ValueError(
            f"current: got {current.numel()} B, expected {previous.numel()} B, as of `previous`"
        )
    if current.device.type != "cpu":
        return encode_in_torch(previous, current, element_size, max_bytes)
    num_chunks = _num_chunks(num_elements)
    counts = torch.empty(2, num_chunks, dtype=torch.int32)
    marks = torch.empty(num_chunks * CHUNK // 64, dtype=torch.int64)
    shared = {
        "after": current,
        "element_size": element_size,
        "num_elements": num_elements,
        "marks": marks,
        "changed": counts[0],
        "position_bytes": counts[1],
    }
    backend.run("weight_delta_mark", current.device, before=previous, **shared)
    num_changed, values_at, positions_at, num_bytes = _layout(counts, element_size)
    if num_bytes > max_bytes:
        return Encoded(None, num_changed)
    payload = torch.empty(num_bytes, dtype=torch.uint8)
    payload[:values_at] = counts.view(-1).view(torch.uint8)
    backend.run(
        "weight_delta_encode",
        current.device,
        **shared,
        value_starts=_starts(counts[0]),
        position_starts=_starts(counts[1]),
        values=payload[values_at:],
        positions=payload[positions_at:],
    )
    return Encoded(payload, num_changed)


def apply(base: Tensor, payload: Tensor, element_size: int) -> None:
    """Turn `base`, the version that a delta was made from, into the newer version, in place.

    base: u8[N * element_size], and payload: u8[num_bytes], both on the CPU. It is not checked that
    `base` is the right version. Raises ValueError if `payload` is not a delta for N elements;
    `base` may then hold neither version.
    """
    num_elements = _num_elements(base, element_size)
    num_chunks = _num_chunks(num_elements)
    if payload.numel() < 8 * num_chunks:
        raise ValueError(f"payload: got {payload.numel()} B, expected at least {8 * num_chunks} B")
    counts = payload[: 8 * num_chunks].view(torch.int32).view(2, num_chunks)
    _, values_at, positions_at, num_bytes = _layout(counts, element_size)
    if payload.numel() != num_bytes or bool(counts.lt(0).any()):
        raise ValueError(
            f"payload: got {payload.numel()} B, expected {num_bytes} B by its counts of elements"
        )
    backend.run(
        "weight_delta_apply",
        base.device,
        base=base,
        element_size=element_size,
        num_elements=num_elements,
        changed=counts[0],
        position_bytes=counts[1],
        value_starts=_starts(counts[0]),
        position_starts=_starts(counts[1]),
        values=payload[values_at:],
        positions=payload[positions_at:],
    )


def encode_in_torch(
    previous: Tensor, current: Tensor, element_size: int, max_bytes: int
) -> Encoded:
    """Compute `encode` with torch's ops on the device of `current`, in bounded memory.

    TORCH_PIECE elements are compared at a time, which takes up to PIECE_BYTES bytes for each.
    """
    before, after = previous.view(BITS[element_size]), current.view(BITS[element_size])
    if not after.numel():
        return Encoded(torch.empty(0, dtype=torch.uint8), 0)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    num_changed, room = 0, max_bytes
    for old, new in zip(before.split(TORCH_PIECE), after.split(TORCH_PIECE), strict=True):
        differs = old.to(new.device) != new
        num = int(differs.sum())
        num_changed, room = num_changed + num, room - num * element_size
        if room >= 0:
            found.append(_encode_piece(differs, new))
    if room < 0:
        return Encoded(None, num_changed)
    counts, values, positions = zip(*found, strict=True)
    parts = [torch.cat(counts, dim=1).view(-1), torch.cat(values), torch.cat(positions)]
    payload = torch.cat([part.view(torch.uint8) for part in parts])
    return Encoded(payload if payload.numel() <= max_bytes else None, num_changed)


def _encode_piece(differs: Tensor, current: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode the deltas of K consecutive chunks. The last chunk may have fewer than CHUNK elements.

    differs: bool[M], true for the elements that changed. current: [M], the newer version. Returns
    three tensors on the CPU: i32[2, K] with the rows `changed` and `position_bytes`, the values
    [n], and the positions, u8[sum of position_bytes] (see the module docstring).
    """
    device = differs.device
    at = differs.nonzero().view(-1)
    chunks = at // CHUNK
    num_chunks = _num_chunks(differs.numel())
    sizes = torch.full((num_chunks,), CHUNK, device=device)
    sizes[-1] = differs.numel() - (num_chunks - 1) * CHUNK
    changed = torch.bincount(chunks, minlength=num_chunks)
    has_bitmap = 8 * changed > sizes
    former = torch.cat([at.new_full((1,), -1), at])[:-1]
    gaps = at - torch.maximum(former, chunks * CHUNK - 1) - 1
    num_long = gaps // LONG_GAP
    gap_bytes = torch.zeros_like(changed).index_add_(0, chunks, num_long + 1)
    position_bytes = torch.where(has_bitmap, (sizes + 7) // 8, gap_bytes)
    positions = torch.full((int(position_bytes.sum()),), LONG_GAP, dtype=torch.uint8, device=device)
    # A gap ends in the byte that its chunk's gaps and the bitmaps of earlier chunks have reached.
    bitmap_bytes = torch.where(has_bitmap, position_bytes, 0).cumsum(0)
    by_gap = ~has_bitmap[chunks]
    ends = (num_long + 1)[by_gap].cumsum(0) - 1 + bitmap_bytes[chunks[by_gap]]
    positions[ends] = (gaps - LONG_GAP * num_long)[by_gap].to(torch.uint8)
    starts = _starts(position_bytes)
    for chunk in has_bitmap.nonzero().view(-1).tolist():
        packed = _pack_bits(differs[chunk * CHUNK : (chunk + 1) * CHUNK])
        positions[int(starts[chunk]) :][: packed.numel()] = packed
    counts = torch.stack([changed, position_bytes]).to(torch.int32)
    return counts.cpu(), current[at].cpu(), positions.cpu()


def _pack_bits(bits: Tensor) -> Tensor:
    """Return u8[ceil(M / 8)] with the first of the bits bool[M] in the lowest bit of the first byte."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8))
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded.view(-1, 8) * powers).sum(1, dtype=torch.uint8)


def _layout(counts: Tensor, element_size: int) -> tuple[int, int, int, int]:
    """Return (n, offset of the first byte of `values`, offset of the first byte of `positions`,
    number of bytes of the whole delta). counts: i32[2, K], the parts `changed` and
    `position_bytes`."""
    num_changed, position_bytes = counts.sum(1).tolist()
    values_at = counts.nbytes
    positions_at = values_at + num_changed * element_size
    return num_changed, values_at, positions_at, positions_at + position_bytes


def _starts(sizes: Tensor) -> Tensor:
    """Return i64[K]: for each of the K sizes the sum of all sizes before it."""
    return sizes.cumsum(0) - sizes


def _num_chunks(num_elements: int) -> int:
    return -(-num_elements // CHUNK)


def _num_elements(flat: Tensor, element_size: int) -> int:
    if element_size not in BITS or flat.numel() % element_size:
        raise ValueError(
            f"element_size: got {element_size} for {flat.numel()} B, expected a divisor among "
            f"{list(BITS)}"
        )
    return flat.numel() // element_size

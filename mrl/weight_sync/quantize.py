"""Quantises the buckets of an export before they are sent to engines (`rollout.quantization`).

The values that are quantised are those of the export, which the trainer's own forward pass uses. The
optimizer's float32 copies would be quantised to other values.

The export's digests prove that a bucket was gathered correctly. This module compares them with the
bucket's weights, and gives the bucket new digests, of what the engine will hold: on GPUs the
quantised weights and their scales, on CPUs the dequantised weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from mrl.errors import NotFinite
from mrl.kernels.digest import add_digests, digests_of
from mrl.quantization import SCHEMES, Scheme, quantized_tensors
from mrl.system.shared_memory import SharedMemory
from mrl.types import WeightBucket

NUM_BUFFERS = 2
ADVICE = "start the run again, it continues from its last checkpoint, and report this"


def quantized_buckets(
    buckets: Iterator[WeightBucket], quantization: str, memory: SharedMemory
) -> Iterator[WeightBucket]:
    """Yield each bucket with its matrices quantised as `rollout.quantization` says; `none` leaves the
    buckets as they are.

    Quantised buckets are written into memory of their own. On CPUs they are written into buffers 0 and
    1 of `memory` in turn, so a bucket is overwritten when the second bucket after it is requested.
    Raises RuntimeError if a bucket's weights do not have the digests that the bucket carries, or if a
    quantised weight is further from its original than rounding explains; ValueError if a weight is not
    finite.
    """
    if quantization == "none":
        yield from buckets
        return
    scheme = SCHEMES[quantization]
    try:
        for number, bucket in enumerate(buckets):
            yield _quantized(bucket, scheme, memory, number % NUM_BUFFERS)
    finally:
        for _ in buckets:  # other ranks wait for this rank's part of the export
            pass


def _quantized(
    bucket: WeightBucket, scheme: Scheme, memory: SharedMemory, number: int
) -> WeightBucket:
    """Return a bucket with quantised matrices, in the buffer `number`."""
    if bucket.digest is not None and add_digests(digests_of(bucket.tensors)) != bucket.digest:
        raise RuntimeError(
            f"weight sync to version {bucket.version}: the gathered weights have other digests "
            f"than the ranks' shards: they were corrupted in between; {ADVICE}"
        )
    for name, weight in bucket.tensors:
        if not bool(weight.isfinite().all()):
            raise NotFinite(
                f"weight sync to version {bucket.version}: {name} has NaN or infinity and cannot be "
                "quantised; look at the model with mrl check --deep, or continue from an earlier "
                "checkpoint"
            )
    tensors = quantized_tensors(bucket.tensors, scheme)
    flat, path, views = _packed(list(tensors), memory, number)
    held = list(_held(dict(bucket.tensors), views, scheme))
    return dataclasses.replace(
        bucket,
        tensors=list(views.items()),
        flat=flat,
        shared_path=path,
        digest=add_digests(digests_of(held)),
        sent_digest=add_digests(digests_of(views.items())),
    )


def _packed(
    tensors: list[tuple[str, Tensor]], memory: SharedMemory, number: int
) -> tuple[Tensor, str | None, dict[str, Tensor]]:
    """Copy tensors end to end into one u8[num_bytes]. Return it, the path of its file (None on GPUs),
    and the views of the tensors by name."""
    # A view of bytes must start at a multiple of its element size, so large elements come first.
    tensors = sorted(tensors, key=lambda item: -item[1].element_size())
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    path = None
    device = tensors[0][1].device if tensors else torch.device("cpu")
    if device.type == "cpu":
        buffer = memory.take(size, number)
        flat, path = buffer.tensor[:size], buffer.path
    else:
        flat = torch.empty(size, dtype=torch.uint8, device=device)
    views: dict[str, Tensor] = {}
    start = 0
    for name, tensor in tensors:
        end = start + tensor.numel() * tensor.element_size()
        views[name] = flat[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start = end
    return flat, path, views


def _held(
    weights: dict[str, Tensor], views: dict[str, Tensor], scheme: Scheme
) -> Iterator[tuple[str, Tensor]]:
    """Yield pairs (name, tensor) of what the engine will hold: on GPUs the tensors that are sent, on
    CPUs the dequantised weights. Raises RuntimeError if a quantised weight differs from its original in
    `weights` by more than rounding explains."""
    for name, weight in weights.items():
        scales = views.get(name + scheme.suffix)
        if scales is None:
            yield name, views[name]
            continue
        values = scheme.dequantize(views[name], scales, torch.float32)
        error = (values - weight.float()).abs_()
        bound = scheme.largest_error(weight, scales)
        if not bool((error <= bound).all()):
            row, column = divmod(int((error > bound).flatten().int().argmax()), weight.shape[1])
            raise RuntimeError(
                f"{name}: the element [{row}, {column}] is {float(weight[row, column]):g}, and "
                f"{float(values[row, column]):g} when it is quantised and packed; {ADVICE}"
            )
        if weight.device.type == "cpu":
            yield name, values.to(weight.dtype)
        else:
            yield name, views[name]
            yield name + scheme.suffix, scales

"""Quantises the buckets of an export before they are sent to engines (`rollout.quantization`).

The values that are quantised are those of the export, which the trainer's own forward pass uses. The
optimizer's float32 copies would be quantised to other values.

The export's digests prove that a bucket was gathered correctly. They are compared here, and the bucket
gets new digests, of what the engine will hold: on GPUs the quantised weights and their scales, on CPUs
the dequantised weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mrl.kernels.digest import add_digests, digests_of
from mrl.quantization import SCHEMES, Scheme, is_quantized
from mrl.system.shared_memory import SharedMemory
from mrl.types import WeightBucket

NUM_BUFFERS = 2


def quantized_buckets(
    buckets: Iterator[WeightBucket], quantization: str, memory: SharedMemory
) -> Iterator[WeightBucket]:
    """Yield each bucket with its matrices quantised as `rollout.quantization` says; `none` leaves the
    buckets as they are.

    The buckets have memory of their own: on CPUs in `memory`, numbered from 0. There are two buffers,
    so a bucket is overwritten when the second bucket after it is requested. Raises RuntimeError if a
    bucket does not have the digests that it carries, and ValueError if a weight is not finite.
    """
    if quantization == "none":
        yield from buckets
        return
    scheme = SCHEMES[quantization]
    for number, bucket in enumerate(buckets):
        yield _quantized(bucket, scheme, memory, number % NUM_BUFFERS)


def _quantized(
    bucket: WeightBucket, scheme: Scheme, memory: SharedMemory, number: int
) -> WeightBucket:
    if bucket.digest is not None and add_digests(digests_of(bucket.tensors)) != bucket.digest:
        raise RuntimeError(
            f"weight sync to version {bucket.version}: the gathered weights have other digests than "
            "the ranks' shards, so they were corrupted on the way; start the run again, it continues "
            "from its last checkpoint, and report this"
        )
    tensors: list[tuple[str, Tensor]] = []
    held: list[tuple[str, Tensor]] = []
    for name, weight in bucket.tensors:
        if not is_quantized(name, weight.dim()):
            tensors.append((name, weight))
            held.append((name, weight))
            continue
        quantized, scales = scheme.quantize(weight)
        tensors += [(name, quantized), (name + scheme.suffix, scales)]
        if weight.device.type == "cpu":
            held.append((name, scheme.dequantize(quantized, scales, weight.dtype)))
        else:
            held += tensors[-2:]
    # Views of a byte buffer need starts that are multiples of the element size.
    tensors.sort(key=lambda item: -item[1].element_size())
    return _packed(bucket, tensors, add_digests(digests_of(held)), memory, number)


def _packed(
    bucket: WeightBucket,
    tensors: list[tuple[str, Tensor]],
    digest: dict[str, int],
    memory: SharedMemory,
    number: int,
) -> WeightBucket:
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    device, path = tensors[0][1].device, None
    if device.type == "cpu":
        buffer = memory.take(size, number)
        flat, path = buffer.tensor[:size], buffer.path
    else:
        flat = torch.empty(size, dtype=torch.uint8, device=device)
    views, start = [], 0
    for name, tensor in tensors:
        end = start + tensor.numel() * tensor.element_size()
        view = flat[start:end].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        views.append((name, view))
        start = end
    return WeightBucket(
        views,
        bucket.version,
        flat=flat,
        is_last=bucket.is_last,
        shared_path=path,
        digest=digest,
        digest_s=bucket.digest_s,
    )

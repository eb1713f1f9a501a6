"""Replace weights by the values that an engine with quantised weights holds, for a measurement.

Scales belong to blocks of the whole matrices, which may span several ranks. So each matrix is gathered
by the export, quantised and dequantised, and every rank takes its shard of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mrl.system.shared_memory import SharedMemory
from parallel.export import export_buckets
from parallel.shards import join, take_shard
from parallel.weights import WeightMap

FakeQuantize = Callable[[str, Tensor], Tensor]
"""Takes the name of a weight in Hugging Face's format and the weight. Returns, in
the same shape and dtype, the values that an engine with quantised weights holds."""


@contextmanager
def fake_quantized(
    weights: WeightMap,
    fake_quantize: FakeQuantize,
    max_bytes: int,
    memory: SharedMemory,
    dtype: torch.dtype | None,
) -> Iterator[None]:
    """Context manager. Replaces the weights with the results of `fake_quantize`, and restores the
    weights bit for bit when the `with` statement ends. A collective.

    `max_bytes`, `memory` and `dtype` are those of `parallel.export.export_buckets`: values are cast to
    the dtype of the export before they are quantised. Each rank needs memory for a copy of its shards.
    """
    originals: list[tuple[Tensor, Tensor]] = []
    try:
        _replace(weights, fake_quantize, max_bytes, memory, dtype, originals)
        yield
    finally:
        with torch.no_grad():
            for parameter, original in originals:
                parameter.copy_(original)


@torch.no_grad()
def _replace(
    weights: WeightMap,
    fake_quantize: FakeQuantize,
    max_bytes: int,
    memory: SharedMemory,
    dtype: torch.dtype | None,
    originals: list[tuple[Tensor, Tensor]],
) -> None:
    """Replace the weights, and append pairs (parameter, copy of its original values) to
    `originals`."""
    by_name = {entry.hf_names()[0]: entry for entry in weights.entries if not entry.rule.is_buffer}
    for bucket in export_buckets(weights, 0, max_bytes, memory, dtype):
        tensors = dict(bucket.tensors)
        for name in tensors.keys() & by_name.keys():
            entry = by_name[name]
            parts = [fake_quantize(each, tensors[each]) for each in entry.hf_names()]
            if all(
                part is tensors[each] for part, each in zip(parts, entry.hf_names(), strict=True)
            ):
                continue
            rank, size = weights.tp_place(entry)
            full = join(parts, entry.rule.split, weights.num_groups)
            originals.append((entry.parameter.data, entry.parameter.detach().clone()))
            entry.parameter.copy_(take_shard(full, entry.rule.split, rank, size))

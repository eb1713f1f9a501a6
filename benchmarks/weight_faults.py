"""This module makes faulty weight updates, to show that each is caught before a token is generated.

Every fault is drawn from a seed: one random tensor of the model is left out, sent twice, or has one
random bit of one random element flipped, on the trainer's side or on the way to the engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from mrl.engines.sglang.manifest import Manifest
from mrl.engines.sglang.weights.base import WeightPush
from mrl.engines.sglang.weights.update import WeightUpdater
from mrl.kernels.digest import add_digests, digests_of
from mrl.system.shared_memory import SharedMemory
from mrl.types import WeightBucket
from mrl.weight_sync.transports import push_of

Weights = Sequence[tuple[str, Tensor]]
FAULTS = ("dropped", "doubled", "flipped", "dropped on the way", "doubled on the way")


def updater_for(engine: Any, model: Path, method: str = "tensor") -> WeightUpdater:
    """Make another updater for the server of a running engine."""
    manifest = Manifest(model, AutoConfig.from_pretrained(model))
    num_ranks = engine.core.config.tensor_parallel_size
    push = push_of(method)
    return WeightUpdater(engine.connection, manifest, num_ranks=num_ranks, push=push)


def shared_buckets(
    weights: Weights, version: int, memory: SharedMemory, *, num_buckets: int = 3
) -> Iterator[WeightBucket]:
    """Yield what parallel/export.py gives on a CPU: shared memory, digests from before the copy."""
    size = -(-len(weights) // num_buckets)
    for number, start in enumerate(range(0, len(weights), size)):
        part = weights[start : start + size]
        digest = add_digests(digests_of(part))
        whole = sum(t.numel() * t.element_size() for _, t in weights)
        shared = memory.take(whole, number % 2)  # the engine may still read the one before
        views, end = [], 0
        for name, tensor in part:
            first, end = end, end + tensor.numel() * tensor.element_size()
            view = shared.tensor[first:end].view(tensor.dtype).view(tensor.shape)
            views.append((name, view.copy_(tensor)))
        yield WeightBucket(
            views,
            version,
            flat=shared.tensor[:end],
            is_last=start + size >= len(weights),
            shared_path=shared.path,
            digest=digest,
        )


def moved(weights: Weights, version: int) -> list[tuple[str, Tensor]]:
    """Return the weights of another step: every tensor differs from that of any other version."""
    return [(name, tensor + 1e-3 * (1 + version)) for name, tensor in weights]


class Fault:
    """A fault changes one tensor of one update."""

    def __init__(self, kind: str, weights: Weights, rng: random.Random) -> None:
        self.kind = kind
        self._rng = rng
        self.name, tensor = rng.choice(list(weights))
        # Another weight of the same values in its place would be no fault: norms start as ones.
        twins = [n for n, t in weights if t.shape == tensor.shape and not torch.equal(t, tensor)]
        self._twin = rng.choice(twins) if twins else None

    def in_buckets(self, buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
        """Put the fault on the trainer's side, where the sync counts what it gets."""
        for bucket in buckets:
            names = [name for name, _ in bucket.tensors]
            at = names.index(self.name) if self.name in names else None
            if at is None or self.kind.endswith("on the way"):
                yield bucket
            elif self.kind == "dropped":
                yield _without_buffer(bucket, bucket.tensors[:at] + bucket.tensors[at + 1 :])
            elif self.kind == "doubled":
                yield _without_buffer(bucket, [*bucket.tensors, bucket.tensors[at]])
            else:
                flip_bit(bucket.tensors[at][1], self._rng)
                yield bucket

    def on_the_way(self, push: WeightPush) -> WeightPush:
        """Put the fault after the sync's counting: what leaves is not what was counted."""
        return _LossyPush(push, self)

    def of_bucket(self, bucket: WeightBucket) -> WeightBucket:
        tensors = dict(bucket.tensors)
        if self.kind == "dropped on the way" or self._twin is None:
            tensors.pop(self.name, None)
        elif self.name in tensors:  # loaded twice: in its own place and in another's
            return _without_buffer(
                bucket, [*((n, t) for n, t in bucket.tensors if n != self._twin),
                         (self._twin, tensors[self.name])]
            )  # fmt: skip
        elif self._twin in tensors:
            tensors.pop(self._twin)
        return _without_buffer(bucket, list(tensors.items()))


class _LossyPush:
    needs_session = True

    def __init__(self, inner: WeightPush, fault: Fault) -> None:
        self._inner, self._fault = inner, fault
        self.close, self.finish, self.settle = inner.close, inner.finish, inner.settle

    def push(self, bucket: WeightBucket) -> None:
        self._inner.push(self._fault.of_bucket(bucket))


def _without_buffer(bucket: WeightBucket, tensors: list[tuple[str, Tensor]]) -> WeightBucket:
    """Return the bucket with other tensors than those that lie end to end in its own memory."""
    return replace(bucket, tensors=tensors, flat=None, shared_path=None)


def flip_bit(tensor: Tensor, rng: random.Random) -> None:
    """Flip one random bit of one random element, in place."""
    as_bytes = tensor.view(-1).view(torch.uint8)
    as_bytes[rng.randrange(as_bytes.numel())] ^= 1 << rng.randrange(8)


def is_caught(
    sync: WeightUpdater, weights: Weights, version: int, kind: str, seed: int
) -> str | None:
    """Return the error that an update with this fault ends in; None where it is not caught."""
    fault = Fault(kind, weights, random.Random(seed))
    buckets = shared_buckets(moved(weights, version), version, SharedMemory())
    good, sync._push = sync._push, sync._push
    if kind.endswith("on the way"):
        sync._push = fault.on_the_way(good)
    try:
        sync.update(fault.in_buckets(buckets), version)
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        sync._push = good
    return None

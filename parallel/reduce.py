"""Statistics of all ranks -> plain numbers, the same on every rank."""

from __future__ import annotations

import math

import torch.distributed as dist

from mrl.types import Max, Mean, Statistics


def merge(parts: list[Statistics]) -> Statistics:
    """Statistics of several micro-batches of one rank, keys united."""
    merged: Statistics = {}
    for part in parts:
        for key, value in part.items():
            known = merged.get(key)
            if known is None:
                merged[key] = value
            elif isinstance(value, Mean) and isinstance(known, Mean):
                merged[key] = Mean(known.total + value.total, known.count + value.count)
            elif isinstance(value, Max) and isinstance(known, Max):
                merged[key] = Max(known.value.maximum(value.value))
            else:
                raise TypeError(f"statistic {key!r} is a Mean in one place and a Max in another")
    return merged


def reduce_statistics(stats: Statistics) -> dict[str, float]:
    """Over all ranks, in rank order and in fp64. A collective; ranks may hold different keys.

    A mean over nothing is NaN: it was not measured.
    """
    mine = {
        key: (float(v.total), float(v.count)) if isinstance(v, Mean) else float(v.value)
        for key, v in stats.items()
    }
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    result: dict[str, float] = {}
    for key in dict.fromkeys(key for part in everyone for key in part):
        values = [part[key] for part in everyone if key in part]
        if isinstance(values[0], tuple):
            count = sum(c for _, c in values)
            result[key] = sum(t for t, _ in values) / count if count else math.nan
        else:
            result[key] = max(values)
    return result

"""This module reduces the statistics of all ranks to plain numbers, the same on every rank."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.system.histogram import NUM_BINS, quantile
from mrl.types import Max, Mean, Quantiles, Statistic, Statistics, Sum


def merge(parts: list[Statistics]) -> Statistics:
    """Merge the statistics of several micro-batches of one rank; keys are united."""
    merged: Statistics = {}
    for part in parts:
        for key, value in part.items():
            known = merged.get(key)
            merged[key] = value if known is None else _add(key, known, value)
    return merged


def _add(key: str, a: Statistic, b: Statistic) -> Statistic:
    if isinstance(a, Mean) and isinstance(b, Mean):
        return Mean(a.total + b.total, a.count + b.count)
    if isinstance(a, Sum) and isinstance(b, Sum):
        return Sum(a.value + b.value)
    if isinstance(a, Max) and isinstance(b, Max):
        return Max(a.value.maximum(b.value))
    if isinstance(a, Quantiles) and isinstance(b, Quantiles) and a.reported == b.reported:
        return Quantiles(a.counts + b.counts, a.reported)
    raise TypeError(f"statistic {key!r} is of two kinds: {type(a).__name__}, {type(b).__name__}")


def reduce_statistics(stats: Statistics) -> dict[str, float]:
    """Reduce over all ranks, in rank order and in fp64. A collective; ranks may hold different keys.

    A mean over nothing is NaN: it was not measured.
    """
    mine = _plain(stats)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    result: dict[str, float] = {}
    for key in dict.fromkeys(key for part in everyone for key in part):
        parts = [part[key] for part in everyone if key in part]
        kind, values = parts[0][0], [numbers for _, *numbers in parts]
        if kind == "Max":
            found = [value for (value,) in values]
            result[key] = math.nan if any(map(math.isnan, found)) else max(found)
        elif kind == "Quantiles":
            result |= _quantiles(values)
        else:
            total, *count = (math.fsum(column) for column in zip(*values, strict=True))
            divisor = count[0] if count else 1.0
            result[key] = total / divisor if divisor else math.nan
    return result


def _quantiles(parts: list[list[Any]]) -> dict[str, float]:
    """Parts of all ranks, each (counts by bin, what is reported)."""
    total = [0] * NUM_BINS
    for counts, _ in parts:
        for place, count in counts:
            total[place] += count
    return {key: quantile(total, q) for key, q in parts[0][1]}


def _plain(stats: Statistics) -> dict[str, tuple[Any, ...]]:
    """Plain numbers. All scalars are read in one go: a GPU is waited for once, not once a number."""
    scalars = [tensor for value in stats.values() for tensor in _scalars(value)]
    numbers = iter(_read(scalars))
    plain: dict[str, tuple[Any, ...]] = {}
    for key, value in stats.items():
        if isinstance(value, Quantiles):
            counts = value.counts.tolist()
            found = ("Quantiles", [(i, n) for i, n in enumerate(counts) if n], value.reported)
        else:
            found = (type(value).__name__, *(next(numbers) for _ in _scalars(value)))
        plain[key] = found
    return plain


def _scalars(value: Statistic) -> tuple[Tensor, ...]:
    if isinstance(value, Quantiles):
        return ()
    return (value.total, value.count) if isinstance(value, Mean) else (value.value,)


def _read(scalars: list[Tensor]) -> list[float]:
    """Their values in fp64, which holds those of fp32 and counts below 2^53."""
    by_device: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(scalars):
        by_device.setdefault(tensor.device, []).append(place)
    found = [0.0] * len(scalars)
    for places in by_device.values():
        mine = [scalars[place].detach().double().reshape(()) for place in places]
        for place, value in zip(places, torch.stack(mine).tolist(), strict=True):
            found[place] = value
    return found

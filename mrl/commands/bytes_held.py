"""Says in words who holds the memory of a rank, for the report of a run that ran out of it."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from mrl.system.files import bytes_in_words
from mrl.types import Max, SampleGroup
from parallel.ledger import Bytes

if TYPE_CHECKING:
    from mrl.trainer import Trainer

_NAMES = {"parameters": "weights", "critic_parameters": "critic_weights"}
"""The ledger's kinds that users call otherwise."""


def bytes_held(trainer: Trainer) -> str:
    """Return the bytes of this rank by owner: the ledger's kinds, routes, the engine, and the rest."""
    where = trainer.policy.ledger.where()
    device = trainer.mesh.device
    if device.type == "cuda":
        own = torch.cuda.max_memory_allocated(device)
        place = "on the GPU"
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        place = "in the process"
    numbers = trainer.collector.statistics()
    found = [each for key, each in numbers.items() if _is_engine(key, device)]
    engine = max((float(each.value) for each in found if isinstance(each, Max)), default=0.0)
    return in_words(where, own, place, route_bytes(trainer.collector.groups), int(engine))


def in_words(where: Mapping[str, Bytes], own: int, place: str, routes: int, engine: int) -> str:
    """Return the text for the ledger's `where`, the peak bytes of the trainer's `own` process or
    device, the routes of the step, and the engine."""
    parts = []
    for kind, count in where.items():
        name = _NAMES.get(kind, kind)
        if count.device:
            parts.append(f"{name} {bytes_in_words(count.device)}")
        if count.host:
            parts.append(f"{name} on the host {bytes_in_words(count.host)}")
    rest = max(0, own - sum(count.device for count in where.values()))
    parts.append(
        f"activations and all else {place} {bytes_in_words(rest)} at most (the peak less the above)"
    )
    parts.append(f"routes of the step {bytes_in_words(routes)}")
    parts.append(f"the engine {bytes_in_words(engine)}" if engine else "the engine unknown")
    return ", ".join(parts)


def route_bytes(groups: Iterable[SampleGroup]) -> int:
    """Return the bytes of the routes that this rank holds of a step; those of others have none here."""
    traces = (sample.routing for group in groups for sample in group.samples)
    tensors = (
        tensor
        for trace in traces
        if trace is not None
        for tensor in (trace.expert_ids, trace.expert_weights)
        if tensor is not None and tensor.device.type != "meta"
    )
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_engine(key: str, device: torch.device) -> bool:
    if device.type == "cuda":
        return key.startswith("memory/") and key.endswith("/engine_device_bytes")
    return key == "memory/engine_rss_bytes"

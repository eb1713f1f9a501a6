"""Describes what uses a rank's memory, for the report of a run that ran out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mrl.system.files import bytes_in_words
from mrl.system.memory_error import peak_bytes
from mrl.types import Max

if TYPE_CHECKING:
    from mrl.trainer import Trainer

_NAMES = {"parameters": "weights", "critic_parameters": "critic_weights"}
"""For some kinds of memory that `policy.ledger.where()` returns, the name that the report uses
instead."""


def bytes_held(trainer: Trainer) -> str:
    """Return a text that lists what uses this rank's memory.

    The list has an entry for each kind of memory that the policy accounts for (such as weights), one
    for the rest of the peak memory, one for the routes (expert ids and gate weights) of the step's
    samples, and one for the engine.
    """
    where, device = trainer.policy.ledger.where(), trainer.mesh.device
    parts = []
    for kind, count in where.items():
        name = _NAMES.get(kind, kind)
        if count.device:
            parts.append(f"{name} {bytes_in_words(count.device)}")
        if count.host:
            parts.append(f"{name} on the host {bytes_in_words(count.host)}")
    rest = max(0, peak_bytes(device) - sum(count.device for count in where.values()))
    place = "on the GPU" if device.type == "cuda" else "in the process"
    parts.append(
        f"activations and all else {place} {bytes_in_words(rest)} at most (the peak less the above)"
    )
    traces = (sample.routing for group in trainer.collector.groups for sample in group.samples)
    routes = sum(trace.num_bytes for trace in traces if trace is not None)
    parts.append(f"routes of the step {bytes_in_words(routes)}")
    numbers = trainer.collector.statistics()
    found = [each for key, each in numbers.items() if _is_engine(key, device)]
    engine = max((int(each.value) for each in found if isinstance(each, Max)), default=0)
    parts.append(f"the engine {bytes_in_words(engine)}" if engine else "the engine unknown")
    return ", ".join(parts)


def _is_engine(key: str, device: torch.device) -> bool:
    if device.type == "cuda":
        return key.startswith("memory/") and key.endswith("/engine_device_bytes")
    return key == "memory/engine_rss_bytes"

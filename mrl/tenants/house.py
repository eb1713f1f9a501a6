"""A house is what the tenants of a service share on one rank: the base model, and a way to engines."""

from __future__ import annotations

import resource
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from mrl.collect.base import Collector
from mrl.config.service import TenantLimits
from mrl.preflight import Plan
from mrl.run.folder import RunFolder
from mrl.system.files import bytes_in_words
from parallel.lora.shared_base import SharedBase
from parallel.mesh import Mesh


@dataclass
class House(ABC):
    """Holds what is there once, however many tenants come and go."""

    mesh: Mesh
    base: SharedBase
    limits: TenantLimits
    """What each tenant may use."""

    @abstractmethod
    def make_collector(self, plan: Plan, folder: RunFolder, name: str, weight: float) -> Collector:
        """Return what collects the groups of one tenant.

        Raises InputError for an adapter that the engines have no room for.
        """

    def bytes_held(self) -> str:
        """Return in words who holds how much of this rank's memory, for the report of a service that
        ran out of it."""
        where, device = self.base.ledger.where(), self.mesh.device
        parts = [f"{k} {bytes_in_words(n.device)}" for k, n in where.items() if n.device]
        on_host = sum(count.host for count in where.values())
        parts.append(f"all tenants on the host {bytes_in_words(on_host)}")
        if device.type == "cuda":
            peak, place = torch.cuda.max_memory_allocated(device), "GPU"
        else:
            peak, place = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "process"
        return ", ".join([*parts, f"the peak of the {place} was {bytes_in_words(peak)}"])

    @abstractmethod
    def start(self) -> None:
        """Start the engines. A collective."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engines. Harmless when repeated."""

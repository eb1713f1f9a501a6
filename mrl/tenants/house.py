"""A house is what the tenants of a service share on one rank: the base model, and a way to engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from mrl.collect.base import Collector
from mrl.config.service import TenantLimits
from mrl.preflight import Plan
from mrl.run.folder import RunFolder
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

    @abstractmethod
    def start(self) -> None:
        """Start the engines. A collective."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engines. Harmless when repeated."""

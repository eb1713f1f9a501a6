"""What the tenants of a service share on one rank: the base model, and the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mrl.collect.collector import Collector
from mrl.config import ServiceConfig
from mrl.preflight import Plan
from mrl.run.folder import RunFolder
from mrl.service.sessions.sampling import SessionEngines, SessionModel
from mrl.system.files import bytes_in_words
from mrl.system.memory_error import peak_bytes
from parallel.lora.shared_base import SharedBase
from parallel.mesh import Mesh


class SharedEngines(Protocol):
    """The engines that generate for all tenants. Every method but `close` is a collective."""

    @property
    def world(self) -> int:
        """The number of ranks of the service, including rollout ranks."""
        ...

    def start(self, base: SharedBase) -> None:
        """Start the engines."""
        ...

    def make_collector(
        self, plan: Plan, mesh: Mesh, folder: RunFolder, name: str, weight: float
    ) -> Collector:
        """Return the object that collects one tenant's sample groups. `name`: the tenant's name in
        the engines (`mrl.service.record.engine_name`).

        Raises InputError if the engines have no room for the adapter.
        """
        ...

    def make_sampling(self, session: SessionModel) -> SessionEngines:
        """Return the engines as one session uses them.

        Raises InputError if the engines have no room for the adapter.
        """
        ...

    def close(self) -> None:
        """Stop the engines. Harmless when repeated."""
        ...


Engines = TypeVar("Engines", bound=SharedEngines)


@dataclass
class SharedResources(Generic[Engines]):
    """The objects that exist once on a rank and are used by all tenants."""

    config: ServiceConfig
    mesh: Mesh
    base: SharedBase
    engines: Engines

    def bytes_held(self) -> str:
        """Return one line for the message about an out-of-memory error: how many bytes of this
        rank's memory each kind of tensor takes, and the peak."""
        where, device = self.base.ledger.where(), self.mesh.device
        parts = [f"{k} {bytes_in_words(n.device)}" for k, n in where.items() if n.device]
        on_host = sum(count.host for count in where.values())
        parts.append(f"all tenants on the host {bytes_in_words(on_host)}")
        place = "GPU" if device.type == "cuda" else "process"
        parts.append(f"the peak of the {place} was {bytes_in_words(peak_bytes(device))}")
        return ", ".join(parts)

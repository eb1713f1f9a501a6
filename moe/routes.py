"""Routes as the routers of one rank take them, and what a pass is told to replay.

n rows of this rank, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor


@dataclass(frozen=True)
class GatedRoute:
    """A layer's route with the gate weights to use."""

    ids: Tensor
    """i64[n, K]."""
    weights: Tensor
    """f32[n, K]: the factor of each chosen expert's output."""


Route = Tensor | GatedRoute
"""Expert ids i64[n, K] of a layer, alone or with their weights; NATIVE_ROUTE rows are free."""

Routes = Mapping[int, Route]
"""Routes by Megatron layer number, for this rank's rows; a layer left out decides for itself."""


def ids_of(route: Route) -> Tensor:
    """Return the expert ids i64[n, K] of a route, with or without weights."""
    return route.ids if isinstance(route, GatedRoute) else route


@dataclass(frozen=True)
class Replay:
    """A `Replay` says what the routers replay in a pass: `Replay.off` nothing, `Replay.rollout` the
    rollout's routes, `Replay.recorded(routes)` those of an earlier pass."""

    kind: Literal["off", "rollout", "recorded"]
    routes: tuple[Routes, ...] = ()
    """Routes by micro-batch, where `kind` is `recorded`."""

    off: ClassVar[Replay]
    """Every router decides for itself."""
    rollout: ClassVar[Replay]
    """The routes that the engine took, as the micro-batches carry them (R3)."""

    @classmethod
    def recorded(cls, routes: Sequence[Routes]) -> Replay:
        """Replay `routes`, one entry per micro-batch, such as an earlier pass recorded them (R2)."""
        return cls("recorded", tuple(routes))

    def of_batches(self, share: slice) -> Replay:
        """Return the same replay for a slice of the micro-batches."""
        return Replay(self.kind, self.routes[share])


Replay.off = Replay("off")
Replay.rollout = Replay("rollout")

"""Types for routes. The route of a layer says which experts were chosen for each token. A `Replay`
says which routes a pass over the model replays.

Dimensions: n rows (tokens) of this rank, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from moe.keys import Keys


@dataclass(frozen=True)
class GatedRoute:
    """The route of one layer, with the gate weights of the chosen experts."""

    ids: Tensor
    """i64[n, K]: the ids of the chosen experts; NATIVE_ROUTE in rows without a captured route."""
    weights: Tensor
    """f32[n, K]: the factor by which each chosen expert's output is multiplied."""


Route = Tensor | GatedRoute
"""Expert ids i64[n, K] of a layer, with or without gate weights. In rows whose ids are NATIVE_ROUTE,
the router chooses the experts."""

Routes = Mapping[int, Route]
"""Routes of this rank's rows, by Megatron's 1-based layer number. In a layer that is missing, the
router chooses the experts."""


def ids_of(route: Route) -> Tensor:
    """Return the expert ids i64[n, K] of a route that may or may not have gate weights."""
    return route.ids if isinstance(route, GatedRoute) else route


@dataclass(frozen=True)
class RouterScores:
    """The experts that a pass used, and how probable the routers found them (`moe.router_shift`)."""

    ids: Tensor
    """i16[n, L, K]: the experts of L layers."""
    logprobs: Tensor
    """f32[n, L, K]: the logarithms of the routers' softmax, over all experts, at `ids`."""


@dataclass(frozen=True)
class Replay:
    """The routes that a pass replays: none (`Replay.off`), the engine's (`Replay.rollout`), or
    those that an earlier pass recorded (`Replay.recorded(routes)`)."""

    kind: Literal["off", "rollout", "recorded"]
    routes: tuple[Routes, ...] = ()
    """One entry per micro-batch if `kind` is `recorded`, otherwise empty."""
    scores: tuple[RouterScores, ...] = ()
    """One entry per micro-batch if the training pass compares its routers with those of an earlier
    pass, otherwise empty."""
    keys: tuple[Keys, ...] = ()
    """One entry per micro-batch if the indexers of sparse attention replay their choice of keys,
    whatever the routers replay, otherwise empty."""

    off: ClassVar[Replay]
    """Every router chooses the experts itself."""
    rollout: ClassVar[Replay]
    """Every router replays the engine's routes, which the micro-batches carry (R3)."""

    @classmethod
    def recorded(cls, routes: Sequence[Routes]) -> Replay:
        """Replay the routes that an earlier pass of the trainer recorded (R2).

        routes: one entry per micro-batch.
        """
        return cls("recorded", tuple(routes))

    def of_batches(self, share: slice) -> Replay:
        """Return the replay for a part of the micro-batches, which the slice `share` selects."""
        return Replay(self.kind, self.routes[share], self.scores[share], self.keys[share])

    def compared_with(self, scores: Sequence[RouterScores]) -> Replay:
        """Return this replay for a pass that also compares its routers with those of an earlier
        pass."""
        return replace(self, scores=tuple(scores))

    def with_keys(self, keys: Sequence[Keys]) -> Replay:
        """Return this replay for a pass whose indexers also replay the choice of keys of an earlier
        pass with the same micro-batches (`PassOutput.chosen_keys`)."""
        return replace(self, keys=tuple(keys))


Replay.off = Replay("off")
Replay.rollout = Replay("rollout")

"""Replay routes in a Megatron model, in the forward pass and again in activation recompute.

Each router gets its own `LayerReplay` instead of Megatron's `RouterReplay`. `LayerReplay` has the
method that the router calls, so Megatron needs no patch. Megatron's class keeps one global list
over all models and pipeline chunks, replays either every token or none, accepts duplicate ids and
never empties its queue without recompute. A `LayerReplay` belongs to one layer of one model, lets
the router decide for rows without a captured route, and must have an empty queue when a step ends.

The gate weights are the trainer's own scores of the replayed experts, so the router learns (R3,
arXiv 2510.11370). With a `GatedRoute` the forward pass uses recorded weights instead, and their
gradient is passed on to the trainer's own weights (straight-through estimator, arXiv 1308.3432).

Dimensions: n rows of this rank, K experts per token, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe.routes import GatedRoute, Route, Routes, ids_of
from mrl.types import NATIVE_ROUTE


def margins(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return f32[n]: for each row the lowest score of a chosen expert minus the highest score of
    the other experts.

    scores: f32[n, E], the scores by which the router selects. chosen: i64[n, K], the selected
    experts. A margin can be negative under group-limited routing, where an expert of a group that
    was not selected may have a higher score.
    """
    left = scores.scatter(1, chosen, float("-inf")).amax(1)
    return (scores.gather(1, chosen).amin(1) - left).float()


def with_gates(probs: Tensor, route: GatedRoute) -> Tensor:
    """Return gate weights [n, E] that have the values of the route's weights and the gradient of
    `probs`.

    probs: [n, E], 0 except at the chosen experts. Rows without a captured route keep the values of
    `probs`.
    """
    own = probs.detach()
    places = route.ids.clamp(min=0)
    known = route.ids != NATIVE_ROUTE
    weights = torch.where(known, route.weights.to(own.dtype), own.gather(1, places))
    # Not probs + (weights - probs), whose rounding would change the weights.
    return own.scatter(1, places, weights) + (probs - own)


class LayerReplay:
    """The routes that one router replays: first in the forward pass, and again in activation
    recompute. The recomputes come in the order of the forward passes."""

    def __init__(self, layer_number: int, keep_for_recompute: bool) -> None:
        self.layer_number = layer_number
        self.native_ids: Tensor | None = None
        """i64[n, K]: the experts that the router would have chosen in the last forward pass without
        replay."""
        self.chosen: Tensor | None = None
        """i64[n, K]: the experts of the last forward pass or recompute, in the order of the route."""
        self.margins: Tensor | None = None
        """f32[n]: the result of `margins` for the last forward pass; None if that pass did not ask
        for it."""
        self.routing_map: Tensor | None = None
        """bool[n, E]: the map that the router passed to the dispatcher in the last forward pass."""
        self._probs: Tensor | None = None
        self._keep = keep_for_recompute
        self._forward: Route | None = None
        self._used: Route | None = None
        self._in_forward = self._watch = False
        self._recompute: deque[Route | None] = deque()

    def begin_forward(self, target: Route | None, with_grad: bool, watch: bool = False) -> None:
        """Replay `target` in the next forward pass; None lets the router decide. With `watch` the
        pass records the margins.

        If the pass is run `with_grad` and the model recomputes activations, the target is also kept
        for the recompute.
        """
        self._forward, self._in_forward, self._watch = target, True, watch
        self.margins = None
        if self._keep and with_grad:
            self._recompute.append(target)

    def end_forward(self) -> None:
        """End the forward pass: until the next `begin_forward`, only recompute calls the router."""
        self._forward, self._in_forward, self._probs = None, False, None

    @property
    def num_pending(self) -> int:
        """The number of micro-batches whose recompute has not run."""
        return len(self._recompute)

    def native_gates(self) -> GatedRoute:
        """Return the experts that the router chose in the present forward pass, with their gate
        weights.

        The pass must not replay routes. Call this before `end_forward`.
        """
        assert self.native_ids is not None
        assert self._probs is not None
        return GatedRoute(self.native_ids, self._probs.gather(1, self.native_ids).float())

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts for scores [n, E]: those of the replayed route, or the router's own
        choice.

        Megatron's router calls this instead of `RouterReplay.get_replay_topk`. Returns the scores
        [n, K] of the chosen experts and their ids [n, K]. Raises ValueError for a route of another
        shape.
        """
        assert default_compute_topk is not None
        native_scores, native = default_compute_topk(scores, topk, num_groups, group_topk)
        if self._in_forward:
            self.native_ids = native.detach()
            self.margins = margins(scores.detach(), native) if self._watch else None
            self._used = self._forward
        else:
            assert self._recompute, f"router {self.layer_number} recomputed more than it ran"
            self._used = self._recompute.popleft()
        if self._used is None:
            self.chosen = native
            return native_scores, native
        target = ids_of(self._used)
        if target.shape != native.shape:
            raise ValueError(
                f"routes of layer {self.layer_number}: the router has {tuple(native.shape)} "
                f"[rows, experts per token], the routes are {tuple(target.shape)}"
            )
        self.chosen = ids = torch.where(target == NATIVE_ROUTE, native, target)
        return scores.gather(1, ids), ids

    def observe(self, router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> Any:
        """Record the routing map of the forward pass. If a `GatedRoute` is replayed, replace the
        gate weights by the route's weights.

        This is a forward hook of the router. It returns (gate weights, routing map).
        """
        probs, routing_map = output
        if isinstance(self._used, GatedRoute):
            probs = with_gates(probs, self._used)
        if self._in_forward:
            self.routing_map, self._probs = routing_map.detach(), probs.detach()
        return probs, routing_map


class ReplayedChunk:
    """The `LayerReplay` of each router in one model chunk. All of them are set together for each
    forward pass."""

    def __init__(self, chunk: Any, keep_for_recompute: bool) -> None:
        """Make a `LayerReplay` for each router of the chunk, and attach it to the router.

        Raises ValueError if the model's configuration makes routers ignore replayed routes.
        """
        self.layers: dict[int, LayerReplay] = {}
        """The replays by Megatron's layer number."""
        self._routers: list[tuple[Any, LayerReplay]] = []
        self._hooks: list[Any] = []
        for layer in chunk.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is None:
                continue
            _check(router.config)
            replay = LayerReplay(layer.layer_number, keep_for_recompute)
            self._routers.append((router, replay))
            self.layers[layer.layer_number] = replay
        self.attach()

    def attach(self) -> None:
        """Connect the routers to these replays, initially or after `detach`."""
        for router, replay in self._routers:
            router.router_replay = replay
            self._hooks.append(router.register_forward_hook(replay.observe))

    def detach(self) -> None:
        """Disconnect the routers from these replays. They then choose the experts themselves, until
        this or another model's replays are attached."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for router, _ in self._routers:
            router.router_replay = None

    def begin_forward(self, routes: Routes | None, with_grad: bool, watch: bool = False) -> None:
        """Set what each layer replays in the next forward pass (see `LayerReplay.begin_forward`).

        The router decides in a layer that `routes` does not have, and in all layers if `routes` is
        None.
        """
        for number, layer in self.layers.items():
            layer.begin_forward(None if routes is None else routes.get(number), with_grad, watch)

    def end_forward(self) -> None:
        """End the forward pass of every layer."""
        for layer in self.layers.values():
            layer.end_forward()

    def check_drained(self) -> None:
        """Raise RuntimeError if a route that was kept for recompute has not been used, because the
        gradient is wrong then."""
        for number, layer in self.layers.items():
            if layer.num_pending:
                raise RuntimeError(
                    f"router {number}: {layer.num_pending} micro-batches were not recomputed"
                )


def _check(config: Any) -> None:
    """Raise ValueError for router settings that would ignore the replay."""
    if config.moe_router_fusion:
        raise ValueError("routing replay: moe_router_fusion ignores replayed routes; turn it off")
    if config.moe_router_load_balancing_type == "sinkhorn":
        raise ValueError("routing replay: sinkhorn routing ignores replayed routes")
    if config.moe_expert_capacity_factor is not None:
        raise ValueError("routing replay: a capacity factor would drop replayed tokens")

"""Replay routes in a Megatron model: forward, and again in activation recompute.

Each router gets its own `LayerReplay` in the place of Megatron's `RouterReplay` (same method, so
Megatron needs no patch). Megatron's keeps one global list over all models and pipeline chunks, takes
ids for every token or none, runs duplicate ids silently and never drains its queue without recompute;
this one is addressed by the layer number of the model at hand, lets rows without a captured route
decide for themselves, and its queue must be empty when a step ends.

The gate's weights come from the trainer's own scores at the replayed experts, so the router learns
(R3, arXiv 2510.11370). With a `GatedRoute` the forward uses recorded weights instead, and the gradient
passes through them to the trainer's own (straight-through, arXiv 1308.3432).

n rows of this rank, K experts per token, E experts.
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
    """How far a router was from another choice: the least chosen score less the best one left.

    scores f32[n, E] as the router selects by them, chosen i64[n, K] -> f32[n]. Under group-limited
    routing an expert of a group that lost may score higher than a chosen one: below 0.
    """
    left = scores.scatter(1, chosen, float("-inf")).amax(1)
    return (scores.gather(1, chosen).amin(1) - left).float()


def with_gates(probs: Tensor, route: GatedRoute) -> Tensor:
    """Put the route's weights into probs [n, E], 0 off the chosen experts, with their own gradient."""
    own = probs.detach()
    places = route.ids.clamp(min=0)
    known = route.ids != NATIVE_ROUTE
    weights = torch.where(known, route.weights.to(own.dtype), own.gather(1, places))
    # Not probs + (wanted - probs): that is not `wanted` to the last bit.
    return own.scatter(1, places, weights) + (probs - own)


class LayerReplay:
    """One router's routes: set before a forward, kept in order for the recompute."""

    def __init__(self, layer_number: int, keep_for_recompute: bool) -> None:
        self.layer_number = layer_number
        self.native_ids: Tensor | None = None
        """i64[n, K]: what the router would have chosen in the last forward."""
        self.chosen: Tensor | None = None
        """i64[n, K]: what it chose in the last forward or recompute, in the order of the route."""
        self.margins: Tensor | None = None
        """f32[n]: see `margins`; None where the last forward was not watched."""
        self.routing_map: Tensor | None = None
        """bool[n, E]: what the router gave to the dispatcher in the last forward."""
        self._probs: Tensor | None = None
        self._keep = keep_for_recompute
        self._forward: Route | None = None
        self._used: Route | None = None
        self._in_forward = self._watch = False
        self._recompute: deque[Route | None] = deque()

    def begin_forward(self, target: Route | None, with_grad: bool, watch: bool = False) -> None:
        """Route the next forward by `target` (None: natively). `watch`: note the margins."""
        self._forward, self._in_forward, self._watch = target, True, watch
        self.margins = None
        if self._keep and with_grad:
            self._recompute.append(target)

    def end_forward(self) -> None:
        """End the forward: until the next `begin_forward` only recompute calls the router."""
        self._forward, self._in_forward, self._probs = None, False, None

    @property
    def num_pending(self) -> int:
        """Micro-batches whose recompute has not run."""
        return len(self._recompute)

    def native_gates(self) -> GatedRoute:
        """Return the choice of the last native forward with its weights, before `end_forward`."""
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
        """Serve Megatron's hook: scores [n, E] -> (scores [n, K] of the chosen experts, ids [n, K])."""
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
        """Forward hook of the router: keep the map that really goes to the dispatcher, and put the
        recorded weights in the place of its own."""
        probs, routing_map = output
        if isinstance(self._used, GatedRoute):
            probs = with_gates(probs, self._used)
        if self._in_forward:
            self.routing_map, self._probs = routing_map.detach(), probs.detach()
        return probs, routing_map


class ReplayedChunk:
    """A replayed chunk holds the routers of one model chunk, by layer number."""

    def __init__(self, chunk: Any, keep_for_recompute: bool) -> None:
        """Make a replay for each router of the chunk, and attach them."""
        self.layers: dict[int, LayerReplay] = {}
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
        """Let the routers ask these replays, after `detach`."""
        for router, replay in self._routers:
            router.router_replay = replay
            self._hooks.append(router.register_forward_hook(replay.observe))

    def detach(self) -> None:
        """Let the routers decide for themselves, or ask another model's replays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for router, _ in self._routers:
            router.router_replay = None

    def begin_forward(self, routes: Routes | None, with_grad: bool, watch: bool = False) -> None:
        for number, layer in self.layers.items():
            layer.begin_forward(None if routes is None else routes.get(number), with_grad, watch)

    def end_forward(self) -> None:
        for layer in self.layers.values():
            layer.end_forward()

    def check_drained(self) -> None:
        """Every kept route was used by exactly one recompute; anything else is a wrong gradient."""
        for number, layer in self.layers.items():
            if layer.num_pending:
                raise RuntimeError(
                    f"router {number}: {layer.num_pending} micro-batches were not recomputed"
                )


def _check(config: Any) -> None:
    """Refuse the router settings that would ignore the replay."""
    if config.moe_router_fusion:
        raise ValueError("routing replay: moe_router_fusion ignores replayed routes; turn it off")
    if config.moe_router_load_balancing_type == "sinkhorn":
        raise ValueError("routing replay: sinkhorn routing ignores replayed routes")
    if config.moe_expert_capacity_factor is not None:
        raise ValueError("routing replay: a capacity factor would drop replayed tokens")

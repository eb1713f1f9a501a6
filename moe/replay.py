"""Replay routes in a Megatron model: in the forward pass, and again in activation recompute.

Each router gets a `LayerReplay` in place of Megatron's `RouterReplay`. `LayerReplay` has the method
that the router calls, so Megatron needs no patch. Megatron's class keeps one global list over all
models and pipeline chunks, replays either every token or none, accepts duplicate ids, and never
empties its queue if there is no recompute. A `LayerReplay` belongs to one layer of one model, lets
the router choose in rows without a captured route, and must have an empty queue after every pass.

By default the gate weights are the trainer's own scores of the replayed experts, so the router
still gets a gradient (R3, arXiv 2510.11370). With a `GatedRoute` the forward pass uses the recorded
gate weights instead. Their gradient then goes to the trainer's own gate weights (straight-through
estimator, arXiv 1308.3432).

Dimensions: n rows (tokens) of this rank, K experts per token, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe.keys import KeyReplay, Keys
from moe.routes import GatedRoute, Route, Routes, ids_of
from mrl.types import NATIVE_ROUTE


def margins(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return f32[n]: the margin of each row, which is the lowest score of the chosen experts minus
    the highest score of the other experts.

    scores: f32[n, E], the scores by which the router selects experts. chosen: i64[n, K], the ids of
    the chosen experts. Under group-limited routing a margin can be negative, because an expert of a
    group that was not selected may have a higher score than the chosen experts.
    """
    left = scores.scatter(1, chosen, float("-inf")).amax(1)
    return (scores.gather(1, chosen).amin(1) - left).float()


def with_gates(probs: Tensor, route: GatedRoute) -> Tensor:
    """Return gate weights [n, E] with the values of `route.weights` and the gradient of `probs`.

    probs: [n, E], the router's own gate weights, which are 0 except at the chosen experts. Rows
    without a captured route keep the values of `probs`.
    """
    own = probs.detach()
    places = route.ids.clamp(min=0)
    known = route.ids != NATIVE_ROUTE
    weights = torch.where(known, route.weights.to(own.dtype), own.gather(1, places))
    # Not probs + (weights - probs), whose rounding would change the weights.
    return own.scatter(1, places, weights) + (probs - own)


class LayerReplay:
    """Replays routes in one router: in the forward pass, and again in activation recompute.

    The recomputes of the micro-batches must come in the order of their forward passes.
    """

    def __init__(
        self,
        layer_number: int,
        keep_for_recompute: bool,
        scores_are_probabilities: bool = False,
    ) -> None:
        self.layer_number = layer_number
        self.scores_are_probabilities = scores_are_probabilities
        """Whether the router selects experts by the softmax of its logits, and not by the logits."""
        self.native_ids: Tensor | None = None
        """i64[n, K]: the router's own choice in the last forward pass, whether or not a route was
        replayed instead."""
        self.chosen: Tensor | None = None
        """i64[n, K]: the experts used in the last forward pass or recompute. Replayed experts are in
        the order of the route."""
        self.margins: Tensor | None = None
        """f32[n]: the margins (see `margins`) of the router's own choice in the last forward pass;
        None unless `begin_forward` was called with `watch`."""
        self.routing_map: Tensor | None = None
        """bool[n, E]: the experts to which the router sent each row in the last forward pass."""
        self.scores: Tensor | None = None
        """[n, E]: the scores by which the router selects experts, in the current forward pass; None
        unless `begin_forward` was called with `scores`."""
        self._probs: Tensor | None = None
        self._keep = keep_for_recompute
        self._forward: Route | None = None
        self._used: Route | None = None
        self._in_forward = self._watch = self._keep_scores = False
        self._recompute: deque[Route | None] = deque()

    def begin_forward(
        self, target: Route | None, with_grad: bool, watch: bool = False, scores: bool = False
    ) -> None:
        """Prepare the next forward pass.

        target: the route to replay; None lets the router choose the experts.
        with_grad: whether a backward pass follows. If it does and the model recomputes activations,
        `target` is also kept for the recompute.
        watch: whether to record `margins`. scores: whether to keep `scores` until `end_forward`.
        """
        self._forward, self._in_forward, self._watch = target, True, watch
        self._keep_scores = scores
        self.margins = None
        if self._keep and with_grad:
            self._recompute.append(target)

    def end_forward(self) -> None:
        """End the forward pass. Router calls before the next `begin_forward` count as recomputes."""
        self._forward, self._in_forward, self._probs, self.scores = None, False, None, None

    @property
    def num_pending(self) -> int:
        """The number of micro-batches whose recompute has not run yet."""
        return len(self._recompute)

    def native_gates(self) -> GatedRoute:
        """Return the experts that the router chose in the current forward pass, with their gate
        weights.

        Call this after the router has run and before `end_forward`, in a pass that replays no route.
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
        """Choose the experts of each row: those of the replayed route, or else the router's own.

        Megatron's router calls this method instead of `RouterReplay.get_replay_topk`.

        scores: [n, E]. topk: K. default_compute_topk: the router's function for its own choice.

        Returns the scores [n, K] and the ids [n, K] of the chosen experts. Raises ValueError if the
        route does not have the shape [n, K].
        """
        assert default_compute_topk is not None
        native_scores, native = default_compute_topk(scores, topk, num_groups, group_topk)
        if self._in_forward:
            self.native_ids = native.detach()
            self.margins = margins(scores.detach(), native) if self._watch else None
            self.scores = scores.detach() if self._keep_scores else None
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
        """Record what the router returns in a forward pass. If a `GatedRoute` is replayed, replace
        the values of the gate weights by those of the route (see `with_gates`).

        This is a forward hook of the router. `output` and the result are (gate weights [n, E],
        routing map bool[n, E]).
        """
        probs, routing_map = output
        if isinstance(self._used, GatedRoute):
            probs = with_gates(probs, self._used)
        if self._in_forward:
            self.routing_map, self._probs = routing_map.detach(), probs.detach()
        return probs, routing_map


class ReplayedChunk:
    """The `LayerReplay` objects of all routers in one model chunk."""

    def __init__(
        self, chunk: Any, keep_for_recompute: bool, recomputes_attention: bool = False
    ) -> None:
        """Make a `LayerReplay` for each router of the chunk, and a `KeyReplay` for each indexer, and
        attach them.

        keep_for_recompute: whether the routers run a second time in the backward pass.
        recomputes_attention: whether the indexers do. Raises ValueError for router settings that ignore
        replayed routes or drop replayed tokens.
        """
        self.layers: dict[int, LayerReplay] = {}
        """The `LayerReplay` of each MoE layer, by Megatron's 1-based layer number."""
        self.indexers: dict[int, KeyReplay] = {}
        """The `KeyReplay` of each layer with an indexer, by Megatron's 1-based layer number."""
        self._routers: list[tuple[Any, LayerReplay]] = []
        self._choosers: list[tuple[Any, KeyReplay]] = []
        self._hooks: list[Any] = []
        for layer in chunk.decoder.layers:
            indexer = getattr(layer.self_attention, "indexer", None)
            if indexer is not None:
                self.indexers[layer.layer_number] = KeyReplay(recomputes_attention)
                self._choosers.append((indexer, self.indexers[layer.layer_number]))
            router = getattr(layer.mlp, "router", None)
            if router is None:
                continue
            _check(router.config)
            softmax_first = bool(router.config.moe_router_pre_softmax)
            replay = LayerReplay(layer.layer_number, keep_for_recompute, softmax_first)
            self._routers.append((router, replay))
            self.layers[layer.layer_number] = replay
        self.attach()

    def attach(self) -> None:
        """Make the routers use the replays of this chunk. Call it again only after `detach`."""
        for router, replay in self._routers:
            router.router_replay = replay
            self._hooks.append(router.register_forward_hook(replay.observe))
        for indexer, replay in self._choosers:
            indexer.replay = replay

    def detach(self) -> None:
        """Undo `attach`. Without replays, the routers choose the experts themselves."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for router, _ in self._routers:
            router.router_replay = None
        for indexer, _ in self._choosers:
            indexer.replay = None

    def begin_forward(
        self,
        routes: Routes | None,
        with_grad: bool,
        watch: bool = False,
        scores: bool = False,
        keys: Keys | None = None,
        keep_keys: bool = False,
    ) -> None:
        """Set the route, and the choice of keys, that each layer replays in the next forward pass.

        The router chooses the experts itself in layers that `routes` does not have, and in all
        layers if `routes` is None. So do indexers with `keys`; with `keep_keys` their choices are
        recorded. For the other arguments see `LayerReplay.begin_forward`.
        """
        for number, indexer in self.indexers.items():
            indexer.begin_forward((keys or {}).get(number), with_grad, keep_keys)
        for number, layer in self.layers.items():
            route = None if routes is None else routes.get(number)
            layer.begin_forward(route, with_grad, watch, scores)

    def end_forward(self) -> None:
        """End the forward pass of every layer."""
        for layer in (*self.layers.values(), *self.indexers.values()):
            layer.end_forward()

    def chosen_keys(self) -> dict[int, Tensor]:
        """Return the choices of keys that the last forward pass recorded, by layer number."""
        found = {number: indexer.recorded for number, indexer in self.indexers.items()}
        return {number: keys for number, keys in found.items() if keys is not None}

    def check_drained(self) -> None:
        """Raise RuntimeError if a route that was kept for recompute has not been used. A leftover
        route means that the gradient is wrong."""
        for kind, replays in (("router", self.layers), ("indexer", self.indexers)):
            for number, layer in replays.items():
                if layer.num_pending:
                    raise RuntimeError(
                        f"{kind} {number}: {layer.num_pending} micro-batches were not recomputed"
                    )


def _check(config: Any) -> None:
    """Raise ValueError for router settings that ignore replayed routes or drop replayed tokens."""
    if config.moe_router_fusion:
        raise ValueError("routing replay: moe_router_fusion ignores replayed routes; turn it off")
    if config.moe_router_load_balancing_type == "sinkhorn":
        raise ValueError("routing replay: sinkhorn routing ignores replayed routes")
    if config.moe_expert_capacity_factor is not None:
        raise ValueError("routing replay: a capacity factor would drop replayed tokens")

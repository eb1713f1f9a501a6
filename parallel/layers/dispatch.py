"""Megatron's token dispatchers with sums in a fixed order, and the MoE layers that use them.

The exchange between ranks is Megatron's. Two steps within a rank are replaced. Tokens are copied
and summed by `parallel.layers.permutation`. Received rows are sorted by expert with the same
kernels, instead of being split into (ranks x local experts) pieces and joined again. Without expert
and tensor parallelism nothing here waits for the device, because the number of tokens of each
expert is not copied to the host.

Megatron sums the results of a token's K experts in the order of expert index. SGLang sums them in
the order of the route, which is by descending weight. For K >= 3 the two sums round differently.
With `moe.replay: ids_order` the sum follows the route: `NativeMoELayer` does this for mrl's own
layers, and `OrderedMoELayer` for TransformerEngine's layers.

Dimensions: n tokens of this rank, E experts, K experts per token, m rows for this rank's experts, H
hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from torch import Tensor

from parallel.layers.permutation import Permutation, by_expert, reorder, reorder_with
from parallel.megatron_names import MEGATRON

SHARED_WITH_MESSAGES = MEGATRON.has("SharedExpertMLP.wait_current_stream")
"""Whether Megatron computes the two halves of the shared experts (first and second projection) in
`token_dispatch` and `token_combine`, as in 0.19. In 0.16 Megatron computes them in
`dispatch_postprocess` and `combine_postprocess`. This module replaces these two methods, so under 0.16
the replacements compute the shared experts."""


class OrderedAllToAll(MoEAlltoAllTokenDispatcher):
    """An all-to-all dispatcher that sums over a token's experts in a fixed order."""

    route: Tensor | None = None
    """i64[n, K]: each token's experts in the order in which their results are summed; None for
    the order of expert index."""

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Copy each token's row of hidden_states [n, 1, H] once for each of its experts, together
        with the expert's entry in probs [n, E]. The copies are sorted by expert.

        routing_map bool[n, E] has K experts for each token. Return the copied rows [n K, H] and
        probs [n K].
        """
        self.hidden_shape = hidden_states.shape
        self.probs, self.routing_map = probs, routing_map
        rows = hidden_states.view(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = rows.shape
        self.tokens_per_expert = self.preprocess(routing_map)
        # Keep the tensor on the device: Megatron replaces its own by one on the CPU.
        self._num_rows = self.tokens_per_expert
        if self._is_spread_out and self.num_local_experts > 1:
            self._pieces = self.num_global_tokens_per_local_expert
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states.view(self.hidden_shape))
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_permutation_1", self.tokens_per_expert
        )
        if self.route is None:
            topk = self.config.moe_router_topk
            self._permutation = Permutation.of_full_map(routing_map, topk)
        else:
            self._permutation = Permutation.of_ids(self.route, self.num_experts)
        return self._permutation.spread_with(rows, probs)

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sort the received rows by expert.

        Return the rows [m, H], the number of rows of each local expert i64[local experts], and
        probs [m].
        """
        rows, probs = global_input_tokens, global_probs
        if self.shared_experts is not None and not SHARED_WITH_MESSAGES:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        if self.tp_size > 1:
            sizes = self._sizes_over_tp()
            rows, probs = (
                gather_from_sequence_parallel_region(
                    x, group=self.tp_group, output_split_sizes=sizes
                )
                for x in (rows, probs)
            )
        for point in ("before_permutation_2", "before_finish"):
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize(point, self.tokens_per_expert)
        if self._is_spread_out and self.num_local_experts > 1:
            experts = self._experts_of_rows(len(rows))
            self._order, self._back = by_expert(experts, self.num_local_experts)
            rows, probs = reorder_with(rows, probs, self._order, self._back)
        self.tokens_per_expert = None
        return rows, self._num_rows, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Put rows [m, H], sorted by expert, back into the order in which the peers sent them.

        With expert tensor parallelism the rows are also summed over the ranks that split an expert.
        """
        if self._is_spread_out and self.num_local_experts > 1:
            hidden_states = reorder(hidden_states, self._back, self._order)
        if self.tp_size > 1:
            summed = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs.dtype),
                group=self.tp_group,
                input_split_sizes=self._sizes_over_tp(),
            )
            hidden_states = summed.to(hidden_states.dtype)
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Sum the rows [n K, H] over each token's experts, and add the shared experts' output.
        Return [n, 1, H]."""
        if self.shared_experts is not None and not SHARED_WITH_MESSAGES:
            self.shared_experts.linear_fc2_forward(permutated_local_input_tokens)
            self.shared_experts.post_forward_comm()
        output = self._permutation.add_up(permutated_local_input_tokens).view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    @property
    def _is_spread_out(self) -> bool:
        return self.tp_size * self.ep_size > 1

    def _sizes_over_tp(self) -> list[int] | None:
        sizes: Any = self.output_splits_tp
        return None if sizes is None else sizes.tolist()

    def _experts_of_rows(self, num_rows: int) -> Tensor:
        """Return i64[m]: the local expert of each received row. The rows are ordered by sending
        rank, then by expert."""
        pieces: Any = self._pieces  # i64[ranks, local experts]
        experts = torch.arange(self.num_local_experts, device=pieces.device).repeat(len(pieces))
        return experts.repeat_interleave(pieces.reshape(-1), output_size=num_rows)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        """Copy the sizes of messages to the CPU, as Megatron does. Without expert and tensor
        parallelism nothing is copied."""
        if not self._is_spread_out:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)


class OrderedAllGather(MoEAllGatherTokenDispatcher):
    """An all-gather dispatcher that sums over a token's experts in a fixed order.

    Each rank sums in the order of expert index, and the reduce-scatter sums over the ranks.
    """

    route: Tensor | None = None
    """Unused. A rank has only some of a token's experts, so mrl refuses `moe.replay: ids_order`
    with this dispatcher."""

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Copy the rows of this rank's experts, sorted by expert.

        Return the rows [m, H], the number of rows of each local expert i64[local experts], and
        probs [m].
        """
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1]
        self.hidden_shape_before_permute = hidden_states.shape
        routing_map: Any = self.routing_map
        chosen = routing_map[:, first : last + 1]
        most = min(self.config.moe_router_topk, chosen.shape[1])
        self._permutation = Permutation.of_map(chosen, most)
        rows, self.local_probs = self._permutation.spread_with(
            hidden_states, probs[:, first : last + 1]
        )
        self.routing_map = None
        return rows, self._permutation.counts, self.local_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum the rows [m, H] of each token over this rank's experts. Return
        [rows of all ranks, H]."""
        return self._permutation.add_up(hidden_states)


DISPATCHERS: dict[str, Any] = {"alltoall": OrderedAllToAll, "allgather": OrderedAllGather}


class NativeMoELayer(MoELayer):
    """Megatron's MoELayer with the dispatchers of this file.

    The flex dispatcher is not replaced, because it sums in its own kernels.
    """

    def __init__(self, *args: Any, in_route_order: bool = False, **kwargs: Any) -> None:
        """Build the layer.

        `in_route_order`: whether to sum the results of a token's experts in the order in which the
        router or the replayed route lists the experts (`moe.replay.LayerReplay.chosen`), rather
        than in the order of expert index.
        """
        pg_collection = kwargs.setdefault("pg_collection", None) or get_default_pg_collection()
        super().__init__(*args, **{**kwargs, "pg_collection": pg_collection})
        self._in_route_order = in_route_order
        kind = DISPATCHERS.get(self.config.moe_token_dispatcher_type)
        if kind is not None:
            dispatcher = kind(
                self.num_local_experts,
                self.local_expert_indices,
                config=self.config,
                pg_collection=pg_collection,
            )
            if self.shared_expert_overlap:
                dispatcher.set_shared_experts(self.shared_experts)
            self.token_dispatcher = dispatcher

    def preprocess(
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor
    ) -> tuple[Tensor, Tensor]:
        router, dispatcher = self.router, self.token_dispatcher
        if self._in_route_order:
            setattr(dispatcher, "route", getattr(router, "router_replay").chosen)  # noqa: B009, B010
        return super().preprocess(hidden_states, probs, routing_map)


def permuted_rows(routing_map: Tensor, ids: Tensor) -> Tensor:
    """Return i64[n, K]: for each token and each of its experts in `ids` i64[n, K], the row in which
    the dispatcher puts the token's copy for this expert. Rows are sorted by expert, then by token.

    `routing_map` bool[n, E] marks exactly the experts that are in `ids`.
    """
    num_rows, num_experts = routing_map.shape
    places = routing_map.T.reshape(-1).cumsum(0) - 1
    return places.view(num_experts, num_rows).T.gather(1, ids)


def add_in_order(permuted: Tensor, rows: Tensor) -> Tensor:
    """Sum the rows of each token one after the other, in the order of `rows`. Return [n, H].

    `permuted` [n K, H] holds the rows of all tokens, and `rows` i64[n, K] the indices of each
    token's rows.
    """
    first, *others = permuted.index_select(0, rows.T.reshape(-1)).chunk(rows.shape[1])
    for other in others:
        first = first + other
    return first


class OrderedMoELayer(MoELayer):
    """MoELayer that sums the results of a token's experts in the order of
    `moe.replay.LayerReplay.chosen`.

    That is the order in which the router or the replayed route lists the experts.
    """

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        router: Any = self.router
        dispatcher: Any = self.token_dispatcher
        # Megatron's own method handles these too, but nothing in mrl turns them on.
        assert dispatcher.shared_experts is None
        assert not self.config.moe_latent_size
        rows = permuted_rows(dispatcher.routing_map, router.router_replay.chosen)
        output = add_in_order(output, rows).view(dispatcher.hidden_shape)
        return output if shared_expert_output is None else output + shared_expert_output

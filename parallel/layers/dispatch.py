"""Megatron's token dispatchers with sums in a fixed order, and the MoE layer that uses them.

What travels between ranks, and when, is Megatron's. Of its own steps on a rank, two are replaced:
tokens are copied and summed by `parallel.layers.permutation`, and received rows are sorted by expert
by the same kernels in the place of a split and a concatenation of (ranks x local experts) pieces. Where
experts are on one rank only, nothing here waits for the device: the number of tokens of each
expert stays there.

n tokens of this rank, E experts, K experts per token, m rows for this rank's experts, H hidden.
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
from parallel.megatron_names import has

SHARED_WITH_MESSAGES = has("SharedExpertMLP.wait_current_stream")
"""Whether Megatron's own `token_dispatch` and `token_combine` compute the two halves of the shared
experts, as 0.19 does. In 0.16 the steps after the messages do, which are replaced here."""


class OrderedAllToAll(MoEAlltoAllTokenDispatcher):
    """All-to-all whose sums over a token's experts have an order."""

    route: Tensor | None = None
    """i64[n, K]: the experts in the order in which they are added up; None: by number."""

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sort hidden_states [n, 1, H] by routing_map bool[n, E] and probs [n, E] -> ([n K, H],
        [n K])."""
        self.hidden_shape = hidden_states.shape
        self.probs, self.routing_map = probs, routing_map
        rows = hidden_states.view(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = rows.shape
        self.tokens_per_expert = self.preprocess(routing_map)
        # On the device: Megatron moves its own to the CPU before the first message.
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
        """-> rows [m, H] by expert, i64[local experts] how many each has, probs [m]."""
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
        """Sort [m, H] by expert into the rows of this rank's expert-parallel peers, in their order."""
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
        """Add up [n K, H] over each token's experts -> [n, 1, H]."""
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
        """i64[m]: the local expert of each received row; they lie by rank, then by expert."""
        pieces: Any = self._pieces  # i64[ranks, local experts]
        experts = torch.arange(self.num_local_experts, device=pieces.device).repeat(len(pieces))
        return experts.repeat_interleave(pieces.reshape(-1), output_size=num_rows)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        """The sizes of messages have to be known on the CPU; without messages nothing is."""
        if not self._is_spread_out:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)


class OrderedAllGather(MoEAllGatherTokenDispatcher):
    """All-gather whose sums over a token's experts have an order: by number on each rank, then over the
    ranks as the reduce-scatter adds them."""

    route: Tensor | None = None
    """Unused: a rank has only some of a token's experts (`moe.replay: ids_order` is refused)."""

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> rows [m, H] by expert, i64[local experts] how many each has, probs [m]."""
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
        """[m, H] -> [rows of all ranks, H]: this rank's part of each token's sum."""
        return self._permutation.add_up(hidden_states)


DISPATCHERS: dict[str, Any] = {"alltoall": OrderedAllToAll, "allgather": OrderedAllGather}


class NativeMoELayer(MoELayer):
    """MoELayer with the dispatchers of this file; the flex dispatcher, which sums in its own kernels,
    stays Megatron's."""

    in_route_order = False
    """Add the experts of a token in the order in which the router named them (that of the route where
    one is replayed: `moe.replay.LayerReplay.chosen`); otherwise by number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pg_collection = kwargs.setdefault("pg_collection", None) or get_default_pg_collection()
        super().__init__(*args, **{**kwargs, "pg_collection": pg_collection})
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
        if self.in_route_order:
            setattr(dispatcher, "route", getattr(router, "router_replay").chosen)  # noqa: B009, B010
        return super().preprocess(hidden_states, probs, routing_map)


class RouteOrderMoELayer(NativeMoELayer):
    """This layer does `moe.replay: ids_order`."""

    in_route_order = True

"""A token's experts added in the order of its route (`moe.replay: ids_order`), with TransformerEngine's
layers; mrl's own have it in their dispatcher (`parallel.layers.dispatch`).

Megatron adds what the K experts of a token give in the order of the experts' numbers, SGLang in the
order of the route: falling weight. From K = 3 on the two sums round differently.

n rows of this rank, E experts, K of them per token, H hidden.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from parallel.layers import specs


def permuted_rows(routing_map: Tensor, ids: Tensor) -> Tensor:
    """Return each copy's row after the dispatcher has sorted them by expert, then by token.

    routing_map bool[n, E] of just the experts in ids i64[n, K] -> i64[n, K].
    """
    num_rows, num_experts = routing_map.shape
    places = routing_map.T.reshape(-1).cumsum(0) - 1
    return places.view(num_experts, num_rows).T.gather(1, ids)


def add_in_order(permuted: Tensor, rows: Tensor) -> Tensor:
    """Add up the rows of each token, one after the other: permuted [n K, H], rows i64[n, K]
    -> [n, H]."""
    first, *others = permuted.index_select(0, rows.T.reshape(-1)).chunk(rows.shape[1])
    for other in others:
        first = first + other
    return first


class OrderedMoELayer(MoELayer):
    """MoELayer that adds the experts of a token in the order in which the router named them, which is
    that of the route where one is replayed (`moe.replay.LayerReplay.chosen`)."""

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        router: Any = self.router
        dispatcher: Any = self.token_dispatcher
        # What Megatron's own method would add as well; nothing in mrl turns these on.
        assert dispatcher.shared_experts is None
        assert not self.config.moe_latent_size
        rows = permuted_rows(dispatcher.routing_map, router.router_replay.chosen)
        output = add_in_order(output, rows).view(dispatcher.hidden_shape)
        return output if shared_expert_output is None else output + shared_expert_output


def replace_layer(layer_submodules: Any) -> None:
    """Put OrderedMoELayer into the spec of one decoder layer; dense layers stay."""
    if specs.has_experts(layer_submodules):
        layer_submodules.mlp = specs.of_module(layer_submodules.mlp, OrderedMoELayer)

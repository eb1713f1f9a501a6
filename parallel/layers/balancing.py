"""Balance the load of the experts while routers train: balancing losses, z-loss, the expert bias.

All of it is off by default in RL: a balancing loss pulls the router away from what the reward asks
for, and under routing replay it acts on the router's own choices, which are not the experts that
were used.

Megatron's own balancing losses are not used. If the training loss is a sum, as in mrl, Megatron
weights a token by its rank's share of all tokens, and in 0.16.1 this share is wrong by a factor of
the tensor-parallel size. Megatron also counts padding as tokens, and treats a packed micro-batch as
one sequence. Here a forward hook on each router adds the losses instead, so that every layout and
every split into micro-batches has the same gradient as one process.

A row that several samples share is counted once for each of these samples, as a token of that
sample's sequence.

Dimensions: n rows of this rank, m entries of its `RouterRows` (m = n if nothing is shared), E
experts, K experts per token, S segments (the sequences over which choices are counted separately), T
counted tokens of the step on all data-parallel ranks. A token is counted if it is not after the last
loss token of its sample (`moe.align.RouterRows`); padding and samples without a loss token are not
counted.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.align import RouterRows
from mrl.config import MoeConfig
from mrl.types import Mean, Statistics


def expert_biases(chunks: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the expert biases of all routers. These biases balance the experts without a loss."""
    for chunk in chunks:
        for name, buffer in chunk.named_buffers():
            if name.endswith("expert_bias"):
                yield buffer


def z_loss_sum(logits: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over counted tokens of logsumexp(logits)^2, f32[] (arXiv 2202.08906 eq. 5,
    which takes the mean).

    logits: f32[n, E]. weights: bool or i16[n], the number of counted tokens that have each row.
    """
    return (weights * torch.where(weights > 0, logits.logsumexp(-1).square(), 0.0)).sum()


def router_scores(logits: Tensor, score_function: str) -> Tensor:
    """Return f32[n, E]: the router's scores for each row, normalised over all experts.

    logits: f32[n, E]. Raises ValueError for a score function other than softmax and sigmoid.
    """
    if score_function == "softmax":
        return logits.softmax(-1)
    if score_function != "sigmoid":
        raise ValueError(f"balancing: no scores for a router of kind {score_function!r}")
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def choice_counts(scores: Tensor, rows: RouterRows, topk: int) -> Tensor:
    """Return f32[S, E]: for each segment and expert, the number of counted tokens in the segment
    that have the expert among the `topk` experts with the highest scores."""
    chosen = torch.zeros_like(scores).scatter_(1, scores.topk(topk, dim=-1).indices, 1.0)
    chosen = torch.where(rows.counted.unsqueeze(-1), chosen, 0.0)
    return chosen.new_zeros(rows.num_segments, scores.shape[-1]).index_add_(
        0, rows.segments, chosen
    )


def balance_loss_sum(scores: Tensor, rows: RouterRows, counts: Tensor) -> Tensor:
    """Return the sum over counted tokens of `E * sum_e(f_e * p_e)`, f32[] (arXiv 2101.03961 eq. 4
    to 6, times the number of tokens).

    `p_e` is a token's score for expert e, from `scores` f32[m, E]. `f_e` is the expert's share of
    the choices in the token's segment, from `counts` f32[S, E]; it gets no gradient. Perfect
    balance gives 1 for each token.
    """
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1.0)
    per_token = scores.shape[-1] * (share[rows.segments] * scores).sum(-1)
    return torch.where(rows.counted, per_token, 0.0).sum()


@dataclass
class _Router:
    module: Any
    rows: deque[RouterRows]
    """Rows of the micro-batches whose forward pass with gradients has not run yet. With recompute, each
    micro-batch has two forward passes, and only the second has gradients. Both passes process the
    micro-batches in the same order."""
    global_counts: Tensor | None = None


class RouterLosses:
    """The hooks of one model's routers. There are no hooks unless the recipe turns on a loss or the
    update of the bias."""

    def __init__(self, config: MoeConfig, chunks: Iterable[Any]) -> None:
        self.config = config
        self.is_on = bool(config.aux_loss_coeff or config.z_loss_coeff)
        self._watches = self.is_on or config.expert_bias_update_rate > 0
        self._step_tokens: Tensor | None = None
        self._aux: Tensor | int = 0
        self._z: Tensor | int = 0
        self._num_rows: Tensor | int = 0
        self._routers: dict[int, list[_Router]] = {}
        self._handles: list[Any] = []
        for chunk in chunks if self._watches else ():
            layers = (layer.mlp for layer in chunk.decoder.layers)
            routers = [_Router(m.router, deque()) for m in layers if hasattr(m, "router")]
            self._routers[id(chunk)] = routers
        self.attach()

    def attach(self) -> None:
        """Install the hooks."""
        for router in self._all_routers():
            self._handles.append(router.module.register_forward_hook(self._hook(router)))

    def detach(self) -> None:
        """Remove the hooks; the routers then train without these losses."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_step(self, num_tokens: Tensor, dp: ProcessGroup) -> None:
        """Prepare for the passes of an optimizer step. `num_tokens`, a scalar, is the number of
        counted tokens on this data-parallel rank.

        A collective if a loss or the update of the bias is on.
        """
        if not self._watches:
            return
        self._step_tokens = num_tokens.float()
        dist.all_reduce(self._step_tokens, group=dp)
        self._aux, self._z, self._num_rows = 0, 0, 0
        for router in self._all_routers():
            router.rows.clear()  # a step that failed leaves some
            router.global_counts = None

    def begin_forward(self, chunk: Any, rows: RouterRows) -> None:
        """Register the rows that the routers of `chunk` see in the next forward pass with
        gradients."""
        for router in self._routers.get(id(chunk), ()):
            router.rows.append(rows)

    def end_step(self) -> Statistics:
        """Return this rank's part of the statistics `moe/aux_loss` and `moe/z_loss`, each only if
        the recipe turns that loss on.

        They are the means of the losses over counted tokens and layers, without the losses'
        coefficients. Raises RuntimeError if a router missed a micro-batch.
        """
        if any(router.rows for router in self._all_routers()):
            raise RuntimeError("a router did not run, or recompute, every micro-batch of the step")
        stats: Statistics = {}
        count = torch.as_tensor(self._num_rows).double()
        if self.config.aux_loss_coeff:
            stats["moe/aux_loss"] = Mean(torch.as_tensor(self._aux).double(), count)
        if self.config.z_loss_coeff:
            stats["moe/z_loss"] = Mean(torch.as_tensor(self._z).double(), count)
        return stats

    def _all_routers(self) -> list[_Router]:
        return [router for routers in self._routers.values() for router in routers]

    def _hook(self, router: _Router) -> Any:
        def after_forward(module: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> Any:
            # Under recompute the first forward has no gradients, and only the second one counts.
            if not torch.is_grad_enabled():
                return None
            probs, routing_map = output
            rows = router.rows.popleft()
            if self.config.expert_bias_update_rate:
                # Megatron has counted every row once for the update of the bias.
                weights = rows.weights(rows.counted).unsqueeze(-1)
                wanted = (routing_map * weights).sum(0)
                module.local_tokens_per_expert += wanted - routing_map.sum(0)
            if not self.is_on:
                return None
            loss = self._loss(router, inputs[0], rows)
            return MoEAuxLossAutoScaler.apply(probs, loss), routing_map

        return after_forward

    def _loss(self, router: _Router, hidden: Tensor, rows: RouterRows) -> Tensor:
        """Return this rank's part of `(aux_coeff * aux + z_coeff * z) / T` for one layer and
        micro-batch. `aux` and `z` are sums over counted tokens.

        The router's logits are computed again, because they are not among its outputs.
        """
        assert self._step_tokens is not None
        module, config = router.module, self.config
        logits = module.gating(hidden).flatten(0, -2).float()
        total = logits.new_zeros(())
        if config.z_loss_coeff:
            z = z_loss_sum(logits, rows.weights(rows.counted))
            self._z = self._z + z.detach()
            total = total + config.z_loss_coeff * z
        if config.aux_loss_coeff:
            scores = router_scores(logits, module.score_function)
            # The experts' shares differ between the sequences that have the same row.
            aux = self._balance(router, rows.of(scores), rows)
            self._aux = self._aux + aux.detach()
            total = total + config.aux_loss_coeff * aux
        self._num_rows = self._num_rows + rows.counted.sum()
        return total / self._step_tokens.clamp(min=1.0)

    def _balance(self, router: _Router, scores: Tensor, rows: RouterRows) -> Tensor:
        """Return the sum of the balancing loss over this rank's tokens.

        Depending on the recipe's `load_balancing_type`, the experts' shares of the choices are
        counted over a sequence, a micro-batch, or all micro-batches of the step so far.
        """
        kind = self.config.load_balancing_type
        if kind != "seq_aux_loss":
            rows = dataclasses.replace(
                rows, segments=torch.zeros_like(rows.segments), num_segments=1
            )
        with torch.no_grad():
            counts = choice_counts(scores, rows, router.module.topk)
            everyone = kind == "global_aux_loss"
            group = router.module.tp_dp_cp_group if everyone else router.module.tp_cp_group
            if group.size() > 1:
                dist.all_reduce(counts, group=group)
            if everyone:
                known = router.global_counts
                router.global_counts = counts = counts if known is None else known + counts
        return balance_loss_sum(scores, rows, counts)

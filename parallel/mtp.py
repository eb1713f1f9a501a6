"""The loss of the multi-token-prediction (MTP) layers, from which these layers alone learn.

For K layers and the sets S_k of targets, the loss is

    factor / K * sum_k (1 / |S_k|) * sum_{t in S_k} -log p_k(t | tokens up to t - k - 2),

with k from 0, as in Megatron. Hidden states, embedding and output layer enter it detached, so the
gradients of all other parameters are, bit for bit, those without it. S_k are the loss tokens of the
optimizer step, on all data-parallel ranks, that have k + 2 tokens of their sequence before them.

Dimensions: N packed tokens of a micro-batch, all of which are rows (samples share none); c rows of this
context-parallel rank, n of them on this tensor-parallel rank; h hidden size; V_loc this rank's slice of
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import reduce_scatter_to_sequence_parallel_region
from torch import Tensor

from mrl.kernels import linear_logprob
from mrl.types import Mean, MicroBatch, Statistics
from parallel.heads import HeadInput
from parallel.layers.mtp import MtpBlock
from parallel.mesh import Mesh
from parallel.model import unwrap


def mtp_targets(batch: MicroBatch, layer: int) -> Tensor:
    """Return bool[N]: the rows from which MTP layer `layer`, from 0, predicts a loss token.

    Row i predicts token i + layer + 2, which must be of the same sequence.
    """
    shift = layer + 2
    wanted = batch.loss_mask & (batch.position_ids >= shift)
    return F.pad(wanted[shift:], (0, min(shift, len(wanted))))


def next_tokens(batch: MicroBatch, shift: int) -> Tensor:
    """Return i64[N]: the token `shift` places after each row, or 0 after the end of its sequence."""
    known = torch.where(batch.position_ids >= shift, batch.input_ids, 0)
    return F.pad(known[shift:], (0, min(shift, len(known))))


class MtpLoss:
    """Computes the loss of the MTP layers for the micro-batches of an optimizer step."""

    def __init__(
        self,
        chunks: Sequence[Any],
        mesh: Mesh,
        num_layers: int,
        factor: float,
        gather_parameters: Callable[[], None],
    ) -> None:
        """`chunks` are this rank's chunks of a model with `num_layers` MTP layers; `factor` is the
        recipe's `train.mtp_loss_scaling_factor`. `gather_parameters` gathers the weights of the
        chunks on all ranks (`MegatronModel.gather_parameters`)."""
        self._gather_parameters = gather_parameters
        self._chunks = [unwrap(chunk) for chunk in chunks]
        self._mesh, self._num_layers, self._factor = mesh, num_layers, factor
        self._counts: list[float] = []
        self._embedding_weight: Tensor | None = None

    def begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """Prepare for the micro-batches (on the CPU) of an optimizer step. A collective.

        The last pipeline stage gets the weights of the embedding.
        """
        layers = range(self._num_layers)
        counts = torch.tensor([sum(int(mtp_targets(b, k).sum()) for b in batches) for k in layers])
        counts = counts.to(self._mesh.device)
        if self._mesh.dims.dp > 1:
            dist.all_reduce(counts, group=self._mesh.dp)
        self._counts = [max(1.0, float(count)) for count in counts.tolist()]
        self._gather_parameters()
        self._embedding_weight = self._embedding_on_last_stage()

    def end_step(self) -> None:
        """Free the copy of the embedding."""
        self._embedding_weight = None

    def __call__(self, given: HeadInput) -> tuple[Tensor, Statistics]:
        """Return the loss of a micro-batch on the last stage, with gradient, and `loss/mtp`. Under
        context parallelism the loss is that of this rank's rows, and `loss/mtp` of all rows.

        `given.states` are the model's hidden states [1, n, h] after its last norm.
        """
        projection, model = given.projection, self._chunks[-1]
        assert projection is not None
        block: MtpBlock = getattr(model, "mtp")  # noqa: B009
        packed, context, weight = given.packed, given.context, projection.weight.detach()
        assert packed is not None
        hidden = given.states.detach().transpose(0, 1)
        rotary = None
        if packed.rotation is None and hasattr(model, "rotary_pos_emb"):
            rotary = model.rotary_pos_emb(packed.max_seqlen_q, packed_seq=True)
        total = torch.zeros((), device=hidden.device)
        all_nll, num_targets = total.double(), 0
        for number, mtp_layer in enumerate(block.layers):
            embedded = self._embed(context.take(next_tokens(given.batch, number + 1))).unsqueeze(1)
            hidden = mtp_layer(embedded, hidden, packed, rotary)
            targets = mtp_targets(given.on_cpu, number)
            rows = context.take_any(targets).nonzero().squeeze(1)
            rows = rows.to(hidden.device, non_blocking=True)
            labels = context.take(next_tokens(given.batch, number + 2))[rows]
            gathered = projection.gathered(hidden.squeeze(1))
            logprobs, _ = linear_logprob(
                gathered, weight, labels, rows, projection.chunked(temperature=1.0)
            )
            nll = -logprobs.sum()
            total = total + nll / self._counts[number]
            all_nll, num_targets = all_nll + nll.detach(), num_targets + int(targets.sum())
        if self._mesh.dims.cp > 1:  # each of these ranks has a part of the rows
            dist.all_reduce(all_nll, group=self._mesh.cp)
        count = torch.tensor(float(num_targets), dtype=torch.float64)
        return self._factor / self._num_layers * total, {"loss/mtp": Mean(all_nll, count)}

    def _embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [n, h] of the tokens `ids` i64[c]."""
        weight, mesh = self._embedding_weight, self._mesh
        assert weight is not None
        local = ids - mesh.tp_rank * len(weight)
        known = (local >= 0) & (local < len(weight))
        rows = F.embedding(torch.where(known, local, 0), weight) * known.unsqueeze(1)
        if mesh.dims.tp == 1:
            return rows
        return reduce_scatter_to_sequence_parallel_region(rows, group=mesh.tp)

    @torch.no_grad()
    def _embedding_on_last_stage(self) -> Tensor | None:
        """Return the weights [V_loc, h] of the embedding on the last pipeline stage. A collective."""
        mesh, (first, last) = self._mesh, (self._chunks[0], self._chunks[-1])
        if mesh.dims.pp == 1:
            return first.embedding.word_embeddings.weight.detach()
        if last.share_embeddings_and_output_weights:
            weight = last.shared_embedding_or_output_weight() if mesh.is_last_stage else None
            return None if weight is None else weight.detach()
        if mesh.pp_rank == 0:
            weight = first.embedding.word_embeddings.weight.detach()
            dist.send(weight, dist.get_global_rank(mesh.pp, mesh.dims.pp - 1), mesh.pp)
        if not mesh.is_last_stage:
            return None
        own = last.output_layer.weight  # of the same shape
        assert own is not None
        table = torch.empty_like(own)
        dist.recv(table, dist.get_global_rank(mesh.pp, 0), mesh.pp)
        return table

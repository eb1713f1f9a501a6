"""This module computes log-probs of whole sequences, on which trainer and engine are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe.routes import Replay
from mrl.types import MicroBatch, Sample
from parallel.logprobs import LogprobHead
from parallel.megatron_model import MegatronModel
from parallel.mesh import Mesh
from parallel.packing import WeightedSample, pack


def sequence_logprobs(model: MegatronModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Return the log-probs f32[T] of each sequence i64[T] under the present weights at temperature 1;
    the first is 0. A collective.

    Every data-parallel replica computes all of them with native routing; every rank gets the same.
    """
    mesh = model.mesh
    batch = _batch(sequences, mesh)
    repeats = mesh.dims.pp if mesh.dims.vpp > 1 else 1  # Megatron's interleaving wants a multiple
    head = LogprobHead(1.0, mesh.tp)
    output = model.forward_only([batch] * repeats, Replay.off, head=head)
    logprobs = torch.zeros(batch.num_tokens, device=mesh.device)
    if mesh.reports_loss and mesh.dp_rank == 0:  # one rank of all holds them
        logprobs += output.logprobs[0]
    if mesh.dims.world > 1:
        dist.all_reduce(logprobs)
    starts = batch.cu_seqlens.tolist()
    return [
        logprobs[start : start + len(sequence)].cpu()
        for start, sequence in zip(starts, sequences, strict=False)
    ]


def _batch(sequences: Sequence[Tensor], mesh: Mesh) -> MicroBatch:
    samples = [
        Sample(
            group_id=0,
            token_ids=sequence,
            prompt_len=1,
            loss_mask=torch.arange(len(sequence)) > 0,
            rollout_logprobs=torch.zeros(len(sequence)),
            weight_versions=(),
            finish_reason="length",
        )
        for sequence in sequences
    ]
    return pack(
        [WeightedSample(sample, 0.0, 0.0) for sample in samples],
        mesh.dims.token_multiple,
        sequence_multiple=mesh.dims.sequence_multiple,
    )

"""Sums over each sample of a step, wherever its tokens are trained: the same bits on every rank.

A sample is whole on one data-parallel rank, so a sum over ranks adds nothing but zeros to it, and what
is computed from these sums does not depend on how a step was split.

N packed tokens of a micro-batch, B its sequences, S samples of the step, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.types import MicroBatch
from parallel.mesh import Mesh


def sample_sums(
    columns: Sequence[Tensor], batches: Sequence[MicroBatch], num_samples: int, mesh: Mesh
) -> Tensor:
    """f[N, C] of each micro-batch -> f64[S, C] on the CPU: sums over the loss tokens of each sample.

    A collective. `columns` are read on the ranks that report losses, and may be missing on others.
    """
    width = torch.tensor([columns[0].shape[1] if columns else 0], device=mesh.device)
    if mesh.dims.world > 1:
        dist.all_reduce(width, dist.ReduceOp.MAX)
    total = torch.zeros(num_samples, int(width), dtype=torch.float64, device=mesh.device)
    if mesh.reports_loss:
        for batch, values in zip(batches, columns, strict=True):
            assert batch.sample_ids is not None
            device = values.device
            wanted = torch.where(batch.loss_mask.to(device)[:, None], values.double(), 0.0)
            lengths = batch.cu_seqlens.to(device).diff().long()
            sums = torch.segment_reduce(wanted, "sum", lengths=lengths)
            known = batch.sample_ids.to(device) >= 0  # not padding
            total[batch.sample_ids.to(device)[known]] = sums[known]
    if mesh.dims.world > 1:
        dist.all_reduce(total)
    return total.cpu()

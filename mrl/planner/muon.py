"""What Muon costs in an update: products of matrices, and memory for the largest of them.

Legend: a whole matrix has m x n elements with m <= n; b, the bytes of a weight, in whose dtype it is
orthogonalised.
"""

from __future__ import annotations

from mrl.planner.rows import ASSUMPTION, Row
from mrl.planner.shape import ModelShape
from mrl.planner.stages import Stage, local_tensors
from mrl.planner.state import shards_of
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims

NS_STEPS = 5
"""Newton-Schulz iterations that are counted: the default of `optimizer.muon_num_ns_steps`."""


def newton_schulz_flops(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload
) -> float:
    """Return the FLOPs of all orthogonalisations of one update on a rank of the stage.

    An iteration has three products: X X^T and B X with 2 m m n FLOPs each, and A A with 2 m m m. All
    ranks that split a matrix compute the whole. One side is taken to be the hidden size. Ranks that
    divide the matrices are taken to have equal shares.
    """
    if not work.state.muon:
        return 0.0
    shards, total = shards_of(dims, work.distributed_optimizer), 0.0
    for part in stage.trained:
        if not part.is_muons:
            continue
        ways = shards.expert if part.sharing == "expert" else shards.dense
        for (count, _), (_, whole) in zip(local_tensors(part, dims), part.tensors, strict=True):
            m = min(shape.hidden, whole // shape.hidden)
            total += count * NS_STEPS * (4 * m * whole + 2 * m**3) / ways
    return total


def muon_rows(stage: Stage, work: Workload) -> list[Row]:
    """Return the row of temporary memory that an orthogonalisation needs."""
    sizes = [numel for part in stage.trained if part.is_muons for _, numel in part.tensors]
    if not work.state.muon or not sizes:
        return []
    largest, b = max(sizes), work.weight_bytes
    return [
        Row(
            "orthogonalisation",
            (4 + 6 * b) * largest,
            f"(4 + 6 x {b}) B x {largest}: update, shards, whole, X twice, A, B of the largest matrix",
            f"{ASSUMPTION}: an upper bound of Muon's step; A and B are at most as large as X",
            managed=True,
        )
    ]

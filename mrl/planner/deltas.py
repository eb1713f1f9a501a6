"""What `rollout.weight_encoding: delta` saves and costs: bytes on the links, seconds, host memory.

With this setting, most weight syncs send a delta: only the elements of the weights that changed
since the version before.

Legend: W, the bytes of the exported weights; s, the bytes of an element; q, the share of elements
that changed; D, the bytes of a delta.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.kernels.weight_delta import CHUNK, LONG_GAP, PIECE_BYTES, TORCH_PIECE
from mrl.planner.hardware import EFFICIENCY, Hardware
from mrl.planner.rows import ASSUMPTION, Row
from mrl.planner.shape import ModelShape
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims

CHANGED = {2: 0.01, 4: 1.0}
"""Assumed share of the elements that a step changes. The keys are the bytes of an exported element.
Shares measured at a learning rate of 1e-6 are 0.0050 in bfloat16 and 0.991 in float32
(benchmarks/results/delta_sync.json)."""
CHANGED_QUANTIZED = 0.01
"""The same for quantised weights, from whichever dtype they are quantised. Shares of `fp8_block`
measured on random matrices, normal with standard deviations of 0.02 and 0.05, are 0.001 to 0.002 if
weights change by up to 1e-6, and 0.007 to 0.018 if they change by up to 1e-5."""


def delta_bytes(num_bytes: int, element_size: int, changed: float) -> float:
    """Return D, the expected bytes of a delta, if elements change independently of each other.

    `num_bytes` is W, `element_size` is s, and `changed` is q.

    D = W / s (q (s + 1 / (1 - r)) + 8 / CHUNK) with r = (1 - q)^255. A delta has 8 bytes for each
    chunk of CHUNK elements (`mrl.kernels.weight_delta`). For each changed element, it has the value
    and the gap: the number of unchanged elements before the changed one. A gap takes one byte, and
    another byte for every 255 elements. If more than an eighth of the elements change, one bit per
    element replaces the gaps.
    """
    num = num_bytes / element_size
    if changed > 1 / 8:
        positions = num / 8
    else:
        long_gap = (1 - changed) ** LONG_GAP
        positions = num * changed / (1 - long_gap) if changed else 0.0
    return num * changed * element_size + positions + 8 * num / CHUNK


@dataclass(frozen=True)
class DeltaCost:
    """The costs of sending one version of the weights from a trainer rank to its workers.

    A worker leads an engine and receives the weights for it.
    """

    full_bytes: int
    """Bytes that are sent to one worker if the version is sent whole."""
    delta_bytes: float
    """Bytes that are sent to one worker if a delta is sent. If a delta would be larger than the
    version, this is the size of the version."""
    full_s: float
    """Seconds to send the whole version to all workers of the trainer rank."""
    delta_s: float
    """Seconds to send a delta to all workers of the trainer rank. They include the comparison with
    the previous version, and the time in which a worker applies the delta and checks the digest of
    the result."""
    link: float
    """Bytes per second of the link between trainer and worker, at the assumed efficiency."""
    break_even: float
    """The speed of the link, in bytes per second, below which a delta is faster than the whole
    version; 0 if a delta is never faster."""


def delta_cost(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> DeltaCost:
    """Estimate the costs of sending a version of the weights in a disaggregated run.

    A trainer rank sends to ceil(engines / trainer ranks) workers, one after the other.

    - A whole version moves W bytes over the link to each worker, and W bytes from a GPU to the
      worker's host memory.
    - A delta moves D bytes over the link to each worker. To compare the versions, the trainer rank
      copies W bytes from host memory to the GPU, and reads 2 W bytes of GPU memory. The worker
      reads W bytes of host memory to compute digests. If it keeps several versions
      (`async.max_staleness` above 0), it first copies the previous version, which moves another 2 W
      bytes.
    """
    whole, served = work.encoded_bytes(shape), -(-work.num_engines(dims) // dims.world)
    is_near = dims.world + work.rollout_ranks <= gpu.gpus_per_node
    link = EFFICIENCY.links * (gpu.nvlink if is_near else gpu.network)
    host = gpu.host * EFFICIENCY.host
    changed = _changed_bytes(shape, work)
    compare_s = whole / host + 2 * whole / (gpu.hbm * EFFICIENCY.hbm)
    apply_s = (3 if work.staged_versions > 1 else 1) * whole / EFFICIENCY.host_memory
    full_s = served * whole / link + whole / host
    if changed >= whole:
        return DeltaCost(whole, whole, full_s, full_s + compare_s, link, 0.0)
    return DeltaCost(
        full_bytes=whole,
        delta_bytes=changed,
        full_s=full_s,
        delta_s=compare_s + served * changed / link + apply_s,
        link=link,
        break_even=served * (whole - changed) / (compare_s + apply_s - whole / host),
    )


def _changed_bytes(shape: ModelShape, work: Workload) -> float:
    """Return D, the bytes of a delta of the whole model. The scales of quantised weights are counted
    as weights."""
    exact = work.exact_bytes(shape)
    of_exact = delta_bytes(exact, work.weight_bytes, CHANGED[work.weight_bytes])
    of_quantized = delta_bytes(work.encoded_bytes(shape) - exact, 1, CHANGED_QUANTIZED)
    return min(exact, of_exact) + of_quantized


def copy_seconds(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> float:
    """Return the mean seconds to send a version of the weights to all workers of a trainer rank.

    The mean is over all versions, of which every `Workload.full_sync_every`-th is sent whole and
    the others are sent as deltas.
    """
    cost = delta_cost(shape, dims, work, gpu)
    if work.full_sync_every == 1:
        return cost.full_s
    # A version that is sent whole is also copied to the host memory of the rank that sends it.
    full_s = cost.full_s + cost.full_bytes / (gpu.host * EFFICIENCY.host)
    return cost.delta_s + (full_s - cost.delta_s) / work.full_sync_every


def last_version_row(shape: ModelShape, work: Workload) -> Row:
    """Return the host-memory row for a trainer rank's copy of the last exported version.

    The rank makes a delta by comparing the next version with this copy. The row has 0 bytes without
    deltas.
    """
    whole = work.encoded_bytes(shape) if work.full_sync_every > 1 else 0
    return Row(
        "last exported version, for deltas",
        whole,
        f"{whole} B on each rank that sends weights to engines",
        "mrl.weight_sync.delta.LastVersion",
    )


def comparison_row(work: Workload) -> Row:
    """Return the GPU-memory row for the temporary tensors that a trainer rank needs to make a
    delta.

    The row has 0 bytes without deltas.
    """
    return Row(
        "comparison for deltas",
        PIECE_BYTES * TORCH_PIECE if work.full_sync_every > 1 else 0,
        f"at most {PIECE_BYTES} B x {TORCH_PIECE} elements at a time",
        f"{ASSUMPTION}: temporaries of mrl.kernels.weight_delta.encode_in_torch",
        managed=True,
    )

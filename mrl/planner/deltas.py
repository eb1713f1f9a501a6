"""What `rollout.weight_encoding: delta` saves and costs: bytes on the links, seconds, host memory.

Legend: W bytes of the exported weights, in elements of s bytes; q, the share of elements that changed;
D bytes of a delta.
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
"""Assumed share of the elements that a step changes, by the bytes of an exported element. Measured at a
learning rate of 1e-6: 0.0033 in bfloat16 and 0.9997 in float32 (`python -m studies.weight_delta`)."""


def delta_bytes(num_bytes: int, element_size: int, changed: float) -> float:
    """Return D, the expected bytes of a delta, if elements change independently of each other.

    D = W / s (q (s + 1 / (1 - r)) + 8 / CHUNK) with r = (1 - q)^255: each changed element has a value,
    a byte for the gap before it, and one more for every 255 elements of that gap. If more than an
    eighth of the elements change, a bit for each element takes the place of the gaps.
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
    """The costs of sending one version of the weights from a trainer rank to the workers that it
    serves."""

    full_bytes: int
    """W, to one worker."""
    delta_bytes: float
    """D, to one worker; W if a delta would be larger."""
    full_s: float
    """Seconds to send the whole version."""
    delta_s: float
    """Seconds to compare it with the version before, to send what changed, and to apply and to prove
    it in the worker."""
    link: float
    """Bytes per second of the link between trainer and worker, at the assumed efficiency."""
    break_even: float
    """A delta is faster if the link carries fewer bytes per second than this; 0 if it never is."""


def delta_cost(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> DeltaCost:
    """Estimate the costs for a disaggregated run.

    A rank sends one after the other to ceil(engines / trainer ranks) workers. Whole: W over the link to
    each, and W to host memory. Delta: W from host memory to the GPU and 2 W of HBM for the comparison,
    and D over the link to each. In the worker's host memory W is read for the digests, and another 2 W
    are moved to copy the base if it has a buffer of its own (`async.max_staleness` above 0).
    """
    whole, served = work.encoded_bytes(shape), -(-work.num_engines(dims) // dims.world)
    is_near = dims.world + work.rollout_ranks <= gpu.gpus_per_node
    link = EFFICIENCY.links * (gpu.nvlink if is_near else gpu.network)
    host = gpu.host * EFFICIENCY.host
    changed = delta_bytes(whole, work.weight_bytes, CHANGED[work.weight_bytes])
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


def copy_seconds(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> float:
    """Return the seconds to send a version to workers, as a mean over the versions that are sent whole
    and those that are sent as deltas (`Workload.full_sync_every`)."""
    cost = delta_cost(shape, dims, work, gpu)
    if work.full_sync_every == 1:
        return cost.full_s
    # A version that is sent whole is also copied to the host memory of the rank that sends it.
    full_s = cost.full_s + cost.full_bytes / (gpu.host * EFFICIENCY.host)
    return cost.delta_s + (full_s - cost.delta_s) / work.full_sync_every


def last_version_row(shape: ModelShape, work: Workload) -> Row:
    """Return the host memory of a trainer rank that sends deltas."""
    whole = work.encoded_bytes(shape) if work.full_sync_every > 1 else 0
    return Row(
        "last exported version, for deltas",
        whole,
        f"{whole} B on each rank that sends weights to engines",
        "mrl.weight_sync.delta.LastVersion",
    )


def comparison_row(work: Workload) -> Row:
    """Return the GPU memory that a trainer rank needs to make a delta."""
    return Row(
        "comparison for deltas",
        PIECE_BYTES * TORCH_PIECE if work.full_sync_every > 1 else 0,
        f"at most {PIECE_BYTES} B x {TORCH_PIECE} elements at a time",
        f"{ASSUMPTION}: temporaries of mrl.kernels.weight_delta.encode_in_torch",
        managed=True,
    )

"""Memory that engines with quantised weights cost the trainer, besides the buffers of a weight sync.

For a measurement the trainer replaces its own weights for a while (`parallel.quantized`): at the first
sync by weights with noise, which gives the tolerance of the canaries, and in a decomposition of the
mismatch by the weights of the engine. It keeps a copy of the originals meanwhile.
"""

from __future__ import annotations

import dataclasses

from mrl.planner.memory import export_bytes
from mrl.planner.rows import ASSUMPTION, Row
from mrl.planner.shape import ModelShape
from mrl.planner.stages import Stage, local_count
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims

BUCKET_BYTES = 256 << 20
"""The buckets in which the weights are gathered: `BUCKET_BYTES` of parallel/policy.py."""
NOISE_BYTES = 28
"""Bytes per element of a matrix while noise is added to it: seven fp32 tensors at most
(`mrl.quantization.with_rounding_noise`)."""


def num_local_quantized(stage: Stage, dims: ParallelDims) -> int:
    """Return how many weights that engines quantise one rank of a pipeline stage holds."""
    return sum(
        local_count(part, dims)
        for part in stage.parts
        if part.sharing != "whole" and part.name not in ("embedding", "output")
    )


def replacement_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload
) -> tuple[Row, ...]:
    """Return the rows of replacing the weights for a measurement; none if engines do not quantise."""
    if not work.quantized:
        return ()
    local = num_local_quantized(stage, dims)
    own_buckets = dataclasses.replace(work, bucket_bytes=BUCKET_BYTES, quantized=False)
    largest = max(
        2 * shape.hidden * shape.moe_ffn,
        2 * shape.hidden * max(shape.dense_ffn, shape.shared_ffn),
        *shape.attention_sizes,
    )
    return (
        Row(
            "copy of the quantised weights",
            work.weight_bytes * local,
            f"{work.weight_bytes} B x {local}, while they are replaced for a measurement",
            "parallel.quantized.fake_quantized; counted in tests/planner/test_quantized.py",
            managed=True,
        ),
        Row(
            "buckets of the replacement",
            export_bytes(shape, dims, own_buckets) + NOISE_BYTES * largest,
            f"an export in buckets of {BUCKET_BYTES >> 20} MiB, and {NOISE_BYTES} B x {largest} of the "
            "largest matrix",
            f"{ASSUMPTION}: temporaries of mrl.quantization.with_rounding_noise",
            managed=True,
        ),
    )

"""The peak bfloat16 speed of GPUs and the FLOPs of training, for the model FLOPs utilization (MFU).

MFU is the FLOPs that the model needs for the tokens of a step, divided by the FLOPs that the GPUs could
do at their peak in the time of the step (PaLM, arXiv 2204.02311, appendix B). Recomputed activations,
passes without a gradient, padding and communication do not count as useful FLOPs, so they lower the
MFU.
"""

from __future__ import annotations

from collections.abc import Iterable

from mrl.planner import flops
from mrl.planner.shape import ModelShape

PEAK_BF16_FLOPS = {
    "B200": 2250e12,  # NVIDIA Blackwell datasheet (HGX B200: 18 PFLOP/s dense on 8 GPUs)
    "H200": 989e12,  # NVIDIA H200 datasheet: 1,979 with sparsity
    "H100 NVL": 835e12,  # NVIDIA H100 NVL datasheet: 1,671 with sparsity
    "H100 PCIe": 756e12,  # NVIDIA H100 datasheet of 2022: 1,513 with sparsity
    "H100": 989e12,  # NVIDIA H100 datasheet, SXM: 1,979 with sparsity
    "H800": 989e12,  # like the H100 SXM, with a slower NVLink
    "H20": 148e12,  # NVIDIA HGX H20 product brief
    "GH200": 989e12,  # NVIDIA GH200 datasheet: 1,979 with sparsity
    "A100": 312e12,  # NVIDIA A100 datasheet
    "A800": 312e12,  # like the A100, with a slower NVLink
    "L40S": 362e12,  # NVIDIA L40S datasheet: 362.05
    "L4": 121e12,  # NVIDIA L4 datasheet: 242 with sparsity
    "A10": 125e12,  # NVIDIA A10 datasheet
    "MI300X": 1307e12,  # AMD Instinct MI300X datasheet
    "MI325X": 1307e12,  # AMD Instinct MI325X datasheet
}
"""Dense bfloat16 FLOPs per second from the vendors' data sheets. The keys are words in device names; if
several keys occur in a name, the longest one applies."""


def peak_flops(device_name: str) -> float | None:
    """Return the peak bfloat16 FLOPs per second of a device; None if they are unknown.

    A `device_name` is, for example, `NVIDIA H100 80GB HBM3`. Whole words are compared, so the key A10
    does not match an A100.
    """
    words = device_name.replace("-", " ").split()
    found = [name for name in PEAK_BF16_FLOPS if _has(words, name.split())]
    return PEAK_BF16_FLOPS[max(found, key=len)] if found else None


def training_flops(shape: ModelShape, lengths: Iterable[int]) -> float:
    """Return the FLOPs of a forward and a backward pass over sequences of these lengths.

    A token attends to half of its sequence on average, so the result is sum_i T_i f(T_i / 2) over the
    lengths T_i, where f is `flops.training_flops` of one token.
    """
    return sum(length * flops.training_flops(shape, length / 2) for length in lengths)


def _has(words: list[str], part: list[str]) -> bool:
    """Return whether the words of `part` occur in `words` in the same order, with no word between."""
    return any(words[i : i + len(part)] == part for i in range(len(words)))

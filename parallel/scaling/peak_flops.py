"""This module knows the bfloat16 peak of GPUs, and the model FLOPs utilization (MFU) of a step.

MFU is the FLOPs that the model needs for the tokens, over those that the GPUs could do in the time
(PaLM, arXiv 2204.02311, appendix B). Recomputed activations, passes without gradient, padding and
communication do not count as work: they lower the MFU.
"""

from __future__ import annotations

from collections.abc import Iterable

from parallel.scaling import flops
from parallel.scaling.shape import ModelShape

PEAK_BF16_FLOPS = {
    "B200": 2250e12,  # NVIDIA Blackwell datasheet (HGX B200: 18 PFLOP/s dense on 8 GPUs)
    "H200": 989e12,  # NVIDIA H200 datasheet: 1,979 with sparsity
    "H100 NVL": 835e12,  # NVIDIA H100 NVL datasheet: 1,671 with sparsity
    "H100 PCIe": 756e12,  # NVIDIA H100 datasheet of 2022: 1,513 with sparsity
    "H100": 989e12,  # NVIDIA H100 datasheet, SXM: 1,979 with sparsity
    "H800": 989e12,  # as the H100 SXM; only its NVLink is slower
    "H20": 148e12,  # NVIDIA HGX H20 product brief
    "GH200": 989e12,  # NVIDIA GH200 datasheet: 1,979 with sparsity
    "A100": 312e12,  # NVIDIA A100 datasheet
    "A800": 312e12,  # as the A100; only its NVLink is slower
    "L40S": 362e12,  # NVIDIA L40S datasheet: 362.05
    "L4": 121e12,  # NVIDIA L4 datasheet: 242 with sparsity
    "A10": 125e12,  # NVIDIA A10 datasheet
    "MI300X": 1307e12,  # AMD Instinct MI300X datasheet
    "MI325X": 1307e12,  # AMD Instinct MI325X datasheet
}
"""Dense bfloat16 FLOPs per second by a part of the device's name, from the makers' data sheets. Of
several parts that occur in a name, the longest counts."""


def peak_flops(device_name: str) -> float | None:
    """Return the peak of a device, such as `NVIDIA H100 80GB HBM3`; None for one that is not known.

    Whole words are compared, so that an A100 is no A10.
    """
    words = device_name.replace("-", " ").split()
    found = [name for name in PEAK_BF16_FLOPS if _has(words, name.split())]
    return PEAK_BF16_FLOPS[max(found, key=len)] if found else None


def training_flops(shape: ModelShape, lengths: Iterable[int]) -> float:
    """Count the FLOPs that a forward and a backward pass need for sequences of these lengths.

    A backward pass takes twice a forward pass, less the gradients of frozen weights, and a token
    attends to half of its sequence on average: sum_i T_i flops(T_i / 2), with `flops.training_flops`
    for one token.
    """
    return sum(length * flops.training_flops(shape, length / 2) for length in lengths)


def _has(words: list[str], part: list[str]) -> bool:
    """Whether `part` stands in `words`, as whole words one after the other."""
    return any(words[i : i + len(part)] == part for i in range(len(words)))

"""Data sheets of the GPUs that a plan can be made for, and the efficiency that real code is assumed
to reach on them."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.errors import InputError


@dataclass(frozen=True)
class Hardware:
    """One GPU and its links, from the vendor's data sheets. Speeds are in bytes or FLOPs per second."""

    name: str
    memory_bytes: int
    """Bytes of GPU memory that a process can use, slightly fewer than the memory size in `name`."""
    flops: float
    """Peak FLOPs per second of dense bfloat16 matrix products."""
    hbm: float
    nvlink: float
    """Speed in one direction between GPUs of a node."""
    network: float
    """Speed in one direction between nodes, per GPU."""
    host: float
    """Speed in one direction between GPU and host memory (PCIe 5.0 x16)."""
    gpus_per_node: int = 8
    host_memory_bytes: int = 2 << 40
    """Host memory of one node; NVIDIA's DGX H100 and H200 have 2 TiB."""


HARDWARE = {
    "h100": Hardware("H100 80 GB", 79 << 30, 989e12, 3.35e12, 450e9, 50e9, 64e9),
    "h200": Hardware("H200 141 GB", 139 << 30, 989e12, 4.8e12, 450e9, 50e9, 64e9),
}


@dataclass(frozen=True)
class Efficiency:
    """For each speed in the data sheet, the share that real code reaches; also the fixed costs of a
    weight sync.

    All these numbers are assumptions, to be replaced by measurements.
    """

    flops: float = 0.35
    """Share of the GPU's peak bf16 FLOPs that training and prefill reach. Grouped matrix products
    of small experts reach a smaller share than dense matrix products."""
    hbm: float = 0.6
    links: float = 0.7
    host: float = 0.7
    bucket_s: float = 0.01
    """Seconds per bucket of weights for a request to the engine and the engine's answer, in
    addition to the time to copy bytes."""
    tensor_s: float = 0.2e-3
    """Seconds per tensor of a bucket for looking up the parameter and starting a copy in the engine, in
    addition to the time to copy bytes."""
    host_memory: float = 40e9
    """Host-memory bandwidth that one rank gets, in bytes per second; used for Adam on the CPU."""


EFFICIENCY = Efficiency()


def find_hardware(name: str) -> Hardware:
    """Return the hardware with this name.

    Raises InputError, with the known names, for any other name.
    """
    if name not in HARDWARE:
        raise InputError(f"--gpu: got {name!r}, expected {' or '.join(HARDWARE)}")
    return HARDWARE[name]

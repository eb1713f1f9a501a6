"""This module chooses CUDA_DEVICE_MAX_CONNECTIONS, the queues between host and GPU, before CUDA starts.

Megatron asks for a collective before the product that it overlaps with, and relies on the GPU to begin
them in this order. Up to Hopper only a single queue keeps it. The rule is that of Megatron-LM's
`validate_args` (megatron/training/arguments.py, not a part of megatron-core, whose
`tensor_parallel/layers.py` only warns): 1 with tensor or context parallelism, on GPUs before Blackwell.
This has not run on a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mrl.config import ParallelConfig

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10
"""The major compute capability from which on streams keep the order by themselves."""
QUERY = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
QUERY_S = 30.0
DRIVER = Path("/dev/nvidiactl")
"""A machine with NVIDIA's driver has this file."""


def choose_connections(layout: ParallelConfig, ask_capabilities: Callable[[], str]) -> str | None:
    """Return the value that Megatron wants for a layout; None where CUDA's default may stay.

    `ask_capabilities` gives the answer to QUERY, such as "9.0" on a line for each GPU, or nothing; it
    is asked only where the layout needs it.
    """
    if layout.tensor_model_parallel_size == layout.context_parallel_size == 1:
        return None
    majors = [line.split(".")[0].strip() for line in ask_capabilities().splitlines()]
    known = [int(major) for major in majors if major.isdecimal()]
    return "1" if known and min(known) < BLACKWELL else None


def set_connections(layout: ParallelConfig) -> None:
    """Set the variable for this process, unless the user has. Call it before torch asks for GPUs: CUDA
    reads it when it starts."""
    if VARIABLE not in os.environ and (value := choose_connections(layout, _ask)) is not None:
        os.environ[VARIABLE] = value


def _ask() -> str:
    """Ask the driver's tool, as torch would start CUDA. Warn and return nothing if it does not answer
    where there is a GPU."""
    answer = ""
    if shutil.which(QUERY[0]):
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                QUERY, capture_output=True, text=True, timeout=QUERY_S, check=True
            )
            answer = done.stdout
    if not answer.strip() and DRIVER.exists():
        warnings.warn(
            f"{QUERY[0]} did not tell the GPUs' compute capability, so {VARIABLE} stays unset; set "
            "it to 1 on GPUs before Blackwell, where Megatron's tensor and context parallelism want it",
            RuntimeWarning,
            stacklevel=2,
        )
    return answer

"""Choose CUDA_DEVICE_MAX_CONNECTIONS, the number of queues between host and GPU, before CUDA starts.

Megatron issues a collective before the matrix product that it overlaps with, and relies on the GPU to
start them in this order. Up to Hopper only a single queue guarantees that. So on GPUs
before Blackwell, `validate_args` in Megatron-LM's megatron/training/arguments.py requires the value 1
with tensor or context parallelism. megatron-core does not contain that file, and its
`tensor_parallel/layers.py` only warns. This module has not run on a GPU.
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
"""The first major compute capability on which several queues, too, guarantee the order that Megatron
relies on (see the module docstring)."""
QUERY = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
QUERY_S = 30.0
DRIVER = Path("/dev/nvidiactl")
"""A file that exists if NVIDIA's driver is loaded."""


def choose_connections(layout: ParallelConfig, ask_capabilities: Callable[[], str]) -> str | None:
    """Return the value that Megatron needs for a layout; None if CUDA's default may stay.

    `ask_capabilities` returns one line with the compute capability, such as "9.0", for each GPU, or
    an empty string. It is called only if the layout has tensor or context parallelism.
    """
    if layout.tensor_model_parallel_size == layout.context_parallel_size == 1:
        return None
    majors = [line.split(".")[0].strip() for line in ask_capabilities().splitlines()]
    known = [int(major) for major in majors if major.isdecimal()]
    return "1" if known and min(known) < BLACKWELL else None


def set_connections(layout: ParallelConfig) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS for this process if the layout needs a value and the user has
    set none.

    Call this before torch uses a GPU: CUDA reads the variable when it starts.
    """
    if VARIABLE not in os.environ and (value := choose_connections(layout, _ask)) is not None:
        os.environ[VARIABLE] = value


def _ask() -> str:
    """Return the compute capability of each GPU, one per line, as nvidia-smi prints it; an empty
    string if the query fails. torch is not asked, because this would start CUDA.

    Warns if the query fails on a machine with NVIDIA's driver.
    """
    answer = ""
    if shutil.which(QUERY[0]):
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                QUERY, capture_output=True, text=True, timeout=QUERY_S, check=True
            )
            answer = done.stdout
    if not answer.strip() and DRIVER.exists():
        warnings.warn(
            f"{QUERY[0]} did not report the GPUs' compute capability, so {VARIABLE} stays unset; set "
            "it to 1 on GPUs before Blackwell: Megatron's tensor and context parallelism need that",
            RuntimeWarning,
            stacklevel=2,
        )
    return answer

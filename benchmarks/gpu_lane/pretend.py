"""This module lets a process without a GPU go where one with a Hopper GPU goes, up to its first CUDA
call.

torch's questions about the device are answered as an H100 would, because libraries decide by them what
they import and start; nothing else is replaced. The first call that needs the device fails with torch's
own error, and `watch` puts on file where that was.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
STOPS = "MRL_DRY_RUN_STOPS"
"""The variable with the file to which each process adds the CUDA calls that failed, a JSON object a
line."""
GIB = 1 << 30
HOPPER = SimpleNamespace(
    major=9, minor=0, name="NVIDIA H100 80GB HBM3", total_memory=79 * GIB, multi_processor_count=132,
    uuid="none", L2_cache_size=50 << 20, warp_size=32, gcnArchName="", is_integrated=False,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=232448,
)  # fmt: skip


def answer_queries(torch: Any) -> None:
    """Answer torch.cuda's questions; the driver is never asked."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (HOPPER.major, HOPPER.minor),
        "get_device_properties": HOPPER,
        "get_device_name": HOPPER.name,
        "mem_get_info": (78 * GIB, HOPPER.total_memory),
        "is_initialized": False,
        "is_bf16_supported": True,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)


def watch(torch: Any) -> None:
    """Put every failing start of CUDA on file: the line of code that asked for it, and the error."""
    start = torch._C._cuda_init

    def start_and_tell() -> None:
        try:
            start()
        except Exception as error:
            _put_on_file(f"{type(error).__name__}: {error}".splitlines()[0])
            raise

    torch._C._cuda_init = start_and_tell


def _put_on_file(error: str) -> None:
    frames = [f for f in traceback.extract_stack() if not _is_of_torch(f.filename)]
    caller = frames[-1]
    stop = {
        "at": f"{_short(caller.filename)}:{caller.lineno}",
        "function": caller.name,
        "code": caller.line,
        "error": error,
        "process": " ".join(sys.orig_argv[1:4]),
        "pid": os.getpid(),
    }
    with open(os.environ[STOPS], "a") as sink:
        sink.write(json.dumps(stop) + "\n")


def _is_of_torch(file: str) -> bool:
    return "/torch/" in file or file == __file__


def _short(file: str) -> str:
    """Return a file as its package names it, or relative to this repository."""
    if file.startswith(f"{ROOT}{os.sep}"):
        inner = Path(file).relative_to(ROOT)
        if inner.parts[0] != "build":
            return str(inner)
    for folder in sorted((p for p in sys.path if p), key=len, reverse=True):
        if file.startswith(f"{folder}{os.sep}"):
            return file[len(folder) + 1 :]
    return file

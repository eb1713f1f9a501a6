"""This module rehearses the parts of run.py on a machine without a GPU: `--dry-run`.

It needs what a GPU machine has (Python 3.12, torch built for CUDA, the pieces) except the GPU and its
driver. Each part is the same process as on a GPU, with the same arguments, and so are the engines
that it starts; torch's questions about the device are answered (pretend.py), and libcuda.so.1, which
some libraries are linked against, is a stand-in whose functions all report that there is no device. So
a part ends at its first CUDA call, with torch's own error: that is what is expected of it. A part that
ends before, with any other error, has found a mistake that a GPU machine would have found too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_lane.caches import set_variables
from benchmarks.gpu_lane.catalog import NO_FIGURES
from benchmarks.gpu_lane.pretend import STOPS
from benchmarks.gpu_lane.state import FAILED, PASSED
from benchmarks.libcuda import write_libcuda

DEVICE = "dry run"
"""The name of its device in gpu_check.json: no call on a GPU continues from it."""
LIMIT_S = 900.0
"""Seconds of each part: it imports everything on whatever machine this is."""
LINKED = ("sgl_kernel/**/*.so", "torch_memory_saver*.so", "flash_mla/**/*.so", "deep_gemm/**/*.so")
"""Libraries that may want libcuda.so.1 when they are loaded."""
ERROR = re.compile(r"(?:E +)?(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b")
"""How the last line of a traceback begins."""
ASK = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"


def refusal() -> str | None:
    """Return why there can be no dry run with this interpreter; None where there can."""
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"--dry-run: {sys.executable} cannot import torch: {done.stderr.splitlines()[-1]}"
    release, cuda, has_gpu = done.stdout.split()
    if cuda == "None":
        return (
            f"--dry-run: torch {release} is built without CUDA; expected a CUDA build, set PYTHON"
        )
    if has_gpu == "True":
        return "--dry-run is for machines without a GPU, and torch sees one; leave it out"
    if missing := [tool for tool in ("nm", "cc") if not shutil.which(tool)]:
        return f"--dry-run: there is no {missing[0]} on PATH; install a C compiler and binutils"
    return None


class DryRun:
    """The environment of the parts' processes, and the verdict on how each part ended."""

    def __init__(self, folder: Path) -> None:
        """`folder` is scratch space; the environment of this process is changed."""
        self.stops = folder / "stops.jsonl"
        libraries = [file for path in sys.path for each in LINKED for file in Path(path).glob(each)]
        write_libcuda(folder, libraries)
        here = Path(__file__).parent
        os.environ[STOPS] = str(self.stops)
        set_variables(os.environ, folder / "caches")  # nothing of it is of a real GPU
        for name, first in (("LD_LIBRARY_PATH", folder), ("PYTHONPATH", here / "no_gpu")):
            os.environ[name] = os.pathsep.join(filter(None, (str(first), os.environ.get(name))))
        # One test's first CUDA call is enough.
        os.environ["PYTEST_ADDOPTS"] = f"{os.environ.get('PYTEST_ADDOPTS', '')} -x".strip()

    def begin(self) -> None:
        """Forget the calls of the part before."""
        self.stops.unlink(missing_ok=True)

    def judge(self, code: int | None, text: str) -> dict[str, Any]:
        """Return the record of a part that ended with `code` (None: killed) and the log `text`."""
        lines = self.stops.read_text().splitlines() if self.stops.exists() else []
        stops = [json.loads(line) for line in lines]
        found = {"stops": stops}
        if code is None:
            return {"status": FAILED, "why": "killed at its limit", **found}
        if code == 0:
            return {"status": FAILED, "why": "ended without a call that needs a GPU", **found}
        ended = last_error(text) or f"exit code {code}"
        if NO_FIGURES in ended:
            return {"status": PASSED, "why": "made its plan; the figures of `train` need a GPU"}
        for stop in stops:
            if stop["error"] in ended:
                return {"status": PASSED, "why": f"stopped at {describe(stop)}", **found}
        return {"status": FAILED, "why": f"before its first CUDA call: {ended}", **found}


def describe(stop: dict[str, str]) -> str:
    """Return where a process stopped, in one line: place, function, code, the error's first words."""
    error = stop["error"].partition(". ")[0]
    return f"{stop['at']}, {stop['function']}: `{stop['code']}`: {error}"


def last_error(text: str) -> str:
    """Return the last line of a log that ends a traceback, also one of pytest, or an empty text.

    That a child process failed is no error of its own: the child's is in the log, too.
    """
    found = [line for line in text.splitlines() if ERROR.match(line)]
    return next((line for line in reversed(found) if "CalledProcessError" not in line), "")

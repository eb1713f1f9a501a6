"""A dry run of the GPU lane: where a process stopped, and what is accepted as its end."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_lane import caches, catalog, dry_run, pretend, run
from benchmarks.gpu_lane.dry_run import DryRun
from benchmarks.libcuda import NO_DEVICE

ROOT = Path(__file__).parents[2]
NO_DRIVER = "RuntimeError: Found no NVIDIA driver on your system."
STOP = {"at": "a.py:7", "function": "f", "code": "x.cuda()", "error": NO_DRIVER}
TORCH = f"""
from types import SimpleNamespace

def start():
    raise RuntimeError({NO_DRIVER.partition(": ")[2]!r})

_C = SimpleNamespace(_cuda_init=start)
cuda = SimpleNamespace(is_available=lambda: False)
"""
"""The names of torch that the hook touches: a torch built for CPUs has no `_cuda_init`."""


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_torch_without_cuda_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        run.main(["--dry-run"])
    assert left.value.code == 2
    assert f"--dry-run: torch {torch.__version__} is built without CUDA" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("2.11.0 13.0 True", "--dry-run is for machines without a GPU, and torch sees one"),
        ("2.11.0 13.0 False", None),
    ],
)
def test_a_machine_with_a_gpu_is_refused(answer, expected, monkeypatch) -> None:
    monkeypatch.setattr(dry_run, "ASK", f"print({answer!r})")
    refused = dry_run.refusal()
    assert (refused is None) if expected is None else (expected in (refused or ""))


def test_a_process_tells_where_it_first_needed_the_gpu(tmp_path) -> None:
    """The line of the caller and the error of torch itself are on file, also from a child process."""
    (tmp_path / "torch.py").write_text(TORCH)
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)\n"
        "def train():\n"
        "    torch._C._cuda_init()  # asks for the device\n"
        "train()\n"
    )
    folder = Path(pretend.__file__).parent / "no_gpu"
    paths = os.pathsep.join(map(str, (folder, tmp_path, ROOT)))
    stops = tmp_path / "stops.jsonl"
    start = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, {str(program)!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths, pretend.STOPS: str(stops)},
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == NO_DRIVER
    (found,) = (json.loads(line) for line in stops.read_text().splitlines())
    assert (found["at"], found["function"]) == ("program.py:4", "train")
    assert found["code"] == "torch._C._cuda_init()  # asks for the device"
    assert found["error"] == NO_DRIVER


@pytest.fixture
def dry(tmp_path, monkeypatch) -> DryRun:
    changed = ("LD_LIBRARY_PATH", "PYTHONPATH", "PYTEST_ADDOPTS", pretend.STOPS, *caches.FOLDERS)
    for name in changed:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return DryRun(tmp_path)


def test_the_stand_in_for_the_driver_reports_that_there_is_no_device(dry, tmp_path) -> None:
    library = ctypes.CDLL(str(tmp_path / "libcuda.so.1"))
    assert library.cuInit(0) == NO_DEVICE
    assert os.environ["LD_LIBRARY_PATH"].split(os.pathsep)[0] == str(tmp_path)


@pytest.mark.parametrize(
    ("code", "has_stop", "log", "status", "why"),
    [
        (1, True, f"  x.cuda()\n{NO_DRIVER} Get one.", "passed", "a.py:7, f: `x.cuda()`: Runtime"),
        (1, True, f"{NO_DRIVER}\nsubprocess.CalledProcessError: exit status 1", "passed", "a.py:7"),
        (1, True, f"E   {NO_DRIVER}\nFAILED tests/x.py", "passed", "stopped at a.py:7"),
        (
            1,
            True,
            "ImportError: no module",
            "failed",
            "before its first CUDA call: ImportError: no",
        ),
        (1, False, NO_DRIVER, "failed", "before its first CUDA call"),
        (1, True, f"{NO_DRIVER}\nTypeError: in a handler", "failed", "TypeError: in a handler"),
        (1, False, f"AssertionError: {catalog.NO_FIGURES}", "passed", "made its plan"),
        (0, True, "", "failed", "ended without a call that needs a GPU"),
        (None, True, NO_DRIVER, "failed", "killed at its limit"),
        (2, False, "no traceback", "failed", "before its first CUDA call: exit code 2"),
    ],
)
def test_only_the_first_cuda_call_is_accepted_as_an_end(
    dry, code, has_stop, log, status, why
) -> None:
    dry.begin()
    if has_stop:
        dry.stops.write_text(json.dumps(STOP) + "\n")
    found = dry.judge(code, log)
    assert found["status"] == status, found
    assert why in found["why"]

"""csrc/cuda/*.cu as nvcc sees them: no spills, no local memory; and what they must not contain."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from emulator import ROOT

SOURCES = sorted(ROOT.glob("csrc/cuda/*.cu"))
SAMPLES = ROOT / "tests/kernels/emulator/samples.cu"
# As setup.py compiles, with ptxas's report of each kernel.
NVCC_ARGS = ["-O3", "-std=c++17", "-Icsrc", "-arch=sm_90a", "-cubin", "-Xptxas", "-v"]


def find_nvcc() -> Path | None:
    """Folders first: an nvcc on the PATH may be a wrapper."""
    found = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [Path(home, "bin", "nvcc") for home in homes if home]
    candidates += [Path(found)] if found else []
    return next((path for path in candidates if path.exists()), None)


NVCC = find_nvcc()
needs_nvcc = pytest.mark.skipif(
    NVCC is None, reason="no nvcc: set CUDA_HOME or install the toolkit"
)


class Kernel(NamedTuple):
    name: str
    stack: int
    """Bytes of local memory a thread."""
    spill_stores: int
    spill_loads: int


def parse_report(report: str) -> list[Kernel]:
    """The kernels of a `ptxas -v` report. Raises ValueError where it has another form."""
    sizes = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    entry = r"Compiling entry function '(\S+)' for '\S+'"
    found = re.findall(rf"{entry}\n[^\n]*Function properties for \1\s+{sizes}", report)
    if len(found) != report.count("Compiling entry function"):
        raise ValueError(f"a ptxas report of an unknown form:\n{report}")
    return [Kernel(name, *map(int, numbers)) for name, *numbers in found]


def compile_kernels(source: Path, folder: Path, *flags: str) -> list[Kernel]:
    target = folder / f"{source.stem}.cubin"
    command = [str(NVCC), *NVCC_ARGS, *flags, str(source), "-o", str(target)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return parse_report(result.stdout + result.stderr)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, list[Kernel]]:
    folder = tmp_path_factory.mktemp("cubins")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda source: compile_kernels(source, folder), [*SOURCES, SAMPLES])
        return dict(zip([source.name for source in [*SOURCES, SAMPLES]], found, strict=True))


def test_there_are_kernels() -> None:
    assert SOURCES


@needs_nvcc
@pytest.mark.release
@pytest.mark.parametrize("source", [*SOURCES, SAMPLES], ids=lambda source: source.name)
def test_kernels_keep_everything_in_registers(kernels, source, tmp_path) -> None:
    found = kernels[source.name]
    assert found, f"{source.name} has no kernel"
    bad = [k for k in found if k.spill_stores or k.spill_loads]
    if any(k.stack for k in found):
        # The arguments of a printf lie on the stack, in a branch that traps. Nothing else may.
        header = tmp_path / "no_printf.h"
        header.write_text("#include <cstdio>\n#define printf(...) static_cast<void>(0)\n")
        quiet = compile_kernels(source, tmp_path, "-include", str(header))
        assert len(quiet) == len(found)
        bad += [k for k in quiet if k.stack or k.spill_stores or k.spill_loads]
    assert not bad, "\n".join(map(str, bad))


@needs_nvcc
def test_a_spill_and_a_stack_frame_are_seen(tmp_path) -> None:
    source = tmp_path / "spills.cu"
    source.write_text(
        """
        __global__ void Spills(const float* x, float* y) {
          float values[64];
          #pragma unroll
          for (int i = 0; i < 64; ++i) values[i] = x[i * 1024 + threadIdx.x];
          __syncthreads();
          #pragma unroll
          for (int i = 0; i < 64; ++i) y[i * 1024 + threadIdx.x] = values[63 - i] * values[i];
        }
        __global__ void Indexes(const int* x, float* y) {
          float values[64];
          for (int i = 0; i < 64; ++i) values[x[i] & 63] = y[i];
          y[0] = values[x[0] & 63];
        }
        """
    )
    by_name = {k.name: k for k in compile_kernels(source, tmp_path, "-maxrregcount=24")}
    assert len(by_name) == 2
    spills = next(k for name, k in by_name.items() if "Spills" in name)
    indexes = next(k for name, k in by_name.items() if "Indexes" in name)
    assert spills.spill_stores > 0
    assert spills.spill_loads > 0
    assert indexes.stack >= 256


def test_an_unknown_report_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown form"):
        parse_report("ptxas info : Compiling entry function 'K' for 'sm_90a'\nUsed 8 registers")


def code_of(source: Path) -> str:
    """Return the source without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", source.read_text(), flags=re.DOTALL)


def forbidden(code: str) -> list[str]:
    """What would break a promise: sums in one order, kernels that the emulator can run."""
    patterns = {
        "<<<": "launches: use MRL_LAUNCH",
        r"\batomic(?!Add\b)\w*|\b__nv_atomic\w*|\bcuda::atomic\w*": "atomics: only atomicAdd",
        r"\b(?:threadIdx|blockIdx|blockDim|gridDim)\.[yz]": "grids: one dimension only",
        r"\bextern\s+__shared__": "shared memory: arrays of a constant size only",
        r"\b__activemask\b": "masks: full ones only",
        r"\b(?:red|atom)\.\w": "atomics in PTX",
    }
    return [f"{m.group()}: {why}" for p, why in patterns.items() for m in re.finditer(p, code)]


@pytest.mark.parametrize("source", [*SOURCES, SAMPLES], ids=lambda source: source.name)
def test_source_keeps_to_what_launch_h_allows(source) -> None:
    assert not forbidden(code_of(source))


@pytest.mark.parametrize(
    "code", ["K<<<1, 2>>>();", "atomicMax(p, 1);", "threadIdx.y", "extern __shared__ int x[];",
             'asm("red.global.add.f32 [%0], %1;");']
)  # fmt: skip
def test_forbidden_code_is_found(code) -> None:
    assert len(forbidden(code)) == 1


# What the type of a ticket is, the compiler checks: cuda_emulator.h deletes atomicAdd for all but
# unsigned, and every .cu file is compiled with it.
def test_atomic_add_of_a_float_does_not_compile(tmp_path) -> None:
    source = tmp_path / "float_atomic.cpp"
    for kind, compiles in (("unsigned", True), ("float", False)):
        source.write_text(
            f'#include "cuda_emulator.h"\n__global__ void K({kind}* p) {{ atomicAdd(p, {kind}(1)); }}'
        )
        command = ["g++", "-std=c++17", "-fsyntax-only", "-Itests/kernels/emulator", str(source)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (result.returncode == 0) == compiles, result.stderr
        assert compiles or "use of deleted function" in result.stderr

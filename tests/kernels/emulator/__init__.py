"""Runs csrc/cuda/*.cu on a CPU: the same source, compiled by g++ with cuda_emulator.h for CUDA.

`build_samples` and `build_module` compile; `GuardedCopies` (memory.py) gives a kernel memory whose
ends it cannot cross unseen. The fixture `emulated_cuda` in tests/kernels/conftest.py joins them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pybind11

from .memory import GuardedCopies

__all__ = ["ORDERS", "ROOT", "GuardedCopies", "build_module", "build_samples"]

ORDERS = ("forward", "reverse", "shuffled")
"""Orders of threads, warps and blocks: values of the environment variable MRL_EMULATOR_ORDER."""

ROOT = Path(__file__).resolve().parents[3]
_NUM_JOBS = 2
_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-DMRL_WITH_CUDA", "-Icsrc"]
# Kernels go into a library of their own, with no hidden thread-local variable but __shared__ ones.
# No -fopenmp there: a GPU has none. The sanitizers call functions of faults.h, not libubsan.
_CUDA_FLAGS = [
    *_FLAGS,
    "-DMRL_CUDA_EMULATOR",
    "-Itests/kernels/emulator",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-fno-gnu-unique",
    "-ftrivial-auto-var-init=pattern",
    "-fsanitize=alignment,bounds-strict,shift,signed-integer-overflow,integer-divide-by-zero",
    "-x",
    "c++",
]
_CPU_FLAGS = [*_FLAGS, "-fopenmp", "-fvisibility=hidden", "-Wno-psabi", "-DMRL_CUDA_EMULATOR"]


def build_samples(folder: Path) -> ctypes.CDLL:
    """Compile samples.cu, the kernels that test the emulator itself, into `folder` and load it."""
    (built,) = _compile([ROOT / "tests/kernels/emulator/samples.cu"], folder)
    library = ctypes.CDLL(str(_link([built], folder / "samples.so")))
    library.RunSample.restype = ctypes.c_char_p
    return library


def build_module(folder: Path) -> ModuleType:
    """Compile csrc/ with emulated kernels into `folder`; returns it as a second module `_C`.

    Beside the `*_cpu` functions, which are those of mrl._C without its optimizations, it has the
    `*_cuda` functions, for addresses of CPU memory. Raises RuntimeError with g++'s words where a
    file does not compile.
    """
    cuda_sources = sorted(ROOT.glob("csrc/cuda/*.cu"))
    cpu_sources = sorted(
        [*ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/bind/*.cpp"), *ROOT.glob("csrc/cpu/*.cpp")]
    )
    objects = _compile([*cuda_sources, *cpu_sources], folder)
    # Every function that the kernels need must be among them: -z defs says so now, not at a call.
    kernels = _link(
        objects[: len(cuda_sources)], folder / "libmrl_emulated_kernels.so", "-Wl,-z,defs"
    )
    target = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    _link([*objects[len(cuda_sources) :], kernels], target, "-fopenmp", "-Wl,-rpath,$ORIGIN")
    spec = importlib.util.spec_from_file_location("_C", target)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(sources: Sequence[Path], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]

    def compile_one(source: Path) -> Path:
        # x.cpp and x.cu are in different folders of csrc/; their objects must not collide.
        target = folder / ("_".join(source.relative_to(ROOT).parts) + ".o")
        flags = _CUDA_FLAGS if source.suffix == ".cu" else [*_CPU_FLAGS, *includes]
        _run(["g++", *flags, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(_NUM_JOBS) as pool:
        return list(pool.map(compile_one, sources))


def _link(objects: Sequence[Path], target: Path, *flags: str) -> Path:
    _run(["g++", "-shared", *map(str, objects), *flags, "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\nreturned {result.returncode}:\n{result.stderr}")

"""Runs csrc/cuda/*.cu on a CPU: the same source, compiled by g++ with cuda_emulator.h for CUDA.

`build_*` compile, `load_*` load; `GuardedCopies` (memory.py) gives a kernel memory whose ends it
cannot cross unseen. The fixture `emulated_cuda` in tests/kernels/conftest.py joins them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pybind11

from .memory import GuardedCopies

__all__ = [
    "ORDERS",
    "ROOT",
    "GuardedCopies",
    "build_module",
    "build_samples",
    "load_module",
    "load_samples",
]

ORDERS = ("forward", "reverse", "shuffled")
"""Orders of threads, warps and blocks: values of the environment variable MRL_EMULATOR_ORDER."""

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CACHE = ROOT / "build/emulator"
"""Builds of earlier sessions; `make clean` removes them."""
MODULE_FILE = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
KERNELS_FILE = "libmrl_emulated_kernels.so"
_NUM_JOBS = 2
_FLAGS = ["-std=c++17", "-fPIC", "-DMRL_WITH_CUDA", "-Icsrc"]
# Kernels go into a library of their own, with no hidden thread-local variable but __shared__ ones.
# No -fopenmp there: a GPU has none. The sanitizers call functions of faults.h, not libubsan.
_CUDA_FLAGS = [
    *_FLAGS,
    "-O1",
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
_BIND_FLAGS = [
    *_FLAGS,
    "-O0",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-DMRL_CUDA_EMULATOR",
]


def build_samples(folder: Path) -> None:
    """Compile samples.cu, the kernels that test the emulator itself, into `folder`."""
    source = ROOT / "tests/kernels/emulator/samples.cu"

    def make(made: Path) -> None:
        (built,) = _compile([source], made)
        _link([built], made / "samples.so")

    _from_cache([source], folder, make)


def load_samples(folder: Path) -> ctypes.CDLL:
    """What `build_samples` left in `folder`."""
    library = ctypes.CDLL(str(folder / "samples.so"))
    library.RunSample.restype = ctypes.c_char_p
    return library


def build_module(folder: Path) -> None:
    """Compile csrc/ with emulated kernels into `folder`, as a second module `_C`.

    Raises RuntimeError with g++'s words where a file does not compile.
    """
    cuda_sources = sorted(ROOT.glob("csrc/cuda/*.cu"))
    bind_sources = sorted(ROOT.glob("csrc/bind/*.cpp"))

    def make(made: Path) -> None:
        # One unit for all bindings: pybind11 is four of the five seconds that each of them takes.
        bindings = made / "bindings.cpp"
        bindings.write_text("".join(f'#include "{source}"\n' for source in bind_sources))
        *objects, bound = _compile([*cuda_sources, bindings], made)
        # The tests compare with the CPU functions of mrl._C, and nobody calls those of this module:
        # they are left out, and weak names may stay without a function.
        _run(["objcopy", "--wildcard", "--weaken-symbol=_ZN3mrl*Cpu*", str(bound)])
        # Every function that the kernels need must be among them: -z defs says so now, not at a call.
        flags = ("-Wl,-z,defs", f"-Wl,-soname,{KERNELS_FILE}")
        kernels = _link(objects, made / KERNELS_FILE, *flags)
        _link([bound, kernels], made / MODULE_FILE, "-Wl,-rpath,$ORIGIN")

    _from_cache([*cuda_sources, *bind_sources], folder, make)


def load_module(folder: Path) -> ModuleType:
    """What `build_module` left in `folder`.

    Its `*_cuda` functions are for addresses of CPU memory, and its `*_cpu` functions must not be
    called: they have no code.
    """
    spec = importlib.util.spec_from_file_location("_C", folder / MODULE_FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _from_cache(sources: Sequence[Path], folder: Path, make: Callable[[Path], object]) -> None:
    """Fill `folder` with what `make` builds, from build/emulator/ where these very bytes were built.

    The name there is a hash of the sources, of all headers, the flags and the compiler's version.
    """
    headers = [*ROOT.glob("csrc/**/*.h*"), *ROOT.glob("csrc/**/*.cuh"), *HERE.glob("*.h")]
    digest = hashlib.sha256()
    for part in (_CUDA_FLAGS, _BIND_FLAGS, sysconfig.get_path("include"), pybind11.__version__):
        digest.update(repr(part).encode())
    digest.update(subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout)
    for file in sorted({*sources, *headers, Path(__file__)}):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    kept = CACHE / digest.hexdigest()[:16]
    if not kept.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=CACHE))
        try:
            make(made)
            with contextlib.suppress(OSError):  # another session was faster
                made.rename(kept)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(kept, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.o"))


def _compile(sources: Sequence[Path], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.name}.o"
        flags = _CUDA_FLAGS if source.suffix == ".cu" else [*_BIND_FLAGS, *includes]
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

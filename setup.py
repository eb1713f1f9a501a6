"""Builds `mrl._C` from csrc/; everything else about the package is in pyproject.toml.

MRL_CUDA=auto (the default) builds the GPU kernels where nvcc is found, 1 demands them, 0 leaves them
out. They link the static CUDA runtime and no torch, so the result imports without a driver.
MRL_CUDA_ARCH: architectures with machine code, e.g. "90a;100a"; PTX for the rest is always included.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from itertools import chain
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

# No -march=native: the kernels pick their instruction set at run time. No -ffast-math.
COMPILE_ARGS = [
    "-O3",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # vectors are passed between inlined functions only
]
NVCC_ARGS = ["-O3", "-std=c++17", "-Icsrc", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
PTX_ARCH = "80"


def find_cuda() -> Path | None:
    """The CUDA toolkit: /usr/local/bin/nvcc may be a wrapper, so folders come first."""
    found = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    homes.append(str(Path(found).resolve().parents[1]) if found else None)
    return next((Path(h) for h in homes if h and Path(h, "bin", "nvcc").exists()), None)


def choose_cuda() -> Path | None:
    mode = os.environ.get("MRL_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        raise SystemExit(f"MRL_CUDA: got {mode!r}, expected auto, 0 or 1")
    home = None if mode == "0" else find_cuda()
    if mode == "1" and home is None:
        raise SystemExit("MRL_CUDA=1, but there is no nvcc: set CUDA_HOME or install the toolkit")
    return home


CUDA = choose_cuda()


class BuildKernels(build_ext):
    """Compiles C++ files side by side, and the .cu files with nvcc."""

    def build_extension(self, ext):
        self.force = True  # objects from nvcc and MRL_CUDA are not among what setuptools compares
        cuda_sources = [source for source in ext.sources if source.endswith(".cu")]
        ext.sources = [source for source in ext.sources if not source.endswith(".cu")]
        jobs = os.cpu_count() or 1
        with ThreadPoolExecutor(jobs) as pool:
            ext.extra_objects += list(pool.map(self.compile_cuda, cuda_sources))
        compile_all = self.compiler.compile

        def compile_side_by_side(sources, **options):
            with ThreadPoolExecutor(jobs) as pool:
                parts = pool.map(lambda source: compile_all([source], **options), sources)
                return list(chain.from_iterable(parts))

        self.compiler.compile = compile_side_by_side
        super().build_extension(ext)

    def compile_cuda(self, source):
        target = Path(self.build_temp, source).with_suffix(".cu.o")
        target.parent.mkdir(parents=True, exist_ok=True)
        archs = os.environ.get("MRL_CUDA_ARCH", "90a").split(";")
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        codes.append(f"-gencode=arch=compute_{PTX_ARCH},code=compute_{PTX_ARCH}")
        nvcc = str(CUDA / "bin" / "nvcc")
        subprocess.check_call([nvcc, *NVCC_ARGS, *codes, "-c", source, "-o", str(target)])
        return str(target)


sources = glob("csrc/*.cpp") + glob("csrc/bind/*.cpp") + glob("csrc/cpu/*.cpp")
link_args = ["-fopenmp"]
if CUDA:
    sources += glob("csrc/cuda/*.cu")
    link_args += [f"-L{CUDA}/lib64", "-lcudart_static", "-lrt", "-ldl", "-lpthread"]

setup(
    package_dir={"": "."},  # with this, an editable install is one .pth line: new rooms just appear
    packages=find_packages(include=["mrl", "mrl.*", "parallel", "parallel.*", "moe", "moe.*"]),
    package_data={"mrl": ["py.typed", "engines/sglang/plugins/**", "view/page/*"]},
    ext_modules=[
        Pybind11Extension(
            "mrl._C",
            sorted(sources),
            depends=sorted(glob("csrc/**/*.h", recursive=True)),
            include_dirs=["csrc"],
            define_macros=[("MRL_WITH_CUDA", "1")] if CUDA else [],
            cxx_std=17,
            extra_compile_args=COMPILE_ARGS,
            extra_link_args=link_args,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)

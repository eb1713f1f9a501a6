"""Builds `mrl._C` from csrc/; everything else about the package is in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup

# No -march=native: the kernels pick their instruction set at run time. No -ffast-math; no FMA
# contraction either, so that every instruction set gives the same bits.
COMPILE_ARGS = [
    "-O3",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
]

setup(
    package_dir={"": "."},  # with this, an editable install is one .pth line: new rooms just appear
    packages=find_packages(include=["mrl", "mrl.*", "parallel", "parallel.*", "moe", "moe.*"]),
    package_data={"mrl": ["rollout/cpu_stubs/**"]},
    ext_modules=[
        Pybind11Extension(
            "mrl._C",
            sorted(glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.h")),
            cxx_std=17,
            extra_compile_args=COMPILE_ARGS,
            extra_link_args=["-fopenmp"],
        )
    ],
)

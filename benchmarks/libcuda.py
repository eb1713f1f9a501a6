"""A stand-in for the driver's library on a machine without a GPU.

Some wheels link libcuda.so.1, so they cannot be imported without a driver.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

NAME = "libcuda.so.1"
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""
FILES_A_CALL = 200


def write_libcuda(folder: Path, libraries: Iterable[Path]) -> None:
    """Write a libcuda.so.1 into `folder` with every function of it that `libraries` call; each returns
    NO_DEVICE. Needs nm and cc."""
    files = [str(path) for path in libraries]
    names = {"cuInit"}
    for start in range(0, len(files), FILES_A_CALL):
        command = ["nm", "-D", "--undefined-only", *files[start : start + FILES_A_CALL]]
        # nm fails for files that are no libraries, such as linker scripts, and reads the others.
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        names |= set(re.findall(r" U (cu[A-Z]\w*)$", found, re.MULTILINE))
    source = folder / "libcuda.c"
    source.write_text(
        "".join(f"int {each}(void) {{ return {NO_DEVICE}; }}\n" for each in sorted(names))
    )
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", str(folder / NAME)]
    subprocess.run(["cc", *flags, str(source)], check=True)

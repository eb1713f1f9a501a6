"""This module compiles `mrl._C` for the pieces of assemble.py, with its GPU kernels for Hopper, and
takes it from them on the other side.

The extension links no torch and carries CUDA's static runtime, so one file fits every release of torch;
it belongs to one minor version of Python, and to the sources whose digest lies beside it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIGEST = "sources.sha256"
"""The file beside the extension that holds the digest of what it was compiled from."""
ARCH = "90a"
BUILD_PACKAGES = ("pybind11", "setuptools")
"""What setup.py imports: both are Python files alone, so any Python can use another one's."""
TRY = "import torch; from mrl import _C; assert _C.has_cuda, 'it has no GPU kernels'"


def source_digest(root: Path = ROOT) -> str:
    """Return the SHA-256 of everything that the compiler reads of this repository."""
    digest = hashlib.sha256()
    files = sorted(file for file in (root / "csrc").rglob("*") if file.is_file())
    for file in [root / "setup.py", *files]:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def compile_for(python: str, target: Path, scratch: Path) -> Path:
    """Compile the extension for the interpreter `python` into the new folder `target`; minutes.

    Returns the file. Raises SystemExit where it cannot be compiled.
    """
    wanted = [
        line
        for line in (ROOT / "requirements" / "cpu.txt").read_text().split()
        if line.startswith(tuple(f"{name}==" for name in BUILD_PACKAGES))
    ]
    packages = scratch / "build_packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--target", str(packages), *wanted], check=True)
    command = [python, "setup.py", "--quiet", "build_ext"]
    command += ["--build-lib", str(scratch / "lib"), "--build-temp", str(scratch / "objects")]
    environment = {
        **os.environ,
        "PYTHONPATH": str(packages),
        "MRL_CUDA": "1",
        "MRL_CUDA_ARCH": ARCH,
    }
    digest = source_digest()
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    found = list((scratch / "lib" / "mrl").glob("_C.*.so"))
    if done.returncode or len(found) != 1:
        raise SystemExit(
            f"error: {python} setup.py build_ext ended with code {done.returncode} and left "
            f"{len(found)} extensions; --no-extension leaves it to the GPU machine"
        )
    target.mkdir(parents=True)
    shutil.copyfile(found[0], target / found[0].name)
    (target / DIGEST).write_text(digest + "\n")
    return target / found[0].name


def take(folder: Path, package: Path) -> str | None:
    """Put the extension of `folder` into `package`, where it is of these sources and loads.

    Returns None, or why it was not taken; then no file of it is left in `package`.
    """
    digest = folder / DIGEST
    if not digest.is_file():
        return "there is none among the pieces"
    if digest.read_text().strip() != source_digest():
        return "that of the pieces is of other sources"
    name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not (folder / name).is_file():
        return f"that of the pieces is for another Python: it has no {name}"
    partial = package / f".{name}.{os.getpid()}"
    shutil.copyfile(folder / name, partial)
    os.replace(partial, package / name)
    tried = subprocess.run(
        [sys.executable, "-c", TRY], cwd=package.parent, capture_output=True, text=True, check=False
    )
    if tried.returncode == 0:
        return None
    (package / name).unlink()
    lines = tried.stderr.strip().splitlines()
    return f"that of the pieces does not load: {lines[-1] if lines else tried.returncode}"

"""Puts the pieces of assemble.py together, offline: `python benchmarks/gpu_lane/unpack.py FOLDER`.

Only the standard library: it runs before anything is installed. Prints the environment in which the
packages are found, one `export` a line, for `eval`. The folder goes before the machine's own packages
on PYTHONPATH, so that the versions of the lock win (a venv with --system-site-packages would not see
the packages of an interpreter that is a venv itself).
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import lzma
import os
import shlex
import shutil
import sys
import tarfile
from pathlib import Path

PYTHON = (3, 12)
"""The Python version of the wheels that assemble.py fetches."""
PIECES = Path(__file__).parents[2] / ".gpu-lane"
EXTENSION = "MRL_LANE_EXTENSION"
"""The variable with the folder of the compiled extension, which extension.py takes."""
TOOLKITS = ("/usr/local/cuda",)
NEEDED = (
    "PIL", "aiohttp", "einops", "filelock", "httpx", "hypothesis", "jinja2", "numpy", "packaging",
    "prometheus_client", "psutil", "pybind11", "pynvml", "pytest", "pytest_timeout",
    "regex", "requests", "rich", "safetensors", "scipy", "sentencepiece", "tiktoken", "torch",
    "torchvision", "tqdm", "triton", "uvloop", "yaml",
)  # fmt: skip
"""What the machine brings: import names."""


def read_pieces(folder: Path) -> bytes:
    """Return the archive. Raises SystemExit for a piece that is missing or damaged."""
    try:
        listed = json.loads((folder / "pieces.json").read_text())["pieces"]
    except OSError:
        raise SystemExit(
            f"error: no {folder}/pieces.json: run python -m benchmarks.gpu_lane.assemble where there "
            "is a network, and carry the folder here"
        ) from None
    parts = []
    for piece in listed:
        file = folder / piece["name"]
        part = file.read_bytes() if file.is_file() else b""
        if hashlib.sha256(part).hexdigest() != piece["sha256"]:
            raise SystemExit(
                f"error: {file} is missing or damaged: {len(part)} bytes, expected "
                f"{piece['num_bytes']} with SHA-256 {piece['sha256']}"
            )
        parts.append(part)
    return b"".join(parts)


def unpack(archive: bytes, target: Path) -> int:
    """Returns the number of files; nothing is written outside of `target`."""
    with lzma.open(io.BytesIO(archive)) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        tar.extractall(target, filter="data")
    return sum(file.is_file() for file in target.rglob("*"))


def cuda_home() -> Path | None:
    """Return a CUDA toolkit that has the compiler and the runtime to link against.

    SGLang links its small kernels against `lib64` beside the `bin` of the first nvcc on PATH (tvm_ffi,
    cpp/extension.py: _find_cuda_home), and that nvcc may be a wrapper in /usr/local/bin.
    """
    found = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), *TOOLKITS]
    homes.append(str(Path(found).resolve().parents[1]) if found else None)
    for home in filter(None, homes):
        if Path(home, "bin", "nvcc").is_file() and Path(home, "lib64", "libcudart.so").exists():
            return Path(home)
    return None


def environment(site: Path) -> dict[str, str]:
    """Return what the server's processes need: packages, libnuma, CUDA's toolkit, and CUDA's libraries
    of torch's wheels.

    torch_memory_saver is preloaded into the server's processes, before torch could say where its
    libcudart is.
    """
    paths = [site / "native"]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        paths += sorted({file.parent for file in Path(folder).glob("*/lib/libcudart.so.*")})
    toolkit = cuda_home()
    return {
        **({} if toolkit is None else {"CUDA_HOME": str(toolkit)}),
        "PYTHONPATH": str(site),
        "LD_LIBRARY_PATH": ":".join(map(str, paths)),
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        EXTENSION: str(site / "extension"),
    }


def main() -> None:
    if sys.version_info[:2] != PYTHON:
        raise SystemExit(
            f"error: the pieces in {PIECES} are for Python {'.'.join(map(str, PYTHON))}, this is "
            f"{sys.version.split()[0]}; choose another with PYTHON, or move {PIECES.name}/ away"
        )
    site = Path(sys.argv[1]).resolve()
    done = site.with_name(f"{site.name}.done")
    if not done.exists():
        count = unpack(read_pieces(PIECES), site)
        print(f"{count} files in {site}", file=sys.stderr)
        done.touch()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"warning: this Python lacks {', '.join(missing)}", file=sys.stderr)
    if cuda_home() is None:
        print(
            "warning: no CUDA toolkit with bin/nvcc and lib64/libcudart.so is in CUDA_HOME, "
            f"{', '.join(TOOLKITS)} or beside nvcc: SGLang cannot link the kernels that it compiles",
            file=sys.stderr,
        )
    for name, value in environment(site).items():
        kept = f'"${{{name}:+:${name}}}"' if name.endswith("_PATH") or name == "PYTHONPATH" else ""
        print(f"export {name}={shlex.quote(value)}{kept}")


if __name__ == "__main__":
    main()

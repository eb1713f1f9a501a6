"""Packs what a GPU machine without a network needs: `python -m benchmarks.gpu_lane.assemble`.

Downloads the wheels of requirements/gpu-lane.txt for Python 3.12 on Linux x86-64, lays them out as
one folder, leaves out what a Hopper GPU with triton backends never loads, packs the rest as one
tar.xz and cuts it into pieces under `.gpu-lane/` (ignored by Git), each listed with its SHA-256 in
`pieces.json`. `unpack.py` puts them together on the other side with the standard library alone.

`mrl._C` goes along, compiled here with its GPU kernels for Python 3.12 (`--python`), together with the
digest of its sources (extension.py). What that machine brings itself is NEEDED in unpack.py, which says
there what is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.gpu_lane import extension
from benchmarks.gpu_lane.unpack import PYTHON

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "gpu-lane.txt"
TARGET = ROOT / ".gpu-lane"
PIECE_BYTES = 48 << 20
"""A piece; all of them and the working tree together should stay below LIMIT_BYTES."""
LIMIT_BYTES = 64 << 20
GLIBCS = (17, 24, 26, 27, 28, 31, 34, 35)
"""pip takes these manylinux numbers literally; Ubuntu 24.04 has 39."""
LIBNUMA = "libnuma1"
"""sgl_kernel is linked against it; the file comes from Debian's package, where apt-get is."""

TUNED_FOR = re.compile(r"device_name=NVIDIA_(H100_80GB_HBM3|H200)[,._]")
"""GPUs whose tuned tables of triton kernels are kept, as SGLang names them."""

DROP = (
    "bin/*", "include/*", "lib/*", "lib64/*", "tools/*", "*/tests/*", "*.pyi", "*.a", "*.md", "*.rst",
    "*.ipynb",  # headers stay: SGLang compiles small kernels (rope, activations) on the GPU machine
    # Kernels of other chips, and those that the triton backends replace.
    "sgl_kernel/sm100/*", "sgl_kernel/flash_ops*", "sgl_kernel/flashmla_ops*",
    "sgl_kernel/spatial_ops*", "sgl_kernel/testing/*", "_mscclpp*",
    "flashinfer/data/*", "flashinfer/norm/*",  # see EMPTY
    # Image generation and benchmarks of SGLang; tuned tables of other GPUs go in `is_dropped`.
    "sglang/multimodal_gen/*", "sglang/jit_kernel/benchmark/*", "sglang/jit_kernel/tests/*",
    "torch_memory_saver_hook_mode_*_cu12*", "torch_memory_saver_hook_mode_preload.abi3.so",
    "torch_memory_saver_hook_mode_torch.abi3.so",
)  # fmt: skip


EMPTY = ("flashinfer/__init__.py",)
"""Files that are written without their content. SGLang imports flashinfer.sampling on every GPU. If
flashinfer.norm can be imported too, sgl_kernel takes its RMSNorm in bf16, which flashinfer compiles on
first use from sources that want cublasLt.h; if not, sgl_kernel uses its own kernel."""


def is_dropped(path: str) -> bool:
    """Whether a file of the laid-out wheels stays behind."""
    if "/configs/triton_" in path and path.endswith(".json") and not TUNED_FOR.search(path):
        return True
    if path.startswith("transformers/models/") and path.rsplit("/", 1)[-1].startswith("convert_"):
        return True
    return any(fnmatch(path, pattern) for pattern in DROP)


def download(wheels: Path, lock: Path) -> None:
    """Fetch exactly the wheels of the lock; pip refuses what is not a wheel for that machine."""
    platforms = [f"manylinux_2_{n}_x86_64" for n in GLIBCS] + ["manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", "3.12", "--dest", str(wheels), "--requirement", str(lock)]
    for platform in (*platforms, "manylinux1_x86_64"):
        command += ["--platform", platform]
    subprocess.run(command, check=True)


def lay_out(wheels: Path, site: Path) -> None:
    """Unpack the wheels as `pip install --target` would; none has scripts or data that are needed."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for item in archive.infolist():
                name = item.filename
                if ".data/" in name:
                    _, _, inner = name.partition(".data/")
                    scheme, _, inner = inner.partition("/")
                    if scheme not in ("purelib", "platlib"):
                        continue
                    name = inner
                if item.is_dir() or is_dropped(name):
                    continue
                target = site / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(item) as source, open(target, "wb") as sink:
                    if name not in EMPTY:
                        shutil.copyfileobj(source, sink)


def add_libnuma(site: Path, scratch: Path) -> bool:
    """Put libnuma.so.1 into `site/native`; False where there is no apt-get to fetch it."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return False
    fetched = subprocess.run(
        ["apt-get", "download", LIBNUMA], cwd=scratch, capture_output=True, check=False
    )
    packages = list(scratch.glob(f"{LIBNUMA}_*.deb"))
    if fetched.returncode or not packages:
        return False
    subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(scratch / "deb")], check=True)
    library = next((scratch / "deb").rglob("libnuma.so.1"))
    (site / "native").mkdir(exist_ok=True)
    shutil.copyfile(library.resolve(), site / "native" / "libnuma.so.1")
    return True


def pack(site: Path, target: Path) -> dict[str, Any]:
    """Write tar.xz pieces and their list; the same folder gives the same bytes.

    Earlier pieces go; what else is in `target` (caches of a GPU machine) stays.
    """
    target.mkdir(parents=True, exist_ok=True)
    for old in (target / "pieces.json", *target.glob("site.tar.xz.*")):
        old.unlink(missing_ok=True)
    whole = target / "site.tar.xz"
    filters = [
        {"id": lzma.FILTER_X86},
        {"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": 32 << 20},
    ]
    files = sorted((f for f in site.rglob("*") if f.is_file()), key=lambda f: (f.suffix, str(f)))
    with lzma.open(whole, "wb", filters=filters) as out, tarfile.open(fileobj=out, mode="w") as tar:
        for file in files:
            info = tarfile.TarInfo(str(file.relative_to(site)))
            info.size, info.mode = file.stat().st_size, 0o644
            with open(file, "rb") as source:
                tar.addfile(info, source)
    pieces = []
    with open(whole, "rb") as source:
        while part := source.read(PIECE_BYTES):
            name = f"site.tar.xz.{len(pieces):02d}"
            (target / name).write_bytes(part)
            digest = hashlib.sha256(part).hexdigest()
            pieces.append({"name": name, "num_bytes": len(part), "sha256": digest})
    whole.unlink()
    manifest = {
        "pieces": pieces,
        "num_files": len(files),
        "unpacked_bytes": sum(file.stat().st_size for file in files),
        "packages": sorted(line for line in LOCK.read_text().split("\n") if "==" in line),
    }
    (target / "pieces.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def largest(site: Path, count: int = 12) -> list[tuple[str, int]]:
    """Top-level entries of the folder by their bytes, for whoever has to prune harder."""
    sizes: dict[str, int] = {}
    for file in site.rglob("*"):
        if file.is_file():
            top = file.relative_to(site).parts[0]
            sizes[top] = sizes.get(top, 0) + file.stat().st_size
    return sorted(sizes.items(), key=lambda item: -item[1])[:count]


def find_python(given: str | None) -> str | None:
    """Return the interpreter to compile for; None where none was given and PATH has none.

    Raises SystemExit for one that is given and is not of the pieces' version of Python.
    """
    name = f"python{'.'.join(map(str, PYTHON))}"
    if given is None:
        return shutil.which(name)
    ask = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([given, "-c", ask], capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"error: --python {given}: {error.strerror}; expected a {name}") from None
    if done.stdout.split() != [str(number) for number in PYTHON]:
        got = f"Python {'.'.join(done.stdout.split())}" if done.stdout else "no Python"
        raise SystemExit(f"error: --python {given} is {got}; expected a {name}")
    return given


def add_extension(options: argparse.Namespace, site: Path, scratch: Path) -> str:
    """Compile `mrl._C` into `site/extension`; returns a plain line about it."""
    if options.no_extension:
        return "no extension, as asked: the GPU machine compiles it"
    python = find_python(options.python)
    if python is None:
        return "no extension: PATH has no python3.12 (--python names one); the GPU machine compiles"
    file = extension.compile_for(python, site / "extension", scratch)
    return f"{file.name} of {file.stat().st_size / 2**20:.1f} MiB, of these sources"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument(
        "--wheels", type=Path, help="keep the downloads here, and use what is there"
    )
    parser.add_argument("--python", help="a Python 3.12 to compile for; by default that of PATH")
    parser.add_argument(
        "--no-extension", action="store_true", help="leave compiling mrl._C to the GPU machine"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="gpu-lane-") as scratch_name:
        scratch = Path(scratch_name)
        wheels, site = options.wheels or scratch / "wheels", scratch / "site"
        wheels.mkdir(parents=True, exist_ok=True)
        about_extension = add_extension(options, site, scratch)
        download(wheels, LOCK)
        lay_out(wheels, site)
        has_numa = add_libnuma(site, scratch)
        for name, num_bytes in largest(site):
            print(f"{num_bytes / 2**20:8.1f} MiB  {name}")
        manifest = pack(site, options.target)
    print(about_extension)
    if not has_numa:
        print(f"no {LIBNUMA}: apt-get download failed; the GPU machine must have libnuma.so.1")
    total = 0
    for piece in manifest["pieces"]:
        total += piece["num_bytes"]
        print(f"{piece['num_bytes'] / 2**20:8.2f} MiB  {piece['name']}  sha256 {piece['sha256']}")
    unpacked = manifest["unpacked_bytes"] / 2**20
    print(f"{total / 2**20:8.2f} MiB  in all, {unpacked:.0f} MiB unpacked; in {options.target}")
    if total >= LIMIT_BYTES:
        raise SystemExit(f"error: {total} bytes are not below {LIMIT_BYTES}: prune harder (DROP)")


if __name__ == "__main__":
    main()

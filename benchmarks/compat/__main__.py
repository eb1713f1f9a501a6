"""Says what a release of SGLang or megatron-core lacks of the names that mrl takes from inside it.

`make compat VERSION=0.5.24`, or `VERSION=megatron-core==0.19.2`; without a version, the supported
releases. The wheel is downloaded once, into runs/compat, and read; nothing of it is installed or run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.compat.check import missing
from benchmarks.compat.imports import imported
from benchmarks.compat.source import Source
from mrl.engines.sglang.names import NAMES as SGLANG_NAMES
from mrl.system.releases import SUPPORTED, numbers, refusal
from parallel.megatron_names import NAMES as MEGATRON_NAMES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runs" / "compat"
NAMES = {"sglang": SGLANG_NAMES, "megatron-core": MEGATRON_NAMES}
MODULES = {"sglang": "sglang", "megatron-core": "megatron"}
PYTHONS = ("3.11", "3.12")
"""Releases have wheels for one of them at least."""


def unpacked(package: str, release: str, folder: Path = FOLDER) -> Path:
    """Return the folder with the Python files of a release; download its wheel if it is not there."""
    target = folder / f"{package}-{release}"
    if target.exists():
        return target
    why = ""
    folder.mkdir(parents=True, exist_ok=True)
    for python in PYTHONS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += [
            "--disable-pip-version-check",
            "--only-binary=:all:",
            "--python-version",
            python,
        ]
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another call may do the same
            wheels, files = Path(own, "wheel"), Path(own, "files")
            done = subprocess.run(
                [*command, "--dest", str(wheels), f"{package}=={release}"],
                check=False, capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode == 0:
                with zipfile.ZipFile(next(wheels.glob("*.whl"))) as archive:
                    sources = [name for name in archive.namelist() if name.endswith(".py")]
                    archive.extractall(files, sources)
                with suppress(OSError):  # it has been made meanwhile
                    files.rename(target)
                return target
            why = done.stderr.strip()[-300:]
    raise SystemExit(f"{package} {release}: pip could not download it: {why}")


def lacks(package: str, release: str, folder: Path) -> Iterator[str]:
    """Yield one line for each name that a release lacks; `folder` holds its Python files."""
    source = Source(folder)
    yield from missing(NAMES[package], release, source)
    files = sorted(
        path for room in ("mrl", "moe", "parallel") for path in (ROOT / room).rglob("*.py")
    )
    for place, path in imported(files, MODULES[package]):
        if source.find(path) is None:
            yield f"{Path(place).relative_to(ROOT)}: there is no {path}"


def main() -> int:
    """Print what each release lacks; exit with 1 if that is anything."""
    parser = argparse.ArgumentParser(prog="make compat", description=__doc__)
    parser.add_argument(
        "release", nargs="*", help="0.5.24, sglang==0.5.24 or megatron-core==0.19.2"
    )
    given = [each.rpartition("==") for each in parser.parse_args().release]
    wanted = [(package or "sglang", release) for package, _, release in given]
    wanted = wanted or [(name, release) for name, known in SUPPORTED.items() for release in known]
    num_lacking = 0
    for package, release in wanted:
        if package not in NAMES or not numbers(release):
            parser.error(
                f"got {package}=={release}, expected a release of {' or '.join(NAMES)}, such as 0.5.24"
            )
        found = list(lacks(package, release, unpacked(package, release)))
        num_lacking += bool(found)
        state = "not supported" if refusal(package, release) else "supported"
        print(f"{package} {release} ({state}): {len(found)} of mrl's names are missing or changed")
        for line in found:
            print(f"  {line}")
    print(f"{len(wanted) - num_lacking} passed, {num_lacking} failed")
    return num_lacking > 0


if __name__ == "__main__":
    sys.exit(main())

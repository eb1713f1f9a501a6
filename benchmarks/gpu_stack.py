"""Installs what docs/install.md tells a GPU user to install, and runs mrl with it on a CPU.

`make gpu-stack` downloads several GB and needs 12 GB of disk under runs/gpu-stack. The wheels are those
for CUDA. A stand-in for the driver's library lets those be imported that link it; nothing runs on a
GPU. Prints a line for each part and writes runs/results/gpu_stack.json.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.evidence.result import finish, summary, write_result
from benchmarks.gpu_environment.environment import Environment, install
from benchmarks.gpu_environment.parts import PARTS

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument(
        "--checkout", type=Path, default=ROOT, help="another checkout of mrl to install and run"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu-stack")
    parser.add_argument("--python", default=f"python{platform.python_version().rpartition('.')[0]}")
    parser.add_argument("--only", nargs="*", choices=[part.name for part in PARTS])
    parser.add_argument("--output", type=Path, help="by default runs/results/gpu_stack.json")
    options = parser.parse_args()
    environment = Environment(options.checkout.resolve(), options.folder.resolve())
    if shutil.which(options.python) is None:
        parser.error(f"--python: there is no {options.python}; expected a Python of 3.11 or later")
    start = time.monotonic()
    command = install(environment, options.python)
    print(f"installed by: {command} ({time.monotonic() - start:.0f} s)", flush=True)
    rows: list[dict[str, Any]] = []
    for part in PARTS:
        if options.only and part.name not in options.only:
            continue
        start = time.monotonic()
        try:
            says, status = part.run(environment), "passed"
        except Exception as error:  # each part says what it found, whatever the others did
            says, status = f"{type(error).__name__}: {error}", "failed"
        says = says.replace(f"{environment.folder}/", "").replace(f"{environment.checkout}/", "")
        print(f"{part.name}: {status} ({time.monotonic() - start:.0f} s): {says}", flush=True)
        rows.append({"part": part.name, "tells": part.tells, "status": status, "says": says})
    failed = sum(row["status"] == "failed" for row in rows)
    passed = len(rows) - failed
    if not options.only:
        content = {"python": options.python, "command": command, "parts": rows}
        write_result("gpu_stack", content, passed=passed, failed=failed, path=options.output)
    finish(passed, failed)


if __name__ == "__main__":
    main()

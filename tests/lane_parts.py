"""Stand-ins for the parts that need a GPU, for test_gpu_lane.py: `python -m tests.lane_parts`.

`drive ARGUMENTS` is the driver over these parts. Otherwise it is one of them, as the driver starts it.
LANE_PARTS_SEEN names a file to which each part adds its name when it starts, and LANE_PARTS_LIMIT_S
is the time limit of the part that hangs. With LANE_PARTS_GPU, a folder, the driver believes that there
is a GPU and keeps its results and caches there; the parts cache a kernel each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_lane import run
from benchmarks.gpu_lane.catalog import Part
from benchmarks.gpu_lane.run import FIGURES, main

LIMIT_S = int(os.environ.get("LANE_PARTS_LIMIT_S", "5"))
"""The time limit of the part that hangs, in which it must have begun."""
PARTS = {
    part.name: part
    for part in (
        Part("first", "", "passes", 20, 20),
        Part("hangs", "", "never ends, nor does what it started", LIMIT_S, LIMIT_S),
        Part("fails", "", "raises after some figures", 20, 20),
        Part("needs_gpu", "", "is not for a CPU", 20),
        Part("last", "", "passes", 20, 20),
    )
}


def note(**figures: object) -> None:
    print(FIGURES + json.dumps(figures), flush=True)


def run_part(name: str) -> None:
    with open(os.environ["LANE_PARTS_SEEN"], "a") as seen:
        seen.write(f"{name}\n")
    print(f"{name} begins", flush=True)
    if "LANE_PARTS_GPU" in os.environ:
        kernel = Path(os.environ["TRITON_CACHE_DIR"], name, "kernel.cubin")
        note(was_cached=kernel.exists(), threads=os.environ["OMP_NUM_THREADS"])
        kernel.parent.mkdir(parents=True, exist_ok=True)
        kernel.write_text(name)
    if name == "hangs":
        note(reached=1)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                                 start_new_session=True)  # fmt: skip
        note(child=child.pid, part=os.getpid())
        time.sleep(300)
    if name == "fails":
        note(reached=2)
        print("\n".join(f"line {n}" for n in range(100)))
        raise RuntimeError("as it should")
    note(says=f"{name} is well")


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        if "LANE_PARTS_GPU" in os.environ:
            folder = Path(os.environ["LANE_PARTS_GPU"])
            run.has_gpu = lambda: True
            run.RESULTS, run.CACHES = folder / "results", folder / "caches"
            run.CARRIED = folder / "carried.tar.gz"
        sys.exit(main(sys.argv[2:], PARTS, "tests.lane_parts"))
    run_part(sys.argv[1])

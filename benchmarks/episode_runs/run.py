"""One run of `mrl train`, and its metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.digest import ROOT

LIMIT_S = 7200.0


def train(
    recipe: str, folder: Path, keys: Sequence[str], num_processes: int = 1
) -> list[dict[str, Any]]:
    """Train `recipe` with `keys` in `folder`, or continue there, and return the metrics of each step.

    Its output goes to FOLDER.log. Raises SystemExit with the end of it if the run fails.
    """
    launcher = ["mrl.launch", "--standalone", f"--nproc-per-node={num_processes}", "-m", "mrl"]
    start = launcher if num_processes > 1 else ["mrl"]
    command = [sys.executable, "-m", *start, "train", recipe, f"output_dir={folder}", *keys]
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    with log.open("ab") as sink:
        done = subprocess.run(
            command, cwd=ROOT, stdout=sink, stderr=sink, timeout=LIMIT_S, check=False,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )  # fmt: skip
    if done.returncode != 0:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"{' '.join(command)}\nended with code {done.returncode}:\n{last}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

"""Prints the table of docs/slurm.md: `python -m tests.slurm [--long]`, as root.

Every row on a real SLURM under both process trackers at SlurmdTimeout 30; with --long also the rows
in which it could matter at SLURM's default of 300 s, which takes 6 minutes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.slurm.cluster import TRACKERS, Tracker, why_not, why_not_tracked
from tests.slurm.rows import ROWS, SLOW
from tests.slurm.table import tried


def main() -> None:
    if reason := why_not():
        sys.exit(f"mrl: no SLURM: {reason}")
    timeouts = (30, 300) if "--long" in sys.argv[1:] else (30,)
    cases = [(tracker, seconds) for tracker in TRACKERS for seconds in timeouts]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        tables = list(pool.map(lambda case: _rows(Path(folder), *case), cases))
    lines = [line for table in tables for line in table]
    print("| tracker | SlurmdTimeout | event | outcome | s | |")
    print("|---|--:|---|---|--:|---|")
    print("\n".join(lines))
    num_failed = sum(line.endswith("| failed |") for line in lines)
    print(
        f"{len(lines) - num_failed} passed, {num_failed} failed in {time.monotonic() - start:.0f} s"
    )
    sys.exit(num_failed > 0)


def _rows(folder: Path, tracker: Tracker, timeout: int) -> list[str]:
    if reason := why_not_tracked(tracker):
        return [f"| {tracker} | {timeout} | all | not tried: {reason} | | |"]
    lines = []
    names = list(ROWS) if timeout == 30 else SLOW
    with tried(folder / f"{tracker}_{timeout}", tracker, timeout, names) as results:
        for name, result in results.items():
            try:
                text, seconds = result.result()
                lines.append(
                    f"| {tracker} | {timeout} | {name} | {text} | {seconds:.0f} | passed |"
                )
            except AssertionError as error:
                print(f"{tracker} {timeout} {name}: {error}", file=sys.stderr)
                lines.append(f"| {tracker} | {timeout} | {name} | see above | | failed |")
    return lines


if __name__ == "__main__":
    main()

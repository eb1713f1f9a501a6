"""Run mrl on chosen cores: `python -m studies.placement_study.pinned CORES... -- ARGUMENTS OF MRL`.

A launcher starts it once for each rank: `python -m mrl.launch ... -m studies.placement_study.pinned
0 1 -- train RECIPE`. Rank n keeps to the n-th of CORES, which names a core (`1`) or several (`0,1`).
The processes that the rank starts, engines and workers among them, inherit its cores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

USAGE = "usage: LOCAL_RANK=N python -m studies.placement_study.pinned CORES... -- ARGUMENTS OF MRL"


def cores_of(rank: int, words: Sequence[str]) -> set[int]:
    """Return the cores of a rank. Raises ValueError where there are none for it."""
    if rank >= len(words):
        raise ValueError(f"got cores for {len(words)} rank(s), expected some for rank {rank}, too")
    return {int(core) for core in words[rank].split(",")}


def main() -> None:
    """Take the cores of this rank and become mrl."""
    words = sys.argv[1:]
    if "--" not in words or "LOCAL_RANK" not in os.environ:
        sys.exit(USAGE)
    end = words.index("--")
    os.sched_setaffinity(0, cores_of(int(os.environ["LOCAL_RANK"]), words[:end]))
    os.execv(sys.executable, [sys.executable, "-m", "mrl", *words[end + 1 :]])


if __name__ == "__main__":
    main()

"""Tries all rows on a cluster at once, each on two nodes of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.slurm.cluster import Cluster, Tracker, free_ports
from tests.slurm.rows import LIMIT_S, ROWS, Bench

Results = dict[str, "Future[tuple[str, float]]"]


@contextmanager
def tried(
    folder: Path, tracker: Tracker, slurmd_timeout: int, names: Iterable[str]
) -> Iterator[Results]:
    """Start a cluster and all rows of `names` -> what comes of each, and the seconds it took.

    Nodes under proctrack/cgroup have two GPUs each, those under proctrack/linuxproc none.
    """
    names = list(names)
    gpus = 2 if tracker == "cgroup" else 0
    cluster = Cluster(2 * len(names), tracker, slurmd_timeout=slurmd_timeout, gpus_per_node=gpus)
    with cluster, ThreadPoolExecutor(max_workers=len(names)) as pool:
        yield {
            name: pool.submit(
                _try,
                name,
                Bench(
                    cluster,
                    cluster.names[2 * index : 2 * index + 2],
                    folder / f"row_{index}",
                    port,
                    LIMIT_S + slurmd_timeout,
                ),
            )
            for index, (name, port) in enumerate(zip(names, free_ports(len(names)), strict=True))
        }


def _try(name: str, bench: Bench) -> tuple[str, float]:
    start = time.monotonic()
    return ROWS[name](bench), time.monotonic() - start

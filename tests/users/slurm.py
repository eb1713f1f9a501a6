"""Runs on a cluster: sbatch on a real SLURM of two nodes, and what ends a job there."""

from __future__ import annotations

import pytest

from tests.loop.conftest import REPOSITORY
from tests.slurm.cluster import Cluster, Tracker, free_ports, why_not, why_not_tracked
from tests.slurm.rows import LIMIT_S, ROWS, Bench
from tests.users.things import User, thing


def cluster(tracker: Tracker, gpus_per_node: int = 0) -> Cluster:
    """Return a SLURM of two nodes that is not started yet; skips where there can be none."""
    if reason := why_not() or why_not_tracked(tracker):
        pytest.skip(reason)
    return Cluster(2, tracker, gpus_per_node=gpus_per_node)


def bench(user: User, slurm: Cluster) -> Bench:
    return Bench(slurm, slurm.names, user.folder / "slurm", free_ports(1)[0], LIMIT_S)


def row(user: User, name: str, tracker: Tracker, gpus_per_node: int = 0) -> str:
    """Try a row of the table in docs/slurm.md."""
    with cluster(tracker, gpus_per_node) as slurm:
        return ROWS[name](bench(user, slurm))


@thing("I submit to a cluster without GPUs, and have edited nothing.")
def no_gpus(user: User) -> str:
    return row(user, "two nodes train, with nothing edited", "linuxproc")


@thing("I submit to a cluster with GPUs, and have edited nothing.")
def gpus(user: User) -> str:
    return row(user, "two nodes train, with nothing edited", "cgroup", gpus_per_node=2)


@thing("I submit a recipe with a key that does not exist, and no job comes back again and again.")
def wrong_key(user: User) -> str:
    with cluster("linuxproc") as slurm:
        job = bench(user, slurm)
        words = user.recipe("run", "train.num_stepz=3")
        overrides = [word for word in words[1:] if not word.startswith("output_dir=")]
        job.folder.mkdir()
        job.start(words[0], *overrides, PYTHONPATH=str(REPOSITORY))
        job.check_end("FAILED", restarts=0, code=2)
        (line,) = [line for line in job.log().splitlines() if line.startswith("mrl: ")]
        assert "num_stepz" in line
        assert "num_steps" in line
    return line


@thing("A process of my job is killed on a node: the job is requeued and continues.")
def rank_killed(user: User) -> str:
    return row(user, "kill -9 of a rank on the second node", "cgroup")


@thing("My job is told to leave while it starts, where SLURM signals every process of a job.")
def told_to_leave(user: User) -> str:
    return row(user, "SIGUSR1 to all tasks while the ranks start", "linuxproc")


@thing("My run never gets past a step: the job is not requeued for ever.")
def no_step_gained(user: User) -> str:
    return row(user, "no start keeps a step: the restarts are bounded", "linuxproc")

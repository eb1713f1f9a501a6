"""Chooses where the engines run that are added to a job.

Each rollout rank that leads an engine can start further engines on its machine. On a machine
without GPUs there is room for any number of engines. An engine on GPUs needs some that nobody uses:
those of an engine that was removed, or those that the command names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mrl.errors import InputError

GPU_ID = re.compile("0|[1-9][0-9]{0,5}|[A-Za-z][A-Za-z0-9/-]{0,99}")
"""An id of a GPU: in one form only, so that no other text names a GPU that is used."""


@dataclass(frozen=True)
class Place:
    """Where an engine runs."""

    rank: int
    """The rollout rank that starts the engine's workers, as the number of the engine that the rank
    leads from the start of the job."""
    host: str
    gpus: tuple[str, ...] = ()
    """The ids of the engine's GPUs on its machine; empty on CPUs."""

    def text(self) -> str:
        """Describe the place for a table."""
        return f"{self.host}, GPU {','.join(self.gpus)}" if self.gpus else self.host


@dataclass(frozen=True)
class HostRank:
    """A rollout rank that can start engines on its machine."""

    own: Place
    """The place of the engine that the rank leads from the start of the job."""
    rank_gpus: tuple[str, ...] = ()
    """The ids of the GPUs that the ranks on this machine use, those of trainers among them."""


def choose_places(
    ranks: Sequence[HostRank],
    used: Sequence[Place],
    count: int,
    num_gpus: int,
    host: str | None = None,
    gpus: Sequence[str] = (),
) -> list[Place]:
    """Return a place for each of `count` new engines.

    `ranks` are the rollout ranks that can start engines, `used` the places of the job's engines.
    `num_gpus` is the number of GPUs of an engine on GPUs. `host` and `gpus` are what the command
    has asked for. Raises InputError if there is no room for all of these engines.
    """
    here = [rank for rank in ranks if host in (None, rank.own.host)]
    names = sorted({rank.own.host for rank in ranks})
    if not here:
        raise InputError(
            f"host {host!r} has no rollout rank of this job; expected one of {', '.join(names)}: "
            "only a rank that leads engines can start more of them"
        )
    if gpus:
        return _on_given(here, used, count, num_gpus, tuple(gpus))
    if all(rank.own.gpus for rank in here):
        return _on_free(here, used, count)
    on_cpus = [rank for rank in here if not rank.own.gpus]
    found: list[Place] = []
    for _ in range(count):
        taken = [*used, *found]
        least = min(on_cpus, key=lambda rank: sum(p.host == rank.own.host for p in taken))
        found.append(least.own)
    return found


def _on_free(ranks: Sequence[HostRank], used: Sequence[Place], count: int) -> list[Place]:
    """Return places on GPUs that an engine of the job had until it was removed."""
    free = [rank.own for rank in ranks if not _users(rank.own.host, rank.own.gpus, used)]
    if len(free) < count:
        raise InputError(
            f"{count} engine(s) need GPUs, and removed engines have left {len(free)} place(s); name "
            "GPUs that nobody uses with --host and --gpus, or remove an engine first"
        )
    return free[:count]


def _on_given(
    ranks: Sequence[HostRank],
    used: Sequence[Place],
    count: int,
    num_gpus: int,
    gpus: tuple[str, ...],
) -> list[Place]:
    """Return places on the GPUs `gpus` of one machine."""
    names = sorted({rank.own.host for rank in ranks})
    if len(names) > 1:
        raise InputError(f"--gpus: the job has the hosts {', '.join(names)}; choose one: --host")
    if not all(rank.own.gpus for rank in ranks):
        raise InputError(f"--gpus: the engines of host {names[0]} run on CPUs; leave --gpus out")
    if len(gpus) != count * num_gpus or len(set(gpus)) != len(gpus):
        raise InputError(
            f"--gpus: got {','.join(gpus)}, expected {count * num_gpus} different ids: {count} "
            f"engine(s) of {num_gpus} GPU(s) (rollout.tensor_parallel_size)"
        )
    for gpu in gpus:
        if GPU_ID.fullmatch(gpu) is None:
            raise InputError(
                f"--gpus: got {gpu[:80]!r}, expected ids as in CUDA_VISIBLE_DEVICES, such as 6 or "
                "GPU-5c8a81f0"
            )
        if engines := _users(names[0], (gpu,), used):
            raise InputError(f"--gpus: GPU {gpu} of {names[0]} is used by {engines[0].text()}")
        is_left = any(gpu in rank.own.gpus for rank in ranks)  # by an engine that was removed
        if any(gpu in rank.rank_gpus for rank in ranks) and not is_left:
            raise InputError(f"--gpus: a rank that trains uses GPU {gpu} of {names[0]}")
    parts = [gpus[i : i + num_gpus] for i in range(0, len(gpus), num_gpus)]
    return [Place(ranks[0].own.rank, names[0], part) for part in parts]


def _users(host: str, gpus: Sequence[str], used: Sequence[Place]) -> list[Place]:
    """Return the places that have one of these GPUs."""
    return [place for place in used if place.host == host and set(place.gpus) & set(gpus)]

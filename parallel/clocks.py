"""Compares the clocks of the nodes: logs of several nodes are read by their times."""

from __future__ import annotations

import socket
import time

import torch.distributed as dist

MAX_SKEW_S = 5.0
"""Clocks that ntp or chrony keeps are within a tenth of a second."""


def compare_clocks() -> str:
    """Return in words which node's clock is apart from the others'; empty where none is. A collective.

    The ranks read their clocks right after a barrier, so the times differ by its latency, too.
    """
    dist.barrier()
    everyone: list[tuple[str, float]] = [("", 0.0)] * dist.get_world_size()
    dist.all_gather_object(everyone, (socket.gethostname(), time.time()))
    return skew_in_words(everyone)


def skew_in_words(times: list[tuple[str, float]], most: float = MAX_SKEW_S) -> str:
    """Return a warning where the (host, seconds since 1970) of ranks are more than `most` apart."""
    (early, first), (late, last) = (pick(times, key=lambda pair: pair[1]) for pick in (min, max))
    if last - first <= most or early == late:
        return ""
    return (
        f"the clock of {late} is {last - first:.0f} s ahead of that of {early}: times in logs and "
        "files of the two cannot be compared; look at timedatectl, and let chrony or ntp set both"
    )

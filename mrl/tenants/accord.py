"""Lets the ranks agree on how the work for a tenant went, before they do anything else together.

Where that work raises on some ranks only, the others may sit in one of its collectives and wait for
them. So the ranks agree in a process group of their own, in which no work can be under way, and a rank
on which the work failed waits for the others for a while only.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from mrl.errors import ExitCode, RunFailed
from mrl.exchange.sharing import share_bytes
from mrl.system.heartbeat import beat

ALONE_S = 120.0
"""How long a rank on which a tenant's work failed waits for the others to come to the end of it."""
LOOK_S = 0.05


class FailedAlone(RunFailed):
    """A tenant's work failed on this rank, and the others wait for it in a collective."""

    exit_code = ExitCode.HUNG_RANK


class Accord:
    """An `Accord` is made by all ranks at once, and every call is a collective."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: how long a rank on which all went well may wait for the others."""
        self._group: dist.ProcessGroup | None = None
        if dist.get_world_size() > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(group, dist.ProcessGroup)
            self._group = group

    def first(self, failure: str, *, limit_s: float = math.inf) -> str:
        """Return what went wrong on the first rank on which anything did; empty for none.

        Raises FailedAlone where `failure` is not empty and the others have not come after `limit_s`.
        """
        if self._group is None:
            return failure
        count = torch.tensor(int(bool(failure)))
        work = dist.all_reduce(count, group=self._group, async_op=True)
        assert work is not None
        deadline = time.monotonic() + limit_s
        while failure and not work.is_completed():
            if time.monotonic() > deadline:
                raise FailedAlone(
                    f"rank {dist.get_rank()} failed alone ({failure}), and after {limit_s:g} s the "
                    "others were still at work or waited for it; every tenant continues when the "
                    "service is started again"
                )
            beat()
            time.sleep(LOOK_S)
        work.wait()
        if not count:
            return ""
        return next(said.decode() for said in share_bytes(failure.encode()) if said)

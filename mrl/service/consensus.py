"""Makes the ranks agree on whether the work for a tenant failed, before they do anything else
together.

If the work raises an error on some ranks only, the other ranks may be waiting for the failed ranks
in a collective that belongs to the work. So the ranks agree in a process group that is used for
nothing else, and a failed rank waits for the other ranks only for a limited time.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from mrl.engines.base import EngineLost
from mrl.errors import EngineGone, ExitCode, OutOfMemory, RankLost, RunFailed
from mrl.exchange.sharing import share_bytes
from mrl.system.heartbeat import beat
from mrl.system.printable import encodable

ALONE_S = 120.0
"""If a tenant's work fails on a rank, that rank waits at most this many seconds for the other ranks
to end the work."""
LOOK_S = 0.05


class FailedAlone(RunFailed):
    """A tenant's work failed on this rank, and the other ranks did not end the work in time. They
    probably wait for this rank in a collective."""

    exit_code = ExitCode.HUNG_RANK


SERVICE_FAULTS = (
    *(EngineGone, EngineLost, RankLost, OutOfMemory, MemoryError, dist.DistError),
    FailedAlone,
)
"""Errors after which the ranks cannot continue. They end the service, whichever tenant's work
raises them."""


def describe(error: BaseException) -> str:
    """Return an error in one line that is never empty and can always be written, with the name of its
    class unless it is a ValueError or RuntimeError with a text. It may be one of a tenant's code."""
    name = type(error).__name__
    try:
        text = " ".join(str(error).split())
    except Exception as inner:
        return f"{name}: its str() raises {type(inner).__name__}"
    if not text:
        return name
    is_plain = isinstance(error, (ValueError, RuntimeError))
    return encodable(text if is_plain else f"{name}: {text}")


class FailureConsensus:
    """Tells every rank whether work failed on any rank. All ranks construct the object together,
    and every call is a collective."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: seconds that a rank whose own work succeeded may wait for the other ranks."""
        self._group: dist.ProcessGroup | None = None
        if dist.get_world_size() > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(group, dist.ProcessGroup)
            self._group = group

    def first(self, failure: str, *, limit_s: float = math.inf) -> str:
        """Return the failure text of the first rank that has one; empty if no rank has one.

        `failure`: the failure text of this rank, empty if its work succeeded. Raises FailedAlone if
        `failure` is not empty and some other rank has still not called this method after `limit_s`
        seconds.
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
        return next(said.decode() for said in share_bytes(encodable(failure).encode()) if said)

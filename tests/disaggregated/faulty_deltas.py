"""An engine, and the memory of its worker, with a fault while version 2 arrives as a delta.

It is `rollout.engine=tests.disaggregated.faulty_deltas`. `MRL_FAULT` is one of `FAULTS`; it happens
once, where the file `MRL_FAULT_DONE` is made.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mrl.engines.base import EngineConfig
from mrl.engines.sglang.server import SGLangServer
from mrl.types import WeightBucket
from mrl.weight_sync.staging import Staging

VERSION = 2
FAULTS = ("worker", "engine", "engine_in_load", "one_bit", "every_bucket")
"""The worker, or its engine, is killed when the second delta of the version has arrived; the engine is
killed when it has the first bucket of the version; one byte of the base is changed before the first
delta is applied, or before every delta."""
_servers: list[SGLangServer] = []
"""The server of this worker."""


class Engine(SGLangServer):
    """A healthy engine whose process the faults find."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        _servers.append(self)


def _is_due(fault: str) -> bool:
    done = Path(os.environ["MRL_FAULT_DONE"])
    if os.environ["MRL_FAULT"] != fault or done.exists():
        return False
    done.touch()
    return True


def _kill_engine() -> None:
    (process_id,) = [server.process_id for server in _servers]
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)


def _faulty_patch(patch: Callable[..., str]) -> Callable[..., str]:
    def patched(self: Staging, header: Mapping[str, Any], payload: Tensor) -> str:
        base, number = self._base, len(self._headers) + 1
        if self._arriving == VERSION and base is not None:
            if number == 2 and _is_due("worker"):
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 2 and _is_due("engine"):
                _kill_engine()
            if os.environ["MRL_FAULT"] == "every_bucket" or _is_due("one_bit"):
                base.memory.take(int(header["num_bytes"]), number).tensor[99] ^= 8
                Path(os.environ["MRL_FAULT_DONE"]).touch()
        return patch(self, header, payload)

    return patched


def _faulty_buckets(
    buckets: Callable[[Staging], Iterator[WeightBucket]],
) -> Callable[[Staging], Iterator[WeightBucket]]:
    def yielded(self: Staging) -> Iterator[WeightBucket]:
        for number, bucket in enumerate(buckets(self), start=1):
            if number == 2 and bucket.version == VERSION and _is_due("engine_in_load"):
                _kill_engine()
            yield bucket

    return yielded


if "MRL_FAULT" in os.environ:  # in a worker, and not in the tests that import this
    Staging.patch = _faulty_patch(Staging.patch)
    Staging.buckets = _faulty_buckets(Staging.buckets)

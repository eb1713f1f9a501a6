"""An engine that dies, or takes its worker with it, at one moment.

It is `rollout.engine=tests.disaggregated.dying_engine`. `MRL_DIES` names the moment; it happens once,
where the file `MRL_DIED` is made.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mrl.engines.base import Completion, EngineConfig, PauseMode, Request, SyncReport
from mrl.engines.sglang.server import SGLangServer
from mrl.types import WeightBucket
from mrl.weight_sync.staging import Staging

WORKER = ("lease", "receive", "update", "answer")
"""The worker dies when it has a lease, while weights come, before it loads them, before it delivers."""
ENGINE = ("pause", "paused", "loaded")
"""The engine dies before it is paused for new weights, before it takes them, and when it has them."""
ALWAYS = "always"
"""Each engine dies when it is asked for samples."""


def _die_at(moment: str, process_id: int | None = None) -> None:
    died, is_due = Path(os.environ["MRL_DIED"]), os.environ["MRL_DIES"] == moment
    if is_due and (moment == ALWAYS or not died.exists()):
        died.touch()
        os.kill(process_id or os.getpid(), signal.SIGKILL)


_room = Staging.room


def _dying_room(self: Staging, header: Any) -> Tensor:
    if self._arriving >= 2:
        _die_at("receive")
    return _room(self, header)


if "MRL_DIES" in os.environ:  # in a worker, and not in the tests that import this
    Staging.room = _dying_room


class Engine(SGLangServer):
    """A healthy engine until version 2 comes, and after its death. It is its own endpoint."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._healthy = self.endpoint
        self.endpoint = self  # pyright: ignore[reportAttributeAccessIssue]
        self.sequence_logprobs, self.abort = self._healthy.sequence_logprobs, self._healthy.abort

    @property
    def weight_version(self) -> int | None:
        return self._healthy.weight_version

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        if version >= 2:
            _die_at("update")
        if self._healthy.in_flight.is_paused:
            _die_at("paused", self.process_id)
        return self._healthy.update_weights(buckets, version)

    def generate(self, requests: Sequence[Request], **options: Any) -> Iterator[Completion]:
        is_due = (self.weight_version or 0) >= 2
        if is_due:
            _die_at("lease")
            _die_at(ALWAYS, self.process_id)
        yield from self._healthy.generate(requests, **options)
        if is_due:
            _die_at("answer")

    def pause(self, mode: PauseMode = "in_place") -> None:
        _die_at("pause", self.process_id)
        super().pause(mode)

    def resume(self) -> None:
        _die_at("loaded", self.process_id)
        super().resume()

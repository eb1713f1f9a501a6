"""The SGLang engine that is wrong about its weights: `rollout.engine=benchmarks.planted_versions`.

A worker makes its engine in a process of its own, so the environment names the fault: `MRL_PLANTED`
is one of `FAULTS`. It begins with version `FIRST`; before it the engine is a healthy one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mrl.engines.base import Completion, EngineConfig, Request, SyncReport
from mrl.engines.sglang.in_flight import InFlightRequests, OpenCall
from mrl.engines.sglang.request_sender import SendContext
from mrl.engines.sglang.server import SGLangServer
from mrl.types import WeightBucket

VARIABLE = "MRL_PLANTED"
FAULTS = ("stale_prefix", "stamp_of_server", "stamp_of_engine")
"""The prefix cache has no keys, so that requests read what older weights computed; the server stamps
tokens with another version; mrl's own engine says that newer weights sampled them."""
FIRST = 2


class _Unkeyed(InFlightRequests):
    """Calls whose requests lose their key on the way to the server."""

    is_planted = False

    def _context_of(
        self, opened: OpenCall, rids: Sequence[str], requests: Sequence[Request]
    ) -> SendContext:
        context = super()._context_of(opened, rids, requests)
        return context._replace(extra_key=None) if self.is_planted else context


class Engine:
    """A healthy engine until version `FIRST` comes. It is its own endpoint; what is not defined here
    is the healthy engine's."""

    def __init__(self, config: EngineConfig) -> None:
        self._server = SGLangServer(config)
        self.endpoint, self._healthy = self, self._server.endpoint
        self._fault = os.environ.get(VARIABLE, "")
        if self._fault not in FAULTS:
            raise ValueError(f"got {VARIABLE}={self._fault!r}, expected one of {', '.join(FAULTS)}")
        self._is_planted = False
        core = self._server.core
        self._healthy.in_flight = self._in_flight = _Unkeyed(
            core.connection, core.routes, core.launch.shape, core.config
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server if hasattr(self._server, name) else self._healthy, name)

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        report = self._healthy.update_weights(buckets, version)
        self._is_planted = version >= FIRST
        self._in_flight.is_planted = self._is_planted and self._fault == "stale_prefix"
        if self._is_planted and self._fault == "stamp_of_server":
            body = {"new_version": str(version - 1), "abort_all_requests": False}
            self._server.connection.post("/update_weight_version", body)
        return report

    def generate(self, requests: Sequence[Request], **options: Any) -> Iterator[Completion]:
        for completion in self._healthy.generate(requests, **options):
            is_wrong = self._is_planted and self._fault == "stamp_of_engine"
            yield _newer(completion) if is_wrong else completion


def _newer(completion: Completion) -> Completion:
    spans = tuple(
        dataclasses.replace(span, version=span.version + 1) for span in completion.weight_versions
    )
    return dataclasses.replace(completion, weight_versions=spans)

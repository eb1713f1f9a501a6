"""The SGLang engine that is wrong about its weights: `rollout.engine=benchmarks.planted_versions`.

A worker makes its engine in a process of its own, so the environment names the fault: `MRL_PLANTED`
is one of `FAULTS`. It begins with version `FIRST`; before it the engine is a healthy one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mrl.rollout.base import Completion, Request, SyncReport
from mrl.rollout.sglang import engine as sglang
from mrl.rollout.sglang.flight import Sending
from mrl.rollout.sglang.flights import Flights, OpenFlight
from mrl.types import WeightBucket

VARIABLE = "MRL_PLANTED"
FAULTS = ("stale_prefix", "stamp_of_server", "stamp_of_engine")
"""The prefix cache has no keys, so that requests read what older weights computed; the server stamps
tokens with another version; mrl's own engine says that newer weights sampled them."""
FIRST = 2


class _Unkeyed(Flights):
    """The account of calls whose requests lose their key on the way to the server."""

    is_planted = False

    def _sending(
        self, opened: OpenFlight, rids: Sequence[str], requests: Sequence[Request]
    ) -> Sending:
        sending = super()._sending(opened, rids, requests)
        return sending._replace(extra_key=None) if self.is_planted else sending


class Engine(sglang.Engine):
    """Is a healthy engine until version `FIRST` comes."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._fault = os.environ.get(VARIABLE, "")
        if self._fault not in FAULTS:
            raise ValueError(f"got {VARIABLE}={self._fault!r}, expected one of {', '.join(FAULTS)}")
        self._is_planted = False
        self.served.flights = self._flights = _Unkeyed(
            self.server, self.routes, self.shape, self.config
        )

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        report = super().update_weights(buckets, version)
        self._is_planted = version >= FIRST
        self._flights.is_planted = self._is_planted and self._fault == "stale_prefix"
        if self._is_planted and self._fault == "stamp_of_server":
            body = {"new_version": str(version - 1), "abort_all_requests": False}
            self.server.post("/update_weight_version", body)
        return report

    def generate(self, requests: Sequence[Request], **options: Any) -> Iterator[Completion]:
        for completion in super().generate(requests, **options):
            is_wrong = self._is_planted and self._fault == "stamp_of_engine"
            yield _newer(completion) if is_wrong else completion


def _newer(completion: Completion) -> Completion:
    spans = tuple(
        dataclasses.replace(span, version=span.version + 1) for span in completion.weight_versions
    )
    return dataclasses.replace(completion, weight_versions=spans)

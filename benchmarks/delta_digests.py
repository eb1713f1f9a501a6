"""The SGLang engine that notes what it was sent and what it holds:
`rollout.engine=benchmarks.delta_digests`.

After each weight sync it asks SGLang's processes for the digests of their weights, and adds a line to
the file that the environment variable `MRL_DIGESTS` names. Of both sides the line has the digest of the
whole model: the sum of the digests of all modules, modulo 2^64.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mrl.engines.base import EngineConfig, SyncReport
from mrl.engines.sglang.digests import ACTION, held_digests, in_hex
from mrl.engines.sglang.server import SGLangServer
from mrl.kernels.digest import MODULUS, add_digests
from mrl.types import WeightBucket

VARIABLE = "MRL_DIGESTS"


class Engine:
    """A healthy engine of one rank. It is its own endpoint; what is not defined here is the healthy
    engine's."""

    def __init__(self, config: EngineConfig) -> None:
        self._server = SGLangServer(config)
        self.endpoint, self._healthy = self, self._server.endpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server if hasattr(self._server, name) else self._healthy, name)

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        digests: list[tuple[str, int]] = []
        report = self._healthy.update_weights(_noting(buckets, digests), version)
        answer = self._server.connection.post("/weights_checker", {"action": ACTION})
        held, _ = held_digests(answer, 1)
        manifest = self._server.core.manifest
        sent = {
            place: digest
            for place, digest in manifest.with_tied_output(add_digests(digests), held).items()
            if place in held or place not in manifest.optional_places
        }
        line = {
            "version": version,
            "trainer": _whole(sent),
            "engine": _whole(held),
            "is_equal": sent == held,
        }
        with Path(os.environ[VARIABLE]).open("a") as file:
            file.write(json.dumps(line) + "\n")
        return report


def _noting(
    buckets: Iterable[WeightBucket], digests: list[tuple[str, int]]
) -> Iterator[WeightBucket]:
    """Yield the buckets, and add to `digests` what the trainer says that the engine shall hold."""
    for bucket in buckets:
        assert bucket.digest is not None
        digests += bucket.digest.items()
        yield bucket


def _whole(digests: dict[str, int]) -> str:
    return in_hex(sum(digests.values()) % MODULUS)

"""A healthy engine, unless it is engine 1 of a run: that one gets weights with wrong digests.

It is `rollout.engine=tests.disaggregated.wrong_engine`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from mrl.engines.base import EngineConfig, SyncReport
from mrl.engines.sglang.server import SGLangServer
from mrl.types import WeightBucket


def _spoiled(bucket: WeightBucket) -> WeightBucket:
    digest = bucket.digest and {name: value + 1 for name, value in bucket.digest.items()}
    return dataclasses.replace(bucket, digest=digest)


class Engine(SGLangServer):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        if config.log_path.name == "engine_01.log":
            endpoint: Any = self.endpoint
            healthy = endpoint.update_weights

            def update(buckets: Iterable[WeightBucket], version: int) -> SyncReport:
                return healthy((_spoiled(bucket) for bucket in buckets), version)

            endpoint.update_weights = update

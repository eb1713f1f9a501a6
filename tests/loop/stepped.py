"""Trainers that share one engine in one process: for tests and benchmarks that compare runs."""

from __future__ import annotations

from mrl.collect.live import EngineCollector
from mrl.rollout.base import RolloutEngine
from mrl.trainer import Trainer


class SteppedRun(Trainer):
    """A run that is driven step by step, with an engine that outlives it."""

    collector: EngineCollector

    def begin(self, engine: RolloutEngine | None) -> RolloutEngine:
        if engine is None:
            self.collector.start(self.policy)
        else:
            self.collector.engine = engine
        self._restore_or_run_sft()
        assert self.collector.engine is not None
        return self.collector.engine

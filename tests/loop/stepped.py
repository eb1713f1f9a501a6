"""Trainers that share one engine in one process: for tests and benchmarks that compare runs."""

from __future__ import annotations

from mrl.collect.live import LiveCollector
from mrl.rollout.base import RolloutEngine
from mrl.system.clock import Clock
from mrl.trainer import Trainer
from mrl.types import SampleGroup


def collected(trainer: Trainer) -> list[SampleGroup]:
    """The groups of the trainer's next step, which does not learn from them."""
    clock, collector = Clock(), trainer.collector
    collector.begin(trainer.step, clock)
    while not collector.is_over:
        trainer.sync(clock)
        collector.rollout(clock)
        collector.score(clock)
    return collector.groups


class SteppedRun(Trainer):
    """A run that is driven step by step, with an engine that outlives it."""

    collector: LiveCollector

    def begin(self, engine: RolloutEngine | None) -> RolloutEngine:
        if engine is None:
            self.collector.start(self.policy)
        else:
            self.collector.slot.engine = engine
        self._restore_or_run_sft()
        assert self.collector.slot.engine is not None
        return self.collector.slot.engine

"""Trainers that share one engine in one process: for tests and benchmarks that compare runs."""

from __future__ import annotations

from typing import cast

from mrl.collect.collector import Collector
from mrl.collect.prompts import PromptSupply
from mrl.collect.saved import SavedCollector
from mrl.engine_pool.local import LocalPool
from mrl.engine_pool.part import EnginePart
from mrl.engines.base import RolloutEngine
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


def part_of(collector: Collector | SavedCollector) -> EnginePart:
    """The part of the engine on this rank that a colocated collector has."""
    assert isinstance(collector, Collector)
    assert isinstance(collector.pool, LocalPool)
    return collector.pool.part


def supply_of(collector: Collector | SavedCollector) -> PromptSupply:
    """Where a collector's prompts come from."""
    assert isinstance(collector, Collector)
    return collector.supply


def exchange_engine(collector: Collector | SavedCollector, engine: RolloutEngine) -> RolloutEngine:
    """Let a collector use an engine that runs already; return the one that it had."""
    part = part_of(collector)
    former, part.engine.server, part.endpoint = part.engine.server, engine, engine.endpoint
    return cast(RolloutEngine, former)


class SteppedRun(Trainer):
    """A run that is driven step by step, with an engine that outlives it."""

    def begin(self, engine: RolloutEngine | None) -> RolloutEngine:
        if engine is None:
            self.collector.start(self.policy)
        else:
            exchange_engine(self.collector, engine)
        self._restore_or_run_sft()
        server = part_of(self.collector).engine.server
        assert server is not None
        return cast(RolloutEngine, server)

"""This rank's place for an engine: it notes when the engine is lost, and starts another one there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from mrl.collect.engine_nodes import EngineNodes
from mrl.errors import EngineGone
from mrl.exchange.sharing import sum_over_ranks
from mrl.rollout.base import CUDA_GRAPH, KV_CACHE, WEIGHTS, EngineLost
from mrl.run import console
from mrl.system.clock import Clock
from mrl.system.heartbeat import beat, phase
from mrl.system.memory_watch import MemoryWatch


class EngineSlot:
    """Holds the engine that this rank leads; ranks that lead none have an empty slot.

    A lost engine is no error yet, because the ranks have to agree on what to do: the loss is noted,
    further calls do nothing, and `replace_lost`, a collective, starts another engine.
    """

    def __init__(
        self,
        nodes: EngineNodes,
        engine_number: int,
        max_restarts: int,
        watch: MemoryWatch,
        *,
        keeps_weights: bool = False,
    ) -> None:
        """`max_restarts`: how many engines may be lost in one step, over all ranks. `keeps_weights`:
        syncs bring an adapter, so the engine must keep its weights while it sleeps."""
        self.engine = nodes.engine
        self.is_needed = True
        """False while this rank's engine has nothing to generate: it stays asleep."""
        self.watch = watch
        self._nodes = nodes
        self._number = engine_number
        self._max_restarts = max_restarts
        self._sleep_level = 1 if keeps_weights else 2
        self._lost: EngineLost | None = None
        self._restarts = 0
        self._explained = 0
        """Restarts that do not count, because the requests that caused them are not tried again."""
        self._recovery_s = 0.0

    def begin_step(self) -> None:
        """Set the counts of restarts and of seconds to zero."""
        self._restarts, self._explained, self._recovery_s = 0, 0, 0.0

    def start(self) -> None:
        """Start the engine and put it to sleep. A collective of the ranks that the engine spans."""
        self._nodes.start()
        if self.engine is not None:
            self.engine.sleep(self._sleep_level)

    @property
    def is_active(self) -> bool:
        """Whether there is an engine here that is needed and not lost."""
        return self.engine is not None and self.is_needed and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether the engine here was lost and no other has been started yet."""
        return self._lost is not None

    def wake_weights(self) -> None:
        """Let the engine take device memory back for its weights, which are not loaded yet."""
        self._wake(WEIGHTS)

    def wake_cache(self) -> None:
        """Let the engine take device memory back for its KV cache and CUDA graphs."""
        self._wake(KV_CACHE, CUDA_GRAPH)

    def _wake(self, *tags: str) -> None:
        if self.engine is not None and self.is_active:
            with self.noting_loss():
                self.engine.wake(tags)

    def sleep(self) -> None:
        """Let the engine give all device memory back; reads memory before and after."""
        if self.engine is not None and self.is_active:
            with self.noting_loss():
                self.watch.read("awake", self.engine.process_id)
                self.engine.sleep(self._sleep_level)
                self.watch.read("asleep", self.engine.process_id)

    @contextmanager
    def noting_loss(self) -> Iterator[None]:
        """Note an EngineLost that is raised inside, and leave the block."""
        try:
            yield
        except EngineLost as error:
            self._lost = error

    def replace_lost(self, clock: Clock) -> bool:
        """Start another engine wherever one was lost; return whether any was. A collective.

        Raises EngineGone, on every rank, where more than `max_restarts` engines were lost in a step.
        """
        with clock.part("rollout"):  # the wait for the slowest engine is part of it
            num_lost = self._count_lost()
        if not num_lost:
            return False
        start = time.perf_counter()
        with phase("rollout:restart"):
            while num_lost:  # the next one may be lost while it starts
                self._restarts += num_lost
                self._explained += sum_over_ranks(
                    self.engine is not None and self._lost is not None and self._lost.is_explained
                )
                beat()  # each start has a limit of its own
                self._start_another()
                num_lost = self._count_lost()
        self._recovery_s += time.perf_counter() - start
        return True

    def _count_lost(self) -> int:
        """Return how many engines were lost, over all ranks; every rank of a lost one learns of it."""
        self._lost = self._nodes.share_loss(self._lost)
        return sum_over_ranks(self._lost is not None and self.engine is not None)

    def _start_another(self) -> None:
        if (count := self._restarts - self._explained) > self._max_restarts:
            raise EngineGone(
                f"{count} rollout engines were lost in one step, more than "
                f"rollout.max_restarts={self._max_restarts}; "
                f"{self._lost or 'see the messages of other ranks'}"
            )
        if self._lost is None:
            return
        if self.engine is not None:
            console.warning(f"{self._lost}")
            console.warning(f"rollout engine {self._number}: starting another one")
        self._lost = None
        try:
            self.start()
        except RuntimeError as error:
            self._lost = error if isinstance(error, EngineLost) else EngineLost(str(error))

    def metrics(self) -> dict[str, float]:
        """Return this step's restarts over all ranks, and the seconds that they took."""
        return {
            "rollout/engine_restarts": float(self._restarts),
            "time/recovery_s": self._recovery_s,
        }

    def stop(self) -> None:
        """Leave no process behind. Harmless when repeated."""
        self._nodes.stop()

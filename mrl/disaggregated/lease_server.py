"""This module is the server of a free-running run: it gives its workers leases of single prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mrl.config import Recipe
from mrl.disaggregated.leasing import Leasing
from mrl.disaggregated.peers import Pair, Peer, never_started
from mrl.disaggregated.server import Server
from mrl.disaggregated.work import Delivered
from mrl.run.rollouts import decode_groups
from mrl.types import Prompt


class LeaseServer(Server):
    """Gives leases to the workers that ask, and collects finished groups in a queue."""

    def __init__(
        self,
        num_engines: int,
        recipe: Recipe,
        hosts: Sequence[str],
        draw: Callable[[int], list[Prompt]],
    ) -> None:
        """`draw(n)` gives the next n prompts; it is called by the server's threads, one at a time."""
        self._leasing = Leasing(recipe, draw, self._tell_engine)
        self._missing = set(range(num_engines))
        """Engines that no worker has started yet."""
        self._start_limit_s, self._start_deadline = 0.0, math.inf
        super().__init__(num_engines, recipe.asynchronous, hosts)

    def wait_until_started(self, limit_s: float) -> None:
        """Wait until one engine has a worker that is ready. The others join when they come, within the
        same limit. Raises RunFailed past it, now or in a later wait."""
        self._start_limit_s, self._start_deadline = limit_s, time.monotonic() + limit_s
        self._wait(lambda: len(self._missing) < self._num_engines)

    def _find_silent(self) -> None:
        super()._find_silent()
        if self._missing and time.monotonic() > self._start_deadline and self._failure is None:
            self._failure = never_started(self._missing, self._start_limit_s)

    def start_leases(self, step: int) -> None:
        """Begin with a step, where there is no state of an earlier one."""
        with self._changed:
            ledger = self._leasing.ledger
            ledger.step = max(ledger.step, step)

    def wait_for_batch(self, step: int) -> Delivered | None:
        """Wait for the groups of a step; return None where a worker can take newer weights before that,
        which it may need to go on."""
        taken: list[Delivered] = []

        def over() -> bool:
            if (batch := self._leasing.take(step)) is not None:
                taken.append(batch)
            return bool(taken) or bool(self._takers(step))

        self._wait(over)
        return taken[0] if taken else None

    def take_batch(self, step: int) -> Delivered | None:
        """Return the groups of a step if they are there, without a wait."""
        with self._changed:
            return self._leasing.take(step)

    def wait_until_free(self, version: int) -> None:
        """Return at once: the trainer waits for no engine."""

    def _takers(self, version: int) -> list[Peer]:
        """Return the workers that lack a version and can receive it."""
        return [w for w in self._workers.values() if w.sent < version and w.can_receive]

    def metrics(self) -> dict[str, float]:
        """Return `async/*` of the ledger, and what workers have measured."""
        with self._changed:
            num_engines = sum(worker.sent >= 0 for worker in self._workers.values())
            found = {**super().metrics(), **self._leasing.ledger.metrics()}
            return {**found, "async/engines": float(num_engines)}

    def begin_update(self, version: int) -> list[Pair]:
        with self._changed:
            pairs = super().begin_update(version)
            for pair in pairs:
                self._leasing.give(pair.engine, version)
            return pairs

    def _queued(self) -> list[int]:
        return [group.oldest for group in self._leasing.ledger.finished]

    @contextmanager
    def paused(self) -> Iterator[Leasing]:
        """Yield the leases; during the block no lease is given out and no group is accepted."""
        with self._changed:
            yield self._leasing

    def _tell_engine(self, engine: int, message: dict[str, Any], body: bytes) -> None:
        if worker := self._workers.get(engine):
            self._tell(worker, message, body)

    def _on_join(self, engine: int, incarnation: int) -> None:
        self._leasing.join(engine, incarnation, time.monotonic())

    def _on_loss(self, engine: int) -> None:
        self._leasing.lose(engine)

    def _heed(self, worker: Peer, message: dict[str, Any], body: bytes) -> None:
        super()._heed(worker, message, body)
        if message["type"] == "started":
            self._missing.discard(worker.pair.engine)

    def _on_message(self, worker: Peer, message: dict[str, Any], body: bytes) -> bool:
        engine = worker.pair.engine
        if message["type"] == "ask":
            self._leasing.ask(engine, int(message["version"]), int(message["most"]))
        elif message["type"] == "group":
            (group,) = decode_groups(body)
            self._leasing.finish(message["lease_id"], group, int(message["num_failed"]))
            self._losses[engine] = 0
        elif message["type"] == "sample":
            (group,) = decode_groups(body)
            self._leasing.report(message["lease_id"], int(message["place"]), group)
        else:
            return False
        return True

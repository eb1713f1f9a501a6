"""This module shows an engine to one of several callers, as if it had the engine for itself.

What drives an engine (mrl/collect/single_turn.py, multi_turn.py) calls generate() and abort() and knows
of nobody else. Behind `beside_others` several of them share one engine, each in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

from mrl.rollout.base import Completion, Request, RolloutEngine


def beside_others(engine: RolloutEngine, *, stale_prefixes: bool = False) -> RolloutEngine:
    """Return a view of `engine` for one thread: its generate() says `beside_others`, and its abort()
    of everything ends only what this view has asked for. All else is the engine's own.

    Request ids must be unique over all views. `stale_prefixes` is that of `RolloutEngine.generate`.
    """
    return cast(RolloutEngine, _View(engine, stale_prefixes))


class _View:
    """The engine of one caller."""

    def __init__(self, engine: RolloutEngine, stale_prefixes: bool) -> None:
        self._engine = engine
        self._stale_prefixes = stale_prefixes
        self._lock = threading.Lock()
        self._in_flight: set[str] = set()

    def generate(
        self, requests: Sequence[Request], *, reuse_cache: bool = False
    ) -> Iterator[Completion]:
        """Generate beside others. The prefix cache is kept, whatever `reuse_cache` says."""
        completions = self._engine.generate(
            requests, beside_others=True, stale_prefixes=self._stale_prefixes
        )
        return self._watched(completions, {request.request_id for request in requests})

    def _watched(self, completions: Iterator[Completion], ids: set[str]) -> Iterator[Completion]:
        with self._lock:
            self._in_flight |= ids
        try:
            for completion in completions:
                with self._lock:
                    self._in_flight.discard(completion.request_id)
                yield completion
        finally:
            with self._lock:
                self._in_flight -= ids
            if (close := getattr(completions, "close", None)) is not None:
                close()

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests, or all, where this view has asked for them."""
        with self._lock:
            wanted = self._in_flight if request_ids is None else self._in_flight & set(request_ids)
            ids = sorted(wanted)
        if ids:
            self._engine.abort(ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

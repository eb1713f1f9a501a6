"""This module adds up over time what passes a gate: how full the engine was, whose requests filled it,
and how long requests waited.

The numbers of requests change only when one comes, is sent or ends, and the gate sees each of these
moments. So every sum is exact as the gate sees it, and nobody has to ask the engine.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable


class GateTimes:
    """Keeps the sums of one gate, which calls it under its lock.

    A sum whose name ends in `_s` is over time: a request that was in the engine for 3 seconds adds 3 to
    `sent_s`. All sums can be added to those of other gates and other times.

    seconds    the time itself
    room_s     the requests that the engine can run at once
    sent_s     requests in the engine, which keeps some of them waiting where it has no room
    running_s  the same, but no more of them than it can run
    cache_s    the tokens that its KV cache holds
    held_s     tokens of prompts and answers, as if each answer grew evenly; counted when a request ends
    counted_s  tokens that the gate expects of the requests in the engine, which is what it admits by
    busy_s     the time in which any request is in the engine
    mix_s      the tenants that have requests in the engine

    and of each tenant:

    NAME/sent_s, NAME/waited_s     its requests in the engine, and those that wait at the gate
    NAME/requests, NAME/tokens     its requests that no longer wait, and the tokens generated for it
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._at = now()
        self._max_running = self._cache_tokens = 0
        self._waiting: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def resize(self, max_running: int, cache_tokens: int) -> None:
        """Note how many requests the engine can run at once, and the tokens that its cache holds."""
        self._advance()
        self._max_running, self._cache_tokens = max_running, cache_tokens

    def come(self, tenant: str, number: int) -> None:
        """Note that requests begin to wait."""
        self._advance()
        self._waiting[tenant] += number

    def withdraw(self, tenant: str, number: int) -> None:
        """Note that waiting requests are not sent any more."""
        self._advance()
        self._waiting[tenant] -= number
        self._sums[f"{tenant}/requests"] += number

    def send(self, tenant: str, expected: int) -> float:
        """Note that a waiting request is sent, of which `expected` tokens are expected. Return when."""
        self._advance()
        self._waiting[tenant] -= 1
        self._sent[tenant] += 1
        self._counted[tenant] += expected
        self._sums[f"{tenant}/requests"] += 1
        return self._at

    def end(self, tenant: str, expected: int, since: float, num_prompt: int, num_new: int) -> None:
        """Note the end of a request that was sent at `since`, after `num_new` tokens."""
        self._advance()
        self._sent[tenant] -= 1
        self._counted[tenant] -= expected
        self._sums["held_s"] += (num_prompt + num_new / 2) * (self._at - since)
        self._sums[f"{tenant}/tokens"] += num_new

    def leave(self, tenant: str) -> None:
        """Forget the requests of a tenant; what it has in the sums stays."""
        self._advance()
        for counts in (self._waiting, self._sent, self._counted):
            counts.pop(tenant, None)

    def take(self) -> dict[str, float]:
        """Return the sums since the last time, and begin anew with those requests that are there."""
        self._advance()
        taken, self._sums = self._sums, defaultdict(float)
        return dict(taken)

    def _advance(self) -> None:
        """Add the time since the last change."""
        before, self._at = self._at, self._now()
        passed = self._at - before
        in_engine = self._sent.total()
        for name, number in (
            ("seconds", 1),
            ("room_s", self._max_running),
            ("sent_s", in_engine),
            ("running_s", min(in_engine, self._max_running)),
            ("cache_s", self._cache_tokens),
            ("counted_s", self._counted.total()),
            ("busy_s", in_engine > 0),
            ("mix_s", sum(number > 0 for number in self._sent.values())),
            *((f"{tenant}/sent_s", number) for tenant, number in self._sent.items()),
            *((f"{tenant}/waited_s", number) for tenant, number in self._waiting.items()),
        ):
            self._sums[name] += number * passed

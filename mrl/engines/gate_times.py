"""Statistics of a gate: how full the engine was over time, whose requests filled it, and how long
requests waited.

The numbers of requests change only when a request arrives, is sent or ends. The gate sees each of
these events, so its sums are exact for the requests that it has sent, without asking the engine.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable


class GateTimes:
    """The sums of one gate. The gate calls these methods under its lock.

    `seconds` is the time itself, and `busy_s` the time during which the engine had a request. Every
    other sum whose name ends in `_s` is the integral over time of the number that its line names: a
    request that was in the engine for 3 seconds adds 3 to `sent_s`. Sums of several gates, or of
    several periods, can be added.

    seconds    the time itself
    busy_s     the time during which the engine had a request
    room_s     the number of requests that the engine can run at once
    sent_s     the number of requests in the engine, running or queued there
    running_s  the number of requests in the engine, but at most the number that it can run at once
    cache_s    the number of tokens that the engine's KV cache can hold
    held_s     the number of tokens, prompt and answer, that requests in the engine have so far. A
               request's part is added when it ends, as if its answer had grown evenly.
    counted_s  the number of tokens that requests in the engine are expected to have when they end
    mix_s      the number of tenants that have requests in the engine

    And for each tenant, where NAME is its name:

    NAME/sent_s     the number of the tenant's requests in the engine
    NAME/waited_s   the number of the tenant's requests that wait at the gate
    NAME/requests   a count, not an integral: requests that were sent or withdrawn
    NAME/tokens     a count, not an integral: tokens that were generated for the tenant
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
        """Record how many requests the engine can run at once, and how many tokens its cache holds."""
        self._advance()
        self._max_running, self._cache_tokens = max_running, cache_tokens

    def come(self, tenant: str, number: int) -> None:
        """Record that `number` requests of a tenant have begun to wait."""
        self._advance()
        self._waiting[tenant] += number

    def withdraw(self, tenant: str, number: int) -> None:
        """Record that `number` waiting requests of a tenant will not be sent."""
        self._advance()
        self._waiting[tenant] -= number
        self._sums[f"{tenant}/requests"] += number

    def send(self, tenant: str, expected: int) -> float:
        """Record that a waiting request has been sent and is expected to hold `expected` tokens when it
        ends. Return the current time."""
        self._advance()
        self._waiting[tenant] -= 1
        self._sent[tenant] += 1
        self._counted[tenant] += expected
        self._sums[f"{tenant}/requests"] += 1
        return self._at

    def end(self, tenant: str, expected: int, since: float, num_prompt: int, num_new: int) -> None:
        """Record that a request with `num_prompt` prompt tokens ended after `num_new` new tokens. The
        request was sent at the time `since`, and was expected to hold `expected` tokens."""
        self._advance()
        self._sent[tenant] -= 1
        self._counted[tenant] -= expected
        self._sums["held_s"] += (num_prompt + num_new / 2) * (self._at - since)
        self._sums[f"{tenant}/tokens"] += num_new

    def leave(self, tenant: str) -> None:
        """Forget the requests of a tenant. What these requests have added to the sums so far stays in
        the sums."""
        self._advance()
        for counts in (self._waiting, self._sent, self._counted):
            counts.pop(tenant, None)

    def take(self) -> dict[str, float]:
        """Return the sums and reset them to 0. The current numbers of requests, at the gate and in the
        engine, are not reset."""
        self._advance()
        taken, self._sums = self._sums, defaultdict(float)
        return dict(taken)

    def _advance(self) -> None:
        """Add the time since the last event to the sums."""
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

"""A gate before an engine that several tenants share: it says which waiting requests are sent now.

An engine serves what it has been sent in the order in which it came, so that the thousand requests of
one tenant would starve those of another. Behind a gate requests wait in the trainer's process, and a
policy from outside (mrl/tenants/schedule.py) admits them by what is left of the KV memory. Without a
policy all are admitted at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mrl.rollout.base import Request
from mrl.rollout.gate_times import GateTimes

UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Demand:
    """Says what a tenant wants of an engine's KV memory; tokens of prompt and answer."""

    tenant: str
    weight: float
    num_waiting: int
    """Requests that are not in the engine yet."""
    tokens_each: int
    """What one of them is expected to hold in the end: `Policy.tokens_each`."""
    tokens_in_flight: int
    """What its requests in the engine are expected to hold in the end."""
    max_tokens_in_flight: int
    """The tenant's limit."""


class Policy(Protocol):
    """A policy decides; `mrl.tenants.schedule.Admission` is one. The gate calls it from any thread, one
    call at a time."""

    def tokens_each(self, tenant: str, max_tokens: int) -> int:
        """Return how many tokens a request of the tenant is expected to hold, at most `max_tokens`."""
        ...

    def admit(
        self, free_tokens: int, capacity_tokens: int, demands: Sequence[Demand]
    ) -> Mapping[str, int]:
        """Return how many of the waiting requests of each tenant are sent now. `free_tokens` is
        `capacity_tokens` less what is in flight."""
        ...

    def finished(self, tenant: str, num_tokens: int) -> None:
        """Note the tokens, prompt and answer, of a request that finished."""
        ...

    def leave(self, tenant: str) -> None:
        """Forget a tenant."""
        ...


class AdmitAll:
    """The default policy, which is to admit every request at once."""

    def tokens_each(self, tenant: str, max_tokens: int) -> int:
        return max_tokens

    def admit(
        self, free_tokens: int, capacity_tokens: int, demands: Sequence[Demand]
    ) -> Mapping[str, int]:
        return {demand.tenant: demand.num_waiting for demand in demands}

    def finished(self, tenant: str, num_tokens: int) -> None:
        pass

    def leave(self, tenant: str) -> None:
        pass


class Sent(NamedTuple):
    """Holds a request that was admitted and is not over."""

    request: Request
    expected: int
    """The tokens that the gate counts it with."""
    since: float
    """When it was admitted, by the clock of `GateTimes`."""


@dataclass
class _Tenant:
    """Holds what the gate knows of a tenant."""

    weight: float
    max_tokens_in_flight: int
    lines: list[Line] = field(default_factory=list)
    """Those that have requests left, in the order in which they came."""
    in_flight: int = 0
    """Tokens that are expected of the requests in the engine."""


class Gate:
    """A gate stands before one engine. Any thread may use it."""

    def __init__(
        self,
        policy: Policy | None = None,
        capacity_tokens: int = UNLIMITED,
        times: GateTimes | None = None,
    ) -> None:
        """`capacity_tokens` is the size of the engine's KV memory; `resize` sets it later."""
        self.capacity_tokens = capacity_tokens
        self._policy: Policy = policy or AdmitAll()
        self._times = times or GateTimes()
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}

    def resize(self, capacity_tokens: int, max_running: int) -> None:
        """Note the size of the engine's KV memory, and how many requests it can run at once."""
        with self._lock:
            self.capacity_tokens = capacity_tokens
            self._times.resize(max_running, capacity_tokens)

    def take_times(self) -> dict[str, float]:
        """Return what passed the gate since the last time, as `GateTimes.take` does."""
        with self._lock:
            return self._times.take()

    def enter(
        self, tenant: str, *, weight: float = 1.0, max_tokens_in_flight: int = UNLIMITED
    ) -> None:
        """Add a tenant, or change its weight and its limit."""
        with self._lock:
            known = self._tenants.setdefault(tenant, _Tenant(weight, max_tokens_in_flight))
            known.weight, known.max_tokens_in_flight = weight, max_tokens_in_flight
        self._look()

    def leave(self, tenant: str) -> None:
        """Forget a tenant and its requests."""
        with self._lock:
            self._tenants.pop(tenant, None)
            self._policy.leave(tenant)
            self._times.leave(tenant)
        self._look()

    def line_up(
        self, tenant: str, requests: Sequence[Request], on_admitted: Callable[[], None]
    ) -> Line:
        """Return a line of these requests. `on_admitted` is called, from any thread, when some of them
        may be sent. Raises RuntimeError for a tenant that is not there."""
        line = Line(self, tenant, requests, on_admitted)
        with self._lock:
            if tenant not in self._tenants:
                raise RuntimeError(f"generate: tenant {tenant!r} is not at the gate of this engine")
            self._tenants[tenant].lines.append(line)
            self._times.come(tenant, line.num_waiting)
        self._look()
        return line

    def _look(self) -> None:
        """Ask the policy, and tell the lines whose requests may be sent."""
        with self._lock:
            told = self._admit()
        for line in told:
            line.on_admitted()

    def _admit(self) -> list[Line]:
        demands = [self._demand(name, tenant) for name, tenant in self._tenants.items()]
        waiting = [demand for demand in demands if demand.num_waiting]
        if not waiting:
            return []
        in_flight = sum(demand.tokens_in_flight for demand in demands)
        free_tokens = max(0, self.capacity_tokens - in_flight)
        granted = dict(self._policy.admit(free_tokens, self.capacity_tokens, demands))
        if not in_flight and not any(granted.values()):
            granted = {waiting[0].tenant: 1}  # or nothing would ever change
        told: list[Line] = []
        for name, number in granted.items():
            tenant = self._tenants[name]
            for _ in range(number):
                line = tenant.lines[0]
                tenant.in_flight += line.admit_next(self._policy, self._times)
                told += [line] if line not in told else []
                if not line.num_waiting:
                    tenant.lines.pop(0)
        return told

    def _demand(self, name: str, tenant: _Tenant) -> Demand:
        longest = max((line.longest for line in tenant.lines), default=0)
        return Demand(
            tenant=name,
            weight=tenant.weight,
            num_waiting=sum(line.num_waiting for line in tenant.lines),
            tokens_each=self._policy.tokens_each(name, longest) if longest else 0,
            tokens_in_flight=tenant.in_flight,
            max_tokens_in_flight=tenant.max_tokens_in_flight,
        )

    def give_back(self, name: str, sent: Sent, num_new: int, *, is_whole: bool) -> None:
        """Note that the engine holds nothing more of a request, which has `num_new` new tokens."""
        num_prompt = sent.request.token_ids.numel()
        with self._lock:
            if (tenant := self._tenants.get(name)) is not None:
                tenant.in_flight -= sent.expected
                self._times.end(name, sent.expected, sent.since, num_prompt, num_new)
                if is_whole:
                    self._policy.finished(name, num_prompt + num_new)
        self._look()

    def withdraw(
        self, name: str, line: Line, request_ids: Collection[str] | None = None
    ) -> list[Request]:
        """Take these requests, or all, out of a line, and return those that had not been admitted."""
        with self._lock:
            taken = line.remove(request_ids)
            tenant = self._tenants.get(name)
            if tenant is not None:
                self._times.withdraw(name, len(taken))
                if not line.num_waiting and line in tenant.lines:
                    tenant.lines.remove(line)
        return taken


class Line:
    """A line holds the requests of one call of generate(), in their order. `Gate.line_up` makes it."""

    def __init__(
        self, gate: Gate, tenant: str, requests: Sequence[Request], on_admitted: Callable[[], None]
    ) -> None:
        self.on_admitted = on_admitted
        self.longest = max(map(most_tokens, requests), default=0)
        self._gate, self._tenant = gate, tenant
        self._waiting = deque(requests)
        self._admitted: list[Request] = []
        self._sent: dict[str, Sent] = {}
        """Requests that were admitted and are not over, by their ids."""
        self._changing = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """The requests that were not admitted yet."""
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to be sent."""
        with self._changing:
            return not self._waiting and not self._admitted

    def take(self) -> list[Request]:
        """Return the requests that were admitted since the last time."""
        with self._changing:
            taken, self._admitted = self._admitted, []
        return taken

    def finish(self, request: Request, num_new: int, *, is_whole: bool = True) -> None:
        """Note that a request is over after `num_new` tokens. `is_whole`: it was not aborted."""
        with self._changing:
            sent = self._sent.pop(request.request_id, None)
        if sent is not None:
            self._gate.give_back(self._tenant, sent, num_new, is_whole=is_whole)

    def withdraw(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """Take these requests, or all, out of the line, and return those that were not sent."""
        unsent = self._gate.withdraw(self._tenant, self, request_ids)
        with self._changing:
            taken, kept = _split(self._admitted, request_ids)
            self._admitted = kept
        for request in taken:
            self.finish(request, 0, is_whole=False)
        return unsent + taken

    def close(self) -> None:
        """Note that nothing more of these requests is sent, and that none is in the engine."""
        self.withdraw()
        with self._changing:
            left, self._sent = self._sent, {}
        for sent in left.values():
            self._gate.give_back(self._tenant, sent, 0, is_whole=False)

    def admit_next(self, policy: Policy, times: GateTimes) -> int:
        """Admit one request, and return the tokens that are expected of it. For the gate alone."""
        with self._changing:
            request = self._waiting.popleft()
            expected = policy.tokens_each(self._tenant, most_tokens(request))
            self._admitted.append(request)
            since = times.send(self._tenant, expected)
            self._sent[request.request_id] = Sent(request, expected, since)
        return expected

    def remove(self, request_ids: Collection[str] | None) -> list[Request]:
        """Remove what waits of these, or all. For the gate alone."""
        with self._changing:
            taken, kept = _split(self._waiting, request_ids)
            self._waiting = deque(kept)
        return taken


def most_tokens(request: Request) -> int:
    """Return how many tokens a request can come to hold."""
    return request.token_ids.numel() + request.sampling.max_new_tokens


def _split(
    requests: Iterable[Request], request_ids: Collection[str] | None
) -> tuple[list[Request], list[Request]]:
    """Return those with these ids, all for None, and the others."""
    taken, kept = [], []
    for request in requests:
        (taken if request_ids is None or request.request_id in request_ids else kept).append(
            request
        )
    return taken, kept

"""A gate before an engine that several tenants share: it says which waiting requests are sent now.

An engine serves what it has been sent in the order in which it came, so that the thousand requests of
one tenant would starve those of another. Behind a gate requests wait in the trainer's process, and a
policy from outside (mrl/tenants/schedule.py) admits them by what is left of the KV memory. Without a
policy all are admitted at once.

A call whose requests were in flight when an engine died runs alone in the next one
(crashed_requests.py): the requests in it finish first, and all others wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mrl.rollout.base import Request
from mrl.rollout.crashed_requests import CrashedRequests
from mrl.rollout.gate_times import GateTimes
from mrl.rollout.line import Line, Sent

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
        self._crashed = CrashedRequests()
        self._alone: Line | None = None
        """The line that runs alone in the engine."""
        self.num_starts = 0
        self._is_lost = False
        """Whether the engine died since its newest start; then nothing is admitted."""
        self._ended_alone = False
        """Whether the engine died while a line ran alone in it."""

    @property
    def has_culprit(self) -> bool:
        """Whether, if the engine has died, the cause is requests that ran alone in it. Any thread that
        finds the engine lost may ask, even before the one that sent these requests does."""
        with self._lock:
            return self._ended_alone or (self._alone is not None and self._alone.is_sent)

    def resize(self, capacity_tokens: int, max_running: int) -> None:
        """Record that an engine has started, the size of its KV memory, and how many requests it can
        run at once."""
        with self._lock:
            self.capacity_tokens = capacity_tokens
            self._times.resize(max_running, capacity_tokens)
            self.num_starts += 1
            self._is_lost = self._ended_alone = False
        self._look()

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
            self._crashed.leave(tenant)
            if self._alone is not None and self._alone.tenant == tenant:
                self._alone = None
        self._look()

    def line_up(
        self, tenant: str, requests: Sequence[Request], on_admitted: Callable[[], None]
    ) -> Line:
        """Return a line of these requests. `on_admitted` is called, from any thread, when some of them
        may be sent. Raises RuntimeError for an unknown tenant, and EndsEngine for a request that was in
        flight when two engines died."""
        line = Line(self, tenant, requests, on_admitted)
        with self._lock:
            if tenant not in self._tenants:
                raise RuntimeError(f"generate: tenant {tenant!r} is not at the gate of this engine")
            self._crashed.check(tenant, line.ids)
            line.must_run_alone = self._crashed.has_any(tenant, line.ids)
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
        in_flight = sum(tenant.in_flight for tenant in self._tenants.values())
        if self._is_lost or not self._may_admit(in_flight):
            return []
        demands = [self._demand(name, tenant) for name, tenant in self._tenants.items()]
        waiting = [demand for demand in demands if demand.num_waiting]
        if not waiting:
            return []
        free_tokens = max(0, self.capacity_tokens - in_flight)
        granted = dict(self._policy.admit(free_tokens, self.capacity_tokens, demands))
        if not in_flight and not any(granted.values()):
            granted = {waiting[0].tenant: 1}  # or nothing would ever change
        told: list[Line] = []
        for name, number in granted.items():
            tenant = self._tenants[name]
            for _ in range(number):
                line = self._alone or tenant.lines[0]
                tenant.in_flight += line.admit_next(self._policy, self._times)
                told += [line] if line not in told else []
                if not line.num_waiting:
                    tenant.lines.remove(line)
        return told

    def _may_admit(self, in_flight: int) -> bool:
        """Return whether any request may be sent now. If the engine is empty, the first line that must
        run alone is chosen."""
        if self._alone is not None:
            return True
        lines = [line for tenant in self._tenants.values() for line in tenant.lines]
        retried = next((line for line in lines if line.must_run_alone), None)
        if retried is not None and not in_flight:
            self._alone = retried
        return retried is None or not in_flight

    def _demand(self, name: str, tenant: _Tenant) -> Demand:
        lines = tenant.lines
        if self._alone is not None:
            lines = [line for line in lines if line is self._alone]
        longest = max((line.longest for line in lines), default=0)
        return Demand(
            tenant=name,
            weight=tenant.weight,
            num_waiting=sum(line.num_waiting for line in lines),
            tokens_each=self._policy.tokens_each(name, longest) if longest else 0,
            tokens_in_flight=tenant.in_flight,
            max_tokens_in_flight=tenant.max_tokens_in_flight,
        )

    def lose(self, tenant: str, line: Line, ids: Collection[str]) -> bool:
        """Record that the engine died with these requests of a line in flight; return whether the line
        ran alone. Nothing is admitted until another engine has started."""
        with self._lock:
            self._is_lost |= line.num_starts == self.num_starts
            were_alone = self._alone is line
            self._crashed.add(tenant, ids, were_alone=were_alone)
            self._ended_alone |= were_alone and bool(ids)
            return were_alone and bool(ids)

    def end(self, tenant: str, line: Line, survived: Collection[str]) -> None:
        """Record that a line is finished; the engine survived these requests of it."""
        with self._lock:
            self._crashed.remove(tenant, survived)
            if self._alone is line:
                self._alone = None
        self._look()

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

"""A gate in front of an engine that several tenants share: it decides when each request is sent.

An engine serves requests in the order in which they came, so a thousand requests of one tenant would
starve the others. Behind a gate, requests wait in the trainer's process, and a separate policy
(mrl/service/schedule.py) admits them according to the KV memory that is left. Without a policy all
requests are admitted at once.

A call whose requests were in flight when an engine died runs alone in the next engine
(crashed_requests.py). It begins when the requests that are already in that engine have finished, and
all other requests wait until it has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from mrl.engines.admission import UNLIMITED, AdmissionPolicy, Demand
from mrl.engines.base import Request
from mrl.engines.crashed_requests import CrashedRequests
from mrl.engines.gate_times import GateTimes


class Admitted(NamedTuple):
    """A request that was admitted and is not finished."""

    request: Request
    expected: int
    """The number of tokens, prompt and answer, that the request is expected to hold when it ends."""
    since: float
    """When it was admitted, in seconds on the clock of `GateTimes`."""


class AdmissionQueue:
    """The requests of one call of generate() at a gate, in order. `Gate.enqueue` creates the queue; any
    thread may use it."""

    def __init__(
        self,
        gate: Gate,
        tenant: str,
        requests: Sequence[Request],
        on_admitted: Callable[[], None],
    ) -> None:
        self._gate, self.tenant, self.on_admitted = gate, tenant, on_admitted
        self.longest = max(map(most_tokens, requests), default=0)
        self.ids = {request.request_id for request in requests}
        self.must_run_alone = False
        self.num_starts = gate.num_starts
        """How often the engine had been started when this queue was created."""
        self.waiting = deque(requests)
        self.untaken: list[Request] = []
        """Requests that were admitted since the last `take`."""
        self.in_engine: dict[str, Admitted] = {}
        """Requests that were admitted and are not finished, by their ids."""
        self.in_flight_at_loss: set[str] = set()
        """Ids of the requests that were in flight when the engine died."""

    @property
    def is_empty(self) -> bool:
        """Whether no request is left to be admitted or taken."""
        with self._gate.lock:
            return not self.waiting and not self.untaken

    def take(self) -> list[Request]:
        """Return the requests that were admitted since the previous call."""
        with self._gate.lock:
            taken, self.untaken = self.untaken, []
        return taken

    def finish(self, request: Request, num_new: int, *, is_whole: bool = True) -> None:
        """Record that a request ended after `num_new` new tokens. `is_whole` is False if it was
        aborted."""
        with self._gate.changing() as gate:
            gate.note_end(self, request.request_id, num_new, is_whole=is_whole)
            is_over = not self.waiting and not self.in_engine
            if is_whole and self.must_run_alone and is_over:
                gate.note_survived(self, self.ids - self.in_flight_at_loss)

    def withdraw(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """Remove and return the requests with these ids (None: all) that were not sent yet."""
        with self._gate.changing() as gate:
            return gate.take_back(self, request_ids)

    def lose(self) -> bool:
        """Record that the engine died while this queue was open; call this before close(). Nothing is
        admitted until another engine has started.

        Return True if the queue ran alone in the engine and had requests in flight: these requests then
        killed the engine.
        """
        with self._gate.lock:
            self.in_flight_at_loss = set(self.in_engine)
            return self._gate.note_loss(self)

    def close(self) -> None:
        """Record that no more of these requests will be sent, and that none of them is in the
        engine."""
        with self._gate.changing() as gate:
            unsent = {request.request_id for request in gate.take_back(self, None)}
            for request_id in list(self.in_engine):
                gate.note_end(self, request_id, 0, is_whole=False)
            gate.note_survived(self, self.ids - self.in_flight_at_loss - unsent)


def most_tokens(request: Request) -> int:
    """Return the most tokens that a request can have: its prompt and its longest possible answer."""
    return request.token_ids.numel() + request.sampling.max_new_tokens


@dataclass
class _Tenant:
    weight: float
    max_tokens_in_flight: int
    queues: list[AdmissionQueue] = field(default_factory=list)
    """The tenant's queues that have waiting requests, the oldest first."""
    in_flight: int = 0
    """Tokens that the tenant's requests in the engine are expected to hold when they end."""


class Gate:
    """The gate of one engine. Any thread may use it."""

    def __init__(
        self,
        policy: AdmissionPolicy | None = None,
        capacity_tokens: int = UNLIMITED,
        times: GateTimes | None = None,
    ) -> None:
        """`capacity_tokens` is the size of the engine's KV memory in tokens; `resize` sets it later."""
        self.capacity_tokens = capacity_tokens
        self._policy = policy
        self._times = times or GateTimes()
        self.lock = threading.Lock()
        """Guards the gate and its queues."""
        self._tenants: dict[str, _Tenant] = {}
        self._crashed = CrashedRequests()
        self._alone: AdmissionQueue | None = None
        """The queue whose requests run alone in the engine; None if no queue runs alone."""
        self.num_starts = 0
        self._is_lost = False
        """Whether the engine has died since its last start. Nothing is admitted then."""
        self._ended_alone = False
        """Whether the engine died while the requests of a queue ran alone in it."""

    @contextmanager
    def changing(self) -> Iterator[Gate]:
        """Hold the lock during the block, then admit what the policy allows. After releasing the lock,
        call `on_admitted` of each queue from which requests were admitted."""
        with self.lock:
            yield self
            notified = self._admit()
        for queue in notified:
            queue.on_admitted()

    @property
    def has_culprit(self) -> bool:
        """Whether requests that ran alone in the engine caused its loss; only meaningful after a loss.
        The answer is right even before the thread that sent these requests has noticed the loss."""
        with self.lock:
            return self._ended_alone or (self._alone is not None and bool(self._alone.in_engine))

    def resize(self, capacity_tokens: int, max_running: int) -> None:
        """Record that an engine has started. `capacity_tokens` is the size of its KV memory, and
        `max_running` the number of requests that it can run at once."""
        with self.changing():
            self.capacity_tokens = capacity_tokens
            self._times.resize(max_running, capacity_tokens)
            self.num_starts += 1
            self._is_lost = self._ended_alone = False

    def take_times(self) -> dict[str, float]:
        """Return the sums of `GateTimes` since the last call, and reset them."""
        with self.lock:
            return self._times.take()

    def enter(
        self, tenant: str, *, weight: float = 1.0, max_tokens_in_flight: int = UNLIMITED
    ) -> None:
        """Add a tenant. The policy sees `weight` and `max_tokens_in_flight` in the tenant's `Demand`.
        `weight` is the size of the tenant's share of the engine, relative to the other tenants'
        weights."""
        with self.changing():
            self._tenants[tenant] = _Tenant(weight, max_tokens_in_flight)

    def leave(self, tenant: str) -> None:
        """Remove a tenant and its requests."""
        with self.changing():
            self._tenants.pop(tenant, None)
            if self._policy is not None:
                self._policy.leave(tenant)
            self._times.leave(tenant)
            self._crashed.leave(tenant)
            if self._alone is not None and self._alone.tenant == tenant:
                self._alone = None

    def enqueue(
        self, tenant: str, requests: Sequence[Request], on_admitted: Callable[[], None]
    ) -> AdmissionQueue:
        """Return a queue of these requests. `on_admitted` is called, from any thread, when some of them
        may be sent. Raises RuntimeError for an unknown tenant, and EndsEngine for a request that was in
        flight when two engines died."""
        queue = AdmissionQueue(self, tenant, requests, on_admitted)
        with self.changing():
            if tenant not in self._tenants:
                raise RuntimeError(f"generate: tenant {tenant!r} is not at the gate of this engine")
            self._crashed.check(tenant, queue.ids)
            queue.must_run_alone = self._crashed.has_any(tenant, queue.ids)
            self._tenants[tenant].queues.append(queue)
            self._times.come(tenant, len(queue.waiting))
        return queue

    def _admit(self) -> list[AdmissionQueue]:
        """Admit what the policy allows now, and return the queues of the admitted requests."""
        in_flight = sum(tenant.in_flight for tenant in self._tenants.values())
        if self._is_lost or not self._may_admit(in_flight):
            return []
        demands = [self._demand(name, tenant) for name, tenant in self._tenants.items()]
        waiting = [demand for demand in demands if demand.num_waiting]
        if not waiting:
            return []
        granted = {demand.tenant: demand.num_waiting for demand in waiting}
        if self._policy is not None:
            free_tokens = max(0, self.capacity_tokens - in_flight)
            granted = dict(self._policy.admit(free_tokens, self.capacity_tokens, demands))
        if not in_flight and not any(granted.values()):
            granted = {waiting[0].tenant: 1}  # an idle engine would wait forever
        notified: list[AdmissionQueue] = []
        for name, number in granted.items():
            tenant = self._tenants[name]
            for _ in range(number):
                queue = self._alone or tenant.queues[0]
                self._admit_one(queue, tenant)
                notified += [queue] if queue not in notified else []
                if not queue.waiting:
                    tenant.queues.remove(queue)
        return notified

    def _admit_one(self, queue: AdmissionQueue, tenant: _Tenant) -> None:
        request = queue.waiting.popleft()
        expected = self._tokens_each(queue.tenant, most_tokens(request))
        since = self._times.send(queue.tenant, expected)
        tenant.in_flight += expected
        queue.untaken.append(request)
        queue.in_engine[request.request_id] = Admitted(request, expected, since)

    def _tokens_each(self, name: str, max_tokens: int) -> int:
        return max_tokens if self._policy is None else self._policy.tokens_each(name, max_tokens)

    def _may_admit(self, in_flight: int) -> bool:
        """Return whether any request may be sent now. If a queue must run alone, nothing is sent
        until the engine has no requests; from then on only this queue is admitted. `in_flight` is
        the sum of `_Tenant.in_flight`, which is 0 if the engine has no requests."""
        if self._alone is not None:
            return True
        queues = [queue for tenant in self._tenants.values() for queue in tenant.queues]
        retried = next((queue for queue in queues if queue.must_run_alone), None)
        if retried is not None and not in_flight:
            self._alone = retried
        return retried is None or not in_flight

    def _demand(self, name: str, tenant: _Tenant) -> Demand:
        queues = tenant.queues
        if self._alone is not None:
            queues = [queue for queue in queues if queue is self._alone]
        longest = max((queue.longest for queue in queues), default=0)
        return Demand(
            tenant=name,
            weight=tenant.weight,
            num_waiting=sum(len(queue.waiting) for queue in queues),
            tokens_each=self._tokens_each(name, longest) if longest else 0,
            tokens_in_flight=tenant.in_flight,
            max_tokens_in_flight=tenant.max_tokens_in_flight,
        )

    def note_loss(self, queue: AdmissionQueue) -> bool:
        """Record that the engine died while a queue was open. Return whether the queue ran alone
        and had requests in flight."""
        self._is_lost |= queue.num_starts == self.num_starts
        were_alone = self._alone is queue
        self._crashed.add(queue.tenant, queue.in_flight_at_loss, were_alone=were_alone)
        ended_alone = were_alone and bool(queue.in_flight_at_loss)
        self._ended_alone |= ended_alone
        return ended_alone

    def note_survived(self, queue: AdmissionQueue, request_ids: Collection[str]) -> None:
        """Record that a queue has ended, and that the engine survived its requests `request_ids`."""
        self._crashed.remove(queue.tenant, request_ids)
        if self._alone is queue:
            self._alone = None

    def note_end(
        self, queue: AdmissionQueue, request_id: str, num_new: int, *, is_whole: bool
    ) -> None:
        """Record that a request left the engine after `num_new` new tokens. `is_whole` is False if it
        was aborted. A second call does nothing."""
        admitted, name = queue.in_engine.pop(request_id, None), queue.tenant
        if admitted is None or (tenant := self._tenants.get(name)) is None:
            return
        num_prompt = admitted.request.token_ids.numel()
        tenant.in_flight -= admitted.expected
        self._times.end(name, admitted.expected, admitted.since, num_prompt, num_new)
        if is_whole and self._policy is not None:
            self._policy.finished(name, num_prompt + num_new)

    def take_back(
        self, queue: AdmissionQueue, request_ids: Collection[str] | None
    ) -> list[Request]:
        """Remove and return the requests with these ids (None: all) that were not sent yet."""
        waiting, kept = _split(queue.waiting, request_ids)
        queue.waiting = deque(kept)
        untaken, queue.untaken = _split(queue.untaken, request_ids)
        if (tenant := self._tenants.get(queue.tenant)) is not None:
            self._times.withdraw(queue.tenant, len(waiting))
            if not queue.waiting and queue in tenant.queues:
                tenant.queues.remove(queue)
        for request in untaken:
            self.note_end(queue, request.request_id, 0, is_whole=False)
        return waiting + untaken


def _split(
    requests: Iterable[Request], request_ids: Collection[str] | None
) -> tuple[list[Request], list[Request]]:
    """Return two lists: the requests with these ids (None: all requests), and the others."""
    taken, kept = [], []
    for request in requests:
        (taken if request_ids is None or request.request_id in request_ids else kept).append(
            request
        )
    return taken, kept

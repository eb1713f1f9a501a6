"""The requests of one call of generate(), which wait for admission by a gate (gate.py) or are sent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mrl.rollout.base import Request
from mrl.rollout.gate_times import GateTimes

if TYPE_CHECKING:
    from mrl.rollout.gate import Gate, Policy


class Sent(NamedTuple):
    """A request that was admitted and is not finished."""

    request: Request
    expected: int
    """The tokens that the gate expects of it."""
    since: float
    """When it was admitted, by the clock of `GateTimes`."""


class Line:
    """Holds the requests of one call of generate(), in order. `Gate.line_up` creates it."""

    def __init__(
        self, gate: Gate, tenant: str, requests: Sequence[Request], on_admitted: Callable[[], None]
    ) -> None:
        self.on_admitted = on_admitted
        self.longest = max(map(most_tokens, requests), default=0)
        self.ids = {request.request_id for request in requests}
        self.must_run_alone = False
        self.num_starts = gate.num_starts
        """How often the engine had been started when this line was created."""
        self._gate, self.tenant = gate, tenant
        self._waiting = deque(requests)
        self._admitted: list[Request] = []
        self._sent: dict[str, Sent] = {}
        """Requests that were admitted and are not finished, by their ids."""
        self._in_flight_at_loss: set[str] = set()
        """Ids of the requests that were in flight when the engine died."""
        self._changing = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """The number of requests that were not admitted yet."""
        return len(self._waiting)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be sent or answered."""
        with self._changing:
            return not self._waiting and not self._sent

    @property
    def is_sent(self) -> bool:
        """Whether any of its requests are in the engine."""
        with self._changing:
            return bool(self._sent)

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
        """Record that a request finished after `num_new` tokens. `is_whole`: it was not aborted."""
        with self._changing:
            sent = self._sent.pop(request.request_id, None)
        if sent is not None:
            self._gate.give_back(self.tenant, sent, num_new, is_whole=is_whole)
        if is_whole and self.must_run_alone and self.is_over:
            self._gate.end(self.tenant, self, self.ids - self._in_flight_at_loss)

    def withdraw(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """Remove these requests, or all, from the line, and return those that were not sent."""
        unsent = self._gate.withdraw(self.tenant, self, request_ids)
        with self._changing:
            taken, kept = _split(self._admitted, request_ids)
            self._admitted = kept
        for request in taken:
            self.finish(request, 0, is_whole=False)
        return unsent + taken

    def lose(self) -> bool:
        """Record, before close(), that the engine died with these requests in flight; return whether
        they were the only ones in it."""
        with self._changing:
            self._in_flight_at_loss = set(self._sent)
        return self._gate.lose(self.tenant, self, self._in_flight_at_loss)

    def close(self) -> None:
        """Record that no more of these requests will be sent, and that none is in the engine."""
        unsent = {request.request_id for request in self.withdraw()}
        with self._changing:
            left, self._sent = self._sent, {}
        for sent in left.values():
            self._gate.give_back(self.tenant, sent, 0, is_whole=False)
        self._gate.end(self.tenant, self, self.ids - self._in_flight_at_loss - unsent)

    def admit_next(self, policy: Policy, times: GateTimes) -> int:
        """Admit one request, and return the tokens that are expected of it. Only the gate calls it."""
        with self._changing:
            request = self._waiting.popleft()
            expected = policy.tokens_each(self.tenant, most_tokens(request))
            self._admitted.append(request)
            since = times.send(self.tenant, expected)
            self._sent[request.request_id] = Sent(request, expected, since)
        return expected

    def remove(self, request_ids: Collection[str] | None) -> list[Request]:
        """Remove these requests, or all, that are not admitted yet. Only the gate calls it."""
        with self._changing:
            taken, kept = _split(self._waiting, request_ids)
            self._waiting = deque(kept)
        return taken


def most_tokens(request: Request) -> int:
    """Return the most tokens that a request can have: its prompt and the longest answer."""
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

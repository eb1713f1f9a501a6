"""Sends the requests of one call of generate(), and yields the answers, each exactly once.

Up to 1024 requests travel in one streamed batch, so that they reach the scheduler together and in
order. A thread for each batch reads the answers as they finish. A request is sent again if its
connection breaks, or if the server aborts it although mrl did not ask for it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mrl.engines.base import EngineLost, Request, RequestFailed
from mrl.engines.gate import AdmissionQueue
from mrl.engines.sglang.body import build_request
from mrl.engines.sglang.connection import REAP_S, ServerConnection
from mrl.engines.sglang.decode import finish_reason, refusal
from mrl.engines.sglang.http import EventStream, ServerError

SAMPLES_PER_BATCH = 1024
MALFORMED = 400
NUM_RETRIES = 2
"""How often a request is sent again if the server fails it but does not die."""
POLL_S = 0.2
PROBE_AFTER_S = 5.0
"""Seconds without an answer after which the scheduler is asked whether it still works. Silence alone
proves nothing, because no answer comes while the scheduler generates long ones."""
DRAIN_TIMEOUT_S = 60.0
ABORTED = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
"""Stands for the answer to a request that was aborted before it was sent, or whose connection broke
after the abort."""


class SendContext(NamedTuple):
    """The state of the weights, for requests that are about to be sent."""

    num_updates: int = 0
    """Number of weight updates since the call of generate() began."""
    extra_key: str | None = None
    """The key of the requests in the prefix cache (`body.version_key`); None if they have no key."""
    adapter: str | None = None
    """SGLang's name of the adapter that the requests use; None is the base model."""


class Answer(NamedTuple):
    """SGLang's answer to one request."""

    rid: str
    """SGLang's id of the request."""
    request: Request
    num_updates: int
    """`SendContext.num_updates` when the request was sent."""
    answer: dict[str, Any]


OnSend = Callable[[Sequence[str], Sequence[Request]], SendContext]
"""Called just before requests are sent. The arguments are SGLang's ids of the requests, and the
requests themselves, in the same order."""


Enqueue = Callable[[Sequence[Request], Callable[[], None]], AdmissionQueue]
"""Puts requests into a gate's queue. The gate calls the second argument when it admits some of them."""


class _Event(NamedTuple):
    """What a thread tells the consumer of `answers()`: the answer to a request (one id), the end of
    a stream (the ids of its batch, with the error if it broke), or that a gate has admitted
    requests (no ids)."""

    rids: Sequence[str]
    answer: dict[str, Any] | None
    error: Exception | None


class RequestSender:
    """The requests of one call of generate(). One consumer iterates `answers()`; any thread may call
    `abort()`."""

    def __init__(
        self,
        connection: ServerConnection,
        requests: Sequence[Request],
        *,
        return_routes: bool,
        request_timeout_s: float,
        stall_timeout_s: float,
        on_send: OnSend = lambda rids, requests: SendContext(),
        is_alone: bool = True,
        enqueue: Enqueue | None = None,
    ) -> None:
        """`is_alone`: the server has no requests of other calls while this call is open. With
        `enqueue`, requests wait until a gate admits them."""
        self._enqueue = enqueue
        self._queue: AdmissionQueue | None = None
        self._connection = connection
        self._on_send = on_send
        self._is_alone = is_alone
        self._requests = requests
        self.request_ids = {request.request_id for request in requests}
        self._return_routes = return_routes
        self._request_timeout_s = request_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[str, Request] = {}
        """Unanswered requests by SGLang's id, which is new at each try."""
        self._sent_at: dict[str, float] = {}
        """When each unanswered request was first sent (`time.monotonic`), by `Request.request_id`, the
        oldest first."""
        self._num_updates: dict[str, int] = {}
        self._lost: EngineLost | None = None
        self._ended: RuntimeError | None = None
        self._aborting: set[str] = set()
        self._num_tries: dict[str, int] = {}
        self._streams: list[EventStream] = []
        self._threads: list[threading.Thread] = []
        self._last_sign = time.monotonic()

    @property
    def pending(self) -> Mapping[str, Request]:
        """A copy of the unanswered requests, by SGLang's id."""
        with self._lock:
            return dict(self._pending)

    def pending_since(self) -> set[int | None]:
        """Return the values of `SendContext.num_updates` of the unanswered requests. None stands for
        requests whose sending has only begun."""
        with self._lock:
            return {self._num_updates.get(rid) for rid in self._pending}

    def lose(self, error: EngineLost) -> None:
        """Make `answers()` raise `error`, because the server has ended."""
        self._lost = error

    def end(self, error: RuntimeError) -> None:
        """Abort the unanswered requests, and make `answers()` raise `error`."""
        self._ended = error
        self._post_aborts(self.pending, are_all=True)
        for stream in list(self._streams):
            stream.close()

    def answers(self) -> Iterator[Answer]:
        """Yield SGLang's answer to each request. Leaving early aborts the remaining requests.

        Raises RequestFailed if SGLang refuses a request, and EngineLost if the engine is lost. If an
        answer takes longer than `request_timeout_s`, not counting the wait at a gate, raises EngineLost
        if the engine is idle and RunFailed if it is busy.
        """
        try:
            self._begin()
            while self._pending or self._is_waiting:
                event = self._next_event()
                if self._queue is not None and not event.rids:
                    self._send(self._queue.take())
                    continue
                if isinstance(event.error, ServerError) and event.error.status == MALFORMED:
                    raise RequestFailed(f"generate: {event.error}")
                if event.answer is None:
                    self._send_again(event.rids, str(event.error or "the answer never came"))
                    continue
                (rid,) = event.rids
                if finish_reason(event.answer) == "abort" and rid not in self._aborting:
                    self._refuse(rid, event.answer)
                    self._send_again([rid], str(event.answer["meta_info"]["finish_reason"]))
                    continue
                request = self._take(rid)
                if request is not None:
                    self._sent_at.pop(request.request_id, None)
                    yield Answer(rid, request, self._num_updates.pop(rid), event.answer)
        except EngineLost as error:
            self.note_loss(error)
            raise
        finally:
            self.close()

    def note_loss(self, error: EngineLost) -> None:
        """Report to the gate that the engine died while these requests were in flight. If they ran
        alone in the engine, they are the cause of `error`, and `error.is_explained` becomes True."""
        if self._queue is not None and self._queue.lose():
            error.is_explained = True

    def _begin(self) -> None:
        if self._enqueue is None:
            self._send(self._requests)
        else:
            admitted = _Event([], None, None)
            self._queue = self._enqueue(self._requests, lambda: self._events.put(admitted))
            self._send(self._queue.take())

    @property
    def _is_waiting(self) -> bool:
        return self._queue is not None and not self._queue.is_empty

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Abort the requests with these ids, or all. Their answers still come, with the tokens
        generated so far."""
        wanted = None if request_ids is None else set(request_ids)
        for request in [] if self._queue is None else self._queue.withdraw(wanted):
            rid = self._connection.new_request_id()
            with self._lock:
                self._pending[rid], self._num_updates[rid] = request, 0
                self._aborting.add(rid)
            self._events.put(_Event([rid], ABORTED, None))
        with self._lock:
            rids = [
                rid
                for rid, request in self._pending.items()
                if wanted is None or request.request_id in wanted
            ]
            self._aborting |= set(rids)
            are_all = len(rids) == len(self._pending)
        self._post_aborts(rids, are_all=are_all)

    def _post_aborts(self, rids: Iterable[str], *, are_all: bool) -> None:
        """Ask SGLang to abort requests. `are_all`: `rids` are all requests of this call that are in
        flight."""
        # One message for all of them, if the server has no others.
        bodies = [{"abort_all": True}] if are_all and self._is_alone else [{"rid": r} for r in rids]
        for body in bodies:
            self._connection.post("/abort_request", body, timeout_s=self._stall_timeout_s)

    def _send(self, requests: Sequence[Request]) -> None:
        for start in range(0, len(requests), SAMPLES_PER_BATCH):
            self._check_ended()
            batch = requests[start : start + SAMPLES_PER_BATCH]
            rids = [self._connection.new_request_id() for _ in batch]
            with self._lock:
                self._pending |= dict(zip(rids, batch, strict=True))
            context = self._on_send(rids, batch)
            now = time.monotonic()
            for request in batch:
                self._sent_at.setdefault(request.request_id, now)
            with self._lock:
                self._num_updates |= dict.fromkeys(rids, context.num_updates)
            body = build_request(
                batch,
                rids,
                return_routes=self._return_routes,
                extra_key=context.extra_key,
                adapter=context.adapter,
            )
            try:
                stream = self._connection.stream(body)
            except OSError as error:
                self._events.put(_Event(rids, None, error))
                continue
            self._streams.append(stream)
            thread = threading.Thread(target=self._read, args=(rids, stream), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _read(self, rids: list[str], stream: EventStream) -> None:
        """Read the answers of one batch, in a thread of its own. At the end of the stream, add an event
        with the ids of the whole batch, so that requests without an answer are sent again."""
        error: Exception | None = None
        try:
            for answer in stream:
                self._last_sign = time.monotonic()
                if finish_reason(answer) is not None:
                    rid = rids[answer["index"]]
                    self._report_end(rid, answer)
                    self._events.put(_Event([rid], answer, None))
        except Exception as failure:  # whatever it is, the consumer has to handle it
            error = failure
        self._events.put(_Event(rids, None, error))

    def _report_end(self, rid: str, answer: dict[str, Any]) -> None:
        """Report to the gate that a request no longer uses memory in the engine."""
        request = self._pending.get(rid)
        if self._queue is not None and request is not None:
            is_whole = finish_reason(answer) != "abort"
            self._queue.finish(request, len(answer["output_ids"]), is_whole=is_whole)

    def _next_event(self) -> _Event:
        while True:
            self._check_ended()
            with contextlib.suppress(queue.Empty):
                return self._events.get(timeout=POLL_S)
            if self._lost is not None:
                raise self._lost
            self._connection.check_alive()
            if time.monotonic() - self._last_sign > PROBE_AFTER_S:
                self._connection.check_answers(self._stall_timeout_s)
                self._last_sign = time.monotonic()
            if self._waited_s > self._request_timeout_s:
                raise self._connection.too_late(
                    f"no answer within rollout.request_timeout_s={self._request_timeout_s:g} s for "
                    f"{len(self._pending)} of {len(self._requests)} samples"
                )

    @property
    def _waited_s(self) -> float:
        """Seconds since the oldest unanswered request was first sent."""
        now = time.monotonic()
        return now - next(iter(self._sent_at.values()), now)

    def _check_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _take(self, rid: str) -> Request | None:
        """Mark a request as answered, and return it; None if it was already answered or sent again."""
        with self._lock:
            self._aborting.discard(rid)
            return self._pending.pop(rid, None)

    def _refuse(self, rid: str, answer: dict[str, Any]) -> None:
        """Raise RequestFailed if SGLang refuses this request for good."""
        if (why := refusal(answer)) and (request := self._pending.get(rid)) is not None:
            raise RequestFailed(f"{request.request_id}: the engine refused the request: {why}")

    def _send_again(self, rids: Sequence[str], why: str) -> None:
        """Send the unanswered requests among `rids` again, under new ids. Raises EngineLost after too
        many tries."""
        for rid in set(rids) & self._aborting:
            self._events.put(_Event([rid], ABORTED, None))
        failed = [
            request
            for rid in rids
            if rid not in self._aborting and (request := self._take(rid)) is not None
        ]
        if not failed:
            return
        self._connection.check_alive(wait_s=REAP_S)
        for request in failed:
            tries = self._num_tries.get(request.request_id, 1)
            if tries > NUM_RETRIES:
                raise self._connection.lost(f"it failed {request.request_id} {tries} times: {why}")
            self._num_tries[request.request_id] = tries + 1
        self._send(failed)

    def close(self) -> None:
        """Abort the requests in flight and end the threads. A second call does nothing."""
        if self._pending and self._lost is None:
            with contextlib.suppress(RuntimeError):  # EngineLost among them
                self._post_aborts(self.pending, are_all=True)
        if self._queue is not None:
            self._queue.close()
        for stream in self._streams:
            stream.close()
        for thread in self._threads:
            thread.join(DRAIN_TIMEOUT_S)
        self._pending = {}

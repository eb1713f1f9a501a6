"""Requests in flight: all sent to the server at once, answered in any order, each exactly once.

Up to 1024 requests travel in one streamed batch, so that they reach the scheduler together and in
order; a thread for each batch reads the answers as they finish. A request whose connection broke, or
that the server gave up by itself, is sent again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mrl.rollout.base import EngineLost, Request, RequestFailed
from mrl.rollout.gate import Line
from mrl.rollout.sglang.body import build_request
from mrl.rollout.sglang.decode import finish_reason, refusal
from mrl.rollout.sglang.http import EventStream, ServerError
from mrl.rollout.sglang.server import REAP_S, Server

SAMPLES_PER_BATCH = 1024
MALFORMED = 400
NUM_RETRIES = 2
"""Tries of one request that the server fails while it lives."""
POLL_S = 0.2
PROBE_AFTER_S = 5.0
"""Seconds of silence: long answers are silent too, so the scheduler is asked whether it still turns."""
DRAIN_TIMEOUT_S = 60.0
ABORTED = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
"""What stands for the answer to a request that was told to end when its connection broke."""


class Sending(NamedTuple):
    """What holds for requests at the moment when they are sent."""

    num_updates: int = 0
    """The updates of the weights since the call of generate() began."""
    extra_key: str | None = None
    adapter: str | None = None
    """The name of the adapter that they go to; None is the base."""


class Answer(NamedTuple):
    """SGLang's answer to one request."""

    rid: str
    """The id that SGLang knew the request by."""
    request: Request
    num_updates: int
    """The updates between the beginning of the call and the moment when the request was sent."""
    answer: dict[str, Any]


OnSend = Callable[[Sequence[str], Sequence[Request]], Sending]
"""Called with what is about to be sent, and with the ids that SGLang will know the requests by."""


LineUp = Callable[[Sequence[Request], Callable[[], None]], Line]
"""Lets requests wait at a gate; calls the second argument when some of them may be sent."""


class _Event(NamedTuple):
    """What a reading thread saw. Without any ids: requests were admitted."""

    rids: Sequence[str]
    answer: dict[str, Any] | None
    error: Exception | None


class Flight:
    """A flight is one call of generate(). The consumer iterates `answers()`; `abort()` is for
    any thread."""

    def __init__(
        self,
        server: Server,
        requests: Sequence[Request],
        *,
        return_routes: bool,
        request_timeout_s: float,
        stall_timeout_s: float,
        on_send: OnSend = lambda rids, requests: Sending(),
        is_alone: bool = True,
        line_up: LineUp | None = None,
    ) -> None:
        """`is_alone`: no other flight can be open on this server while this one is. `line_up`: requests
        wait at a gate."""
        self._line_up = line_up
        self._line: Line | None = None
        self._server = server
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
        """Requests by the id that SGLang knows; it changes with each try."""
        self._sent_at: dict[str, float] = {}
        """When each request without an answer was first sent, by its own id, in that order."""
        self._num_updates: dict[str, int] = {}
        self._lost: EngineLost | None = None
        self._ended: RuntimeError | None = None
        self._aborting: set[str] = set()
        self._num_tries: dict[str, int] = {}
        self._streams: list[EventStream] = []
        self._threads: list[threading.Thread] = []
        self._heard = time.monotonic()

    @property
    def pending(self) -> Mapping[str, Request]:
        """A copy: the requests without an answer, by the id that SGLang knows."""
        with self._lock:
            return dict(self._pending)

    def pending_since(self) -> set[int | None]:
        """Return after how many updates the requests without an answer were sent; None where one is
        about to be."""
        with self._lock:
            return {self._num_updates.get(rid) for rid in self._pending}

    def lose(self, error: EngineLost) -> None:
        """Let `answers()` raise this: the server that the requests were sent to is no more."""
        self._lost = error

    def end(self, error: RuntimeError) -> None:
        """Abort what is pending, and let `answers()` raise `error`: nobody waits for it any more."""
        self._ended = error
        self._tell_to_abort_these(self.pending, are_all=True)
        for stream in list(self._streams):
            stream.close()

    def answers(self) -> Iterator[Answer]:
        """Yield SGLang's answer to each request. Leaving early aborts the rest.

        Raises RequestFailed where SGLang refuses a request, and EngineLost. Past `request_timeout_s`
        that is raised if the engine is idle, and RunFailed if it is still busy.
        The time that a request waits at a gate does not count.
        """
        try:
            self._begin()
            while self._pending or self._is_waiting:
                event = self._next_event()
                if self._line is not None and not event.rids:
                    self._send(self._line.take())
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
        """Report to the gate that the engine died with the pending requests in flight."""
        if self._line is not None and self._line.lose():
            error.is_explained = True

    def _begin(self) -> None:
        if self._line_up is None:
            self._send(self._requests)
        else:
            admitted = _Event([], None, None)
            self._line = self._line_up(self._requests, lambda: self._events.put(admitted))
            self._send(self._line.take())

    @property
    def _is_waiting(self) -> bool:
        return self._line is not None and not self._line.is_empty

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Ask for what there is of these requests, or of all; they come as usual."""
        wanted = None if request_ids is None else set(request_ids)
        for request in [] if self._line is None else self._line.withdraw(wanted):
            rid = self._server.new_request_id()
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
        self._tell_to_abort_these(rids, are_all=are_all)

    def _tell_to_abort_these(self, rids: Iterable[str], *, are_all: bool) -> None:
        if are_all and self._is_alone:  # one message instead of one a request
            self._tell_to_abort({"abort_all": True})
            return
        for rid in rids:
            self._tell_to_abort({"rid": rid})

    def _tell_to_abort(self, body: dict[str, Any]) -> None:
        self._server.post("/abort_request", body, timeout_s=self._stall_timeout_s)

    def _send(self, requests: Sequence[Request]) -> None:
        for start in range(0, len(requests), SAMPLES_PER_BATCH):
            self._check_ended()
            batch = requests[start : start + SAMPLES_PER_BATCH]
            rids = [self._server.new_request_id() for _ in batch]
            with self._lock:
                self._pending |= dict(zip(rids, batch, strict=True))
            sending = self._on_send(rids, batch)
            now = time.monotonic()
            for request in batch:
                self._sent_at.setdefault(request.request_id, now)
            with self._lock:
                self._num_updates |= dict.fromkeys(rids, sending.num_updates)
            body = build_request(
                batch,
                rids,
                return_routes=self._return_routes,
                extra_key=sending.extra_key,
                adapter=sending.adapter,
            )
            try:
                stream = self._server.stream(body)
            except OSError as error:
                self._events.put(_Event(rids, None, error))
                continue
            self._streams.append(stream)
            thread = threading.Thread(target=self._read, args=(rids, stream), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _read(self, rids: list[str], stream: EventStream) -> None:
        """Read, in a thread of its own, the answers of one batch, then one event for what never
        came."""
        error: Exception | None = None
        try:
            for answer in stream:
                self._heard = time.monotonic()
                if finish_reason(answer) is not None:
                    rid = rids[answer["index"]]
                    self._give_back(rid, answer)
                    self._events.put(_Event([rid], answer, None))
        except Exception as failure:  # whatever it is, the consumer must hear of it
            error = failure
        self._events.put(_Event(rids, None, error))

    def _give_back(self, rid: str, answer: dict[str, Any]) -> None:
        """Let the gate know that the engine holds nothing more of a request."""
        request = self._pending.get(rid)
        if self._line is not None and request is not None:
            is_whole = finish_reason(answer) != "abort"
            self._line.finish(request, len(answer["output_ids"]), is_whole=is_whole)

    def _next_event(self) -> _Event:
        while True:
            self._check_ended()
            with contextlib.suppress(queue.Empty):
                return self._events.get(timeout=POLL_S)
            if self._lost is not None:
                raise self._lost
            self._server.check_alive()
            if time.monotonic() - self._heard > PROBE_AFTER_S:
                self._server.check_answers(self._stall_timeout_s)
                self._heard = time.monotonic()
            if self._waited_s > self._request_timeout_s:
                raise self._server.too_late(
                    f"no answer within rollout.request_timeout_s={self._request_timeout_s:g} s for "
                    f"{len(self._pending)} of {len(self._requests)} samples"
                )

    @property
    def _waited_s(self) -> float:
        """How long the oldest request in the engine has been without an answer."""
        now = time.monotonic()
        return now - next(iter(self._sent_at.values()), now)

    def _check_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _take(self, rid: str) -> Request | None:
        """The request of an answer; None where it was sent again in the meantime."""
        with self._lock:
            self._aborting.discard(rid)
            return self._pending.pop(rid, None)

    def _refuse(self, rid: str, answer: dict[str, Any]) -> None:
        """Raise RequestFailed if SGLang refuses this request for good."""
        if (why := refusal(answer)) and (request := self._pending.get(rid)) is not None:
            raise RequestFailed(f"{request.request_id}: the engine refused the request: {why}")

    def _send_again(self, rids: Sequence[str], why: str) -> None:
        """What of `rids` is still to come, under new ids. Raises EngineLost where it is hopeless."""
        for rid in set(rids) & self._aborting:
            self._events.put(_Event([rid], ABORTED, None))
        failed = [
            request
            for rid in rids
            if rid not in self._aborting and (request := self._take(rid)) is not None
        ]
        if not failed:
            return
        self._server.check_alive(wait_s=REAP_S)
        for request in failed:
            tries = self._num_tries.get(request.request_id, 1)
            if tries > NUM_RETRIES:
                raise self._server.lost(f"it failed {request.request_id} {tries} times: {why}")
            self._num_tries[request.request_id] = tries + 1
        self._send(failed)

    def close(self) -> None:
        """Leave no request in the server and no thread behind. Harmless when repeated."""
        if self._pending and self._lost is None:
            with contextlib.suppress(RuntimeError):  # EngineLost among them
                self._tell_to_abort_these(self.pending, are_all=True)
        if self._line is not None:
            self._line.close()
        for stream in self._streams:
            stream.close()
        for thread in self._threads:
            thread.join(DRAIN_TIMEOUT_S)
        self._pending = {}

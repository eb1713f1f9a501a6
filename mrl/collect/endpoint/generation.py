"""Asks the engine for completions, from any thread, also while a lost engine is being replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from mrl.collect.endpoint.refused import NotSent, Refused
from mrl.engines.base import Completion, EngineLost, PolicyEndpoint, Request

POLL_S = 0.5
CLOSE_S = 60.0
"""Seconds for calls of the engine to end after their requests were aborted."""


class Generation:
    """The engine of one rollout. The rollout's thread calls `open`, `lost` and `close`; requests come
    from other threads, and wait while there is no engine."""

    def __init__(self, options: Mapping[str, bool]) -> None:
        """`options` are passed on to `PolicyEndpoint.generate`."""
        self._options = {**options, "concurrent": True}
        self._changed = threading.Condition()
        self._endpoint: PolicyEndpoint | None = None
        self._num_opened = 0
        """Number of calls of `open`. An engine that was lost may be opened again as the same object."""
        self._lost: EngineLost | None = None
        self.error: Exception | None = None
        """An error that ends the run; None if there is none."""
        self._is_over = False
        self._open: dict[int, Sequence[Request]] = {}
        """The requests of each open call of the engine's generate(), by the identity of their list."""

    def open(self, endpoint: PolicyEndpoint) -> None:
        """Let `endpoint` answer the requests from now on."""
        with self._changed:
            self._endpoint, self._lost = endpoint, None
            self._num_opened += 1
            self._changed.notify_all()

    def close(self, *, is_over: bool) -> None:
        """Let requests wait for another engine or, if the rollout is over, refuse them.

        If it is over, this aborts open calls of the engine and returns when there are none, so that
        the engine can sleep.
        """
        with self._changed:
            self._is_over = is_over
            self._changed.notify_all()
            endpoint, self._endpoint = self._endpoint, None
        end = time.monotonic() + CLOSE_S
        while is_over and endpoint is not None and self._open and time.monotonic() < end:
            # Repeatedly, because a request that is being sent cannot be aborted yet.
            _abort(endpoint, [each for call in list(self._open.values()) for each in call])
            with self._changed:
                self._changed.wait_for(lambda: not self._open, POLL_S)

    @property
    def lost(self) -> EngineLost | None:
        """The loss of the present engine; None if no request has noticed a loss."""
        with self._changed:
            return self._lost

    def generate(
        self, requests: Sequence[Request], is_wanted: Callable[[], bool]
    ) -> list[Completion]:
        """Return the completions, in the order of the requests.

        Requests of a lost engine are sent again to the next one, with the same seeds. Raises Refused
        if the rollout is over, or if `is_wanted` returns False before the requests are sent.
        """
        found: dict[str, Completion] = {}
        while missing := [each for each in requests if each.request_id not in found]:
            try:
                for completion in self.stream(missing, is_wanted):
                    found[completion.request_id] = completion
            except EngineLost:
                continue
            except Refused:
                raise
            except ValueError as error:  # nothing was sent
                raise NotSent(str(error)) from None
            except Exception as error:
                self.error = self.error or error
                raise Refused(500, "the run is ending, because the engine failed") from None
        return [found[request.request_id] for request in requests]

    def stream(
        self, requests: Sequence[Request], is_wanted: Callable[[], bool] | None = None
    ) -> Iterator[Completion]:
        """Yield the completions as they finish. With `is_wanted`, the requests wait while there is no
        engine.

        Raises the errors of the engine, and EngineLost if it is lost before it has answered all
        requests. Raises Refused if the rollout is over, if there is no engine and `is_wanted` is None,
        or if `is_wanted` returns False before the requests are sent.
        """
        endpoint, opened = self._enter(requests, is_wanted)
        try:
            yield from endpoint.generate(requests, **self._options)
        except EngineLost as error:
            with self._changed:
                if self._num_opened == opened:
                    self._endpoint, self._lost = None, error
            raise
        finally:
            with self._changed:
                del self._open[id(requests)]
                self._changed.notify_all()

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests that `generate` is waiting for; they return what they have so far."""
        with self._changed:
            endpoint = self._endpoint
        if endpoint is not None:
            _abort(endpoint, requests)

    def _enter(
        self, requests: Sequence[Request], is_wanted: Callable[[], bool] | None
    ) -> tuple[PolicyEndpoint, int]:
        """Record that `requests` are in a call of the engine; wait for one if `is_wanted` is given.
        Return the engine and the number of `open` calls so far."""
        with self._changed:
            while True:
                if self._is_over or (is_wanted is not None and not is_wanted()):
                    raise Refused(503, "the episode is over; no more is generated for it")
                if self._endpoint is not None:
                    self._open[id(requests)] = requests
                    return self._endpoint, self._num_opened
                if is_wanted is None:
                    raise Refused(503, "there is no engine")
                self._changed.wait(POLL_S)


def _abort(endpoint: PolicyEndpoint, requests: Sequence[Request]) -> None:
    with suppress(EngineLost):  # `generate` notices it
        endpoint.abort([request.request_id for request in requests])

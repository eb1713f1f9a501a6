"""The requests that one worker process of environments works on, with their time limits.

Many requests may be unanswered at a time. The process takes them in order. It is busy with one until it
answers or says that it awaits it (`async`); then it begins with the next. The time limit of a request
begins when the process begins with it.
"""

from __future__ import annotations

import math
import os
import select
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from mrl.rewards.budget import Budget
from mrl.system.worker_connection import FORK_RETURNED, NUMBER
from mrl.system.worker_process import BadReply, WorkerProcess, decoded, unexpected

CANCEL_S = 5.0
"""Seconds in which a process must take note that an `async` call is cancelled because its time is up;
less if the time limit of a call is less. Otherwise its event loop is blocked, and it is killed."""

Owner = TypeVar("Owner")
Reply = dict[str, Any]


@dataclass(eq=False)
class Call(Generic[Owner]):
    """A request that was sent to the process, and not answered yet."""

    owner: Owner
    request: dict[str, Any]
    limit_s: float
    is_counted: bool
    """Whether its time counts for the step's budget."""
    latest: float
    """When the time of the step's budget is up. Times are those of `time.monotonic`."""
    sent_at: float
    begun_at: float | None = None
    """When the process began to work on it; None if it waits for others."""
    state: Literal["sent", "busy", "awaits", "cancelling"] = "sent"
    """`busy`: the process does nothing else. `awaits`: the process works on other requests, too.
    `cancelling`: as `awaits`, but its time is up."""

    @property
    def allowed_s(self) -> float:
        """The seconds that the process has, from when it begins to work on the request."""
        since = self.sent_at if self.begun_at is None else self.begun_at
        return min(self.limit_s, round(self.latest - since, 3))

    @property
    def ends_at(self) -> float:
        """When its time is up."""
        return self.latest if self.begun_at is None else self.begun_at + self.allowed_s


@dataclass(frozen=True)
class LostCalls(Generic[Owner]):
    """What was unanswered when a process was lost."""

    reason: str
    calls: Sequence[Call[Owner]]
    suspects: Sequence[Call[Owner]]
    """Those of `calls` of which one made the process die or hang."""


class Calls(Generic[Owner]):
    """The unanswered requests to a process. For one thread, except for `wake`."""

    def __init__(self, process: WorkerProcess, limit_s: float, budget: Budget) -> None:
        """An answer may take `limit_s` seconds, or what is left of `budget`."""
        self._process, self._limit_s, self._budget = process, limit_s, budget
        self._open: dict[int, Call[Owner]] = {}
        """By number, in the order in which they were sent."""
        self._begun: dict[int, Call[Owner]] = {}
        """Those of them on which the process works."""
        self._num_sent = 0
        self._cancelled_at = 0.0
        """When a call was cancelled last, or the process ceased to be busy after that."""
        self.busy_since: float | None = None
        """When the call began that occupies the process; None if there is none."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)

    def __bool__(self) -> bool:
        return bool(self._open)

    def wake(self) -> None:
        """Let `receive` return soon. Any thread may call this."""
        os.eventfd_write(self._wake, 1)

    def limit_of(self, request: dict[str, Any]) -> float:
        """Return the time limit for the answer to a request, in seconds."""
        return self._limit_s

    def restart(self) -> None:
        """Start a process if there is none. Raises WorkerNotStarted if that is not possible, and
        RunFailed if the budget is used up."""
        if self._process.pid is None:
            self._budget.enter()
            try:
                self._process.restart()
            finally:
                self._budget.leave()

    def send(self, owner: Owner, request: dict[str, Any], *, is_counted: bool = True) -> None:
        """Send a request. Raises RunFailed if it is counted and the budget is used up."""
        left_s = self._budget.enter() if is_counted else math.inf
        now = time.monotonic()
        call = Call(owner, request, self.limit_of(request), is_counted, now + left_s, now)
        self._num_sent += 1
        self._open[self._num_sent] = call
        self._process.send({NUMBER: self._num_sent, **request})
        self._note_next(now)

    def receive(self, until: float) -> Iterator[tuple[Call[Owner], Reply]]:
        """Wait for answers at most until the time `until`, or until `wake` is called, and yield them.
        The reply to a call that was cancelled because its time was up is `{"error": reason}`.

        Raises BadReply, EOFError or OSError if the process is lost or must be killed: call `lose`.
        """
        left_s = max(min(until, self._ends_at) - time.monotonic(), 0.0)
        if self._process.pid is None:
            lines = _wait_for(self._wake, left_s)
        else:
            lines = self._process.receive(left_s, self._wake)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for line in lines:
            if (answer := self._take(line)) is not None:
                yield answer
        self._check_limits()

    def _take(self, line: bytes) -> tuple[Call[Owner], Reply] | None:
        """Return the answer in a line. None if the line says something else about a call."""
        now = time.monotonic()
        reply = decoded(line)
        reply.pop(FORK_RETURNED, None)
        number = reply.pop(NUMBER, None)
        call = self._open.get(number) if isinstance(number, int) else None
        if call is None:
            raise unexpected(line)
        if "begun" in reply:
            self._note_begun(number, now)
            return None
        if "awaits" in reply:
            call.state = "awaits"
            self._note_free(now)
            return None
        self._close(number)
        if call.state == "busy":
            self._note_free(now)
        self._note_next(now)
        if "cancelled" in reply:
            reply = {"error": f"no answer within {call.allowed_s:g} s, cancelled"}
        return call, reply

    def _note_begun(self, number: int, now: float) -> None:
        call = self._begun[number] = self._open[number]
        call.state, call.begun_at, self.busy_since = "busy", now, now

    def _note_free(self, now: float) -> None:
        self.busy_since, self._cancelled_at = None, now

    def _note_next(self, now: float) -> None:
        """Note with which call the process begins now, if it begins with one without saying so."""
        if self._open and not self._begun:
            self._note_begun(next(iter(self._open)), now)

    def _close(self, number: int) -> None:
        call = self._open.pop(number)
        self._begun.pop(number, None)
        if call.is_counted:
            self._budget.leave()

    @property
    def _ends_at(self) -> float:
        """When the first time limit ends."""
        ends = [call.ends_at for call in self._begun.values() if call.state != "cancelling"]
        first = next(iter(self._open.values()), None)
        return min([*ends, math.inf if first is None else first.latest, self._silence_ends_at])

    @property
    def _silence_ends_at(self) -> float:
        """When the process is lost if it does not take note that calls are cancelled."""
        if self.busy_since is not None:
            return math.inf
        grace_s = [c.limit_s for c in self._begun.values() if c.state == "cancelling"]
        return self._cancelled_at + min([CANCEL_S, *grace_s]) if grace_s else math.inf

    def _check_limits(self) -> None:
        """Cancel calls whose time is up. Raises BadReply if only the end of the process ends them."""
        now = time.monotonic()
        if now >= self._silence_ends_at:
            late = next(call for call in self._begun.values() if call.state == "cancelling")
            raise BadReply(f"no answer within {late.allowed_s:g} s")
        for number, call in self._open.items():
            if call.state == "cancelling" or now < call.ends_at:
                continue
            if call.state != "awaits":
                raise BadReply(f"no answer within {call.allowed_s:g} s")
            call.state, self._cancelled_at = "cancelling", now
            self._process.send({NUMBER: 0, "cancel": number})

    def lose(self, error: Exception) -> LostCalls[Owner]:
        """Remove what is left of the process after `receive` has raised `error`. Forget all calls."""
        reason = str(self._process.lost(error))
        calls, self.busy_since = list(self._open.values()), None
        for number in list(self._open):
            self._close(number)
        for states in (("busy",), ("awaits", "cancelling"), ("sent",)):
            if suspects := [call for call in calls if call.state in states]:
                return LostCalls(reason, calls, suspects)
        return LostCalls(reason, calls, [])

    def end(self) -> None:
        """End the process, and forget all calls."""
        self._process.clear()
        for number in list(self._open):
            self._close(number)


def _wait_for(wake: int, timeout_s: float) -> list[bytes]:
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.poll(None if timeout_s == math.inf else timeout_s * 1000)
    return []

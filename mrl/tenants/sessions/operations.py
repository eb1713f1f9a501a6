"""The operations of all sessions of a service: those that wait, and the answers of those that are over.

They are in the memory of rank 0 alone. A session that is opened anew has a new *life*, whose number is
part of the ids of its operations: what was asked in another life was done before the session was left,
or is lost, and is never done again.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Literal

from mrl.errors import InputError
from mrl.run.json_lines import finite_or_null
from mrl.tenants.sessions.bodies import Body, num_tokens

MAX_QUEUED = 32
"""Operations of a session that wait or are under way."""
MAX_QUEUED_TOKENS = 1 << 20
MAX_KEPT = 64
"""Answers of a session that are kept, the newest ones."""
MAX_KEPT_BYTES = 64 << 20
MAX_PAST = 8
"""Sessions whose answers are kept although their life is over."""
KEPT_S = 3600.0
"""How long an answer is kept, in seconds."""
ID = re.compile(r"([0-9a-f]{8})-([1-9][0-9]{0,11})")
LOST = (
    "lost: the session was left before it was done, and is at its newest checkpoint when it is opened "
    "again"
)
State = Literal["queued", "running", "done", "failed", "lost"]


class TooMany(InputError):
    """A session has as many operations in its queue as it may have."""


class OtherLife(InputError):
    """The session was opened anew since the caller last looked."""


class NoOperation(InputError):
    """There is no such operation, or its answer is not kept any more."""


@dataclass
class Operation:
    """An `Operation` waits, or is under way."""

    id: str
    body: Body
    state: State = "queued"


@dataclass(frozen=True)
class _Answer:
    """What is kept of an operation that is over."""

    state: State
    text: bytes
    """JSON: the result, or the error."""
    since_s: float


@dataclass
class _Life:
    """What is kept of a session while it is open, or waits to be."""

    number: str = field(default_factory=lambda: secrets.token_hex(4))
    count: int = 0
    version: int | None = None
    """That of the weights; None while the session is not open."""
    waiting: deque[Operation] = field(default_factory=deque)
    answers: OrderedDict[str, _Answer] = field(default_factory=OrderedDict)


class Operations:
    """Keeps the operations of sessions by the session's name. Any thread may call it."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._past: OrderedDict[str, _Life] = OrderedDict()
        """The lives before those, whose answers can still be asked for, the newest last."""
        self._changing = threading.Lock()

    def post(self, session: str, body: Body, life: str | None = None) -> str:
        """Put an operation into the queue, and return its id.

        Raises OtherLife where `life` is given and over, and TooMany.
        """
        with self._changing:
            mine = self._life(session)
            if life is not None and life != mine.number:
                raise OtherLife(
                    f"session {session} was opened anew: its life is {mine.number} and not "
                    f"{life[:80]!r}; look at its version, then go on from there"
                )
            tokens = num_tokens(body) + sum(num_tokens(each.body) for each in mine.waiting)
            if len(mine.waiting) >= MAX_QUEUED or tokens > MAX_QUEUED_TOKENS:
                raise TooMany(
                    f"session {session} has {len(mine.waiting)} operations in its queue, at most "
                    f"{MAX_QUEUED} with {MAX_QUEUED_TOKENS} tokens fit; wait for the first of them"
                )
            mine.count += 1
            operation = Operation(f"{mine.number}-{mine.count}", body)
            mine.waiting.append(operation)
            return operation.id

    def show(self, session: str) -> dict[str, Any]:
        """Return the life of a session, the version of its weights, and how much waits."""
        with self._changing:
            mine = self._life(session)
            return {"life": mine.number, "version": mine.version, "queued": len(mine.waiting)}

    def look(self, session: str, operation: str) -> dict[str, Any]:
        """Return the state of an operation, with its result, or the reason why there is none.

        Raises NoOperation for what is no id, or was answered too long ago.
        """
        if (asked := ID.fullmatch(operation)) is None:
            raise NoOperation(f"{operation[:80]!r} is not the id of an operation")
        with self._changing:
            mine = self._life(session)
            if asked[1] != mine.number:
                mine = self._past.get(session, mine)
            if asked[1] != mine.number:
                return {"id": operation, "state": "lost", "reason": LOST}
            self._forget_old(mine)
            if (answer := mine.answers.get(operation)) is not None:
                key = "result" if answer.state == "done" else "reason"
                return {"id": operation, "state": answer.state, key: json.loads(answer.text)}
            for each in mine.waiting:
                if each.id == operation:
                    return {"id": operation, "state": each.state}
        raise NoOperation(
            f"session {session} has no operation {operation}, or keeps its answer no longer: at most "
            f"{MAX_KEPT} of them, for {KEPT_S:g} s"
        )

    def begin(self, session: str, version: int) -> None:
        """Note that a session is open, at this version of its weights."""
        with self._changing:
            self._life(session).version = version

    def end(self, session: str) -> None:
        """End the life of a session: whatever waits or is under way is lost."""
        with self._changing:
            if (mine := self._lives.pop(session, None)) is None:
                return
            for each in mine.waiting:
                mine.answers[each.id] = _Answer("lost", json.dumps(LOST).encode(), time.monotonic())
            mine.waiting.clear()
            self._past.pop(session, None)
            self._past[session] = mine
            while len(self._past) > MAX_PAST:
                self._past.popitem(last=False)

    def waiting_tokens(self, session: str) -> int:
        """Return how many tokens the operations of a session's next turn have, at least 1 where any
        operation waits, and 0 where none does."""
        with self._changing:
            turn = self._turn(session)
            samples = [num_tokens(each.body) for each in turn if each.body.kind == "sample"]
            return max(1, sum(samples)) if turn else 0

    def take(self, session: str) -> list[Operation]:
        """Return the operations of a session's next turn, which are under way from now on.

        These are the samples that are first in the queue, and what follows them up to the next sample.
        """
        with self._changing:
            turn = self._turn(session)
            for each in turn:
                each.state = "running"
            return turn

    def answer(
        self, session: str, operation: str, *, result: Any = None, error: str = "", version: int
    ) -> None:
        """End an operation with its result, or with an error in one line; `version` is that of the
        weights since then."""
        state: State = "failed" if error else "done"
        text = json.dumps(error or finite_or_null(result)).encode()
        with self._changing:
            mine = self._life(session)
            mine.version = version
            kept = [each for each in mine.waiting if each.id != operation]
            mine.waiting = deque(kept)
            mine.answers[operation] = _Answer(state, text, time.monotonic())
            self._forget_old(mine)

    def _life(self, session: str) -> _Life:
        return self._lives.setdefault(session, _Life())

    def _turn(self, session: str) -> list[Operation]:
        """Return the first operations in the queue, at least one where there is any."""
        turn: list[Operation] = []
        for each in self._life(session).waiting:
            if turn and each.body.kind == "sample" and turn[-1].body.kind != "sample":
                break
            turn.append(each)
        return turn

    def _forget_old(self, mine: _Life) -> None:
        """Drop the answers beyond the limits; the newest one stays in any case."""
        answers, now = mine.answers, time.monotonic()
        total = sum(len(each.text) for each in answers.values())
        while len(answers) > 1:
            first = next(iter(answers.values()))
            fits = len(answers) <= MAX_KEPT and total <= MAX_KEPT_BYTES
            if fits and now - first.since_s <= KEPT_S:
                return
            answers.popitem(last=False)
            total -= len(first.text)

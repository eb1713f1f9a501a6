"""The operations of all sessions of a service: those that wait, and the answers of those that are over.

They are only in the memory of rank 0. Each incarnation of a session (`Tenant.incarnation`) has its own
*life*, whose number is part of the ids of its operations: an operation of an earlier life was finished
before the session was closed, or is lost; it is never carried out again.
"""

from __future__ import annotations

import hashlib
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
from mrl.tenants.record import name_of
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
MAX_KEYS = 4096
"""How many keys of a life are remembered, the newest ones: a repeated request with a remembered key
adds no operation."""
ID = re.compile(r"([0-9a-f]{8})-([1-9][0-9]{0,11})")
LOST = (
    "lost: the session was left before it was done, and is at its newest checkpoint when it is opened "
    "again"
)
State = Literal["queued", "running", "done", "failed", "lost"]


class TooMany(InputError):
    """A session has as many operations in its queue as it may have."""


class OtherLife(InputError):
    """The session was opened again since the caller last asked, or is closed."""


class OtherBody(InputError):
    """The key of an operation was used before by another one."""


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
    """The state of an incarnation while it is open, or is to be opened."""

    number: str = field(default_factory=lambda: secrets.token_hex(4))
    is_left: bool = False
    """Whether it accepts no more operations."""
    count: int = 0
    version: int | None = None
    """That of the weights; None while the session is not open."""
    waiting: deque[Operation] = field(default_factory=deque)
    answers: OrderedDict[str, _Answer] = field(default_factory=OrderedDict)
    keys: OrderedDict[str, tuple[str, str]] = field(default_factory=OrderedDict)
    """The ids of operations that came with a key, and digests of their bodies."""


class Operations:
    """Keeps the operations of sessions. Any thread may call it.

    `session` is the incarnation of a tenant, but for `look`, which finds those of a name.
    """

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._past: OrderedDict[str, _Life] = OrderedDict()
        """The last life of each name that ended, whose answers can still be read; the newest is
        last."""
        self._changing = threading.Lock()

    def post(
        self, session: str, body: Body, life: str | None = None, key: str | None = None
    ) -> str:
        """Put an operation into the queue, and return its id. With a `key` that was used before in this
        life, nothing is added, and the id of that operation is returned.

        Raises OtherLife if `life` is given and over, OtherBody for a key of another operation, and
        TooMany.
        """
        with self._changing:
            mine, name = self._life(session), name_of(session)
            if mine.is_left or life not in (None, mine.number):
                raise OtherLife(
                    f"session {name} was opened again or closed: its life is {mine.number}, got "
                    f"{str(life)[:80]!r}; look at its version, then go on from there"
                )
            if key is not None and key in mine.keys:
                operation, digest = mine.keys[key]
                if digest != _digest(body):
                    raise OtherBody(
                        f"the key {key!r} was used before for another operation, {operation}; give "
                        "each operation a key of its own"
                    )
                return operation
            tokens = num_tokens(body) + sum(num_tokens(each.body) for each in mine.waiting)
            if len(mine.waiting) >= MAX_QUEUED or tokens > MAX_QUEUED_TOKENS:
                raise TooMany(
                    f"session {name} has {len(mine.waiting)} operations in its queue, at most "
                    f"{MAX_QUEUED} with {MAX_QUEUED_TOKENS} tokens fit; wait for the first of them"
                )
            mine.count += 1
            operation = Operation(f"{mine.number}-{mine.count}", body)
            mine.waiting.append(operation)
            if key is not None:
                mine.keys[key] = operation.id, _digest(body)
                while len(mine.keys) > MAX_KEYS:
                    mine.keys.popitem(last=False)
            return operation.id

    def show(self, session: str) -> dict[str, Any]:
        """Return the life of a session, the version of its weights, and how much waits."""
        with self._changing:
            mine = self._life(session)
            return {"life": mine.number, "version": mine.version, "queued": len(mine.waiting)}

    def look(self, name: str, operation: str) -> dict[str, Any]:
        """Return the state of an operation of a session of this name, with its result, or the reason
        why there is none.

        Raises NoOperation for what is no id, or was answered too long ago.
        """
        if (asked := ID.fullmatch(operation)) is None:
            raise NoOperation(f"{operation[:80]!r} is not the id of an operation")
        with self._changing:
            lives = [life for key, life in self._lives.items() if name_of(key) == name]
            lives += [self._past[name]] if name in self._past else []
            mine = next((life for life in lives if life.number == asked[1]), None)
            if mine is None:
                return {"id": operation, "state": "lost", "reason": LOST}
            self._forget_old(mine)
            if (answer := mine.answers.get(operation)) is not None:
                key = "result" if answer.state == "done" else "reason"
                return {"id": operation, "state": answer.state, key: json.loads(answer.text)}
            for each in mine.waiting:
                if each.id == operation:
                    return {"id": operation, "state": each.state}
        raise NoOperation(
            f"session {name} has no operation {operation}, or no longer keeps its answer: at most "
            f"{MAX_KEPT} of them, for {KEPT_S:g} s"
        )

    def begin(self, session: str, version: int) -> None:
        """Note that a session is open, at this version of its weights."""
        with self._changing:
            self._life(session).version = version

    def close(self, session: str) -> None:
        """Accept no more operations: queued ones are lost, and running ones are finished."""
        with self._changing:
            if (mine := self._lives.get(session)) is not None:
                mine.is_left = True
                self._lose(mine, ("queued",))

    def end(self, session: str) -> None:
        """End the life of a session: whatever waits or is under way is lost."""
        with self._changing:
            if (mine := self._lives.pop(session, None)) is not None:
                self._keep_past(name_of(session), mine)

    def _lose(self, mine: _Life, states: tuple[State, ...]) -> None:
        """Mark the operations in these states as lost."""
        kept: deque[Operation] = deque()
        for each in mine.waiting:
            if each.state not in states:
                kept.append(each)
            else:
                mine.answers[each.id] = _Answer("lost", json.dumps(LOST).encode(), time.monotonic())
        mine.waiting = kept

    def _keep_past(self, name: str, mine: _Life) -> None:
        """Keep the answers of a life that is over."""
        self._lose(mine, ("queued", "running"))
        mine.keys.clear()
        self._past.pop(name, None)
        self._past[name] = mine
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
        """Return the life of an incarnation, and begin it if it is new. Earlier lives that were never
        open end then."""
        if session not in self._lives:
            name = name_of(session)
            for key in [key for key in self._lives if name_of(key) == name]:
                if self._lives[key].version is None:  # it was never open
                    self._keep_past(name, self._lives.pop(key))
            self._lives[session] = _Life()
        return self._lives[session]

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


def _digest(body: Body) -> str:
    return hashlib.sha256(body.model_dump_json().encode()).hexdigest()

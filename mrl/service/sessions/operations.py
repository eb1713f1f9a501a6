"""The operations of all sessions of a service: operations that wait or are under way, and the
answers of operations that have ended.

The operations are only in the memory of rank 0; their answers are also on disk (`journal`). A session
begins a new *life* each time that it is added or resumed. The number of the life is part of the ids of
its operations. An operation of an earlier life ended before the session was closed, or is lost; it is
never carried out later.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, cast

from mrl.errors import InputError
from mrl.run.json_lines import finite_or_null
from mrl.service.record import name_of, order_of
from mrl.service.sessions import answers
from mrl.service.sessions.answers import Answers, State
from mrl.service.sessions.bodies import Body, num_tokens
from mrl.service.sessions.journal import Entry, Journal
from mrl.service.sessions.turns import is_frozen, next_turn

MAX_QUEUED = 32
"""Maximum number of operations of a session that wait or are under way."""
MAX_QUEUED_TOKENS = 1 << 20
MAX_FROZEN, MAX_FROZEN_TOKENS = 1024, 1 << 22
"""The same limits for samples that name a sampler, which are counted apart."""
MAX_PAST = 8
"""Maximum number of closed sessions whose answers are still kept."""
MAX_KEYS = 4096
"""Maximum number of idempotency keys that are remembered for an open session; the oldest are
dropped first. A repeated request with a remembered key adds no operation."""
ID = re.compile(r"([0-9a-f]{8})-([1-9][0-9]{0,11})")
LOST = (
    "lost: the session was left before it was done, and is at its newest checkpoint when it is opened "
    "again"
)


class TooMany(InputError):
    """The queue of a session is full."""


class OtherLife(InputError):
    """The life that the caller names (see the module docstring) is not the session's current life,
    or the session accepts no more operations."""


class NoOperation(InputError):
    """There is no such operation, or its answer is not kept any more."""


@dataclass
class Operation:
    """An operation that waits or is under way."""

    id: str
    body: Body
    state: State = "queued"
    key: str | None = None
    is_noted: bool = False
    """Whether the journal has its end."""


@dataclass
class _Life:
    """The operations of a session from when it is added or resumed until it is closed."""

    number: str = field(default_factory=lambda: secrets.token_hex(4))
    is_left: bool = False
    """Whether the life accepts no more operations."""
    count: int = 0
    version: int | None = None
    """The version of the session's weights; None until the session is open."""
    waiting: list[Operation] = field(default_factory=list)
    answers: Answers = field(default_factory=Answers)
    keys: OrderedDict[str, tuple[str, str]] = field(default_factory=OrderedDict)
    """For each idempotency key, the id of the operation that was posted with this key, and a digest
    of the operation's body."""
    journal: Journal | None = None
    recalled: dict[str, State] = field(default_factory=dict)
    """How an operation ended, by id: those read from the disk, and each `load` of this life."""


class Operations:
    """Keeps the operations of all sessions. Any thread may call the methods.

    The argument `session` is the id `Tenant.incarnation` of a session, which changes when the
    session is resumed. Only `look` takes the session's name instead.
    """

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._past: OrderedDict[str, _Life] = OrderedDict()
        """For each session name, the life that ended last. Its answers can still be read. The lives
        are in the order in which they ended."""
        self._closed: dict[str, tuple[int, int]] = {}
        """For each session name, the newest incarnation that was closed (`order_of`). It never has a
        life again, even if its last one has ended."""
        self._changing = threading.Lock()

    def post(
        self, session: str, body: Body, life: str | None = None, key: str | None = None
    ) -> str:
        """Put an operation into the queue, and return its id. If an operation with the same `key`
        was posted before in the session's current life (see the module's docstring), nothing is
        added, and the id of that operation is returned.

        Raises OtherLife if the session accepts no more operations, or if `life` is given and is not
        the number of the session's current life. Raises TooMany if the queue is full, and InputError
        if the operation with the same key has another body.
        """
        with self._changing:
            name = name_of(session)
            if self._is_over(session):
                raise OtherLife(
                    f"session {name} was closed; look at its state, then go on from there"
                )
            mine = self._life(session)
            if mine.is_left or life not in (None, mine.number):
                raise OtherLife(
                    f"session {name} was opened again or closed: its life is {mine.number}, got "
                    f"{str(life)[:80]!r}; look at its version, then go on from there"
                )
            if key is not None and key in mine.keys:
                operation, digest = mine.keys[key]
                if digest != _digest(body):
                    raise InputError(
                        f"the key {key!r} was used before for another operation, {operation}; give "
                        "each operation a key of its own"
                    )
                return operation
            frozen = is_frozen(body)
            alike = [each for each in mine.waiting if is_frozen(each.body) == frozen]
            tokens = num_tokens(body) + sum(num_tokens(each.body) for each in alike)
            limit, most = (
                (MAX_FROZEN, MAX_FROZEN_TOKENS) if frozen else (MAX_QUEUED, MAX_QUEUED_TOKENS)
            )
            if len(alike) >= limit or tokens > most:
                what = "samples of samplers" if frozen else "operations"
                raise TooMany(
                    f"session {name} has {len(alike)} {what} in its queue, at most {limit} with "
                    f"{most} tokens fit; wait for the first of them"
                )
            mine.count += 1
            operation = Operation(f"{mine.number}-{mine.count}", body, key=key)
            mine.waiting.append(operation)
            if key is not None:
                mine.keys[key] = operation.id, _digest(body)
                if len(mine.keys) > MAX_KEYS:
                    mine.keys.popitem(last=False)
            return operation.id

    def show(self, session: str) -> dict[str, Any]:
        """Return an object with the id of the session's current `life` (it changes when the session
        is reopened), the `version` of the weights, and the number of `queued` operations. The last life
        of a closed session may have ended; its number is empty if it is not kept any more."""
        with self._changing:
            if self._is_over(session):
                past = self._past.get(name_of(session))
                return {"life": past.number if past else "", "version": None, "queued": 0}
            mine = self._life(session)
            return {"life": mine.number, "version": mine.version, "queued": len(mine.waiting)}

    def ended(self, session: str) -> dict[str, State]:
        """Return `_Life.recalled` of a session."""
        with self._changing:
            mine = self._lives.get(session)
            return {} if mine is None else dict(mine.recalled)

    def look(self, name: str, operation: str) -> dict[str, Any]:
        """Return the state of an operation of the session `name`, with its result.

        If the operation failed or was lost, the reason takes the place of the result. An operation
        of an unknown life is reported as lost. Raises NoOperation if `operation` is not an id, if
        the life has no such operation, or if its answer is not kept any more.
        """
        if (asked := ID.fullmatch(operation)) is None:
            raise NoOperation(f"{operation[:80]!r} is not the id of an operation")
        with self._changing:
            lives = [life for key, life in self._lives.items() if name_of(key) == name]
            lives += [self._past[name]] if name in self._past else []
            mine = next((life for life in lives if life.number == asked[1]), None)
            mine = next((life for life in lives if operation in life.recalled), mine)
            if mine is None:
                return {"id": operation, "state": "lost", "reason": LOST}
            if (answer := mine.answers.read(operation)) is not None:
                key = "result" if answer.state == "done" else "reason"
                return {"id": operation, "state": answer.state, key: json.loads(answer.text)}
            for each in mine.waiting:
                if each.id == operation:
                    return {"id": operation, "state": each.state}
        raise NoOperation(
            f"session {name} has no operation {operation}, or no longer keeps its answer: at most "
            f"{answers.MAX_KEPT} of them, for {answers.KEPT_S:g} s"
        )

    def begin(self, session: str, version: int, journal: Journal | None = None) -> None:
        """Record that a session is open, with this version of its weights. The `journal` has the
        answers of earlier lives; those of this life are added to it."""
        entries = [] if journal is None else journal.open(version)
        with self._changing:
            mine = self._life(session)
            mine.version, mine.journal = version, journal
            keys = OrderedDict[str, tuple[str, str]]()
            for each in reversed(entries):  # some may have been posted while it was opened
                text = json.dumps(each.answer).encode()
                mine.answers.add_earlier(each.id, cast(State, each.state), text)
            for each in entries:
                mine.recalled[each.id] = cast(State, each.state)
                if each.key is not None:
                    keys[each.key] = each.id, each.digest
            mine.keys = keys | mine.keys

    def cancel(self, session: str, operation: str) -> bool:
        """Take an operation out of the queue, and let it fail; return whether it waited there."""
        with self._changing:
            if (mine := self._lives.get(session)) is None:
                return False
            for each in mine.waiting:
                if each.id == operation and each.state == "queued":
                    mine.waiting.remove(each)
                    mine.answers.add(operation, "failed", json.dumps("cancelled").encode())
                    return True
        return False

    def close(self, session: str) -> None:
        """Accept no more operations for a session. Operations that wait are lost; operations under
        way are finished."""
        with self._changing:
            name, order = name_of(session), order_of(session)
            self._closed[name] = max(order, self._closed.get(name, order))
            if (mine := self._lives.get(session)) is not None:
                mine.is_left = True
                self._lose(mine, ("queued",))

    def end(self, session: str) -> None:
        """Close a session entirely. Operations that wait, and also operations under way, are
        lost."""
        with self._changing:
            if (mine := self._lives.pop(session, None)) is not None:
                self._keep_past(name_of(session), mine)

    def _lose(self, mine: _Life, states: tuple[State, ...]) -> None:
        """Mark the operations of the life `mine` that are in one of these states as lost."""
        for each in [each for each in mine.waiting if each.state in states]:
            mine.waiting.remove(each)
            mine.answers.add(each.id, "lost", json.dumps(LOST).encode())

    def _keep_past(self, name: str, mine: _Life) -> None:
        """Keep the answers of `mine`, the last life of the session `name`, after the life has
        ended. If answers of more than MAX_PAST sessions are kept, drop those of the session that
        ended first."""
        self._lose(mine, ("queued", "running"))
        mine.keys.clear()
        self._past[name] = mine
        self._past.move_to_end(name)
        if len(self._past) > MAX_PAST:
            self._past.popitem(last=False)

    def waiting_tokens(self, session: str) -> int:
        """Return the number of tokens in the `sample` operations of a session's next turn (see
        `take`), but at least 1 if any operation waits. Return 0 if no operation waits."""
        with self._changing:
            turn = self._turn(session)
            samples = [num_tokens(each.body) for each in turn if each.body.kind == "sample"]
            return max(1, sum(samples)) if turn else 0

    def take(self, session: str) -> list[Operation]:
        """Return the operations of a session's next turn (`turns.next_turn`), and mark them as under
        way."""
        with self._changing:
            turn = self._turn(session)
            for each in turn:
                each.state = "running"
            return turn

    def answer(
        self, session: str, operation: str, *, result: Any = None, error: str = "", version: int
    ) -> None:
        """End an operation with its result or, if `error` is not empty, with this error in one
        line. `version`: the version of the session's weights after the operation."""
        state: State = "failed" if error else "done"
        text = json.dumps(error or finite_or_null(result)).encode()
        self._note(session, operation, state, json.loads(text), version)
        with self._changing:
            mine = self._life(session)
            mine.version = version
            ended = next((each for each in mine.waiting if each.id == operation), None)
            mine.waiting = [each for each in mine.waiting if each.id != operation]
            mine.answers.add(operation, state, text)
            if ended is not None and ended.body.kind == "load":
                mine.recalled[operation] = state

    def note_done(self, session: str, operation: str, result: Any, version: int) -> None:
        """Write the result of an operation to the journal, before a checkpoint has its effect. The
        operation ends with `answer`, after the checkpoint. So an operation whose answer is known is in
        the checkpoint, and one that is in a checkpoint is never repeated."""
        self._note(session, operation, "done", finite_or_null(result), version)

    def _note(self, session: str, operation: str, state: State, said: Any, version: int) -> None:
        """Write the end of an operation to the journal, once."""
        with self._changing:
            mine = self._life(session)
            ended = next((each for each in mine.waiting if each.id == operation), None)
        if mine.journal is not None and ended is not None and not ended.is_noted:
            ended.is_noted = True
            kind, digest = ended.body.kind, _digest(ended.body)
            mine.journal.add(Entry(operation, kind, ended.key, digest, state, version, said))

    def _life(self, session: str) -> _Life:
        """Return the current life of a session. If it has no life yet, begin one. Earlier lives of
        sessions with the same name then end, if these sessions were never open."""
        if session not in self._lives:
            name = name_of(session)
            for key, life in list(self._lives.items()):
                if name_of(key) == name and life.version is None:  # its session was never open
                    self._keep_past(name, self._lives.pop(key))
            self._lives[session] = _Life()
        return self._lives[session]

    def _is_over(self, session: str) -> bool:
        """Whether a session was closed, and its last life has ended."""
        order = self._closed.get(name_of(session))
        return session not in self._lives and order is not None and order_of(session) <= order

    def _turn(self, session: str) -> list[Operation]:
        """Return the operations of a session's next turn, see `take`; empty if none waits."""
        mine = self._lives.get(session)
        return [] if mine is None else next_turn(mine.waiting)


def _digest(body: Body) -> str:
    return hashlib.sha256(body.model_dump_json().encode()).hexdigest()

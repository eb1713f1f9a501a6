"""Requests that were in flight when an engine died, recorded so that no request can kill one engine
after another.

Any of these requests may have been the cause. A call of generate() with such a request is tried
once more, alone in the next engine. If that engine dies as well, the requests of this call are the
cause and are not tried again. If the engine survives, they are treated like any others.
"""

from __future__ import annotations

from collections.abc import Iterable

from mrl.engines.base import EndsEngine

Named = tuple[str, str]
"""A pair: the name of a tenant, and the id of one of the tenant's requests."""


class CrashedRequests:
    """Remembers the requests that were in flight when an engine died. One object serves a gate
    (gate.py) through all starts of its engine. The gate calls these methods under its lock."""

    def __init__(self) -> None:
        self._in_crash: set[Named] = set()
        """Requests that were in flight when the engine died, from calls that did not run alone."""
        self._crashed_alone: set[Named] = set()
        """Requests that were in flight when the engine died, from calls that ran alone."""

    def add(self, tenant: str, ids: Iterable[str], *, were_alone: bool) -> None:
        """Record that the engine died with these requests in flight. `were_alone`: whether their call
        ran alone."""
        named = {(tenant, each) for each in ids}
        if were_alone:
            self._in_crash -= named
            self._crashed_alone |= named
        else:
            self._in_crash |= named

    def remove(self, tenant: str, ids: Iterable[str]) -> None:
        """Record that the engine survived these requests."""
        self._in_crash -= {(tenant, each) for each in ids}

    def has_any(self, tenant: str, ids: Iterable[str]) -> bool:
        """Return whether one of these requests has to be tried alone."""
        return not self._in_crash.isdisjoint((tenant, each) for each in ids)

    def check(self, tenant: str, ids: Iterable[str]) -> None:
        """Raise EndsEngine if one of these requests belongs to a call that ran alone when an engine
        died. The requests found are then forgotten, because a tenant may use the same id for its next
        request."""
        found = self._crashed_alone & {(tenant, each) for each in ids}
        if found:
            self._crashed_alone -= found
            raise EndsEngine(
                f"{min(found)[1]}: the engine ended while it had this request, and again when it had "
                "only this request and those of the same call; it is not tried a third time, and the "
                "log of the engine says why"
            )

    def leave(self, tenant: str) -> None:
        """Forget the requests of a tenant."""
        for named in (self._in_crash, self._crashed_alone):
            named -= {each for each in named if each[0] == tenant}

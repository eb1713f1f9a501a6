"""The requests in whose presence an engine ended, so that one of them cannot end another for everybody.

All requests that were in an engine when it ended are suspects: any of them may have been the reason.
A call of generate() that has a suspect is given the engine alone, once. Where the engine ends again,
these requests are the reason, and are not tried any more. Where it does not, they are suspects no
longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from mrl.rollout.base import EndsEngine

Named = tuple[str, str]
"""A tenant and the id of a request."""


class Suspects:
    """Keeps the suspects of one engine, over all of its starts. The gate calls it under its lock."""

    def __init__(self) -> None:
        self._suspected: set[Named] = set()
        self._known: set[Named] = set()
        """Those that have ended an engine alone."""

    def blame(self, tenant: str, ids: Iterable[str], *, were_alone: bool) -> None:
        """Note that the engine ended with these requests in it."""
        named = {(tenant, each) for each in ids}
        if were_alone:
            self._suspected -= named
            self._known |= named
        else:
            self._suspected |= named

    def clear(self, tenant: str, ids: Iterable[str]) -> None:
        """Note that the engine has survived these requests."""
        self._suspected -= {(tenant, each) for each in ids}

    def has_any(self, tenant: str, ids: Iterable[str]) -> bool:
        """Return whether one of these requests is a suspect."""
        return not self._suspected.isdisjoint((tenant, each) for each in ids)

    def refuse(self, tenant: str, ids: Iterable[str]) -> None:
        """Raise EndsEngine where one of these requests has ended an engine alone. That is said once: a
        tenant may give its next request the same id."""
        found = self._known & {(tenant, each) for each in ids}
        if found:
            self._known -= found
            raise EndsEngine(
                f"{min(found)[1]}: the engine ended while it had this request, and again when it had "
                "this request and those of the same call alone; it is not tried a third time, and the "
                "log of the engine says why"
            )

    def leave(self, tenant: str) -> None:
        """Forget the requests of a tenant."""
        for named in (self._suspected, self._known):
            named -= {each for each in named if each[0] == tenant}

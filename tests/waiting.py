"""How tests wait: for a condition and not for a time, since the machine may be busy with other work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from mrl.environments.calls import Calls
from mrl.system.json_worker import JsonWorker

LIMIT_S = 120.0
"""The end of any wait: a condition that holds later than this is taken to hold never."""


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return as soon as `condition()` is true. Fails after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {LIMIT_S:g} s"
        time.sleep(0.01)


@pytest.fixture
def only_bad_hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a worker that is asked about "bad", which hangs, gets the test's short time limit.

    An innocent call would otherwise be taken for one that hangs where the machine is slow.
    """
    real, limit_of = JsonWorker.call, Calls.limit_of

    def call(self: JsonWorker, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        is_bad = "bad" in request.get("completions", ())
        return real(self, request, timeout_s if is_bad else max(timeout_s, LIMIT_S))

    def limit(self: Calls[Any], request: dict[str, Any]) -> float:
        is_bad = request.get("action") == "bad"
        return limit_of(self, request) if is_bad else max(limit_of(self, request), LIMIT_S)

    monkeypatch.setattr(JsonWorker, "call", call)
    monkeypatch.setattr(Calls, "limit_of", limit)

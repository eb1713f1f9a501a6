"""How long the end of a run waits for its episodes."""

from __future__ import annotations

import pytest


@pytest.fixture
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode that still waits in its step holds the end of the run for a moment only."""
    monkeypatch.setattr("mrl.environments.runner.CLOSE_LIMIT_S", 0.3)

"""An optimizer step that is saved before it is answered: whenever the service is killed, it is either
known and done, or lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.service.sessions.journal import FILE, Journal
from mrl.service.sessions.operations import Operations
from tests.tenants.test_session_journal import ANN, BACKWARD, body, done


def noted(folder: Path, *, answered: bool) -> str:
    """A life in which a step to version 1 is noted, and killed before or after it is answered."""
    queue = Operations()
    queue.begin(ANN, 0, Journal(folder))
    done(queue, BACKWARD, "k0", 0, result={"loss": 0.5})
    step = queue.post(ANN, body("optim_step"), key="k1")
    queue.take(ANN)
    queue.note_done(ANN, step, {"version": 1}, 1)
    assert queue.look("ann", step)["state"] == "running"
    if answered:
        queue.answer(ANN, step, result={"version": 1}, version=1)
        assert queue.look("ann", step)["state"] == "done"
    return step


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize(("version", "state"), [(0, "lost"), (1, "done")])
def test_a_step_is_in_the_checkpoint_or_lost(
    tmp_path: Path, answered: bool, version: int, state: str
) -> None:
    step = noted(tmp_path, answered=answered)
    assert len((tmp_path / FILE).read_text().splitlines()) == 2
    queue = Operations()
    queue.begin(ANN, version, Journal(tmp_path))
    assert queue.look("ann", step)["state"] == state
    assert queue.post(ANN, body("optim_step"), key="k1") == step
    assert queue.take(ANN) == []

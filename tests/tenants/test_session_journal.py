"""Answers of a session that survive a restart of the service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import InputError
from mrl.service.sessions import journal
from mrl.service.sessions.bodies import Bounds, read_body
from mrl.service.sessions.journal import FILE, Journal
from mrl.service.sessions.operations import Operations

ANN = "1-0-ann"
SEQUENCE = {"tokens": [1, 2], "weights": [0, 1]}


def body(kind: str, **keys: Any) -> Any:
    return read_body({"kind": kind, **keys}, Bounds(128, 64))


BACKWARD = body("forward_backward", loss="cross_entropy", sequences=[SEQUENCE])
FORWARD = body("forward", sequences=[{"tokens": [1, 2]}])


def done(queue: Operations, given: Any, key: str, version: int, **answer: Any) -> str:
    """Post an operation and end it at `version`."""
    name = queue.post(ANN, given, key=key)
    queue.take(ANN)
    queue.answer(ANN, name, version=version, **(answer or {"result": {"version": version}}))
    return name


def two_steps(folder: Path) -> dict[str, str]:
    """A life that is killed at version 2, with gradients for a third."""
    queue = Operations()
    queue.begin(ANN, 0, Journal(folder))
    found = {
        "first": done(queue, BACKWARD, "k0", 0, result={"loss": 0.5}),
        "one": done(queue, body("optim_step"), "k1", 1),
        "second": done(queue, BACKWARD, "k2", 1, result={"loss": 0.25}),
        "forward": done(queue, FORWARD, "k3", 1, result={"logprobs": [[0.0, float("nan")]]}),
        "failed": done(queue, body("optim_step", lr=0.5), "k4", 1, error="it is not finite"),
        "two": done(queue, body("optim_step"), "k5", 2),
        "third": done(queue, BACKWARD, "k6", 2, result={"loss": 0.1}),
    }
    found["waits"] = queue.post(ANN, body("optim_step"), key="k7")
    return found


def states(queue: Operations, ids: dict[str, str]) -> dict[str, str]:
    return {name: queue.look("ann", each)["state"] for name, each in ids.items()}


def test_answers_whose_effect_is_saved_survive(tmp_path: Path) -> None:
    ids = two_steps(tmp_path)
    queue = Operations()
    queue.begin(ANN, 2, Journal(tmp_path))
    lost = {"third", "waits"}
    assert states(queue, ids) == {
        name: "lost" if name in lost else "failed" if name == "failed" else "done" for name in ids
    }
    assert queue.look("ann", ids["second"])["result"] == {"loss": 0.25}
    assert queue.look("ann", ids["forward"])["result"] == {"logprobs": [[0.0, None]]}
    assert queue.look("ann", ids["failed"])["reason"] == "it is not finite"
    assert "checkpoint of version 2" in queue.look("ann", ids["third"])["reason"]
    # A retry does nothing a second time, also where the answer is lost.
    assert queue.post(ANN, body("optim_step"), key="k5") == ids["two"]
    assert queue.post(ANN, BACKWARD, key="k6") == ids["third"]
    assert queue.take(ANN) == []
    with pytest.raises(InputError, match="was used before for another operation"):
        queue.post(ANN, body("save"), key="k5")
    assert queue.post(ANN, body("optim_step"), key="k7") != ids["waits"]  # it was never done
    assert [each.body.kind for each in queue.take(ANN)] == ["optim_step"]


def test_what_a_checkpoint_lacks_is_lost_for_good(tmp_path: Path) -> None:
    """The session goes back to version 1 and makes another version 2."""
    ids = two_steps(tmp_path)
    queue = Operations()
    queue.begin(ANN, 1, Journal(tmp_path))
    expected = states(queue, ids)
    assert [name for name, state in expected.items() if state == "lost"] == [
        *("second", "two", "third", "waits")
    ]
    ids["again"] = done(queue, BACKWARD, "k8", 1, result={"loss": 0.2})
    ids["other"] = done(queue, body("optim_step"), "k9", 2)
    queue.end(ANN)
    queue.begin("1-1-ann", 2, Journal(tmp_path))
    assert states(queue, ids) == {**expected, "again": "done", "other": "done"}


def test_an_answer_is_lost_if_its_session_was_left_without_the_step(tmp_path: Path) -> None:
    """Also in the same service: gradients do not survive a pause."""
    queue = Operations()
    queue.begin(ANN, 0, Journal(tmp_path))
    name = done(queue, BACKWARD, "k0", 0, result={"loss": 0.5})
    queue.end(ANN)
    assert queue.look("ann", name)["state"] == "done"
    queue.begin("1-1-ann", 0, Journal(tmp_path))
    assert queue.look("ann", name)["state"] == "lost"


def test_a_line_in_part_is_left_out(tmp_path: Path) -> None:
    ids = two_steps(tmp_path)
    file = tmp_path / FILE
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - 20])
    queue = Operations()
    queue.begin(ANN, 9, Journal(tmp_path))
    assert states(queue, ids)["two"] == "done"
    assert states(queue, ids)["third"] == "lost"


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_LINES", 5)
    monkeypatch.setattr(journal, "MAX_FILE_BYTES", 2000)
    queue = Operations()
    queue.begin(ANN, 0, Journal(tmp_path))
    ids = [done(queue, FORWARD, f"k{n}", 0, result={"logprobs": [[0.0, n]]}) for n in range(60)]
    assert (tmp_path / FILE).stat().st_size < 3000
    again = Operations()
    again.begin(ANN, 0, Journal(tmp_path))
    assert [again.look("ann", each)["state"] for each in ids[-5:]] == ["done"] * 5
    assert again.look("ann", ids[0])["state"] == "lost"
    rows = (tmp_path / FILE).read_text().splitlines()
    assert [json.loads(row)["key"] for row in rows] == [f"k{n}" for n in range(55, 60)]


def test_a_disk_that_refuses_costs_only_the_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = Operations()
    queue.begin(ANN, 0, Journal(tmp_path / "not there"))
    name = done(queue, FORWARD, "k0", 0, result={"logprobs": []})
    done(queue, FORWARD, "k1", 0, result={"logprobs": []})
    assert queue.look("ann", name)["state"] == "done"
    said = capsys.readouterr()
    assert (said.out + said.err).count("answers will not survive a restart") == 1

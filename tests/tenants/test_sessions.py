"""Sessions at the socket: their recipes, their queue, the ids and answers of their operations."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.cli import main
from mrl.client import Datum, OperationFailed, OperationLost, Sample, ServiceClient, Session
from mrl.errors import InputError
from mrl.service.control import Control
from mrl.service.registry import Registry
from mrl.service.sessions import answers, operations
from mrl.service.sessions.bodies import Bounds, read_body
from mrl.service.sessions.operations import Operations
from tests.tenants.parts import service, tenant
from tests.tenants.serving import ROOT

ANN = "1-0-ann"
"""The first incarnation of the session of these tests."""


@pytest.fixture
def queue(control: Control) -> Operations:
    return control.registry.operations


@pytest.fixture
def client(control: Control) -> ServiceClient:
    return ServiceClient(control.registry.root)


@pytest.fixture
def session(client: ServiceClient, tmp_path: Path) -> Session:
    return client.create_session("ann", output_dir=tmp_path / "ann", lora={"rank": 4})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"top_k": 1 << 40}, "sample: top_k is 1099511627776, but the model has only 128 tokens"),
        ({"temperature": 1e30}, r"sample: temperature is 1e\+30, expected 1e-06 to 1e\+06"),
        ({"min_tokens": 1, "stop_token_ids": [128]}, "stop_token_ids has 128, expected 0 to 127"),
        ({"min_tokens": 1, "stop": ["x"]}, "sample: stop is given with min_tokens 1"),
    ],
)
def test_sampling_that_ends_engines_is_refused(given: dict[str, Any], says: str) -> None:
    body = {"kind": "sample", "prompts": [[5]], "max_tokens": 4}
    read_body(body, Bounds(128, 64))
    with pytest.raises(InputError, match=says):
        read_body({**body, **given}, Bounds(128, 64))


def test_operations_take_turns(session: Session, queue: Operations) -> None:
    assert queue.take(ANN) == []
    first = session.sample([[1, 2], [3]], max_tokens=4, n=2, temperature=0.5)
    session.sample([[5]], max_tokens=3)
    passed = session.forward_backward([Datum([1, 2, 3], weights=[0, 1, 0.5])])
    session.optim_step(lr=1e-3)
    last = session.sample([[5]], max_tokens=8)
    assert session.status()["session"] == {"life": session.life, "version": None, "queued": 5}
    assert queue.waiting_tokens(ANN) == 2 * (2 + 4 + 1 + 4) + (1 + 3)
    taken = queue.take(ANN)
    assert [each.body.kind for each in taken] == [
        "sample",
        "sample",
        "forward_backward",
        "optim_step",
    ]
    assert not first.done()
    answer = {"id": "x", "tokens": [7], "logprobs": [-1.5], "version": 0, "stop_reason": "stop"}
    queue.answer(ANN, first.id, result={"samples": [[answer] * 2] * 2}, version=0)
    one = first.result()[1][0]
    assert (one.prompt.tolist(), one.tokens.tolist(), one.logprobs.tolist()) == ([3], [7], [-1.5])
    queue.answer(ANN, passed.id, error="it is not finite", version=0)
    with pytest.raises(OperationFailed, match="it is not finite"):
        passed.result()
    queue.answer(ANN, taken[1].id, result={"samples": []}, version=0)
    queue.answer(ANN, taken[3].id, result={}, version=1)
    assert session.version == 1
    assert [each.id for each in queue.take(ANN)] == [last.id]
    with pytest.raises(TimeoutError):
        last.result(timeout_s=0)


def test_what_waits_is_lost_with_its_life(
    session: Session, queue: Operations, client: ServiceClient
) -> None:
    done, lost = session.optim_step(), session.save()
    queue.take(ANN)
    queue.answer(ANN, done.id, result={"version": 1, "grad_norm": 0.5, "lr": 0.1}, version=1)
    queue.end(ANN)
    assert done.result().version == 1
    with pytest.raises(OperationLost, match="newest checkpoint"):
        lost.result()
    with pytest.raises(OperationLost, match="was reopened"):
        session.save()
    again = client.session("ann")
    assert again.life != session.life
    again.save()
    assert [each.body.kind for each in queue.take(ANN)] == ["save"]
    of_another_start = client.control.operation("ann", "0123abcd-7")
    assert of_another_start["state"] == "lost"


def test_what_waits_is_lost_although_the_disk_refuses_the_state(
    session: Session, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client would otherwise wait until somebody resumes the session."""
    waits, registry = session.save(), control.registry

    def refuse(*given: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mrl.service.registry.write_whole", refuse)
        assert registry.try_move(ANN, "paused", "it failed")
    assert set(registry.kept) == {"ann"}
    assert registry.operations.look("ann", waits.id)["state"] == "lost"


def test_a_closed_session_takes_nothing_after_its_last_life(
    session: Session, queue: Operations, control: Control, client: ServiceClient
) -> None:
    """A request can be checked for so long that its session is removed and gone when it is posted."""
    session.save()
    removed = control.registry.get("ann")
    session.remove()
    queue.end(ANN)  # the run has left
    assert queue.show(ANN) == {"life": session.life, "version": None, "queued": 0}
    for life in (None, session.life):
        with pytest.raises(InputError, match="session ann was closed"):
            queue.post(removed.incarnation, read_body({"kind": "save"}, Bounds(128, 64)), life)
    assert not queue.cancel(ANN, f"{session.life}-1")
    assert (queue.waiting_tokens(ANN), queue.take(ANN), queue.ended(ANN)) == (0, [], {})
    again = client.create_session("ann", output_dir=removed.output_dir + "2", lora={"rank": 4})
    assert again.life != session.life
    again.save()
    (operation,) = queue.take(control.registry.get("ann").incarnation)
    assert operation.id.startswith(again.life)


def test_the_queue_and_its_answers_are_bounded(
    session: Session, queue: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted = [session.save() for _ in range(operations.MAX_QUEUED)]
    with pytest.raises(InputError, match="has 32 operations in its queue"):
        session.save()
    monkeypatch.setattr(answers, "MAX_KEPT", 4)
    for each in queue.take(ANN):
        queue.answer(ANN, each.id, result={"version": 0, "folder": "x"}, version=0)
    assert all(each.done() for each in posted[-4:])
    for forgotten in (posted[0], posted[-5]):
        with pytest.raises(InputError, match="no longer keeps its answer"):
            forgotten.done()
    monkeypatch.setattr(answers, "KEPT_S", 0.0)
    time.sleep(0.01)
    assert posted[-1].done()  # the newest answer stays
    monkeypatch.setattr(operations, "MAX_QUEUED_TOKENS", 10)
    session.forward([[1] * 8])
    with pytest.raises(InputError, match="10 tokens fit"):
        session.forward([[1] * 3])


def test_only_sessions_that_run_take_operations(
    session: Session, control: Control, client: ServiceClient, tmp_path: Path
) -> None:
    client.control.add("bob", tenant(tmp_path / "bob"))
    with pytest.raises(InputError, match="bob has a recipe's loop"):
        client.control.post("bob", {"kind": "save"})
    with pytest.raises(InputError, match="is no session"):
        client.session("bob")
    session.pause("lunch")
    with pytest.raises(InputError, match=r"ann is paused \(lunch\); it takes no operations"):
        session.save()
    session.resume()
    session.save()
    control.registry.move("ann", "running")
    session.save()
    session.remove()
    with pytest.raises(InputError, match="ann is removed"):
        session.save()
    assert [each["name"] for each in client.control.tenants()] == ["bob"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"data": {"path": "x"}}, "a session has no data"),
        ({"train": {"num_steps": 3}}, "a session has no train.num_steps"),
        ({"moe": {"routing_replay": "r2"}}, "take r3 or off"),
        ({"optimizer": {"lr_decay_style": "linear"}}, "give optimizer.lr_decay_steps"),
        ({"lora": {"rank": 100}}, "lora.max_rank=8"),
        ({"rollout": 3}, "rollout"),
    ],
)
def test_recipes_of_sessions_are_checked(
    client: ServiceClient, tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError) as error:
        client.create_session("ann", output_dir=tmp_path, **{"lora": {"rank": 4}, **keys})
    assert says in str(error.value)


def test_answers_of_few_past_lives_are_kept(queue: Operations) -> None:
    body = read_body({"kind": "save"}, Bounds(10, 10))
    names = [f"s{n}" for n in range(operations.MAX_PAST + 1)]
    ids = {name: queue.post(f"1-0-{name}", body) for name in names}
    for name, operation in ids.items():
        queue.answer(f"1-0-{name}", operation, result={}, version=0)
        queue.end(f"1-0-{name}")
    states = [queue.look(name, operation)["state"] for name, operation in ids.items()]
    assert states == ["lost", *["done"] * operations.MAX_PAST]


def test_the_commands_show_sessions(
    session: Session, control: Control, capsys: pytest.CaptureFixture[str]
) -> None:
    session.save()
    folder = str(control.registry.root)
    main(["tenants", "list", "--service", folder])
    assert "0 by a client" in capsys.readouterr().out
    main(["tenants", "status", "ann", "--service", folder])
    shown = capsys.readouterr().out
    assert "0 by a client" in shown
    assert "1 operation(s)" in shown
    main(["tenants", "pause", "ann", "--service", folder])
    main(["tenants", "resume", "ann", "--service", folder])
    main(["tenants", "remove", "ann", "--service", folder])
    assert "ann is removed" in capsys.readouterr().out


def test_the_client_needs_no_torch() -> None:
    code = "import sys, mrl.client; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_disaggregated_service_has_sessions(tmp_path: Path, model: Path) -> None:
    rollout = {"placement": "disaggregated", "num_ranks": 1}
    with Registry(service(tmp_path, model, rollout=rollout)) as registry:
        keys = {"lora": {"rank": 2}, "output_dir": str(tmp_path / "x")}
        registry.add("ann", keys, loop="client")
        recipe = registry.recipe("ann")
        assert (recipe.rollout.placement, recipe.asynchronous.max_staleness) == ("disaggregated", 0)


def test_a_restart_keeps_sessions(tmp_path: Path, model: Path) -> None:
    config = service(tmp_path, model)
    with Registry(config) as registry:
        registry.add("ann", {"lora": {"rank": 2}, "output_dir": str(tmp_path / "x")}, loop="client")
        registry.move("ann", "running")
    with Registry(config) as registry:
        kept = registry.get("ann")
        assert (kept.loop, kept.state) == ("client", "running")
        assert registry.recipe("ann").lora.rank == 2  # pyright: ignore[reportOptionalMemberAccess]


def test_a_sample_becomes_what_trains_it() -> None:
    prompt, tokens, logprobs = (
        np.array([5, 6]),
        np.array([7, 8, 9]),
        np.array([-1.1, -2, -0.3], np.float32),
    )
    sample = Sample("a-1/0/0", prompt, tokens, logprobs, 3, "stop")
    body = sample.datum(-0.5, weight=0.25).body()
    assert body["tokens"] == [5, 6, 7, 8, 9]
    assert body["advantages"] == [0, 0, -0.5, -0.5, -0.5]
    assert np.array_equal(np.float32(body["logprobs"][2:]), logprobs)
    assert (body["weight"], body["sample"]) == (0.25, "a-1/0/0")
    assert "sample" not in sample.datum(1.0, replay=False).body()
    with pytest.raises(TypeError, match="expected a list of token ids"):
        Datum(np.array([1.5, 2.0])).body()

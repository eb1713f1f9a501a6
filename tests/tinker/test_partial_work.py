"""Batches of which a part is refused, and samplers whose model is not there any more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import DiskFailed
from mrl.tinker.backend import Backend
from mrl.tinker.bodies import CreateSampler
from mrl.tinker.ledger import INDEXES, TABLES, Ledger
from mrl.tinker.server import TinkerServer
from mrl.web.limits import NotYet
from parallel.checkpoint.manifest import write_manifest
from tests.tenants.parts import session as client_session
from tests.tinker.conftest import Api
from tests.tinker.test_requests import PROTO, json_pass, request, sample
from tests.tinker.test_wire import tensor
from tests.waiting import wait_until


def refused_pass(api: Api, content: Any, **headers: str) -> str:
    found = api.call("forward_backward", content, **headers)
    assert found.status_code in (400, 422), found.text
    return found.json()["detail"]


def step(model: str, number: int) -> dict[str, Any]:
    return {"model_id": model, "seq_id": number, "adam_params": {}}


@pytest.mark.parametrize("how", ["inputs", "shape", "json", "vocabulary", "bits"])
def test_a_step_without_a_part_of_its_batch_fails(api: Api, how: str) -> None:
    model = api.model()
    contents: dict[str, Any] = {
        "inputs": request(model, 2, "ppo"),
        "shape": request(model, 2, weights=tensor([1.0, 1.0], "<f4", 1)),
        "json": {**json_pass(model, [6, 7.7, 8]), "seq_id": 2},
        "vocabulary": {**json_pass(model, [6, 7, 1 << 20]), "seq_id": 2},
        "bits": {**json_pass(model, [6, 7, 1e300]), "seq_id": 2},
    }
    assert api.call("forward_backward", request(model, 1), **PROTO).is_success
    headers = {} if isinstance(contents[how], dict) else PROTO
    assert "the next optim_step of this model will fail" in refused_pass(
        api, contents[how], **headers
    )
    assert api.call("forward_backward", request(model, 3), **PROTO).is_success
    for _ in range(2):  # the second is a repetition of the first
        api.ask("optim_step", step(model, 4))
    *passes, dropped = api.taken(model)
    assert [each.body.kind for each in passes] == ["forward_backward"] * 2
    body = dropped.body.model_dump()
    assert body["kind"] == "drop_gradients"
    assert f"forward_backward {model}:2 was refused" in body["reason"]
    for each in passes:
        api.answer(model, each, {"loss": 0.0, "logprobs": [], "metrics": {}})
    api.answer(model, dropped, error=body["reason"])
    found = api.result(f"{model}:4")
    assert (found["category"], "begin the step again" in found["error"]) == ("user", True)
    api.ask("optim_step", step(model, 5))
    assert [each.body.kind for each in api.taken(model)] == ["optim_step"]


def test_a_refused_part_is_remembered_by_the_next_service(api: Api) -> None:
    model = api.model()
    refused_pass(api, {**json_pass(model, [6, 7.7, 8]), "seq_id": 1})
    api.server.close()
    with TinkerServer(api.registry) as server:
        api = replace(api, server=server)
        assert api.call("forward_backward", request(model, 2), **PROTO).is_success
        api.ask("optim_step", step(model, 3))
        api.ask("optim_step", step(model, 4))
        kinds = [each.body.kind for each in api.taken(model)]
    assert kinds == ["forward_backward", "drop_gradients", "optim_step"]


def test_other_refusals_cost_no_step(api: Api) -> None:
    """Those of `forward`, of another user, and those before a checkpoint is loaded."""
    model, eve = api.model(), api.another("eve")
    found = api.call("forward", json_pass(model, [6, 7.7, 8]))
    assert (found.status_code, "optim_step" in found.text) == (400, False)
    assert "optim_step" not in refused_pass(eve, json_pass(model, [6, 7.7, 8]))
    assert api.call("forward_backward", b"\xff", **PROTO).status_code == 400
    api.ask("optim_step", step(model, 1))
    refused_pass(api, {**json_pass(model, [6, 7.7, 8]), "seq_id": 2})
    load = {"kind": "load", "version": 0}
    backend, name = api.server.calls.backend, api.tenant(model).name
    backend.post("ann", f"{model}:3", "load_weights", name, load, {"path": "p", "model": model})
    api.ask("optim_step", step(model, 4))
    kinds = [each.body.kind for each in api.taken(model)]
    assert kinds == ["optim_step", "load", "optim_step"]


def saved_sampler(api: Api, session: str, model: str) -> str:
    """Save a sampler without a name, as the SDK does; return its id."""
    saved = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "snapshot"}
    api.ask("save_weights_for_sampler", saved)
    (operation,) = api.taken(model)
    name = operation.body.model_dump()["name"]
    place = api.server.calls.backend.run_folder(api.tenant(model).name) / "samplers" / name
    (place / "iter_0000000").mkdir(parents=True)
    write_manifest(place / "iter_0000000", {"trainer": {"weights_only": True}}, {})
    api.answer(model, operation, {"version": 0, "folder": str(place), "name": name})
    return f"{session}:sample:0"


@pytest.mark.parametrize("state", ["paused", "done", "removed"])
def test_a_sampler_goes_on_from_its_checkpoint(api: Api, state: Any) -> None:
    session = api.session()
    model = api.model(session)
    sampler, ledger = saved_sampler(api, session, model), api.server.calls.ledger
    first = api.ask("asample", sample(sampler, 0))
    (operation,) = api.taken(model)
    api.answer(model, operation, {"samples": [[]]})
    api.registry.move(api.tenant(model).name, state)
    asked: list[Any] = []
    thread = threading.Thread(target=lambda: asked.append(api.ask("asample", sample(sampler, 1))))
    thread.start()

    def hosts() -> list[Any]:
        return [each for each in api.registry.tenants() if each.name.startswith("tk-host")]

    wait_until(lambda: bool(hosts()))
    (host,) = hosts()
    api.registry.operations.begin(host.incarnation, 0)  # it is open now
    thread.join(30)
    (operation,) = api.registry.operations.take(host.incarnation)
    assert asked[0]["sample_sequence_ids"][0] == f"{operation.id}/0/0"
    row = ledger.get("samplers", sampler)
    assert row is not None
    assert operation.body.model_dump()["sampler"] == row["name"]
    saved = api.server.calls.backend.saved(host.name, "sampler", row["name"])
    assert saved is not None
    assert api.ask("asample", sample(sampler, 0)) == first  # a repetition is no other request
    checkpoint = api.server.calls.checkpoints
    checkpoint.delete("ann", row["path"])  # and its copy
    assert api.server.calls.backend.saved(host.name, "sampler", row["name"]) is None


def save_named(api: Api, model: str, seq_id: int, kind: str = "save_weights_for_sampler") -> None:
    """Save a checkpoint under the name a, replacing a state of that name."""
    more = {"overwrite": True} if kind == "save_weights" else {}
    api.ask(kind, {"model_id": model, "seq_id": seq_id, "path": "a", **more})
    *_, operation = api.taken(model)
    folder = "states" if kind == "save_weights" else "samplers"
    place = api.server.calls.backend.run_folder(api.tenant(model).name) / folder / "a/iter_0000000"
    place.mkdir(parents=True, exist_ok=True)
    write_manifest(place, {"trainer": {"weights_only": True}}, {})
    api.answer(model, operation, {"version": 0, "folder": str(place), "name": "a"})
    api.result(f"{model}:{seq_id}")


def new_sampler(api: Api, session: str, number: int, path: str) -> str:
    body = {"session_id": session, "sampling_session_seq_id": number, "model_path": path}
    return api.ask("create_sampling_session", body)["sampling_session_id"]


def test_a_sampler_never_samples_what_replaces_its_checkpoint(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    path, checkpoints = f"tinker://{model}/sampler_weights/a", api.server.calls.checkpoints
    save_named(api, model, 1)
    old = new_sampler(api, session, 0, path)
    first = api.ask("asample", sample(old, 0))
    checkpoints.delete("ann", path)
    assert api.ask("asample", sample(old, 0)) == first  # a repetition, whose first answer was lost
    save_named(api, model, 2)
    new = new_sampler(api, session, 1, path)
    status, why = api.refused("asample", sample(old, 1))
    assert (status, "was removed or replaced" in why) == (404, True)
    api.ask("asample", sample(new, 1))
    api.registry.move(api.tenant(model).name, "done")
    assert api.refused("asample", sample(old, 2))[0] == 404
    assert [each.name for each in api.registry.tenants() if "host" in each.name] == []


def test_a_sampler_of_a_state_keeps_its_copy(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    save_named(api, model, 1, "save_weights")
    sampler = new_sampler(api, session, 0, f"tinker://{model}/weights/a")
    save_named(api, model, 2, "save_weights")
    api.ask("asample", sample(sampler, 0))
    (operation,) = api.taken(model)
    assert operation.body.model_dump()["sampler"].startswith("copy.")
    api.registry.move(api.tenant(model).name, "done")
    assert api.refused("asample", sample(sampler, 1))[0] == 404


def test_a_checkpoint_that_is_replaced_in_this_moment_is_not_sampled(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = api.session()
    model = api.model(session)
    save_named(api, model, 1)
    path = f"tinker://{model}/sampler_weights/a"
    sampler, post = new_sampler(api, session, 0, path), Backend.post

    def late(backend: Backend, *arguments: Any) -> str:
        monkeypatch.setattr(Backend, "post", post)
        api.server.calls.checkpoints.delete("ann", path)
        save_named(api, model, 2)
        return post(backend, *arguments)

    monkeypatch.setattr(Backend, "post", late)
    for _ in range(2):
        assert api.refused("asample", sample(sampler, 0))[0] == 404


def test_a_model_is_no_other_tenant_of_its_name(api: Api) -> None:
    session = api.session()
    model, base = api.model(session), api.server.calls.backend.model_name
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base}
    sampler = api.ask("create_sampling_session", body)["sampling_session_id"]
    api.ask("asample", sample(sampler, 0))
    names = [each.name for each in api.registry.tenants()]
    for name in names:
        api.registry.move(name, "removed")
        output = api.registry.root / "runs" / f"other-{name}"
        other = api.registry.add(name, client_session(output), loop="client")
        api.registry.operations.begin(other.incarnation, 0)
    status, why = api.refused("optim_step", step(model, 1))
    assert (status, "the model is removed" in why) == (410, True)
    api.ask("unload_model", {"model_id": model})
    api.ask("asample", sample(sampler, 1))
    assert [each.state for each in api.registry.tenants()] == ["queued"] * 3
    for name in names:
        assert api.registry.operations.take(api.registry.get(name).incarnation) == []


def test_a_host_that_nobody_waits_for_gives_its_place(api: Api) -> None:
    """The service has room for three tenants."""
    calls, sessions = api.server.calls, [api.session() for _ in range(3)]
    model = api.model(sessions[0])
    save_named(api, model, 1)
    api.ask("unload_model", {"model_id": model})
    path = f"tinker://{model}/sampler_weights/a"
    asked = CreateSampler(session_id=sessions[0], sampling_session_seq_id=0, model_path=path)
    with pytest.raises(NotYet):  # its client gives up
        calls.samplers.create("ann", asked)
    (host,) = [each.name for each in api.registry.tenants() if "host" in each.name]
    for number in range(2):
        api.model(sessions[1], number)
    body = {
        "session_id": sessions[2], "model_seq_id": 0, "lora_config": {"rank": 2},
        "base_model": calls.backend.model_name,
    }  # fmt: skip
    assert "tenants.max_number=3" in api.refused("create_model", body)[1]
    api.ask(f"sessions/{sessions[0]}/finish", {"reason": {"type": "success"}})
    api.ask("create_model", body)
    assert api.registry.get(host).state == "done"


def test_a_ledger_without_a_column_gets_it(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.add("samplers", id="a", session="s")
        ledger._run("alter table samplers drop column saved")
    with Ledger(tmp_path) as ledger:
        row = ledger.get("samplers", "a")
    assert row is not None
    assert (row["session"], row["saved"]) == ("s", None)


def test_rows_are_looked_up_by_an_index(api: Api) -> None:
    ledger = api.server.calls.ledger
    assert set(INDEXES) == set(TABLES)
    columns = [(table, name) for table, names in INDEXES.items() for name in names]
    for table, column in [*columns, *((table, names[0]) for table, names in TABLES.items())]:
        sql = f"explain query plan select * from {table} where {column} = ? order by rowid"
        (plan,) = ledger._run(sql, ["x"])
        assert plan["detail"].startswith(f"SEARCH {table} USING INDEX"), plan


def test_writes_take_effect_together_or_not_at_all(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:

        def write(then: Callable[[], Any]) -> None:
            with ledger.together():
                ledger.add("refused", tenant="a", what="x")
                then()

        with pytest.raises(ZeroDivisionError):
            write(lambda: 1 // 0)
        assert ledger.get("refused", "a") is None
        with pytest.raises(DiskFailed):  # SQLite rolls back by itself where the disk is full
            write(lambda: ledger._run("rollback"))
        assert ledger.find("refused") == []
        write(lambda: None)
        assert ledger.find("refused") == [{"tenant": "a", "what": "x"}]

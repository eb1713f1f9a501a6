"""Who may do what: keys, owners, web pages, limits; and models whose clients have ended."""

from __future__ import annotations

import socket
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mrl.cli import main
from mrl.errors import InputError
from mrl.service.record import State
from mrl.service.registry import Registry
from mrl.tinker.keys import Keys, digest
from mrl.tinker.server import TinkerServer
from tests.tenants.parts import service
from tests.tinker.conftest import Api

PATHS = [
    ("GET", "training_runs/{model}", None),
    ("GET", "training_runs/{model}/checkpoints", None),
    ("GET", "sessions/{session}", None),
    ("GET", "samplers/{sampler}", None),
    ("POST", "get_info", {"model_id": "{model}"}),
    ("POST", "unload_model", {"model_id": "{model}"}),
    ("POST", "optim_step", {"model_id": "{model}", "seq_id": 5, "adam_params": {}}),
    ("POST", "save_weights", {"model_id": "{model}", "seq_id": 5, "path": "x"}),
    ("POST", "save_weights_for_sampler", {"model_id": "{model}", "seq_id": 5, "path": "x"}),
    ("POST", "session_heartbeat", {"session_id": "{session}"}),
    ("POST", "sessions/{session}/finish", {}),
    ("POST", "retrieve_future", {"request_id": "{model}:1"}),
    ("POST", "cancel_future", {"request_id": "{model}:1"}),
    ("POST", "join_sampling_session", {"sampling_session_id": "{sampler}"}),
    ("POST", "weights_info", {"tinker_path": "tinker://{model}/weights/one"}),
    ("DELETE", "training_runs/{model}/checkpoints/weights/one", None),
    ("PUT", "training_runs/{model}/checkpoints/weights/one/ttl", {"ttl_seconds": 7200}),
    ("GET", "training_runs/{model}/checkpoints/weights/one/external_weights_urls", None),
    (
        "POST",
        "asample",
        {
            "sampling_session_id": "{sampler}", "seq_id": 1, "sampling_params": {"max_tokens": 1},
            "prompt": {"chunks": [{"tokens": [5]}]},
        },
    ),
    (
        "POST",
        "load_weights",
        {"session_id": "{own}", "model_seq_id": 0, "path": "tinker://{model}/weights/one",
         "optimizer": True},
    ),
    (
        "POST",
        "create_sampling_session",
        {"session_id": "{own}", "sampling_session_seq_id": 0,
         "model_path": "tinker://{model}/sampler_weights/one"},
    ),
    (
        "POST",
        "create_model",
        {"session_id": "{session}", "model_seq_id": 9, "base_model": "{base}",
         "lora_config": {"rank": 2}},
    ),
]  # fmt: skip


def filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: filled(inner, names) for key, inner in value.items()}
    return value.format(**names) if isinstance(value, str) else value


def test_a_key_opens_nothing_of_another_user(api: Api) -> None:
    session = api.session()
    model, base = api.model(session), api.server.calls.backend.model_name
    api.ask("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    api.ask("save_weights", {"model_id": model, "seq_id": 2, "path": "one"})
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base}
    sampler = api.ask("create_sampling_session", asked)["sampling_session_id"]
    other = api.another("bob")
    names = {
        "model": model, "session": session, "sampler": sampler, "base": base,
        "own": other.session(),
    }  # fmt: skip
    for method, path, body in PATHS:
        status, why = other.refused(path.format(**names), filled(body, names), method)
        assert status == 404, (path, why)
        assert "that this key owns" in why
    assert len(api.taken(model)) == 2
    assert other.ask("training_runs", method="GET")["training_runs"] == []
    assert other.ask("checkpoints", method="GET")["checkpoints"] == []
    assert other.ask("sessions", method="GET")["sessions"] == [names["own"]]
    assert api.ask("sessions", method="GET")["sessions"] == [session]


def test_callers_without_a_key_and_web_pages(api: Api) -> None:
    for headers, status in (
        ({"X-API-Key": ""}, 401),
        ({"X-API-Key": "tml-wrong"}, 401),
        ({"X-API-Key": api.key, "Origin": "http://localhost"}, 403),
        ({"X-API-Key": api.key, "Host": "evil.example"}, 403),
    ):
        found = httpx.get(f"{api.server.address}/api/v1/sessions", headers=headers)
        assert (found.status_code, "detail" in found.json()) == (status, True), headers
        if headers["X-API-Key"] == "tml-wrong":
            assert found.json()["detail"].startswith("the key in X-API-Key is none of this service")
    assert httpx.get(f"{api.server.address}/api/v1/healthz").json() == {"status": "ok"}
    Keys(api.registry.root).remove("ann")
    assert api.refused("sessions", method="GET")[0] == 401


def test_keys_are_kept_as_digests(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    one, two = keys.add("ann"), keys.add("ann")
    file = tmp_path / "tinker" / "keys.json"
    assert one not in file.read_text()
    assert digest(one) in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [keys.owner(each) for each in (one, two, "tml-x", "", None)] == [
        "ann", "ann", None, None, None,
    ]  # fmt: skip
    with pytest.raises(InputError, match="the user 'bob' has no key; users with keys: ann"):
        keys.remove("bob")
    with pytest.raises(InputError, match="expected 1 to 63 small letters"):
        keys.add("Ann Smith")
    assert keys.remove("ann") == 2
    assert keys.owner(one) is None


def test_keys_that_are_changed_at_the_same_time(tmp_path: Path) -> None:
    """Neither is a new key lost, nor is one back that was removed."""
    users = [f"user-{number}" for number in range(8)]
    for user in users:
        Keys(tmp_path).add(user)

    def change(user: str) -> None:
        Keys(tmp_path).remove(user)
        for _ in range(5):
            Keys(tmp_path).add(f"{user}-new")

    with ThreadPoolExecutor(len(users)) as pool:
        list(pool.map(change, users))
    found = sorted(row["user"] for row in Keys(tmp_path).list())
    assert found == sorted(f"{user}-new" for user in users for _ in range(5))


def test_the_command_makes_and_removes_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--service", str(tmp_path)]
    main(["tenants", "key", "add", "ann", *place])
    key = capsys.readouterr().out.strip()
    assert Keys(tmp_path).owner(key) == "ann"
    main(["tenants", "key", "list", *place])
    shown = capsys.readouterr().out
    assert digest(key)[:8] in shown
    assert key not in shown
    main(["tenants", "key", "remove", "ann", *place])
    assert "1 key(s) of ann removed" in capsys.readouterr().out


def test_bodies_have_limits(api: Api) -> None:
    deep = b'{"a":' * 40 + b"1" + b"}" * 40
    assert api.call("create_session", deep).status_code == 400
    assert api.call("create_session", b"{").status_code == 400
    assert api.call("create_session", b"[]").status_code == 400
    large = b'{"tags": ["' + b"x" * (9 << 20) + b'"]}'
    assert api.call("create_session", large).status_code == 413
    strange = {"Content-Encoding": "br"}
    assert api.call("create_session", b"{}", **strange).status_code == 415


def test_a_finished_session_ends_its_models(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    api.ask(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    assert api.tenant(model).state == "done"
    step = {"model_id": model, "seq_id": 1, "adam_params": {}}
    assert api.refused("optim_step", step)[0] == 410
    assert api.refused("session_heartbeat", {"session_id": session})[0] == 410


def test_models_whose_clients_have_ended_give_their_place(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service has room for three tenants."""
    backend = api.server.calls.backend
    backend._started -= 3600  # the service has been up for long
    sessions = [api.session() for _ in range(4)]
    models = [api.model(session) for session in sessions[:3]]
    body = {
        "session_id": sessions[3], "model_seq_id": 0, "lora_config": {"rank": 2},
        "base_model": api.server.calls.backend.model_name,
    }  # fmt: skip
    status, why = api.refused("create_model", body)
    assert (status, "tenants.max_number=3" in why) == (400, True)
    with monkeypatch.context() as patch:  # the clock of the machine is set to tomorrow
        now = time.time()
        patch.setattr("time.time", lambda: now + 86400.0)
        assert api.refused("create_model", body)[0] == 400
    backend._seen[sessions[1]] -= 3600
    api.ask("create_model", body)
    assert [api.tenant(model).state for model in models] == ["queued", "done", "queued"]


def test_a_model_is_created_with_one_seed(api: Api) -> None:
    body = {
        "session_id": api.session(),
        "model_seq_id": 0,
        "base_model": api.server.calls.backend.model_name,
        "lora_config": {"rank": 4, "seed": 1},
    }
    first = api.ask("create_model", body)
    assert api.ask("create_model", body) == first
    status, why = api.refused("create_model", {**body, "lora_config": {"rank": 4, "seed": 2}})
    assert (status, "already" in why) == (400, True)


def test_an_empty_reason_finishes_a_session(api: Api) -> None:
    session = api.session()
    assert api.call(f"sessions/{session}/finish", {"reason": {"type": ""}}).is_success
    assert api.refused("session_heartbeat", {"session_id": session})[0] == 410


@pytest.mark.parametrize("state", ["done", "removed"])
def test_a_sampler_outlives_its_session_of_the_service(api: Api, state: State) -> None:
    base = api.server.calls.backend.model_name
    asked = {"session_id": api.session(), "sampling_session_seq_id": 0, "base_model": base}
    sampler = api.ask("create_sampling_session", asked)["sampling_session_id"]
    ledger = api.server.calls.ledger
    first = ledger.find("samplers", id=sampler)[0]["tenant"]
    sample = {
        "sampling_session_id": sampler, "seq_id": 1, "sampling_params": {"max_tokens": 1},
        "prompt": {"chunks": [{"tokens": [5]}]},
    }  # fmt: skip
    api.ask("asample", sample)
    api.registry.move(first, state)
    api.ask("asample", {**sample, "seq_id": 2})
    second = ledger.find("samplers", id=sampler)[0]["tenant"]
    assert second != first
    assert [api.registry.get(name).state for name in (first, second)] == [state, "queued"]


def test_flags_of_an_adapter(api: Api) -> None:
    for flags, says in (
        ({"train_attn": False, "train_mlp": False}, "set train_attn or train_mlp"),
        ({"train_attn": False}, "set train_attn or train_mlp"),  # this service has no MLP adapters
        ({"rank": 64}, "rank"),
    ):
        body = {
            "session_id": api.session(), "model_seq_id": 0, "lora_config": {"rank": 2, **flags},
            "base_model": api.server.calls.backend.model_name,
        }  # fmt: skip
        status, why = api.refused("create_model", body)
        assert (status, says in why) == (400, True), why
    made = api.ask("create_session", {"tags": [], "sdk_version": "0"})
    assert "train_unembed" in made["warning_message"]
    assert "train_mlp" in made["warning_message"]


def test_a_port_in_use_is_named_by_its_key(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = service(tmp_path, model, control={"tinker": port})
        says = f"^control.tinker={port}: .*choose another port"
        with Registry(config) as registry, pytest.raises(InputError, match=says):
            TinkerServer(registry)


def test_what_was_lost_stops_a_client(tmp_path: Path, model: Path) -> None:
    """After a restart the session is at its newest checkpoint; a client that does not know must not go
    on, unless nothing was lost or it loads a checkpoint."""
    config = service(tmp_path, model, control={"tinker": 0})
    with Registry(config) as registry, TinkerServer(registry) as server:
        api = Api(server, registry, Keys(registry.root).add("ann"))
        trained, fresh = api.model(), api.model()
        api.ask("optim_step", {"model_id": trained, "seq_id": 1, "adam_params": {}})
        (operation,) = api.taken(trained)
        api.answer(trained, operation, {"version": 1, "grad_norm": 1.0, "lr": 1e-4})
        key = api.key
    with Registry(config) as registry, TinkerServer(registry) as server:
        api = Api(server, registry, key)
        step = {"model_id": trained, "seq_id": 2, "adam_params": {}}
        status, why = api.refused("optim_step", step)
        assert (status, "is being opened" in why) == (503, True)
        api.open(trained)
        api.open(fresh)
        status, why = api.refused("optim_step", step)
        assert (status, "lost" in why, "checkpoint" in why) == (410, True, True)
        found = api.result(f"{trained}:1")
        assert (found["category"], "lost" in found["error"]) == ("server", True)
        api.ask("optim_step", {"model_id": fresh, "seq_id": 1, "adam_params": {}})

"""Sessions of the service and files of checkpoints that nobody would remove: none stays."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.errors import DiskFailed
from mrl.tinker import paths
from mrl.tinker.backend import Backend
from mrl.tinker.ledger import Ledger
from parallel.checkpoint.manifest import write_manifest
from tests.tinker.conftest import Api
from tests.tinker.test_partial_work import save_named


def test_a_model_that_was_never_recorded_gives_its_place(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service was killed after it had added the session, and the client does not ask again."""
    ledger, session, add = api.server.calls.ledger, api.session(), Ledger.add

    def killed(self: Ledger, table: str, **row: Any) -> Any:
        if table == "models":
            raise DiskFailed("the service was killed here")
        return add(self, table, **row)

    body = {
        "session_id": session, "model_seq_id": 0, "lora_config": {"rank": 4},
        "base_model": api.server.calls.backend.model_name,
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "add", killed)
        assert api.refused("create_model", body)[0] == 507
    (left,) = api.registry.tenants()
    api.model(), api.model()
    api.ask(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    api.model()
    assert api.registry.get(left.name).state == "done"
    assert ledger.find("hosts") == [ledger.get("hosts", left.name)]


def test_a_checkpoint_that_expires_before_it_is_written_is_removed_afterwards(api: Api) -> None:
    """Without a record, nobody would remove its files."""
    model, ledger = api.model(), api.server.calls.ledger
    path = f"tinker://{model}/weights/a"
    api.ask("save_weights", {"model_id": model, "seq_id": 1, "path": "a", "ttl_seconds": 3600})
    ledger.set("checkpoints", path, expires=1.0)
    api.ask("save_weights", {"model_id": model, "seq_id": 2, "path": "b"})
    listing = f"training_runs/{model}/checkpoints"
    assert api.ask(listing, method="GET")["checkpoints"] == []
    place = api.server.calls.backend.run_folder(api.tenant(model).name) / "states/a/iter_0000000"
    place.mkdir(parents=True)
    write_manifest(place, {"trainer": {"weights_only": False}}, {})
    operation = api.taken(model)[0]
    api.answer(model, operation, {"version": 0, "folder": str(place), "name": "a"})
    assert api.ask(listing, method="GET")["checkpoints"] == []
    assert (ledger.get("checkpoints", path), place.exists()) == (None, False)


def test_a_checkpoint_that_cannot_be_removed_hinders_no_other(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ledger = api.model(), api.server.calls.ledger
    path = f"tinker://{model}/sampler_weights/a"
    save_named(api, model, 1)
    ledger.set("checkpoints", path, expires=1.0)

    def fail(*_: Any) -> None:
        raise PermissionError("not permitted")

    listing = f"training_runs/{model}/checkpoints"
    with monkeypatch.context() as patch:
        patch.setattr("mrl.tinker.checkpoints.remove_saved", fail)
        api.ask("save_weights", {"model_id": model, "seq_id": 2, "path": "b"})
        assert api.ask(listing, method="GET")["checkpoints"] == []
        assert ledger.get("checkpoints", path) is not None
    api.ask(listing, method="GET")
    assert ledger.get("checkpoints", path) is None


def test_a_checkpoint_that_failed_removes_no_record_of_another(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request saves under the same path while the first one is looked up."""
    checkpoints, ledger = api.server.calls.checkpoints, api.server.calls.ledger
    path, saved = paths.Path(api.model(), "training", "a"), Backend.saved
    checkpoints.note(path, "ann", "failed", None, None)

    def late(*_: Any) -> None:
        monkeypatch.setattr(Backend, "saved", saved)
        checkpoints.note(path, "ann", "new", None, None)

    monkeypatch.setattr(Backend, "saved", late)
    assert not checkpoints.exists(path)
    row = ledger.get("checkpoints", str(path))
    assert row is not None
    assert row["request"] == "new"

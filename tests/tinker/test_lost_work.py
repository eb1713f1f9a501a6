"""What could cost a client its work, or give it another result than it believes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import DiskFailed
from mrl.service.sessions import journal
from mrl.service.sessions.journal import Journal
from mrl.tinker import paths
from mrl.tinker.backend import Backend
from mrl.tinker.wire import bytes_field, int_field
from mrl.web.limits import Refused
from mrl.web.reading import read_object
from tests.tinker.conftest import Api
from tests.tinker.test_requests import PROTO, request, sample
from tests.tinker.test_wire import SPAN, datum, tensor


def step(api: Api, model: str, number: int, folder: Path, version: int) -> None:
    """Take an optimizer step, whose answer is on disk."""
    api.ask("optim_step", {"model_id": model, "seq_id": number, "adam_params": {}})
    incarnation = api.tenant(model).incarnation
    for each in api.taken(model):
        result = {"version": version, "grad_norm": 0.5, "lr": 1e-3}
        api.registry.operations.answer(incarnation, each.id, result=result, version=version)


def reopened(api: Api, model: str, folder: Path, version: int) -> None:
    """End the life of the model's session, and open it again at a checkpoint of `version`."""
    incarnation = api.tenant(model).incarnation
    api.registry.operations.end(incarnation)
    api.registry.operations._past.clear()  # as after a restart of the service
    api.registry.operations.begin(incarnation, version, Journal(folder))


@pytest.fixture
def opened(api: Api, tmp_path: Path) -> tuple[str, Path]:
    """A model whose answers are on disk, and their folder."""
    model, folder = api.model(), tmp_path / "run"
    folder.mkdir()
    reopened(api, model, folder, 0)
    return model, folder


def test_steps_that_are_long_past_are_not_taken_for_lost(
    api: Api, opened: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_LINES", 3)
    model, folder = opened
    for number in range(1, 7):
        step(api, model, number, folder, number)
    reopened(api, model, folder, 6)
    step(api, model, 7, folder, 7)
    reopened(api, model, folder, 6)
    status, says = api.refused("optim_step", {"model_id": model, "seq_id": 8, "adam_params": {}})
    assert (status, "went on from its checkpoint of version 6" in says) == (410, True), says


def test_a_clock_that_was_set_back_hides_no_loss(
    api: Api, opened: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = opened
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now - 3600.0)
    step(api, model, 1, folder, 1)
    reopened(api, model, folder, 0)
    status, says = api.refused("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
    assert (status, "went on from its checkpoint of version 0" in says) == (410, True), says


@pytest.mark.parametrize("version", [1, 0])
def test_passes_that_a_failed_step_has_dropped_are_not_missed(
    api: Api, opened: tuple[str, Path], version: int
) -> None:
    """But a step before them is, if the checkpoint does not have it."""
    model, folder = opened
    step(api, model, 1, folder, 1)
    assert api.call("forward_backward", request(model, 2), **PROTO).is_success
    api.ask("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}})
    passed, failed = api.taken(model)
    api.answer(model, passed, {"loss": 1.0, "logprobs": [[0.0] * 4], "metrics": {}})
    api.answer(model, failed, error="a part of the batch is missing")
    reopened(api, model, folder, version)
    found = api.call("forward_backward", request(model, 4), **PROTO)
    if version == 1:
        assert found.is_success, found.text
    else:
        assert (found.status_code, f"optim_step {model}:1 was lost" in found.text) == (410, True)


@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_pass_that_failed_before_a_restart_is_missing_after_it(
    api: Api, opened: tuple[str, Path], is_stepped: bool
) -> None:
    """Unless the step that it was for has failed, too."""
    model, folder = opened
    assert api.call("forward_backward", request(model, 1), **PROTO).is_success
    step_3 = {"model_id": model, "seq_id": 3, "adam_params": {}}
    if is_stepped:
        api.ask("optim_step", {**step_3, "seq_id": 2})
    for each in api.taken(model):
        api.answer(model, each, error="it is not finite")
    reopened(api, model, folder, 0)
    assert api.call("forward_backward", request(model, 4), **PROTO).is_success
    api.ask("optim_step", step_3)
    _, last = api.taken(model)
    body = last.body.model_dump()
    assert body["kind"] == ("optim_step" if is_stepped else "drop_gradients")
    if not is_stepped:
        assert f"forward_backward {model}:1 was refused or failed" in body["reason"]


def test_a_save_that_is_refused_changes_no_checkpoint(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = api.model()
    api.ask("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    ledger, path = api.server.calls.ledger, f"tinker://{model}/weights/a"
    before = ledger.get("checkpoints", path)
    monkeypatch.setattr("mrl.service.sessions.operations.MAX_QUEUED", 1)
    again = {"model_id": model, "seq_id": 2, "path": "a", "overwrite": True, "ttl_seconds": 3600}
    assert api.refused("save_weights", again)[0] == 429
    assert ledger.get("checkpoints", path) == before
    assert api.refused("save_weights", {"model_id": model, "seq_id": 3, "path": "b"})[0] == 429
    assert ledger.get("checkpoints", f"tinker://{model}/weights/b") is None


@pytest.mark.parametrize("fails", ["add", "remove"])
def test_a_checkpoint_outlives_a_failure_of_what_replaces_or_removes_it(
    api: Api, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Otherwise its files stay, and nobody can load or remove them, or use their name again."""
    model = api.model()
    checkpoints, ledger = api.server.calls.checkpoints, api.server.calls.ledger
    path = paths.Path(model, "training", "a")
    checkpoints.note(path, "ann", "none", None, None)
    folder = api.registry.root / "kept"
    folder.mkdir()
    ledger.set("checkpoints", str(path), folder=str(folder))
    before = ledger.get("checkpoints", str(path))

    def fail(*given: Any, **more: Any) -> None:
        raise DiskFailed("the disk is full")

    with monkeypatch.context() as patch:
        if fails == "add":
            patch.setattr(ledger, "add", fail)
            again = {"model_id": model, "seq_id": 1, "path": "a", "overwrite": True}
            assert api.refused("save_weights", again)[0] == 507
        else:
            patch.setattr("mrl.tinker.checkpoints.remove_saved", fail)
            address = f"training_runs/{model}/checkpoints/weights/a"
            assert api.refused(address, method="DELETE")[0] == 507
    assert ledger.get("checkpoints", str(path)) == before


def test_a_step_before_many_samples_is_remembered(
    api: Api, opened: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_LINES", 3)
    model, folder = opened
    step(api, model, 1, folder, 1)
    incarnation, backend = api.tenant(model).incarnation, api.server.calls.backend
    for number in range(5):
        asked = {"kind": "sample", "prompts": [[5]], "max_tokens": 1}
        backend.post("ann", f"sample:{number}", "sample", api.tenant(model).name, asked)
        for each in api.taken(model):
            api.registry.operations.answer(incarnation, each.id, result={}, version=1)
    reopened(api, model, folder, 1)
    step(api, model, 2, folder, 2)


def test_answers_that_were_dropped_are_not_lost(
    api: Api, opened: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = opened
    step(api, model, 1, folder, 1)
    step(api, model, 2, folder, 2)
    reopened(api, model, folder, 2)
    monkeypatch.setattr("mrl.service.sessions.answers.KEPT_S", -1.0)
    api.registry.operations.look(api.tenant(model).name, "00000000-1")
    row = api.server.calls.ledger.get("requests", f"{model}:1")
    assert row is not None
    api.server.calls.backend.look(row)  # forgets it
    step(api, model, 3, folder, 3)


def test_a_load_that_failed_brings_nothing_back(api: Api, opened: tuple[str, Path]) -> None:
    model, folder = opened
    step(api, model, 1, folder, 1)
    reopened(api, model, folder, 0)
    assert api.refused("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})[0] == 410
    backend, name = api.server.calls.backend, api.tenant(model).name
    asked = {"kind": "load", "version": 0}
    backend.post("ann", f"{model}:3", "load_weights", name, asked, {"path": "p", "model": model})
    next_step = {"model_id": model, "seq_id": 4, "adam_params": {}}
    assert api.refused("optim_step", next_step)[0] == 503
    (operation,) = api.taken(model)
    api.answer(model, operation, error="it is damaged")
    assert api.refused("optim_step", next_step)[0] == 410
    backend.post("ann", f"{model}:5", "load_weights", name, asked, {"path": "p", "model": model})
    (operation,) = api.taken(model)
    api.answer(model, operation, {"version": 1})
    api.ask("optim_step", next_step)


def test_a_state_is_never_swept(api: Api) -> None:
    model = api.model()
    checkpoints, ledger = api.server.calls.checkpoints, api.server.calls.ledger
    for number in range(20):
        path = paths.Path(model, "training", f"ephemeral.{number}")
        checkpoints.note(path, "ann", "none", None, None)
        folder = api.registry.root / f"kept{number}"
        folder.mkdir()
        ledger.set("checkpoints", str(path), folder=str(folder))
    assert len(checkpoints.of_run(model)) == 20


def test_what_has_expired_is_removed_by_the_next_save(api: Api) -> None:
    """A client that saves often need not list its checkpoints."""
    model = api.model()
    checkpoints, ledger = api.server.calls.checkpoints, api.server.calls.ledger
    for name, ttl_s in (("old", -1), ("kept", 3600), ("new", None)):
        checkpoints.note(paths.Path(model, "training", name), "ann", "none", ttl_s, None)
    names = [row["name"] for row in ledger.find("checkpoints", run=model)]
    assert names == ["kept", "new"]


def test_an_export_is_of_the_newest_checkpoint(api: Api) -> None:
    model = api.model()
    checkpoints, ledger = api.server.calls.checkpoints, api.server.calls.ledger
    path = paths.Path(model, "training", "a")
    exports = []
    for _ in range(2):
        checkpoints.note(path, "ann", "none", None, None)
        row = ledger.get("checkpoints", str(path))
        assert row is not None
        exports.append(checkpoints._exported(row))
        assert not exports[-1].exists()
        exports[-1].mkdir(parents=True)
        time.sleep(0.01)
    assert [each.exists() for each in exports] == [False, True]


def test_a_checkpoint_is_noted_before_its_operation(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = api.model()
    post = Backend.post

    def killed(self: Backend, *arguments: Any) -> str:
        post(self, *arguments)
        raise Refused(503, "the service was killed here")

    with monkeypatch.context() as patch:
        patch.setattr(Backend, "post", killed)
        assert api.refused("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})[0] == 503
    api.ask("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    assert api.server.calls.ledger.get("checkpoints", f"tinker://{model}/weights/a") is not None


def test_only_samples_are_cancelled(api: Api) -> None:
    model = api.model()
    assert api.call("forward_backward", request(model, 1), **PROTO).is_success
    api.ask("cancel_future", {"request_id": f"{model}:1"})
    assert len(api.taken(model)) == 1
    base = api.server.calls.backend.model_name
    session = api.session()
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base}
    sampler = api.ask("create_sampling_session", asked)["sampling_session_id"]
    posted = api.ask("asample", sample(sampler, 0))
    api.ask("cancel_future", {"request_id": posted["request_id"]})
    row = api.server.calls.ledger.get("requests", posted["request_id"])
    assert row is not None
    api.registry.operations.begin(api.registry.get(row["tenant"]).incarnation, 0)
    assert api.server.calls.backend.look(row)["state"] == "failed"


@pytest.mark.parametrize("keeps_routes", [False, True])
def test_the_name_of_a_sample_is_no_error(api: Api, *, keeps_routes: bool) -> None:
    """Without R3 there is nothing to replay; with it, there may be no such sample."""
    model = api.model()
    service = api.registry.service
    moe = service.moe.model_copy(update={"capture_routes": keeps_routes})
    api.registry.service = service.model_copy(update={"moe": moe})
    inputs = {"target_tokens": tensor([6, 7, 8], "<i8", 2)}
    given = datum([5, 6, 7], **inputs) + bytes_field(4, SPAN)
    for number, forward_only in ((1, 0), (2, 1)):
        content = bytes_field(1, model) + int_field(2, number) + bytes_field(3, given)
        content += bytes_field(4, "cross_entropy") + int_field(6, forward_only)
        assert api.call("forward_backward", content, **PROTO).is_success
    for operation in api.taken(model):
        body = operation.body.model_dump()
        (sequence,) = body["sequences"]
        found = (body["replay"], sequence["sample"])
        assert found == (("match", "ab-1/0/2") if keeps_routes else ("named", None))


def test_a_model_without_a_seed_is_created_once(api: Api) -> None:
    body = {
        "session_id": api.session(),
        "model_seq_id": 0,
        "base_model": api.server.calls.backend.model_name,
        "lora_config": {"rank": 4},
    }
    first = api.ask("create_model", body)
    api.server.calls.ledger.remove("models", first["model_id"])  # killed before it was written
    assert api.ask("create_model", body) == first


def test_a_restart_does_not_end_clients(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    backend = api.server.calls.backend
    backend._seen.clear()  # as after a restart
    api.model(), api.model()
    with pytest.raises(AssertionError, match="max_number"):
        api.model()
    assert api.tenant(model).is_active
    backend._started -= 3600
    api.model()
    assert not api.tenant(model).is_active


def test_a_key_that_occurs_twice_is_found_at_once() -> None:
    names = [f'"{number}":0' for number in range(40_000)]
    text = "{" + ",".join([*names, names[-1]]) + "}"
    start = time.perf_counter()
    with pytest.raises(Refused, match="39999"):
        read_object(text.encode(), 8)
    assert time.perf_counter() - start < 2.0

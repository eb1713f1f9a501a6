"""What a client sees of a service that is not there, is starting or busy, or whose answers get lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.responses import Response

from mrl.cli import main
from mrl.client import OperationLost, ServiceClient, Session
from mrl.errors import InputError, RunFailed
from mrl.service import client as client_module
from mrl.service import start
from mrl.service.client import Busy, ControlClient, NobodyListens
from mrl.service.control import Control
from mrl.service.registry import Registry
from mrl.service.start import is_alive, note_start
from mrl.service.tokenizer import ServiceTokenizer
from parallel.hf_config import HfModel
from tests.tenants.parts import service, session, tenant

COMMAND = "python -m mrl.launch --standalone --nproc-per-node 2 -m mrl serve /x/service.yaml"


@pytest.fixture
def ann(control: Control, tmp_path: Path) -> Session:
    client = ServiceClient(control.registry.root)
    return client.create_session("ann", output_dir=tmp_path / "ann", lora={"rank": 4})


def lose_answers(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Let the service end the next connections when it has done what it was asked, without a word."""
    send, lost = Response.__call__, list(range(number))

    async def losing(response: Response, scope: Any, receive: Any, respond: Any) -> None:
        if lost:
            lost.pop()
            scope["state"]["connection"].transport.abort()
        await send(response, scope, receive, respond)

    monkeypatch.setattr(Response, "__call__", losing)
    return lost


def test_an_operation_whose_answer_is_lost_is_the_same_when_it_comes_again(
    ann: Session, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_answers(monkeypatch, 2)
    first, second = ann.optim_step(), ann.save()
    assert not lost
    taken = control.registry.operations.take("1-0-ann")
    assert [each.id for each in taken] == [first.id, second.id]


def test_what_would_be_done_twice_is_not_asked_again(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ControlClient(control.registry.root)
    client.add("ann", session(tmp_path / "ann"), loop="client")
    lose_answers(monkeypatch, 1)
    with pytest.raises(RunFailed, match="did not answer"):
        client.pause("ann")
    lose_answers(monkeypatch, 1)
    assert [each["state"] for each in client.tenants()] == ["paused"]  # a look may be repeated


def test_a_session_whose_answer_is_lost_is_made_once(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ServiceClient(control.registry.root)
    given: dict[str, Any] = {"output_dir": tmp_path / "ann", "lora": {"rank": 4}}
    lost = lose_answers(monkeypatch, 2)
    made = client.create_session("ann", **given)
    assert not lost
    assert [tenant.sequence for tenant in control.registry.tenants()] == [1]
    assert made.status()["session"]["life"]
    says = r"a tenant ann already; .*attach to it: client.session\('ann'\)"
    with pytest.raises(InputError, match=says):
        client.create_session("ann", **given)  # another request


def test_a_request_for_a_tenant_is_known_after_a_restart_and_a_removal(
    tmp_path: Path, model: Path
) -> None:
    asked = session(tmp_path / "ann")
    with Registry(service(tmp_path, model)) as registry:
        registry.add("ann", asked, loop="client", request="r1")
    with Registry(service(tmp_path, model)) as registry:
        assert registry.add("ann", asked, loop="client", request="r1").sequence == 1
        registry.move("ann", "removed")
        assert registry.add("ann", asked, loop="client", request="r1").state == "removed"
        other = registry.add("ann", session(tmp_path / "other"), loop="client", request="r2")
        assert other.sequence == 2
        assert registry.add("ann", asked, loop="client", request="r1").sequence == 1


def test_a_key_is_that_of_one_operation_of_one_life(ann: Session, control: Control) -> None:
    client = ControlClient(control.registry.root)
    body = {"kind": "optim_step", "key": "k-1", "life": ann.life}
    first = client.post("ann", body)
    assert client.post("ann", body) == first
    with pytest.raises(InputError, match="the key 'k-1' was used before for another operation"):
        client.post("ann", {**body, "lr": 0.5})
    with pytest.raises(InputError, match="comes with a life"):
        client.post("ann", {"kind": "save", "key": "k-2"})
    with pytest.raises(InputError, match="key is 1 to 64 letters"):
        client.post("ann", {**body, "key": "a/b"})
    ann.pause()
    assert client.operation("ann", first["id"])["state"] == "lost"
    ann.resume()
    with pytest.raises(InputError, match="was opened again"):
        client.post("ann", body)  # of the life before
    assert client.post("ann", {**body, "life": ann.life}) != first


@pytest.mark.parametrize("operation", ["a b", "a\nb", "a?b#c", "\u00e4", "%41"])
def test_an_id_that_is_none_is_refused_at_once(
    ann: Session, control: Control, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(client_module, "AGAIN_S", 0.0)
    with pytest.raises(InputError) as error:
        ControlClient(control.registry.root).operation("ann", operation)
    assert repr(operation) in str(error.value)


def test_a_busy_service_is_asked_again(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    client, call = ControlClient(control.registry.root), ControlClient._call
    refusals = [1, 2]

    def busy(*args: Any) -> Any:
        if refusals:
            refusals.pop()
            raise Busy("too many callers at a time")
        return call(*args)

    monkeypatch.setattr(ControlClient, "_call", busy)
    assert client.tenants() == []
    refusals[:] = [1] * 100
    monkeypatch.setattr(client_module, "AGAIN_S", 0.0)
    with pytest.raises(RunFailed, match="too many callers"):
        client.tenants()


def test_a_session_object_never_reaches_another_tenant_of_its_name(
    ann: Session, control: Control, tmp_path: Path
) -> None:
    control.registry.move("ann", "removed")
    ServiceClient(control.registry.root).create_session(
        "ann", output_dir=tmp_path / "other", lora={"rank": 4}
    )
    for call in (ann.save, ann.status):
        with pytest.raises(OperationLost, match="another tenant has its name"):
            call()
    for change in (ann.pause, ann.remove):
        with pytest.raises(InputError, match="now has the sequence 2, expected 1"):
            change()
    assert control.registry.get("ann").state == "queued"


def test_nowhere_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(NobodyListens) as error:
        ServiceClient(tmp_path / "nowhere")
    assert "nowhere is not the folder of a service: it has no service.yaml" in str(error.value)


@pytest.mark.parametrize("wait_s", [60, 0])
def test_a_service_that_starts_is_waited_for(tmp_path: Path, model: Path, wait_s: int) -> None:
    """Also without a wait, once its folder says that a process of it starts."""
    config, starts, made = service(tmp_path, model), threading.Event(), threading.Event()

    def serve() -> None:
        with Registry(config) as registry:
            note_start(registry.root, COMMAND)
            starts.set()
            made.wait(0.3)  # it loads a model
            with Control(registry):
                made.wait(30)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert wait_s or starts.wait(30)
        assert ServiceClient(config.output_dir, wait_s=wait_s).control.tenants() == []
    finally:
        made.set()
        thread.join()


def test_a_stopped_service_is_listed_as_stopped_with_its_command(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = service(tmp_path, model)
    with Registry(config) as registry:
        note_start(registry.root, COMMAND)
        for name in ("ann", "bob"):
            registry.add(name, tenant(tmp_path / name))
        registry.move("ann", "running")
        registry.move("bob", "paused", "lunch")
    assert is_alive(registry.root)  # it is this process
    main(["tenants", "list", "--service", config.output_dir])
    said = capsys.readouterr().out
    assert "starting" in said
    monkeypatch.setattr(start, "_began", lambda pid: "another process")
    main(["tenants", "list", "--service", config.output_dir])
    said = capsys.readouterr().out
    lines = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert "stopped" in lines["ann"]
    assert "running" not in said
    assert "paused" in lines["bob"]
    assert COMMAND in " ".join(said.split())
    main(["tenants", "status", "ann", "--service", config.output_dir])
    assert "stopped" in capsys.readouterr().out
    with pytest.raises(NobodyListens, match=r"start it again: python -m mrl\.launch"):
        ServiceClient(config.output_dir)


def test_texts_and_chats_are_encoded_by_the_service(ann: Session) -> None:
    tokens = ann.encode("abc cab")
    assert ann.decode(np.array(tokens)) == "abc cab"
    chat = ann.encode_chat([{"role": "user", "content": "abc"}])
    whole = ann.decode(chat, skip_special=False)
    assert "abc" in whole
    assert len(whole) > len(ann.decode(chat))
    asked = ann.encode_chat([{"role": "user", "content": "abc"}], add_generation_prompt=False)
    assert chat[: len(asked)] == asked
    assert len(chat) > len(asked)
    for body, says in (
        ({"texts": "abc"}, "texts: Input should be a valid list"),
        ({"texts": [3]}, "texts.0"),
        ({"texts": ["a"], "more": 1}, "more"),
    ):
        with pytest.raises(InputError, match=says):
            ann._client.call("POST", "/tokenizer/encode", body)
    with pytest.raises(InputError, match=r"token 100000, expected 0 to \d+: the model has"):
        ann.decode([100_000])
    with pytest.raises(InputError, match="message 0 needs a role and content, got"):
        ann.encode_chat([{"speaker": "me"}])
    with pytest.raises(InputError, match="encode, encode_chat, decode"):
        ann._client.call("POST", "/tokenizer/translate", {})


def test_texts_whose_answer_is_lost_are_asked_for_again(
    ann: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_answers(monkeypatch, 0)
    for call in (
        lambda: ann.encode("abc"),
        lambda: ann.decode([70]),
        lambda: ann.encode_chat([{"role": "user", "content": "abc"}]),
    ):
        lost.append(0)
        assert call()
        assert not lost


def test_texts_get_no_token_that_nobody_wrote_and_templates_get_the_tools(model: Path) -> None:
    served = ServiceTokenizer(HfModel.read(str(model / "model")))
    tokenizer, given = served._tokenizer, []
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"
    encode = tokenizer.encode
    tokenizer.encode = lambda text, **how: given.append(how) or encode(text, **how)
    served.answer("encode", {"texts": ["abc"]})
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert served.answer("encode_chat", body)["tokens"] == []
    found = served.answer("encode_chat", {**body, "tools": [{"name": "abc"}]})["tokens"]
    assert served.text(found) == "abc"
    assert given == [{"add_special_tokens": False}] * 3  # the template writes what it wants

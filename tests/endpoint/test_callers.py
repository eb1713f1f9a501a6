"""Agents that misuse connections: the endpoint answers in OpenAI's form, records only what was
received, and ends in time."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from mrl.collect.endpoint import app, server
from mrl.collect.endpoint.refused import Refused
from mrl.collect.endpoint.server import EndpointServer
from mrl.collect.endpoint.turns import Asked, Caller
from mrl.web.connection import Connection
from mrl.web.limits import Limits
from tests.endpoint.speaking import QUESTION, Speaking, make_record, tokenizer
from tests.endpoint.test_odd_requests import complete
from tests.waiting import wait_until

KEY = {"Authorization": "Bearer the key"}
CHAT = {"model": "policy", "messages": QUESTION}


@pytest.fixture
def engine():
    return Speaking(tokenizer())


@pytest.fixture
def endpoint() -> Iterator[EndpointServer]:
    with EndpointServer() as endpoint:
        yield endpoint


@pytest.fixture
def record(engine, endpoint):
    record = make_record(engine)
    endpoint.app.add("the key", record)
    return record


def connect(endpoint: EndpointServer) -> socket.socket:
    port = int(endpoint.address.removesuffix("/v1").rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), 60)


def chat(body: object = CHAT, path: str = "/v1/chat/completions", key: str = "the key") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def answers(connection: socket.socket, number: int) -> list[tuple[int, dict]]:
    """Return status and object of the next answers."""
    found, stream = [], connection.makefile("rb")
    for _ in range(number):
        status, length = int(stream.readline().split()[1]), 0
        while line := stream.readline().strip().lower():
            length = int(line.split()[1]) if line.startswith(b"content-length") else length
        found.append((status, json.loads(stream.read(length))))
    return found


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # without a host
        (b"GET / HTTP/1.1\r\nHost: x\r\nBroken\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * (1 << 17), 431),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 411),
        (chat(path="/v1/chat/completions/"), 404),
        (chat().replace(b"POST", b"OPTIONS", 1), 405),
        (chat(key="another"), 401),
        (chat([]), 400),
    ],
    ids=["nonsense", "no host", "header", "long", "encoding", "slash", "options", "key", "list"],
)
def test_every_refusal_has_the_form_of_openai(endpoint, record, given, status):
    with connect(endpoint) as connection:
        connection.sendall(given)
        ((found, answer),) = answers(connection, 1)
    assert found == status
    assert answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_several_requests_on_one_connection(endpoint, record):
    """Also after refusals, and if all are sent ahead."""
    body = json.dumps(CHAT).encode()
    chunked = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer the key\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
        + f"{len(body):x}\r\n".encode()
        + body
        + b"\r\n0\r\n\r\n"
    )
    with connect(endpoint) as connection:
        for _ in range(2):
            connection.sendall(chat() + chat({}) + chunked + chat())
            found = answers(connection, 4)
            assert [status for status, _ in found] == [200, 400, 200, 200]
    assert len(record.leaves) == 6


def test_the_key_counts_only_in_its_place(endpoint, record):
    url = f"{endpoint.address}/chat/completions"
    for more in (
        {"headers": {"X-API-Key": "the key"}},
        {"headers": {"api-key": "the key"}},
        {"headers": {"Authorization": "the key"}},
        {"headers": {"Authorization": "Basic the key"}},
        {"params": {"key": "the key"}},
        {"headers": {"Cookie": "the key"}},
    ):
        assert httpx.post(url, json=CHAT, **more).status_code == 401
    record.end()
    assert httpx.post(url, json=CHAT, headers=KEY).status_code == 401
    endpoint.app.remove("the key")
    assert "no running episode" in httpx.post(url, json=CHAT, headers=KEY).text


@pytest.mark.parametrize("is_half", [False, True], ids=["closed", "half-closed"])
def test_an_answer_that_comes_when_the_caller_has_just_gone_is_forgotten(
    endpoint, engine, record, monkeypatch, is_half
):
    """It comes before the next look at the connection."""
    monkeypatch.setattr(app, "LOOK_S", 600.0)
    has_gone = threading.Event()

    def say(request):
        assert has_gone.wait(60)
        return "late"

    engine.say = say
    connection = connect(endpoint)
    connection.sendall(chat())
    wait_until(lambda: engine.asked)
    with connection:
        if is_half:
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""  # taken for a caller that has gone
    has_gone.set()
    wait_until(lambda: engine.aborted)
    assert not record.leaves
    engine.say = lambda request: "in time"
    assert httpx.post(f"{endpoint.address}/chat/completions", json=CHAT, headers=KEY).is_success
    assert [leaf.text for leaf in record.leaves] == ["in time"]


def test_a_request_that_is_being_sent_is_aborted_later(endpoint, engine, record, monkeypatch):
    """An engine cannot abort what it does not have yet."""
    monkeypatch.setattr(app, "LOOK_S", 0.02)
    ended = threading.Event()

    def say(request):
        wait_until(lambda: len(engine.aborted) >= 2)
        ended.set()
        return "late"

    engine.say = say
    with connect(endpoint) as connection:
        connection.sendall(chat())
        wait_until(lambda: engine.asked)
    assert ended.wait(60)


def test_answers_do_not_wait_for_acknowledgements(endpoint, record, monkeypatch):
    """A second packet of a side without TCP_NODELAY would wait 40 ms for the first."""
    made, connections = Connection.connection_made, []

    def noted(self, transport):
        made(self, transport)
        connections.append(transport.get_extra_info("socket"))

    monkeypatch.setattr(Connection, "connection_made", noted)
    with httpx.Client(headers=KEY) as client:
        for _ in range(2):
            assert client.post(f"{endpoint.address}/chat/completions", json=CHAT).is_success
        (peer,) = connections  # both requests
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_it_ends_with_requests_open(engine, monkeypatch, capfd):
    monkeypatch.setattr(server, "LIMITS", Limits(stop_s=1))
    go_on = threading.Event()

    def say(request):
        assert go_on.wait(60)
        return "late"

    engine.say = say
    with EndpointServer() as endpoint:
        endpoint.app.add("the key", make_record(engine))
        slow, idle = connect(endpoint), connect(endpoint)
        slow.sendall(chat())
        wait_until(lambda: engine.asked)
        threading.Timer(2.0, go_on.set).start()
    assert answers(slow, 1)[0][0] == 503
    assert slow.recv(1) == idle.recv(1) == b""
    assert "Traceback" not in capfd.readouterr().err


def test_what_a_caller_did_not_receive_is_forgotten(engine):
    record = make_record(engine)
    gone, other = Caller(), Caller()
    complete(record, "a", caller=gone)
    (kept,) = complete(record, "b", caller=gone)
    (last,) = complete(record, "bhello more", caller=other)
    assert last.context.parent is kept
    record.drop(gone)
    assert record.leaves == [last]
    assert record.leaves[0].context.parent is kept  # which an agent has evidently received


def begun(record):
    """A conversation of two answers, a request that continues it, and a function that drops both."""
    callers = Caller(), Caller()
    complete(record, "a", caller=callers[0])
    (last,) = complete(record, "ahello b", caller=callers[1])

    def drop(request=None):
        for caller in reversed(callers):
            record.drop(caller)
        return "hello"

    return last, record.text("ahello bhello c"), drop


@pytest.mark.parametrize("when", ["before it is sent", "while it is answered"])
def test_an_answer_that_an_open_request_continues_is_not_forgotten(engine, when):
    record = make_record(engine)
    last, context, drop = begun(record)
    if when == "before it is sent":
        drop()
        assert not record.leaves
    else:
        engine.say = drop
    record.answer([context], Asked(), Caller())
    (leaf,) = record.leaves
    assert leaf.context.parent is last
    (sample,) = record.samples(3, is_tree=True)
    assert sample.loss_mask.sum() == 3 * len(leaf.completion.output_ids) > 0


def test_it_is_not_forgotten_either_if_that_request_fails(engine):
    record = make_record(engine)
    last, context, drop = begun(record)
    engine.say = lambda request: drop() + str(record.end())
    with pytest.raises(Refused):
        record.answer([context], Asked(), Caller())
    assert record.leaves == [last]
    drop()  # nothing continues it any more
    assert not record.leaves

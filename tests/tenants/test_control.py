"""The control socket: what it answers, who may call it, and 1,000 requests that are none."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import InputError, RunFailed
from mrl.service.client import ControlClient, NobodyListens
from mrl.service.control import Control
from mrl.service.registry import Registry
from mrl.service.sockets import open_tcp, read_token
from mrl.web.limits import Limits
from mrl.web.unix_socket import connect_unix, open_unix
from tests.release import release
from tests.tenants.answering import JsonServer
from tests.tenants.malformed import Case, cases
from tests.tenants.parts import service, session, tenant
from tests.waiting import LIMIT_S

REQUEST_S = 0.5
"""How long a request may take to arrive in these tests."""


@pytest.fixture
def control(tmp_path: Path, model: Path) -> Iterator[Control]:
    with (
        Registry(service(tmp_path, model)) as registry,
        Control(registry, Limits(head_s=LIMIT_S, request_s=LIMIT_S)) as made,
    ):
        yield made


@pytest.fixture
def client(control: Control) -> ControlClient:
    return ControlClient(control.registry.root)


def test_a_tenant_from_its_start_to_its_end(
    control: Control, client: ControlClient, tmp_path: Path
) -> None:
    assert client.tenants() == []
    added = client.add("a", tenant(tmp_path / "a"), 2.0)
    assert (added["state"], added["weight"], added["num_steps"]) == ("queued", 2.0, 3)
    assert client.tenant("a") == added
    assert client.pause("a")["reason"] == "a user paused it"
    assert client.resume("a")["state"] == "queued"
    control.registry.move("a", "running")
    assert client.pause("a", "lunch")["reason"] == "lunch"
    assert [each["name"] for each in client.tenants()] == ["a"]
    assert client.remove("a")["state"] == "removed"
    assert client.tenants() == []


def test_refusals_reach_the_user_in_one_line(client: ControlClient, tmp_path: Path) -> None:
    for body, says in (
        ({}, "name is missing"),
        ({"name": "a"}, "recipe is missing"),
        ({"name": "a", "recipe": []}, "recipe is of type list"),
        ({"name": 3, "recipe": {}}, "name is of type int"),
        ({"name": "a", "recipe": {}, "weight": True}, "weight is of type bool"),
        ({"name": "a", "recipe": {}, "weight": 10**400}, "a number is too large"),
        ({"name": "a", "recipe": {"seed": 1 << 63}}, "a number is too large"),
        ({"name": "a", "recipe": tenant(tmp_path), "weight": 1e-7}, "expected a number from 1e-06"),
        ({"name": "a", "recipe": {}, "is_record": 1}, "is_record is of type int"),
        ({"name": "a", "recipe": {}, "wait": 1}, "unknown key 'wait'"),
        ({"name": "a", "recipe": {}, "key": "x/y"}, "key is 1 to 64 letters, digits, _ and -"),
        ({"name": "A", "recipe": {}}, "the name of a tenant is 'A'"),
        ({"name": "a", "recipe": {}}, "train: required"),
        ({"name": "a", "recipe": {"model": "m"}}, "did you mean model.path"),
        ({"name": "a", "recipe": tenant(Path("relative"))}, "expected an absolute path"),
        ({"name": "a", "recipe": tenant(tmp_path, lora={"rank": 99})}, "lora.max_rank=8"),
    ):
        with pytest.raises(InputError) as error:
            client.call("POST", "/tenants", body)
        assert says in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="there is no tenant 'b'; there are: none"):
        client.tenant("b")
    client.add("a", tenant(tmp_path / "a"))
    with pytest.raises(InputError, match="it cannot become queued from there, only from paused"):
        client.resume("a")
    with pytest.raises(InputError, match="expected no body"):
        client.call("POST", "/tenants/a/pause", {"reason": 3})
    with pytest.raises(InputError, match="expected GET or DELETE, got POST"):
        client.call("POST", "/tenants/a")
    with pytest.raises(InputError, match="GET takes no body here"):
        client.call("GET", "/tenants", {"a": 1})


def test_metrics_are_those_of_the_loop(control: Control, client: ControlClient) -> None:
    assert client.metrics() == {}
    control.publish({"round": 3, "loss": float("nan")})
    assert client.metrics() == {"round": 3, "loss": None}


def test_what_a_fault_of_ours_says(
    control: Control, client: ControlClient, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(control.registry, "tenants", lambda: 1 // 0)
    with pytest.raises(RunFailed, match="ZeroDivisionError, which mrl does not foresee"):
        client.tenants()
    assert "integer division" in capsys.readouterr().err
    assert client.metrics() == {}


def test_the_socket_is_its_owners_and_ends_with_the_service(
    control: Control, client: ControlClient
) -> None:
    place = control.registry.root / "control.sock"
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    control.close()
    assert not place.exists()
    with pytest.raises(NobodyListens, match=r"no service listens in .*mrl serve .*service\.yaml"):
        client.tenants()


def test_the_socket_of_a_killed_service_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    open_unix(folder).close()
    with pytest.raises(ConnectionRefusedError):
        connect_unix(folder, 1.0)
    with JsonServer(lambda request: (200, {"path": "/x"})) as server:
        server.listen(open_unix(folder))
        assert ControlClient(folder).call("GET", "/x") == {"path": "/x"}


def test_a_socket_listens_from_the_moment_its_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen, before = socket.socket.listen, []

    def listens(listener: socket.socket) -> None:
        before.append((tmp_path / "control.sock").exists())
        listen(listener)

    monkeypatch.setattr(socket.socket, "listen", listens)
    with open_unix(tmp_path):
        assert before == [False]
        connect_unix(tmp_path, 1.0).close()
    assert [file.name for file in tmp_path.iterdir()] == ["control.sock"]


def test_a_service_that_cannot_listen_leaves_no_socket(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        tcp = taken.getsockname()[1]
        with Registry(service(tmp_path, model, control={"tcp": tcp})) as registry:
            with pytest.raises(InputError, match=rf"tcp={tcp}"):
                Control(registry)
            (registry.root / "control.sock").mkdir()  # this fails if the socket was left
            with pytest.raises(InputError, match=r"cannot listen at .*control\.sock: Is a dir"):
                Control(registry)
            assert not list(registry.root.glob("*.new"))


def exchange(
    connection: socket.socket, data: bytes, limit_s: float = LIMIT_S
) -> tuple[int, dict[str, Any], bytes]:
    """Status, message and head of what is answered to `data`, which may end in the middle."""
    with connection:
        connection.settimeout(limit_s)
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        return answer_of(connection)


def answer_of(connection: socket.socket) -> tuple[int, dict[str, Any], bytes]:
    """Status, message and head of an answer. Behind it the connection may be reset: the rest of what
    was sent is never read."""
    answer = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body.find(b"\n") == len(body) - 1, answer
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body or b"{}"), head


def test_over_tcp_a_token_is_asked_for(tmp_path: Path) -> None:
    token = read_token(tmp_path)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert read_token(tmp_path) == token
    listener = open_tcp(0)
    address = listener.getsockname()
    assert address[0] == "127.0.0.1"
    with JsonServer(lambda request: (200, {})) as server:
        server.listen(listener, token)
        for given, status in (
            ("", 401),
            ("Authorization: Bearer\r\n", 401),
            (f"Authorization: Bearer {token[:-1]}\r\n", 401),
            (f"Authorization: {token}\r\n", 401),
            (f"Authorization: Bearer {token}\r\n", 200),
            (f"Authorization: Bearer {token}\r\nOrigin: http://localhost\r\n", 403),
            (f"Authorization: Bearer {token}\r\nHost: evil.example\r\n", 403),
            (f"Authorization: Bearer {token}\r\nHost: localhost:80\r\n", 200),
        ):
            host = "" if "Host" in given else "Host: localhost\r\n"
            head = f"GET /x HTTP/1.1\r\n{host}{given}\r\n".encode()
            answer = exchange(socket.create_connection(address), head)
            assert answer[0] == status, given
            assert (b"www-authenticate: bearer" in answer[2].lower()) == (status == 401)
            assert token not in str(answer[1])


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    read_token(tmp_path)
    file.chmod(0o640)
    with pytest.raises(InputError, match="others can read it"):
        read_token(tmp_path)
    file.unlink()
    (tmp_path / "other").write_text("0" * 64)
    (tmp_path / "other").chmod(0o600)
    file.symlink_to(tmp_path / "other")
    with pytest.raises(InputError, match="remove it"):
        read_token(tmp_path)
    file.unlink()
    file.touch(0o600)
    with pytest.raises(InputError, match="holds no token"):
        read_token(tmp_path)


def send(folder: Path, case: Case) -> int:
    """Send a case, and return the status; the answer has to be one line with an error."""
    connection = connect_unix(folder, LIMIT_S)
    with connection:
        for number, part in enumerate(case.parts):
            if number:
                time.sleep(case.pause_s)
            try:
                connection.sendall(part)
            except (BrokenPipeError, ConnectionResetError):
                break  # it has refused what it has seen so far
        if case.half_closes:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        status, message, _ = answer_of(connection)
    if case.is_head:
        return status
    assert list(message) == ["error"], (case.kind, message)
    assert message["error"].strip(), case.kind
    assert "\n" not in message["error"], case.kind
    return status


def head(*headers: str) -> bytes:
    return "\r\n".join(["POST /tenants HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def with_body(text: str) -> bytes:
    return head(f"Content-Length: {len(text)}") + text.encode()


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (b"\xff", 400, "the first line is not METHOD /PATH HTTP/1.1"),
        (head("A: \x01"), 400, "the header a has a control character"),
        (head("no colon"), 400, "not a request of HTTP/1.1: illegal header line"),
        (b"GET /tenants\r\n\r\n", 400, "not a request of HTTP/1.1: illegal request line"),
        (b"GET /tenants HTTP/2.0\r\nHost: localhost\r\n\r\n", 400, "expected HTTP/1.1"),
        (b"GET /tenants HTTP/1.1\r\n\r\n", 400, "Missing mandatory Host: header"),
        (b"X" * 17_000, 431, "has more than 16384 bytes"),
        (head(*(f"H{n}: {'x' * 300}" for n in range(60))), 431, "has more than 16384 bytes"),
        (head(*(f"H{n}: x" for n in range(65))), 431, "more than 64 headers"),
        (head("Content-Length: 2", "content-length: 3"), 400, "conflicting Content-Length"),
        (head("Origin: x", "origin: y"), 400, "the header origin occurs twice"),
        (head("Content-Length: 2x"), 400, "bad Content-Length"),
        (head("Content-Length: 1048577"), 413, "has 1048577 bytes; at most 1048576"),
        (head("Transfer-Encoding: chunked"), 411, "and not in chunks"),
        (head("Content-Length: 1") + b"{}", 400, "more bytes follow"),
        (with_body('{"name": "a", "recipe": {}, "name": "a"}'), 400, "`name` occurs twice"),
        (with_body('{"weight": NaN}'), 400, "NaN is no number of JSON"),
        (with_body('{"weight": 1e999}'), 400, "a number is too large"),
        (with_body('{"name": "\\ud800"}'), 400, "surrogates not allowed"),
        (with_body('{"name": "\\u0000"}'), 400, "a text has the character NUL"),
        (with_body('{"a":' * 40 + "1" + "}" * 40), 400, "nested too deeply"),
        (with_body("[" * 100_000), 400, "has more than 32 levels"),
        (with_body("[]"), 400, "the body is a list; expected a JSON object"),
    ],
)
def test_each_refusal_has_its_reason(control: Control, data: bytes, status: int, says: str) -> None:
    answer = exchange(connect_unix(control.registry.root, LIMIT_S), data)
    assert answer[0] == status
    assert says in answer[1]["error"]


def test_a_request_has_one_time_limit_however_slowly_it_comes(tmp_path: Path) -> None:
    with JsonServer(lambda request: (200, {}), Limits(head_s=0.3)) as server:
        server.listen(open_unix(tmp_path))
        with connect_unix(tmp_path, LIMIT_S) as connection:
            num_sent = 0
            with suppress(BrokenPipeError, ConnectionResetError):
                while num_sent < 200:
                    connection.sendall(b"G")
                    num_sent += 1
                    time.sleep(0.05)
            assert num_sent < 200
            assert answer_of(connection)[0] == 408


def one_in(share: int, made: list[Case]) -> Iterator[Case]:
    """One in `share` of the cases of each kind."""
    counts: Counter[str] = Counter()
    for case in made:
        counts[case.kind] += 1
        if counts[case.kind] % share == 1 % share:
            yield case


@pytest.mark.parametrize("share", [4, release(1)])
def test_a_thousand_malformed_requests(share: int, tmp_path: Path, model: Path) -> None:
    limits = Limits(head_s=REQUEST_S, request_s=REQUEST_S, connections=64)
    made = cases(random.Random(20))
    assert len(made) >= 1000
    made = list(one_in(share, made))
    with Registry(service(tmp_path, model)) as registry, Control(registry, limits):
        root, descriptors = registry.root, len(os.listdir("/proc/self/fd"))
        registry.add("s", session(tmp_path / "s"), loop="client")
        with ThreadPoolExecutor(32) as pool:
            found = list(pool.map(lambda case: (case, send(root, case)), made))
        wrong = [(case.kind, status) for case, status in found if not 400 <= status < 500]
        assert not wrong
        assert {case.kind for case, _ in found} == {case.kind for case in made}
        client = ControlClient(root)
        assert [(t["name"], t["session"]["queued"]) for t in client.tenants()] == [("s", 0)]
        client.add("a", tenant(tmp_path / "a"))
        assert {p.name for p in (root / "tenants").iterdir()} == {".removed", "a", "s"}
        end = time.monotonic() + LIMIT_S
        while len(os.listdir("/proc/self/fd")) > descriptors and time.monotonic() < end:
            time.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert threading.active_count() < 40

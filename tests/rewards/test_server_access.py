"""Who may call a reward server, and what it does with more calls than it has workers for."""

import http.client
import json
import re
import socket
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mrl.cli import main
from mrl.errors import InputError
from mrl.rewards import resolve_reward
from mrl.rewards.remote import TOKEN_VARIABLE, ServerFailed, ServerRefused
from mrl.rewards.runner import RewardRunner
from mrl.rewards.server import WAIT_SHARE, RewardServer
from tests.rewards.test_remote import GOOD, ZOO, call, scripted, served, serving
from tests.rewards.test_runner import group
from tests.waiting import LIMIT_S

SECRET, OTHER = "5ecret-of-the-server", "an0ther-token"
BODY = json.dumps({"prompts": ["p"], "completions": ["abc"]})


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def guarded():
    """The address of a server that has the token SECRET."""
    with served(f"{ZOO}:lengths", token=SECRET) as url:
        yield url


@pytest.fixture(scope="module")
def unguarded():
    with served(f"{ZOO}:lengths") as url:
        yield url


@contextmanager
def busy(**settings):
    """A server whose only worker is taken."""
    with serving(f"{ZOO}:lengths", **settings) as server:
        lane = server._free.get()
        try:
            yield server
        finally:
            server._free.put(lane)


def ask(url, method, headers, body=None):
    """(status, message, headers) of one request."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LIMIT_S)
    connection.request(method, "/", body, headers)
    response = connection.getresponse()
    answer = response.status, json.loads(response.read()), response.headers
    connection.close()
    return answer


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", f"Bearer {OTHER}", f"Bearer {SECRET}x", SECRET, "Bearer \xe9"],
)
def test_without_the_token_nothing_is_answered(guarded, given):
    headers = {} if given is None else {"Authorization": given}
    for method, body in (("GET", None), ("POST", BODY)):
        status, message, reply_headers = ask(guarded, method, headers, body)
        assert status == 401
        assert list(message) == ["error"]
        assert SECRET not in str(message)
        assert reply_headers["WWW-Authenticate"] == "Bearer"
        assert reply_headers["Connection"] == "close"
    right = {"Authorization": f"Bearer {SECRET}"}
    assert ask(guarded, "GET", right)[:2] == (200, {"reward": f"{ZOO}:lengths"})
    assert ask(guarded, "POST", right, BODY)[:2] == (200, {"rewards": [3.0]})


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "evil.example:8000"},
        {"Host": "192.168.0.7"},
        {"Host": "[::1"},
    ],
)
def test_web_pages_are_refused_where_no_token_is_set(guarded, unguarded, headers):
    for method, body in (("GET", None), ("POST", BODY)):
        status, message, _ = ask(unguarded, method, headers, body)
        assert (status, list(message)) == (403, ["error"])
    port = unguarded.rpartition(":")[2]
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:1"):
        assert ask(unguarded, "POST", {"Host": host}, BODY)[0] == 200
    right = {"Authorization": f"Bearer {SECRET}"}
    assert ask(guarded, "POST", headers | right, BODY)[0] == 200


def test_the_body_of_a_stranger_is_not_awaited_and_no_reset_overtakes_the_answer(guarded):
    host, port = guarded.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as stranger:
        head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n"
        stranger.sendall(head)
        reply = b""
        while b"expected the token" not in reply:
            piece = stranger.recv(1000)
            assert piece, reply
            reply += piece
        for _ in range(2):  # after a reset the second could not be sent
            stranger.sendall(bytes(100_000))
            time.sleep(0.1)
        assert stranger.recv(1000) == b""  # it hangs up
    assert reply.startswith(b"HTTP/1.1 401 ")


def test_the_run_sends_the_token_of_its_environment(guarded, monkeypatch):
    """Also through the worker process, which inherits it."""
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    with RewardRunner(guarded, 10) as runner:
        (rewards,) = runner.score([group(2)], [["a", "abc"]])
        assert rewards.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("token", "num_chars"),
    [(None, 3), (OTHER, 3), (OTHER, 32 << 20)],
    ids=["none", "another", "more than is read"],
)
def test_a_refused_run_is_told_the_variable(guarded, monkeypatch, token, num_chars):
    if token:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
    refusal = pytest.raises(ServerRefused, match=f"HTTP 401: .*; set {TOKEN_VARIABLE}")
    with refusal as caught:
        call(guarded, ["x" * num_chars])
    assert not re.search(r"\(\d+ tr(y|ies)\)", str(caught.value))  # it was not tried again
    assert OTHER not in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "end\n", "caf\xe9"])
def test_a_token_that_no_header_holds(monkeypatch, token):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(InputError, match=f"^{TOKEN_VARIABLE} is empty or not all") as caught:
        resolve_reward("http://127.0.0.1:1")
    assert not token or token not in str(caught.value)
    with pytest.raises(SystemExit, match="2"):
        main(["reward", "serve", "first_char", "--port", "0"])


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
def test_off_loopback_a_token_is_required(capsys, monkeypatch, host):
    monkeypatch.setattr(RewardServer, "serve", lambda self: None)
    with pytest.raises(SystemExit, match="2"):
        main(["reward", "serve", "first_char", "--port", "0", "--host", host])
    shown = capsys.readouterr().err
    assert shown.startswith(f"mrl: address {host!r} is open to other machines")
    assert f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32)" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost"])
def test_the_command_takes_the_token_of_its_environment(capfd, monkeypatch, host):
    tokens = []
    monkeypatch.setattr(RewardServer, "serve", lambda self: tokens.append(self.token))
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    main(["reward", "serve", "first_char", "--port", "0", "--host", host])
    assert tokens == [SECRET]
    shown = capfd.readouterr()
    assert shown.out.endswith(f", with the same {TOKEN_VARIABLE}\n")
    assert SECRET not in shown.out + shown.err


def test_a_call_waits_for_a_worker_only_a_part_of_its_time(unguarded):
    busy_answer = {"error": "all 1 workers are busy; start the server with more --workers"}
    with busy(timeout_s=0.4) as server:
        waits, get = [], server._free.get
        server._free = SimpleNamespace(
            get=lambda timeout: (waits.append(timeout), get(timeout=timeout))[1],
            put=server._free.put,
        )
        for headers in ({"X-Timeout-S": "0.6"}, {"X-Timeout-S": "2000"}, {}):
            assert ask(server.url, "POST", headers, BODY)[:2] == (503, busy_answer)
        assert waits[0] <= 0.6 * WAIT_SHARE
        assert waits[1:] == [0.4, 0.4]
        for text in ("soon", "nan", "0", "-1"):
            status, message, _ = ask(server.url, "POST", {"X-Timeout-S": text}, BODY)
            assert status == 400
            assert "X-Timeout-S: expected seconds above 0" in message["error"]
    assert ask(unguarded, "POST", {"X-Timeout-S": "1e9"}, BODY)[:2] == (200, {"rewards": [3.0]})


def test_a_busy_server_is_no_hang_of_the_function():
    with busy() as server, RewardRunner(server.url, 2.0) as runner:
        (rewards,) = runner.score([group(3)], [["a", "b", "c"]], step_samples=100)
        assert bool(rewards.isnan().all())
        assert (runner.report.num_failed, runner.report.num_repeated) == (3, 0)
        error = runner.report.first_error
        assert "ServerRefused: " in error
        assert "all 1 workers are busy; start the server with more --workers" in error


def test_no_answer_after_busy_is_no_hang_either():
    full = (503, b'{"error": "full"}')
    with (
        scripted(full, LIMIT_S) as (url, _),
        pytest.raises(ServerRefused, match=r"HTTP 503: full; then no .* s left \(2 tries\)"),
    ):
        call(url, ["a"], timeout_s=1.5)
    with scripted(None, LIMIT_S) as (url, _), pytest.raises(ServerFailed, match="no answer within"):
        call(url, ["a"], timeout_s=0.8)  # a lost connection took none of its time
    with scripted(full, GOOD) as (url, _):
        assert call(url, ["a", "b"]) == [1, None]


def test_what_nobody_waits_for_is_not_computed(tmp_path):
    """The call of a client that has given up never starts."""
    log = tmp_path / "calls"
    module = tmp_path / "noting.py"
    module.write_text(
        "def score(prompts, completions, **columns):\n"
        f"    open({str(log)!r}, 'a').write(completions[0] + ' ')\n"
        "    return [0.0] * len(completions)\n"
    )
    with serving(f"{module}:score") as server:
        lane = server._free.get()
        given_up = json.dumps({"prompts": ["p"], "completions": ["given up"]})
        assert ask(server.url, "POST", {"X-Timeout-S": "0.3"}, given_up)[0] == 503
        server._free.put(lane)
        call(server.url, ["awaited"])
    assert log.read_text() == "awaited "

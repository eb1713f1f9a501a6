"""The client against servers that misbehave, and against our own."""

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mrl.errors import InputError
from mrl.rewards import resolve_reward
from mrl.rewards.base import BrokenReward
from mrl.rewards.remote import ServerFailed, ServerRefused
from mrl.rewards.runner import RewardRunner
from mrl.rewards.server import RewardServer
from mrl.web.connection import Connection
from tests.rewards.test_runner import group
from tests.waiting import LIMIT_S, only_bad_hurries

__all__ = ["only_bad_hurries"]

ZOO = Path(__file__).parent / "zoo.py"


@contextmanager
def scripted(*answers):
    """A server that gives one answer after the other, the last for ever.

    `(status, bytes)`; a number of seconds to sleep and say nothing; None to hang up.
    Yields (url, requests as they came).
    """
    seen = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = answers[min(len(seen), len(answers) - 1)]
            seen.append((self.path, json.loads(body)))
            if not isinstance(answer, tuple):
                time.sleep(answer or 0)
                self.close_connection = True
                return
            status, reply = answer
            self.send_response(status)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score?v=1", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving(spec, **settings):
    settings = {"num_workers": 1, "timeout_s": 10.0, **settings}
    with RewardServer(str(spec), "127.0.0.1", 0, **settings) as server:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()


@contextmanager
def served(spec, **settings):
    with serving(spec, **settings) as server:
        yield server.url


def call(url, texts, timeout_s=LIMIT_S, **columns):
    return resolve_reward(url, timeout_s)(["p"] * len(texts), texts, **columns)


GOOD = (200, b'{"rewards": [1, null]}')


def test_what_is_sent_and_what_comes_back():
    with scripted(GOOD) as (url, seen):
        assert call(url, ["a", "b"], answer=["x", "y"]) == [1, None]
    request = {"prompts": ["p", "p"], "completions": ["a", "b"], "columns": {"answer": ["x", "y"]}}
    assert seen == [("/score?v=1", request)]


@pytest.mark.parametrize("first", [(503, b"busy"), (429, b""), (502, b""), (504, b""), None])
def test_sent_again(first):
    with scripted(first, first, GOOD) as (url, seen):
        assert call(url, ["a", "b"]) == [1, None]
    assert len(seen) == 3


def test_an_idle_connection_that_was_closed_is_opened_again():
    with scripted(GOOD) as (url, seen):
        function = resolve_reward(url, 5.0)
        function(["p"] * 2, ["a", "b"])
        function._connection.sock.shutdown(2)
        assert function(["p"] * 2, ["a", "b"]) == [1, None]
    assert len(seen) == 2


FULL = r"HTTP 503: full(; then no answer in the \S+ s left)? \(\d tries\)"
"""The last try may be late on a loaded machine."""


@pytest.mark.parametrize(
    ("answer", "error", "message", "kind"),
    [
        ((500, b'{"error": "E: no"}'), ServerFailed, "HTTP 500: E: no", "exception"),
        ((500, b'{"error": "x", "kind": "hang"}'), ServerFailed, "HTTP 500: x", "hang"),
        ((500, b"<html>"), ServerFailed, "HTTP 500: '<html>'", "exception"),
        (
            (500, b'{"error": "E", "broken": true}'),
            BrokenReward,
            "HTTP 500: E",
            "wrong type or length",
        ),
        ((404, b"gone"), ServerRefused, "HTTP 404: 'gone'", "refused"),
        ((301, b""), ServerRefused, "HTTP 301: ''", "refused"),
        ((200, b"[1, 2]"), BrokenReward, r"answered '\[1, 2\]', expected", "wrong type or length"),
        ((200, b'{"rewards": 1}'), BrokenReward, "expected {", "wrong type or length"),
        ((200, b"\xff[[["), BrokenReward, "expected {", "wrong type or length"),
        ((503, b'{"error": "full"}'), ServerRefused, FULL, "refused"),
        (None, ServerRefused, r"connection lost: .* \(\d tries\)", "refused"),
        (LIMIT_S, ServerFailed, "no answer within 1.35 s", "hang"),
    ],
)
def test_failures(answer, error, message, kind):
    is_tried_again = not isinstance(answer, tuple) or answer[0] == 503
    with scripted(answer) as (url, _), pytest.raises(error, match=message) as caught:
        call(url, ["a", "b"], timeout_s=1.5 if is_tried_again else LIMIT_S)
    assert url in str(caught.value)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://", "expected http://HOST:PORT/PATH"),
        ("http://me:secret@host/", "without a user or password"),
        ("http://host:port/", "Port could not be cast"),
    ],
)
def test_addresses_that_cannot_be_used(url, reason):
    with pytest.raises(InputError, match=reason):
        resolve_reward(url)


def test_nobody_there():
    with pytest.raises(
        InputError, match=r"no connection: .*refused \(\d tries\); start the server"
    ):
        RewardRunner("http://127.0.0.1:1", 0.5)
    with scripted(GOOD) as (url, _), pytest.raises(InputError, match="SSL"):
        RewardRunner(url.replace("http:", "https:"), 30)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b'{"rewards": [1]}', "BrokenReward: returned 1 rewards for 2 completions"),
        (b'{"rewards": [1, NaN]}', "NotFinite: reward 1 is nan"),
        (b'{"rewards": [1, "2"]}', "NotANumber: reward 1 is '2', expected a number or None"),
    ],
)
def test_the_runner_masks_and_counts(reply, reason):
    with scripted((200, reply), GOOD) as (url, _), RewardRunner(url, 5) as runner:
        runner.score([group(2)], [["a", "b"]], step_samples=100)
        assert runner.report.num_failed == 2  # one by one the scripted server is no better
        assert reason in runner.report.first_error


@pytest.mark.usefixtures("only_bad_hurries")
def test_a_served_function_masks_only_its_culprit():
    with served(f"{ZOO}:hangs", timeout_s=0.5) as url, RewardRunner(url, LIMIT_S) as runner:
        (rewards,) = runner.score([group(3)], [["abc", "bad", "a"]], step_samples=100)
        assert rewards[[0, 2]].tolist() == [3, 1]
        assert bool(rewards[1].isnan())
        assert (runner.report.num_failed, runner.report.num_repeated) == (1, 1)
        assert "HTTP 500: no answer within 0.5 s, killed" in runner.report.first_error


def test_a_broken_function_is_broken_from_afar_too():
    with served(f"{ZOO}:too_few") as url, RewardRunner(url, 10) as runner:
        (rewards,) = runner.score([group(3)], [["abc", "bad", "a"]], step_samples=100)
        assert bool(rewards.isnan().all())
        assert runner.report.num_repeated == 0


def test_columns_arrive_and_two_workers_answer_at_the_same_time(tmp_path):
    with served(f"{ZOO}:meets", num_workers=2, timeout_s=LIMIT_S) as url:
        meet = partial(call, url, ["a"], folder=[str(tmp_path)])
        with ThreadPoolExecutor(2) as threads:  # one after the other they would wait for ever
            assert [f.result() for f in (threads.submit(meet), threads.submit(meet))] == [[2.0]] * 2


def test_the_server_refuses_what_is_no_request():
    good = {"prompts": ["p"], "completions": ["a"]}
    bodies = {
        "[": "Expecting value",
        "[1]": "expected a JSON object",
        json.dumps({**good, "prompts": []}): "prompts must be a list of 1",
        json.dumps({**good, "completions": [1]}): "completions must be a list of strings",
        json.dumps({**good, "columns": {"x": 1}}): "x must be a list of 1",
        json.dumps({**good, "columns": [1]}): "columns must be an object",
        json.dumps({**good, "columns": {"prompts": ["x"]}}): "columns has prompts, which is",
        json.dumps(
            {**good, "columns": {"completions": ["x"]}}
        ): "columns has completions, which is",
    }
    with served(f"{ZOO}:lengths") as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        for body, reason in bodies.items():
            connection.request("POST", "/", body)
            response = connection.getresponse()
            assert response.status == 400
            assert reason in json.loads(response.read())["error"]
        connection.request("GET", "/")
        assert json.loads(connection.getresponse().read()) == {"reward": f"{ZOO}:lengths"}
        connection.putrequest("POST", "/")
        connection.endheaders()  # no length: what follows cannot be told from the next request
        response = connection.getresponse()
        assert (response.status, response.headers["Connection"]) == (411, "close")
        connection.close()


def test_on_all_addresses_the_server_names_the_machine():
    settings = {"num_workers": 1, "timeout_s": 1, "token": "secret"}
    with RewardServer(f"{ZOO}:lengths", "0.0.0.0", 0, **settings) as server:
        assert server.url.startswith(f"http://{socket.gethostname()}:")


def test_a_server_that_cannot_start():
    with pytest.raises(InputError, match="did you mean 'first_char'"):
        RewardServer("first_cha", "127.0.0.1", 0, num_workers=2, timeout_s=1)
    with served(f"{ZOO}:lengths") as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(InputError, match=r"cannot listen on .* in use"):
            RewardServer("first_char", "127.0.0.1", port, num_workers=1, timeout_s=1)


def test_calls_do_not_wait_for_acknowledgements(monkeypatch):
    """A second packet of a side without TCP_NODELAY would wait 40 ms for the first."""
    made, connections = Connection.connection_made, []

    def noted(self, transport):
        made(self, transport)
        connections.append(self)

    monkeypatch.setattr(Connection, "connection_made", noted)
    with served(f"{ZOO}:lengths") as url:
        function = resolve_reward(url, LIMIT_S)
        function(["p"], ["a"])
        function(["p"], ["ab"])
        (connection,) = connections  # both calls
        for side in (function._connection.sock, connection.transport.get_extra_info("socket")):
            assert side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

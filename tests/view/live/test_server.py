"""Who is let in, and the stream of events."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from mrl.cli import main
from mrl.errors import InputError
from mrl.run.json_lines import add_line
from mrl.view.live import stream
from mrl.view.live.feed import KEPT, Feed
from mrl.view.live.server import MAX_STREAMS, LiveServer
from tests.view.invented import metrics, write_run

Event = tuple[str, Any]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", num_steps=3)


@pytest.fixture
def server(run: Path) -> Iterator[LiveServer]:
    with LiveServer([run]) as found:
        yield found


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose files do not change."""
    with LiveServer([write_run(tmp_path_factory.mktemp("quiet") / "run", num_steps=1)]) as found:
        yield found


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client() as found:
        yield found


def address(server: LiveServer, path: str = "", **query: str) -> str:
    return str(
        httpx.URL(server.url).join(f"/{path}").copy_merge_params({"token": server.token, **query})
    )


def listen(server: LiveServer, last: str = "", **query: str) -> socket.socket:
    """An open stream."""
    url = httpx.URL(address(server, "events", **query))
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    more = f"Last-Event-ID: {last}\r\n" if last else ""
    head = f"GET {url.raw_path.decode()} HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}\r\n"
    connection.sendall(head.encode())
    return connection


def events(connection: socket.socket, *, until: str) -> list[Event]:
    """The events up to the first of a kind, without signs of life."""
    data = b""
    while f"event: {until}\n".encode() not in data or not data.endswith(b"\n\n\r\n"):
        part = connection.recv(1 << 16)
        assert part, data
        data += part
    found = []
    for block in data.decode().split("\n\n"):
        lines = [line.partition(": ") for line in block.splitlines()]
        fields = {name: value for name, _, value in lines}
        if "event" in fields and fields["event"] != "alive":
            found.append((fields["event"], json.loads(fields["data"])))
    return found


@pytest.mark.parametrize(
    ("headers", "token", "status"),
    [
        ({}, "right", 200),
        ({"Host": "localhost:1"}, "right", 200),  # as through ssh
        ({"Host": "[::1]:1"}, "right", 200),
        ({"Origin": "own"}, "right", 200),
        ({}, "", 401),
        ({}, "wrong", 401),
        ({"Host": "evil.example"}, "right", 403),  # a name that an attacker lets mean this machine
        ({"Host": "127.0.0.1.evil.example"}, "right", 403),
        ({"Host": ""}, "right", 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, "right", 403),
        ({"Origin": "http://evil.example"}, "right", 403),
        ({"Origin": "null"}, "right", 403),
        ({"Origin": "https://127.0.0.1"}, "right", 403),
        ({"Origin": "http://127.0.0.1:1"}, "right", 403),  # another program of this machine
    ],
)
def test_strangers_are_refused(
    quiet: LiveServer, client: httpx.Client, headers: dict[str, str], token: str, status: int
) -> None:
    given = {"right": quiet.token, "wrong": quiet.token[:-1] + "!"}.get(token, "")
    if headers.get("Origin") == "own":
        headers = {"Origin": f"http://127.0.0.1:{quiet.port}"}
    for path in ("", "state", "events", "samples", "sample", "nowhere"):
        url = f"http://127.0.0.1:{quiet.port}/{path}" + (f"?token={given}" if given else "")
        with client.stream("GET", url, headers=headers) as answer:
            if status == 200:
                assert answer.status_code not in (401, 403)
            else:
                assert answer.status_code == status
                assert quiet.token not in answer.read().decode()
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert "set-cookie" not in answer.headers


def test_odd_requests_are_refused(quiet: LiveServer, client: httpx.Client) -> None:
    both = f"http://127.0.0.1:{quiet.port}/state?token={quiet.token}&token=x"
    assert client.get(both).status_code == 401
    assert client.post(address(quiet, "state")).status_code == 405
    assert client.get(address(quiet, "sample", step="x")).json()["error"].startswith("step is 'x'")
    assert client.get(address(quiet, "samples", step="99")).status_code == 404
    assert client.get(address(quiet, "", tenant="x")).status_code == 404


def test_events_follow_the_files(server: LiveServer, client: httpx.Client, run: Path) -> None:
    state = client.get(address(server, "state")).json()["live"]
    with listen(server, after=f"{state['epoch']}.{state['number']}") as connection:
        add_line(run / "metrics.jsonl", {"step": 98})  # after a line that was cut short
        add_line(run / "metrics.jsonl", metrics(3) | {"new": 1.0})
        found = events(connection, until="row")
        assert found[0][0] == "row"
        assert found[0][1]["step"] == 3
        assert found[0][1]["values"]["grad_norm"] == 4
        assert found[0][1]["units"] == {"new": "value"}
    with listen(server, last=f"{state['epoch']}.{state['number']}") as connection:  # it comes back
        assert events(connection, until="row")[0][1]["step"] == 3
    for last in ("", "another.7", f"{state['epoch']}.{10**15 - 1}", "\u00b2.\u00b2"):
        with listen(server, after=last) as connection:
            assert events(connection, until="reset") == [("reset", {})]


def test_a_restarted_run_begins_anew(server: LiveServer, client: httpx.Client, run: Path) -> None:
    state = client.get(address(server, "state")).json()
    assert state["metrics"]["steps"] == [0, 1, 2]
    with listen(server, after=f"{state['live']['epoch']}.{state['live']['number']}") as connection:
        (run / "new").write_text(json.dumps(metrics(0)) + "\n")
        (run / "new").rename(run / "metrics.jsonl")
        events(connection, until="reset")
    assert client.get(address(server, "state")).json()["metrics"]["steps"] == [0]
    add_line(run / "metrics.jsonl", metrics(1))
    add_line(run / "metrics.jsonl", metrics(0) | {"late": 1})  # not by mrl: the last row counts
    deadline = time.monotonic() + 5
    while "late" not in (found := client.get(address(server, "state")).json()["metrics"])["series"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert found["steps"] == [0, 1]
    assert found["series"]["late"] == {"v": [1], "at": [0]}


def test_many_streams_slow_readers_and_the_end(
    run: Path, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STALLED_S", 1.5)
    with ExitStack() as undo:
        server = undo.enter_context(LiveServer([run]))
        streams = [undo.enter_context(listen(server, after="x.1")) for _ in range(MAX_STREAMS)]
        for connection in streams:
            events(connection, until="reset")
        assert client.get(address(server, "events")).status_code == 503
        text = "x" * 1_000_000
        for _ in range(6):  # more than the kernel holds for those who do not read
            server.pages.main.feed.publish("notes", text)
        fast = streams[0]
        size = 0
        while size < 6_000_000:
            size += len(fast.recv(1 << 20))
        deadline = time.monotonic() + 20
        while server.pages.main.feed.num_listeners > 1:  # the others are hung up on
            assert time.monotonic() < deadline
            time.sleep(0.05)
        again = [undo.enter_context(listen(server, after="x.1")) for _ in range(50)]
        for connection in again:
            events(connection, until="reset")
        begin = time.monotonic()
        server.close()
        assert time.monotonic() - begin < 2
        assert b"event: bye" in again[-1].recv(1 << 16)


def test_the_feed_keeps_a_bounded_number_of_events() -> None:
    feed = Feed()
    for number in range(3 * KEPT):
        feed.publish("row", number)
    assert feed.after(0) is None
    assert feed.after(3 * KEPT + 1) is None
    newest = feed.after(3 * KEPT - 2) or ()
    assert [int(event.data) for event in newest] == [3 * KEPT - 2, 3 * KEPT - 1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port", "x"], "invalid int value"),
        (["--port", "70000", "--follow"], "--port is 70000"),
        (["--port", "1"], "--port is for the page that --follow serves"),
        (["--follow", "--steps", "1:2"], "--steps is for the page as a file"),
        (["--follow", "--output", "x.html"], "--output is for the page as a file"),
        (["{}", "--follow"], "a run folder is given twice"),
    ],
)
def test_misuse_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["view", str(run), *(word.format(run) for word in words)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_port_in_use_and_a_file_are_refused(server: LiveServer, run: Path) -> None:
    with pytest.raises(InputError, match=f"--port {server.port}: .*choose another"):
        LiveServer([run], server.port)
    with pytest.raises(InputError, match="is not a folder"):
        LiveServer([run / "config.yaml"])

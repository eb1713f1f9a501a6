"""This module has the parsers of whole HTTP requests: the service's, the Tinker API's and those of a
reward server.

A request is given to uvicorn's parser and goes through the application as in a server, but for the
socket. The answer must have a status below 500, or one that asks for patience.
"""

from __future__ import annotations

import asyncio
import json
import queue
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from uvicorn.server import ServerState

from benchmarks.fuzz_parsers.base import Parser, require
from benchmarks.fuzz_parsers.bodies import KINDS, OPERATIONS, OTHERS
from benchmarks.fuzz_parsers.wire import CALL, Lane
from mrl.rewards.server import LIMITS as REWARD_LIMITS
from mrl.rewards.server import RewardServer
from mrl.rewards.server import make_api as reward_api
from mrl.service.control import Calls as ServiceCalls
from mrl.service.registry import Registry
from mrl.tinker.app import LIMITS as TINKER_LIMITS
from mrl.tinker.app import App
from mrl.tinker.calls import Calls
from mrl.tinker.keys import Keys, digest
from mrl.tinker.ledger import Ledger
from mrl.web.limits import Limits
from mrl.web.server import plain_error, settings
from mrl.web.stages import Callers
from tests.tenants.parts import make_model, service, session

FINE = (503, 507)
"""Statuses from 500 on that are no fault: too many callers, or a full disk."""
KEY = "tml-fuzz"


class Wire(asyncio.Transport):
    """A transport that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.is_over = bytearray(), asyncio.Event()

    def write(self, data: Any) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_over.set()

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.is_over.is_set()

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Server:
    """An application behind uvicorn's parser."""

    def __init__(self, app: Callable[..., Any], limits: Limits) -> None:
        callers = Callers(limits, plain_error)
        self._settings, self._loop = settings(app, callers), asyncio.new_event_loop()
        self._settings.load()

    def ask(self, request: bytes) -> bytes:
        """Return what is answered to a request, after which the caller sends no more."""
        return self._loop.run_until_complete(self._ask(request))

    async def _ask(self, request: bytes) -> bytes:
        state, wire = ServerState(), Wire()
        make: Any = self._settings.http_protocol_class
        made = make(config=self._settings, server_state=state, app_state={}, _loop=self._loop)
        made.connection_made(wire)
        made.data_received(request)
        if not made.eof_received():
            wire.close()
        await wire.is_over.wait()
        made.connection_lost(None)
        while state.tasks:
            await asyncio.wait(state.tasks)
        return bytes(wire.sent)


@cache
def _service(folder: Path) -> Server:
    make_model(folder)
    registry = Registry(service(folder, folder)).__enter__()
    registry.add("s", session(folder / "s"), loop="client")
    limits = Limits()
    return Server(ServiceCalls(registry).application(None, limits), limits)


@cache
def _tinker(folder: Path) -> Server:
    make_model(folder)
    registry = Registry(service(folder, folder, control={"tinker": 0})).__enter__()
    keys = Keys(registry.root)
    with keys._changing() as rows:
        rows.append({"user": "ann", "sha256": digest(KEY), "made": 0})
    calls = Calls(registry, Ledger(registry.root / "tinker").__enter__(), keys)
    calls.is_closing = True  # nobody waits for a result
    return Server(App(calls).asgi, TINKER_LIMITS)


@cache
def _rewards(folder: Path) -> Server:
    rewards = object.__new__(RewardServer)  # without a port and without workers
    rewards.spec, rewards.token = "first_char", None
    rewards._free, rewards._num_workers, rewards._timeout_s = queue.SimpleQueue(), 1, 1.0
    rewards._free.put(Lane())  # type: ignore[arg-type]
    return Server(reward_api(rewards).asgi, REWARD_LIMITS)


def _request(method: str, path: str, body: Any = None, *headers: str) -> bytes:
    """Return a request, in lines without carriage returns and without the length of its body."""
    head = "\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers])
    return f"{head}\n\n{'' if body is None else json.dumps(body)}".encode()


def _reader(server: Callable[[Path], Server]) -> Callable[[bytes, Path], None]:
    """Return the function that gives such a request to a server."""

    def read(data: bytes, folder: Path) -> None:
        head, blank, body = data.partition(b"\n\n")
        if body and b"content-length" not in head.lower():
            head += b"\nContent-Length: %d" % len(body)
        found = server(folder).ask((head + blank).replace(b"\n", b"\r\n") + body)
        status = re.match(rb"HTTP/1\.1 (\d{3}) ", found)
        require(status is not None, f"answered {found[:80]!r}")
        assert status is not None
        number = int(status[1])
        require(number < 500 or number in FINE, f"status {number}: {found[-200:]!r}")

    return read


def _tinker_seeds() -> tuple[bytes, ...]:
    api, key = "/api/v1", f"X-API-Key: {KEY}"
    ids = {"session_id": "s", "model_id": "s:train:0"}
    posts = [
        _request("POST", f"{api}/{name}", {**body, **{k: ids[k] for k in ids if k in body}}, key)
        for name, (_, body) in KINDS.items()
        if name != "ttl"
    ]
    run = f"{api}/training_runs/s:train:0"
    gets = [
        _request("GET", path, None, key)
        for path in (f"{api}/sessions?limit=3&offset=1", run, f"{api}/healthz",
                     f"{run}/checkpoints", f"{api}/openapi.json", f"{api}/files/ab.cd/README.md")
    ]  # fmt: skip
    return (
        *posts,
        *gets,
        _request("PUT", f"{run}/checkpoints/weights/a/ttl", KINDS["ttl"][1], key),
    )


def _service_seeds() -> tuple[bytes, ...]:
    posts = [_request("POST", "/tenants/s/operations", each) for each in OPERATIONS]
    for name, path in (("pause", "/tenants/s/pause"), ("change", "/tenants/s/resume")):
        posts.append(_request("POST", path, OTHERS[name]))
    posts += [_request("POST", f"/tokenizer/{name}", OTHERS[name]) for name in ("encode", "decode")]
    gets = [_request("GET", path) for path in ("/tenants", "/tenants/s", "/metrics")]
    return (*posts, *gets, _request("POST", "/tenants", OTHERS["new"]))


PARSERS = (
    Parser("service request", _service_seeds(), _reader(_service), ()),
    Parser("tinker request", _tinker_seeds(), _reader(_tinker), ()),
    Parser("reward HTTP", (_request("POST", "/", CALL, "X-Timeout-S: 3"), _request("GET", "/")),
           _reader(_rewards), ()),
)  # fmt: skip

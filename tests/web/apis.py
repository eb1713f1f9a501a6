"""The three APIs of mrl, on ports of loopback: the service's, the Tinker API and a reward server's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mrl.rewards.server import RewardServer
from mrl.service.control import Control
from mrl.service.registry import Registry
from mrl.service.sockets import read_token
from mrl.tinker.keys import Keys
from mrl.tinker.server import TinkerServer
from tests.tenants.parts import service, session

ZOO = Path(__file__).parents[1] / "rewards/zoo.py"
Place = tuple[str, str]
"""The address of an API's description, and the header that lets a caller in."""


@contextmanager
def service_api(folder: Path, model: Path) -> Iterator[Place]:
    """The control socket of a service that has a session, whose operations nobody carries out."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    config = service(folder, model, control={"tcp": port})
    with Registry(config) as registry, Control(registry):
        registry.add("s", session(folder / "s"), loop="client")
        token = read_token(registry.root)
        yield f"http://127.0.0.1:{port}/openapi.json", f"Authorization: Bearer {token}"


@contextmanager
def tinker_api(folder: Path, model: Path) -> Iterator[Place]:
    config = service(folder, model, control={"tinker": 0})
    with Registry(config) as registry, TinkerServer(registry) as server:
        key = Keys(registry.root).add("ann")
        yield f"{server.address}/api/v1/openapi.json", f"X-API-Key: {key}"


@contextmanager
def reward_api(folder: Path, model: Path) -> Iterator[Place]:
    settings = {"num_workers": 1, "timeout_s": 10.0, "token": "secret"}
    with RewardServer(f"{ZOO}:lengths", "127.0.0.1", 0, **settings) as server:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        try:
            yield f"{server.url}/openapi.json", "Authorization: Bearer secret"
        finally:
            server.stop()
            thread.join()


APIS = {"service": service_api, "tinker": tinker_api, "rewards": reward_api}

"""The Tinker API of a service without a trainer: tests answer operations of sessions by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mrl.service.registry import Registry
from mrl.service.sessions.operations import Operation
from mrl.tinker.keys import Keys
from mrl.tinker.server import TinkerServer
from tests.tenants.parts import make_model, service


@pytest.fixture(scope="module")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("tenants_model", make_model)


@dataclass
class Api:
    """A client that sends what the SDK sends, as `user`."""

    server: TinkerServer
    registry: Registry
    key: str
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def call(
        self, path: str, body: Any = None, method: str = "POST", **headers: str
    ) -> httpx.Response:
        own = {"X-API-Key": self.key, **headers}
        url = f"{self.server.address}/api/v1/{path}"
        if isinstance(body, bytes):
            return self.client.request(method, url, content=body, headers=own)
        return self.client.request(method, url, json=body, headers=own)

    def ask(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """Return the answer to a request that is not refused."""
        found = self.call(path, body, method)
        assert found.status_code == 200, found.text
        return found.json()

    def refused(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, str]:
        """Return status and reason of a request that is refused."""
        found = self.call(path, body, method)
        assert found.status_code >= 400, found.text
        return found.status_code, found.json()["detail"]

    def session(self) -> str:
        return self.ask("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})[
            "session_id"
        ]

    def model(self, session: str | None = None, number: int = 0, **lora: Any) -> str:
        """Create a model, and open the session behind it at version 0."""
        body = {
            "session_id": session or self.session(),
            "model_seq_id": number,
            "base_model": self.server.calls.backend.model_name,
            "lora_config": {"rank": 4, "seed": 1, **lora},
        }
        model = self.ask("create_model", body)["model_id"]
        self.open(model)
        return model

    def tenant(self, model: str) -> Any:
        row = self.server.calls.ledger.get("models", model)
        assert row is not None
        return self.registry.get(row["tenant"])

    def open(self, model: str, version: int = 0) -> None:
        self.registry.operations.begin(self.tenant(model).incarnation, version)

    def taken(self, model: str) -> list[Operation]:
        return self.registry.operations.take(self.tenant(model).incarnation)

    def answer(self, model: str, operation: Operation, result: Any = None, error: str = "") -> None:
        self.registry.operations.answer(
            self.tenant(model).incarnation, operation.id, result=result, error=error, version=1
        )

    def result(self, request: str, **more: Any) -> Any:
        return self.ask("retrieve_future", {"request_id": request, **more})

    def another(self, user: str) -> Api:
        """The same service as another user sees it."""
        return replace(self, key=Keys(self.registry.root).add(user))


@pytest.fixture
def api(tmp_path: Path, model: Path) -> Iterator[Api]:
    config = service(tmp_path, model, control={"tinker": 0}, tenants={"max_number": 3})
    with Registry(config) as registry, TinkerServer(registry) as server:
        yield Api(server, registry, Keys(registry.root).add("ann"))

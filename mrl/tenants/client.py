"""Calls the control socket of a service on this machine."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from mrl.errors import InputError, RunFailed
from mrl.tenants.record import check_name
from mrl.tenants.sockets import connect_unix

TIMEOUT_S = 120.0
"""Seconds for an answer: a new tenant's recipe and data are checked before it."""


class NobodyListens(InputError):
    """There is no service in the folder that listens."""


class ControlClient:
    """Knows the addresses of the control socket; docs/tenants.md lists them.

    Every method raises NobodyListens where no service listens, InputError with the service's words
    where it refuses, and RunFailed where it fails.
    """

    def __init__(self, service: Path) -> None:
        self._service = service

    def tenants(self) -> list[dict[str, Any]]:
        return self.call("GET", "/tenants")["tenants"]

    def tenant(self, name: str) -> dict[str, Any]:
        return self.call("GET", f"/tenants/{check_name(name)}")

    def add(
        self,
        name: str,
        recipe: dict[str, Any],
        weight: float = 1.0,
        *,
        is_record: bool = False,
        loop: str = "recipe",
    ) -> dict[str, Any]:
        body = {"name": name, "recipe": recipe, "weight": weight, "is_record": is_record}
        if loop != "recipe":
            body["loop"] = loop
        return self.call("POST", "/tenants", body)

    def pause(self, name: str, reason: str | None = None) -> dict[str, Any]:
        body = None if reason is None else {"reason": reason}
        return self.call("POST", f"/tenants/{check_name(name)}/pause", body)

    def resume(self, name: str) -> dict[str, Any]:
        return self.call("POST", f"/tenants/{check_name(name)}/resume")

    def remove(self, name: str) -> dict[str, Any]:
        return self.call("DELETE", f"/tenants/{check_name(name)}")

    def post(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Put an operation into the queue of a session, and return its id."""
        return self.call("POST", f"/tenants/{check_name(name)}/operations", body)

    def operation(self, name: str, operation: str) -> dict[str, Any]:
        return self.call("GET", f"/tenants/{check_name(name)}/operations/{operation}")

    def metrics(self) -> dict[str, Any]:
        return self.call("GET", "/metrics")

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object that the service answers."""
        connection = http.client.HTTPConnection("localhost", timeout=TIMEOUT_S)
        try:
            connection.sock = connect_unix(self._service, TIMEOUT_S)
        except OSError:
            raise NobodyListens(
                f"no service listens in {self._service}; start one: "
                f"python -m mrl.launch --nproc-per-node N -m mrl serve {self._service}/service.yaml"
            ) from None
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise RunFailed(
                f"the service in {self._service} did not answer: {error or type(error).__name__}"
            ) from None
        finally:
            connection.close()
        if response.status >= 500:
            raise RunFailed(answer["error"])
        if response.status >= 400:
            raise InputError(answer["error"])
        return answer

"""JSON over HTTP on loopback, with the API key on every request."""

from __future__ import annotations

import http.client
import json
from typing import Any


class ServerError(RuntimeError):
    """The server answered, and refused."""


class HttpClient:
    """One connection a request: the server closes idle ones, and they are few and long."""

    def __init__(self, port: int, api_key: str) -> None:
        self._port = port
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body, whatever the status. Raises OSError without a server."""
        return self._request("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Any:
        """The decoded answer.

        Raises ServerError for a status other than 200 or a `success` that is not true, TimeoutError
        past the time limit, ConnectionError where the server goes away.
        """
        status, answer = self._request("POST", path, json.dumps(body).encode(), timeout_s)
        text = answer[:2000].decode(errors="replace")
        if status != 200:
            raise ServerError(f"POST {path}: status {status}, expected 200: {text}")
        try:
            decoded = json.loads(answer) if answer.strip() else None
        except json.JSONDecodeError:
            return text  # flush_cache and a few others answer in prose.
        if isinstance(decoded, dict) and decoded.get("success", True) is not True:
            raise ServerError(f"POST {path}: the server reports no success: {text}")
        return decoded

    def _request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {type(error).__name__} {error}") from error
        finally:
            connection.close()

"""A running server: started until it answers, asked over HTTP, and known when it has died."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.rollout.sglang_server.http import HttpClient, ServerError
from mrl.rollout.sglang_server.process import ServerProcess

PORT_ATTEMPTS = 3
PORT_IN_USE = "address already in use"
CONTROL_TIMEOUT_S = 600.0
READY_POLL_S = 0.1
NUM_RETRIES = 2
"""Of a rollout request whose connection broke while the server lives."""
PLUGIN_FAILURES = ("Failed to load plugin", "Failed to execute general plugin", "Failed to apply")


class Server:
    """SGLang behind a random API key. Every RuntimeError ends with the log's last lines."""

    def __init__(
        self, server_args: Mapping[str, Any], environment: Mapping[str, str], log_path: Path
    ) -> None:
        self._api_key = secrets.token_urlsafe(32)
        self.process = ServerProcess(
            {**server_args, "api_key": self._api_key}, environment, log_path
        )
        self.client: HttpClient | None = None

    def start(self, timeout_s: float) -> None:
        """Block until the server answers; another port where the chosen one was just taken.

        Raises RuntimeError where it dies or is not ready in time; nothing is left running then.
        """
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self.process.start()
            try:
                self.client = self._wait_until_ready(timeout_s)
                self.process.note_shared_memory()
                return
            except RuntimeError:
                clash = PORT_IN_USE in self.process.log_text().lower()
                self.process.stop()
                if not clash or attempt == PORT_ATTEMPTS:
                    raise
            except BaseException:
                self.process.stop()
                raise

    def stop(self) -> None:
        """Harmless when repeated."""
        self.client = None
        self.process.stop()

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """The decoded answer.

        Raises RuntimeError where the server refused or died, TimeoutError past the time limit,
        ConnectionError where the connection broke and the server lives.
        """
        assert self.client is not None
        try:
            return self.client.post(path, body, timeout_s=timeout_s)
        except ServerError as error:
            raise RuntimeError(f"{error}\n{self.process.log_tail()}") from None
        except ConnectionError:
            time.sleep(READY_POLL_S)  # It breaks a moment before the process can be reaped.
            code = self.process.exit_code()
            if code is None:
                raise
            raise RuntimeError(
                f"engine: the SGLang server died, exit code {code}; {self.process.log_tail()}"
            ) from None

    def generate(
        self, body: dict[str, Any], *, num_samples: int, timeout_s: float
    ) -> list[dict[str, Any]]:
        """Post one batch; again where the connection broke. Raises as post() does."""
        answers: Any = None
        for attempt in range(NUM_RETRIES + 1):
            try:
                answers = self.post("/generate", body, timeout_s=timeout_s)
                break
            except TimeoutError:
                self.post("/abort_request", {"abort_all": True})
                raise TimeoutError(
                    f"generate: no answer within rollout.request_timeout_s={timeout_s:g} s for "
                    f"{num_samples} samples; {self.process.log_tail()}"
                ) from None
            except ConnectionError:
                if attempt == NUM_RETRIES:
                    raise
                self.post("/abort_request", {"abort_all": True})
        got = len(answers) if isinstance(answers, list) else type(answers).__name__
        if got != num_samples:
            raise RuntimeError(f"generate: got {got} answers, expected {num_samples}")
        return answers

    def offers(self, path: str) -> bool:
        """Whether the server knows a POST endpoint; a GET tells without doing it."""
        assert self.client is not None
        status, _ = self.client.get(path, timeout_s=CONTROL_TIMEOUT_S)
        return status != 404

    def _wait_until_ready(self, timeout_s: float) -> HttpClient:
        deadline = time.monotonic() + timeout_s
        client = HttpClient(self.process.port, self._api_key)
        while not _answers(client, "/model_info"):
            code = self.process.exit_code()
            if code is not None:
                raise RuntimeError(
                    f"engine: the SGLang server died while starting, exit code {code}; "
                    f"{self.process.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"engine: the SGLang server is not ready after rollout.start_timeout_s="
                    f"{timeout_s:g} s; {self.process.log_tail()}"
                )
            time.sleep(READY_POLL_S)
        for line in self.process.log_text().splitlines():
            if any(text in line for text in PLUGIN_FAILURES):
                raise RuntimeError(
                    f"engine: a plugin of SGLang failed, so sampling would not be reproducible: "
                    f"{line}; see {self.process.log_path}"
                )
        return client


def _answers(client: HttpClient, path: str) -> bool:
    try:
        status, _ = client.get(path, timeout_s=5.0)
    except OSError:
        return False
    return status == 200

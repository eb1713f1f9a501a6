"""Calls the control socket of a service on this machine."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mrl.errors import InputError, RunFailed
from mrl.service.record import check_name
from mrl.service.start import is_alive, start_command
from mrl.web.unix_socket import NoAnswer, ask_unix, connect_unix

TIMEOUT_S = 120.0
"""Seconds to wait for an answer. The time is long because the service checks the recipe and data of
a new tenant before it answers."""
START_S = 900.0
"""Seconds to wait for a service that is starting."""
AGAIN_S = 30.0
"""If the answer to a call was lost, or the service had too many callers, the call may be repeated
for this many seconds."""
FIRST_WAIT_S, LAST_WAIT_S = 0.05, 1.0


class NobodyListens(InputError):
    """No service listens in the given service folder."""


class AnswerLost(RunFailed):
    """The service closed the connection or took too long. It is not known whether the request was
    carried out."""


class Busy(RunFailed):
    """The service has too many callers and did not carry out the request."""


class ControlClient:
    """A client of the control socket, with one method for each HTTP endpoint (docs/tenants.md).

    Every method raises NobodyListens if no service listens, InputError with the service's message
    if the service refuses the request, and RunFailed if the service fails or its answer is lost.
    """

    def __init__(self, service: Path) -> None:
        self._service = service

    def wait_until_listening(self, wait_s: float = 0.0) -> None:
        """Wait until the service listens. The time limit is `wait_s` seconds or, while the
        service's process is alive, the larger of `wait_s` and `START_S`. Raises NobodyListens if
        the service does not listen in time."""
        start, pause_s = time.monotonic(), FIRST_WAIT_S
        while True:
            with suppress(OSError):
                return connect_unix(self._service, TIMEOUT_S).close()
            limit_s = max(wait_s, START_S) if is_alive(self._service) else wait_s
            if time.monotonic() >= start + limit_s:
                raise self._nobody()
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LAST_WAIT_S)

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
        """Add a tenant and return it. If the answer is lost, the request is repeated; the tenant is
        added only once. `loop`: "client" for a session, whose training loop runs in a client,
        otherwise "recipe"."""
        body = {"name": name, "recipe": recipe, "weight": weight, "is_record": is_record}
        body |= {"loop": loop, "key": secrets.token_hex(8)}
        return self.call("POST", "/tenants", body, may_repeat=True)

    def pause(
        self, name: str, reason: str | None = None, sequence: int | None = None
    ) -> dict[str, Any]:
        """Pause a tenant. `sequence` is the number that distinguishes the tenant from other tenants
        that had the same name (`Tenant.sequence`). If it is given, the service refuses the request
        unless the tenant that now has the name also has this number. `resume` and `remove` treat it
        in the same way."""
        body = {"sequence": sequence} | ({} if reason is None else {"reason": reason})
        return self.call("POST", f"/tenants/{check_name(name)}/pause", body)

    def resume(self, name: str, sequence: int | None = None) -> dict[str, Any]:
        return self.call("POST", f"/tenants/{check_name(name)}/resume", {"sequence": sequence})

    def remove(self, name: str, sequence: int | None = None) -> dict[str, Any]:
        return self.call("DELETE", f"/tenants/{check_name(name)}", {"sequence": sequence})

    def post(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Put an operation into the queue of a session, and return an object with its `id`. If
        `body` has a `key`, the request is repeated when its answer is lost; the operation is added
        only once."""
        address = f"/tenants/{check_name(name)}/operations"
        return self.call("POST", address, body, may_repeat="key" in body)

    def operation(self, name: str, operation: str) -> dict[str, Any]:
        """Return an object with the `state` of a session's operation, and its `result` or `reason`."""
        part = quote(operation, safe="")
        return self.call("GET", f"/tenants/{check_name(name)}/operations/{part}")

    def metrics(self) -> dict[str, Any]:
        return self.call("GET", "/metrics")

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without adding special tokens."""
        return self.call("POST", "/tokenizer/encode", {"texts": texts}, may_repeat=True)["tokens"]

    def encode_chat(self, body: dict[str, Any]) -> list[int]:
        """Return the token ids of messages, rendered with the model's chat template. `body` has the
        key `messages`, and may have `add_generation_prompt` and `tools`."""
        return self.call("POST", "/tokenizer/encode_chat", body, may_repeat=True)["tokens"]

    def decode(self, tokens: list[list[int]], *, skip_special: bool) -> list[str]:
        """Return the text of each list of token ids."""
        body = {"tokens": tokens, "skip_special": skip_special}
        return self.call("POST", "/tokenizer/decode", body, may_repeat=True)["texts"]

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        may_repeat: bool = False,
    ) -> dict[str, Any]:
        """Send a request, and return the JSON object with which the service answers.

        If the service has too many callers, the request is repeated for `AGAIN_S` seconds. If the
        answer is lost, the request is repeated only if it is a GET or `may_repeat` is True.
        """
        start, pause_s = time.monotonic(), FIRST_WAIT_S
        while True:
            try:
                return self._call(method, path, body)
            except (Busy, AnswerLost) as error:
                is_safe = isinstance(error, Busy) or may_repeat or method == "GET"
                if not is_safe or time.monotonic() > start + AGAIN_S:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_WAIT_S)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            status, answer = ask_unix(self._service, method, path, body, TIMEOUT_S)
        except OSError:
            raise self._nobody() from None
        except NoAnswer as error:
            raise AnswerLost(f"the service in {self._service} did not answer: {error}") from None
        if status == 503:
            raise Busy(answer["error"])
        if status >= 500:
            raise RunFailed(answer["error"])
        if status >= 400:
            raise InputError(answer["error"])
        return answer

    def _nobody(self) -> NobodyListens:
        folder = self._service
        if is_alive(folder):
            return NobodyListens(f"the service in {folder} is still starting; try again later")
        if not (folder / "service.yaml").is_file():
            return NobodyListens(
                f"{folder} is not the folder of a service: it has no service.yaml; give the output_dir "
                "of a service, or start one: mrl serve SERVICE.yaml"
            )
        command = start_command(folder) or f"mrl serve {folder}/service.yaml"
        return NobodyListens(f"no service listens in {folder}; start it again: {command}")

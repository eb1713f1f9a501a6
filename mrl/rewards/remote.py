"""The client of a reward server (`reward: http://HOST:PORT/PATH`); it runs in a reward worker.

The client POSTs `{"prompts": [...], "completions": [...], "columns": {NAME: [...]}}`, with lists of
equal length, to a server such as `mrl reward serve`. The client expects status 200 with
`{"rewards": [number or null, ...]}`. The client sends two headers: `X-Timeout-S`, the seconds until
it stops waiting, and `Authorization: Bearer TOKEN` if MRL_REWARD_TOKEN is set. An answer with any
other status is a failure, and its key `error` gives the reason. Failures are handled as follows:

  - After 429, 502, 503, 504, or a refused or lost connection, the request is sent again, with growing
    pauses, until nine tenths of the call's time limit have passed. Scoring must have no side effects.
  - After 500, or no answer in time, the call has failed. The runner then sends the samples of the
    call one by one, so that only the samples that cause the failure are masked.
  - After 500 with `"broken": true`, or any other status or answer, no sample of the call has a reward.
    The same holds if a server that was busy at first (429, 502 to 504) does not answer in time.

Proxies and redirects are not used. With https the certificate is verified; with http the token is
sent unencrypted. Only the standard library is needed.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import ssl
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from mrl.errors import InputError
from mrl.rewards.base import HANG, BrokenReward, RewardError

BUSY = (429, 502, 503, 504)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
LEAST_TRY_S = 0.01
"""Minimum number of seconds for another try. If fewer seconds are left, the client gives up,
because a timeout after such a short time would not show that the server hangs."""
WAIT_FOR_SERVER_S = 30.0
"""Seconds that a starting worker waits for the server, because run and server may start together."""
SHARE_OF_TIMEOUT = 0.9
"""Share of the call's time limit after which this client gives up, so that it reports the timeout
before the runner kills the worker."""
MAX_REPLY_BYTES = 64 << 20
MAX_REASON_CHARS = 300
TIME_LEFT_HEADER = "X-Timeout-S"
TOKEN_VARIABLE = "MRL_REWARD_TOKEN"
"""The environment variable with the token. Other users could read a command line, but they cannot
read this variable."""


class ServerFailed(RewardError):
    """The server could not score the samples of a call. A call with fewer samples may succeed."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class ServerRefused(BrokenReward):
    """The server does not answer, or answers with something other than rewards."""

    kind = "refused"


class _Unavailable(Exception):
    """The server could not be reached or was busy. A retry may help."""


class _Busy(_Unavailable):
    """The server answered that it was busy."""


def read_token() -> str | None:
    """Return the token that server and client share; None if it is not set.

    Raises InputError for an invalid token; the message does not contain the token.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise InputError(
            f"{TOKEN_VARIABLE} is empty or not all visible ASCII characters: unset it, or "
            f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32)"
        )
    return token


class HttpReward:
    """Calls a reward server over one persistent connection.

    Raises InputError for an invalid address or token.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s * SHARE_OF_TIMEOUT
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InputError(f"reward {url!r}: {error}; expected http://HOST:PORT") from None
        if not host or parts.username is not None:
            raise InputError(
                f"reward {url!r}: expected http://HOST:PORT/PATH, without a user or password"
            )
        is_https = parts.scheme.lower() == "https"
        kind = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
        self._connection = kind(host, port)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        token = read_token()
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def start_worker(self) -> None:
        """Wait until the server accepts connections.

        Raises InputError if no connection is accepted within WAIT_FOR_SERVER_S seconds, or within the
        time limit of a call if that is shorter.
        """
        deadline = time.monotonic() + min(self._timeout_s, WAIT_FOR_SERVER_S)
        try:
            self._retry(self._connect, deadline)
        except ServerRefused as error:
            raise InputError(
                f"reward {error}; start the server first, e.g. mrl reward serve NAME --port N"
            ) from None

    def __call__(
        self, prompts: list[Any], completions: list[str], /, **columns: list[Any]
    ) -> list[float | None]:
        """Return the list of rewards that the server sent, without checking its entries.

        Raises ServerFailed if a call with fewer samples may succeed, and BrokenReward for any other
        failure. The module's docstring lists the failures.
        """
        request = {"prompts": prompts, "completions": completions, "columns": columns}
        body = json.dumps(request).encode()
        deadline = time.monotonic() + self._timeout_s
        return self._retry(lambda left_s: self._post(body, left_s), deadline)

    def _retry(self, attempt: Any, deadline: float) -> Any:
        pause_s, tries, busy = FIRST_PAUSE_S, 1, ""
        left_s = deadline - time.monotonic()
        while True:
            try:
                return attempt(max(left_s, LEAST_TRY_S))
            except TimeoutError:
                if busy:  # the server got less than the full time limit, so it need not hang
                    late = f"{busy}; then no answer in the {left_s:.3g} s left"
                    raise ServerRefused(f"{self._url!r}: {late} ({tries} tries)") from None
                message = f"{self._url!r}: no answer within {self._timeout_s:.3g} s"
                raise ServerFailed(message, HANG) from None
            except _Unavailable as error:
                busy = str(error) if isinstance(error, _Busy) else busy
                # Jitter, because the workers of many engines see an outage at the same time.
                wait_s = pause_s * random.uniform(0.5, 1.0)
                if time.monotonic() + wait_s < deadline:
                    time.sleep(wait_s)  # a loaded machine may sleep much longer
                    left_s = deadline - time.monotonic()
                else:
                    left_s = 0.0
                if left_s < LEAST_TRY_S:
                    times = f"{tries} {'try' if tries == 1 else 'tries'}"
                    raise ServerRefused(f"{self._url!r}: {error} ({times})") from None
            pause_s, tries = min(2 * pause_s, LONGEST_PAUSE_S), tries + 1

    def _connect(self, left_s: float) -> None:
        self._connection.timeout = left_s
        try:
            self._connection.connect()
        except OSError as error:
            self._connection.close()
            if isinstance(error, ssl.SSLError):
                raise ServerRefused(f"{self._url!r}: {error}") from None
            raise _Unavailable(f"no connection: {error}") from None

    def _post(self, body: bytes, left_s: float) -> list[float | None]:
        """Send one request and return the rewards in the answer.

        Raises TimeoutError if no answer comes within `left_s` seconds, _Unavailable if a retry may
        help, and ServerFailed or BrokenReward for any other failure.
        """
        if self._connection.sock is None:
            self._connect(left_s)
        assert self._connection.sock is not None
        self._connection.sock.settimeout(left_s)
        headers = {**self._headers, TIME_LEFT_HEADER: f"{left_s:.3f}"}
        try:
            # A server that rejects the body answers with the reason before it closes the connection.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._connection.request("POST", self._target, body, headers)
            response = self._connection.getresponse()
            reply = response.read(MAX_REPLY_BYTES + 1)
            if not response.isclosed():  # the reply is longer than the limit, or has no length
                self._connection.close()
        except TimeoutError:
            self._connection.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            # This includes an idle connection that the server has closed.
            self._connection.close()
            raise _Unavailable(f"connection lost: {type(error).__name__}: {error}") from None
        return self._rewards(response.status, reply)

    def _rewards(self, status: int, reply: bytes) -> list[float | None]:
        if len(reply) > MAX_REPLY_BYTES:
            raise BrokenReward(
                f"{self._url!r}: the answer has more than {MAX_REPLY_BYTES >> 20} MiB"
            )
        message: Any = None
        with suppress(ValueError, RecursionError):
            message = json.loads(reply)
        fields = message if isinstance(message, dict) else {}
        if status == http.client.OK:
            if not isinstance(fields.get("rewards"), list):
                raise BrokenReward(
                    f"{self._url!r} answered {_reason(reply)}, expected "
                    '{"rewards": [number or null, ...]}'
                )
            return fields["rewards"]
        reason = f"HTTP {status}: {fields.get('error') or _reason(reply)}"
        if status in BUSY:
            raise _Busy(reason)
        if status == http.client.UNAUTHORIZED:
            reason += f"; set {TOKEN_VARIABLE} where the run starts to the token of the server"
        if status != http.client.INTERNAL_SERVER_ERROR:
            raise ServerRefused(f"{self._url!r}: {reason}")
        if fields.get("broken"):
            raise BrokenReward(f"{self._url!r}: {reason}")
        raise ServerFailed(f"{self._url!r}: {reason}", str(fields.get("kind", RewardError.kind)))


def _reason(reply: bytes) -> str:
    return repr(reply[:MAX_REASON_CHARS].decode("utf-8", "replace"))

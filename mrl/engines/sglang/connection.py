"""The connection to a server process: starts it, posts calls to it, and detects when it is lost."""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from mrl.engines.base import START_ATTEMPTS, EngineLost
from mrl.engines.sglang.http import CallTimeouts, EventStream, HttpClient, ServerError
from mrl.engines.sglang.process import ServerProcess
from mrl.errors import EngineGone, RunFailed

CONTROL_TIMEOUT_S = 600.0
"""Time limit in seconds of a control call for which the recipe sets no limit."""
READY_POLL_S = 0.1
WATCH_S = 1.0
"""Seconds between two checks of the server's processes, while it starts and while a call waits."""
REAP_S = 2.0
"""Seconds to wait for the server's exit code after a connection broke."""
PLUGIN_FAILURES = ("Failed to load plugin", "Failed to execute general plugin", "Failed to apply")

Failure = TypeVar("Failure", bound=Exception)


class ServerConnection:
    """SGLang in a child process, protected by a random API key.

    The message of every RuntimeError is one line, which names the log. The last lines of the log
    are added to the error as a note (`BaseException.add_note`). post() and stream() may be called
    from several threads.
    """

    def __init__(
        self,
        server_args: Mapping[str, Any],
        environment: Mapping[str, str],
        log_path: Path,
        timeouts: CallTimeouts | None = None,
    ) -> None:
        """Start nothing yet. `timeouts` limits the calls that are made without `timeout_s`; by default,
        each of them may take CONTROL_TIMEOUT_S."""
        self._timeouts = timeouts or CallTimeouts(CONTROL_TIMEOUT_S, CONTROL_TIMEOUT_S)
        self._api_key = secrets.token_urlsafe(32)
        self.process = ServerProcess(
            {**server_args, "api_key": self._api_key}, environment, log_path
        )
        self.client: HttpClient | None = None
        self._request_numbers = itertools.count()
        self._losing = threading.Lock()
        self.loss: EngineLost | None = None
        """The error that says why the server was lost; None while it runs, and after stop()."""

    def start(
        self,
        timeout_s: float,
        settings: Mapping[str, Any],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Start the server and block until it answers. If another program takes the chosen port, try
        again with another port.

        `settings` are fields of ServerArgs that differ at each start. `meanwhile` is called repeatedly
        while the server starts, and may raise RuntimeError to end the start. Raises RuntimeError if the
        server dies or is not ready after `timeout_s`, and leaves no process behind.
        """
        with self._losing:  # another thread may still be removing a lost server
            self.loss = None
        self.process.server_args |= settings
        # The processes on other nodes got the same address, so that all of them have to start again:
        # mrl.engine_pool.engine_nodes does so.
        attempts = 1 if "dist_init_addr" in settings else START_ATTEMPTS
        for attempt in range(1, attempts + 1):
            self.process.start()
            try:
                self.client = self._wait_until_ready(timeout_s, meanwhile)
                self.process.note_shared_memory()
                self.process.note_parts()
                return
            except RuntimeError:
                clash = self.process.has_port_clash()
                self.process.stop()
                if not clash or attempt == attempts:
                    raise
            except BaseException:
                self.process.stop()
                raise

    def stop(self) -> None:
        """Stop the server; a second call does nothing."""
        self.client = None
        self.loss = None
        self.process.stop()

    def new_request_id(self) -> str:
        """Return a new id for a request. Ids are never reused: two seconds after an answer SGLang
        aborts the answered id once more. All ids have the same length, because an abort ends every
        request whose id starts with the given id."""
        return f"mrl-{next(self._request_numbers):012d}"

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> Any:
        """Post to the server and return the decoded answer. Without `timeout_s`, the time limit is
        learned from earlier calls of `path`.

        Raises RuntimeError if the server refuses the call, EngineLost if it dies, closes the connection
        or does not answer in time.
        """
        limit_s = self._timeouts.limit_s(path) if timeout_s is None else timeout_s
        begun = time.monotonic()
        try:
            with self._watching():
                answer = self._running_client().post(path, body, timeout_s=limit_s)
            self._timeouts.note(path, time.monotonic() - begun)
            return answer
        except ServerError as error:
            where = f"its log is {self.process.log_path}"
            raise self._with_log(RuntimeError(f"{error}; {where}")) from None
        except TimeoutError:
            raise self.lost(f"no answer to POST {path} within {limit_s:g} s") from None
        except ConnectionError as error:
            self.check_alive(wait_s=REAP_S)  # the exit code comes a moment after the break
            raise self.lost(f"the SGLang server hung up: {error}") from None

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Kill the server if one of its processes dies during the block, or has been stopped (SIGSTOP)
        for `rollout.stall_timeout_s`. The kill breaks the connection on which the block waits.

        SGLang itself takes more than a minute to end after its detokenizer has died.
        """
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(WATCH_S):
                if self.process.dead_part():
                    self.process.kill()
                    return
                try:
                    self._check_halted()
                except EngineLost:  # the call inside the block raises it
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def stream(self, body: dict[str, Any]) -> EventStream:
        """Post to /generate and return the stream of answers. Raises EngineLost if there is no server
        or it does not accept the request within `rollout.stall_timeout_s`, and ConnectionError if it
        closes the connection."""
        limit_s = self._timeouts.least_s
        try:
            return self._running_client().stream("/generate", body, timeout_s=limit_s)
        except TimeoutError:
            raise self.lost(
                "the SGLang server hangs: it accepted no request in "
                f"rollout.stall_timeout_s={limit_s:g} s"
            ) from None

    def check_alive(self, wait_s: float = 0.0) -> None:
        """Raise EngineLost if a process of the server has ended, or ends within `wait_s`."""
        self._running_client()
        deadline = time.monotonic() + wait_s
        while (code := self.process.exit_code()) is None:
            if part := self.process.dead_part():
                raise self.lost(f"the SGLang server's {part} died")
            self._check_halted()
            if time.monotonic() >= deadline:
                return
            time.sleep(wait_s / 10)
        raise self.lost(f"the SGLang server died, exit code {code}")

    def _check_halted(self) -> None:
        """Raise EngineLost if a server process has been stopped for `rollout.stall_timeout_s`."""
        if part := self.process.halted_part(limit_s := self._timeouts.least_s):
            raise self.lost(
                f"the SGLang server's {part} is stopped (SIGSTOP) for "
                f"rollout.stall_timeout_s={limit_s:g} s"
            )

    def check_answers(self, timeout_s: float) -> None:
        """Raise EngineLost if the scheduler does not answer within `timeout_s`, or the server has
        died."""
        try:
            # The scheduler answers this in its loop, between two batches.
            self._running_client().get("/server_info", timeout_s=timeout_s)
        except TimeoutError:
            raise self.lost(
                f"the SGLang server hangs: its scheduler did not answer within "
                f"rollout.stall_timeout_s={timeout_s:g} s"
            ) from None
        except OSError:
            self.check_alive(wait_s=REAP_S)

    def too_late(self, what: str) -> RuntimeError:
        """Return the error to raise for requests that were not answered in time; `what` describes the
        wait in the message.

        If all schedulers are idle, as when the detokenizer hangs, no answer will ever come, and the
        error is EngineLost. If a scheduler is busy, the error is RunFailed. Raises EngineLost if the
        schedulers do not respond.
        """
        if not self._num_requests():
            return self.lost(f"the SGLang server is idle but has not answered: {what}")
        return RunFailed(
            f"generate: {what}, and the engine is still working on it; raise "
            f"rollout.request_timeout_s, or ask for shorter answers or for fewer at a time; its log "
            f"is {self.process.log_path}"
        )

    def _num_requests(self) -> int:
        """Return how many requests are running or queued in the schedulers."""
        try:
            _, text = self._running_client().get("/v1/loads", timeout_s=self._timeouts.least_s)
        except OSError as error:
            raise self.lost(f"the SGLang server hangs: {error}") from None
        loads = json.loads(text)["loads"]
        return sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in loads)

    def lost(self, what: str) -> EngineLost:
        """Remove what is left of the server, and return the error to raise. If several threads find the
        server lost, only the first one removes it, and all of them return the same error."""
        with self._losing:
            if self.client is None and self.loss is not None:
                return self.loss
            error = self._with_log(EngineLost(f"engine: {what}; {self.process.why()}"))
            self.loss = error  # first, because other threads read it as soon as there is no client
            self.client = None
            self.process.stop()
            return error

    def _with_log(self, error: Failure) -> Failure:
        """Return the error with the last lines of the log as a note, which a traceback shows."""
        error.add_note(self.process.log_tail())
        return error

    def _running_client(self) -> HttpClient:
        """Return the HTTP client. Raises EngineLost if the server was found lost or was stopped."""
        client = self.client
        if client is None:
            raise self.loss or EngineLost("engine: the SGLang server was stopped")
        return client

    def room(self) -> tuple[int, int]:
        """Return (token capacity of the KV caches, number of requests that can run at once), each
        summed over the attention replicas."""
        states = self._states()
        return (
            sum(int(state["memory_usage"]["token_capacity"]) for state in states),
            sum(int(state["effective_max_running_requests_per_dp"]) for state in states),
        )

    def cache_of_one(self) -> tuple[int, int]:
        """Return (token capacity of the smallest KV cache among the attention replicas, page size in
        tokens)."""
        states = self._states()
        return (
            min(int(state["memory_usage"]["token_capacity"]) for state in states),
            max(int(state.get("page_size") or 1) for state in states),
        )

    def _states(self) -> list[dict[str, Any]]:
        _, text = self._running_client().get("/server_info", timeout_s=CONTROL_TIMEOUT_S)
        return json.loads(text)["internal_states"]

    def offers(self, path: str) -> bool:
        """Return whether the server has the POST route `path`. This sends a GET, which does not run the
        route."""
        status, _ = self._running_client().get(path, timeout_s=CONTROL_TIMEOUT_S)
        return status != 404

    def _wait_until_ready(
        self, timeout_s: float, meanwhile: Callable[[], None] | None
    ) -> HttpClient:
        deadline, next_check = time.monotonic() + timeout_s, 0.0
        client = HttpClient(self.process.port, self._api_key)
        while not _answers(client, "/model_info"):
            self._check_start()
            if time.monotonic() > next_check:
                if self.process.dead_part():
                    self._end_start()
                self._refuse_halted()
                self.process.note_parts()
                self.process.note_shared_memory()
                next_check = time.monotonic() + WATCH_S
            if time.monotonic() > deadline:
                raise self._failed_start(
                    f"the SGLang server is not ready after rollout.start_timeout_s={timeout_s:g} s; "
                    f"{self.process.why()}"
                )
            if meanwhile is not None:
                meanwhile()
            time.sleep(READY_POLL_S)
        for line in self.process.log_text().splitlines():
            if any(text in line for text in PLUGIN_FAILURES):
                raise RuntimeError(
                    f"engine: a plugin of SGLang failed, so sampling would not be reproducible: "
                    f"{line}; see {self.process.log_path}"
                )
        return client

    def _check_start(self) -> None:
        """Raise EngineGone if the server has ended."""
        code = self.process.exit_code()
        if code is not None:
            raise self._failed_start(
                f"the SGLang server died while starting, {self.process.ending(code)}"
            )

    def _refuse_halted(self) -> None:
        """Raise EngineGone if a starting process has been stopped for `rollout.stall_timeout_s`."""
        if part := self.process.halted_part(limit_s := self._timeouts.least_s):
            raise self._failed_start(
                f"the SGLang server's {part} is stopped (SIGSTOP) while it starts, for "
                f"rollout.stall_timeout_s={limit_s:g} s; {self.process.why()}"
            )

    def _end_start(self) -> None:
        """Raise EngineGone because one of the server's processes has died. First give the server REAP_S
        to end by itself, so that the error can give its exit code."""
        deadline = time.monotonic() + REAP_S
        while time.monotonic() < deadline:
            self._check_start()
            time.sleep(READY_POLL_S)
        part = self.process.dead_part()
        raise self._failed_start(
            f"the SGLang server's {part} died while starting; {self.process.why()}"
        )

    def _failed_start(self, what: str) -> EngineGone:
        """Return the error for a failed start; `what` says how it failed."""
        return self._with_log(EngineGone(f"engine: {what}"))


def _answers(client: HttpClient, path: str) -> bool:
    try:
        status, _ = client.get(path, timeout_s=5.0)
    except OSError:
        return False
    return status == 200

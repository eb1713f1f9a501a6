"""A running server: started until it answers, asked over HTTP, and known when it has died."""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from mrl.errors import EngineGone, RunFailed
from mrl.rollout.base import START_ATTEMPTS, EngineLost
from mrl.rollout.sglang.http import EventStream, HttpClient, ServerError
from mrl.rollout.sglang.patience import Patience
from mrl.rollout.sglang.process import ServerProcess

CONTROL_TIMEOUT_S = 600.0
"""Limit of a control call where no recipe gives one."""
READY_POLL_S = 0.1
WATCH_S = 1.0
"""Seconds between two looks at the server's processes, while it starts and while a request lasts."""
REAP_S = 2.0
"""The wait from a broken connection to an exit code, where the process has died."""
PLUGIN_FAILURES = ("Failed to load plugin", "Failed to execute general plugin", "Failed to apply")

Failure = TypeVar("Failure", bound=Exception)


class Server:
    """A server is SGLang behind a random API key. Every RuntimeError is one line, which names the log;
    the log's last lines are its note (`BaseException.add_note`).

    post() and stream() may be called from several threads.
    """

    def __init__(
        self,
        server_args: Mapping[str, Any],
        environment: Mapping[str, str],
        log_path: Path,
        patience: Patience | None = None,
    ) -> None:
        """Start nothing yet. `patience` limits calls without a limit of their own, by default to
        CONTROL_TIMEOUT_S each."""
        self._patience = patience or Patience(CONTROL_TIMEOUT_S, CONTROL_TIMEOUT_S)
        self._api_key = secrets.token_urlsafe(32)
        self.process = ServerProcess(
            {**server_args, "api_key": self._api_key}, environment, log_path
        )
        self.client: HttpClient | None = None
        self._request_numbers = itertools.count()
        self._losing = threading.Lock()
        self.loss: EngineLost | None = None
        """Why there is no server now, where it was not stopped."""

    def start(
        self,
        timeout_s: float,
        settings: Mapping[str, Any],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Block until the server answers; another port where the chosen one was just taken.

        `settings` are fields of ServerArgs that are new at each start. `meanwhile` is called again and
        again while the server starts, and may raise RuntimeError to give up. Raises RuntimeError where
        the server dies or is not ready in time; nothing is left running then.
        """
        with self._losing:  # another thread may still clear a lost one away
            self.loss = None
        self.process.server_args |= settings
        # The processes on other nodes were given the address too: mrl.collect.engine_nodes starts
        # all of them again.
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
        """Never given out before: two seconds after an answer SGLang aborts its requests by id once
        more. All are of one length: it aborts every request whose id starts with the given one."""
        return f"mrl-{next(self._request_numbers):012d}"

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> Any:
        """Post to the server and return the decoded answer; the default limit is learned from those
        before.

        Raises RuntimeError where the server refused, EngineLost where it died, hung up or did not
        answer in time.
        """
        limit_s = self._patience.limit_s(path) if timeout_s is None else timeout_s
        begun = time.monotonic()
        try:
            with self._watching():
                answer = self._running_client().post(path, body, timeout_s=limit_s)
            self._patience.note(path, time.monotonic() - begun)
            return answer
        except ServerError as error:
            where = f"its log is {self.process.log_path}"
            raise self._with_log(RuntimeError(f"{error}; {where}")) from None
        except TimeoutError:
            raise self.lost(f"no answer to POST {path} within {limit_s:g} s") from None
        except ConnectionError as error:
            self.check_alive(wait_s=REAP_S)  # It breaks a moment before it can be reaped.
            raise self.lost(f"the SGLang server hung up: {error}") from None

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """End the request of the block when one of the server's processes dies, or is stopped for
        `rollout.stall_timeout_s`.

        SGLang itself takes more than a minute to end without its detokenizer. The server is killed,
        which breaks the connection that the block waits for.
        """
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(WATCH_S):
                if self.process.dead_part():
                    self.process.kill()
                    return
                with suppress(EngineLost):  # the request of the block raises it
                    self._check_halted()
                    continue
                return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def stream(self, body: dict[str, Any]) -> EventStream:
        """POST /generate. Raises EngineLost if there is no server, or it does not accept the request in
        `rollout.stall_timeout_s`, and ConnectionError if it closes the connection."""
        limit_s = self._patience.least_s
        try:
            return self._running_client().stream("/generate", body, timeout_s=limit_s)
        except TimeoutError:
            raise self.lost(
                "the SGLang server hangs: it accepted no request in "
                f"rollout.stall_timeout_s={limit_s:g} s"
            ) from None

    def check_alive(self, wait_s: float = 0.0) -> None:
        """Raise EngineLost where a process of the server has ended, also in the next `wait_s`."""
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
        """Raise EngineLost if a process of the server is stopped for too long."""
        if part := self.process.halted_part(limit_s := self._patience.least_s):
            raise self.lost(
                f"the SGLang server's {part} is stopped (SIGSTOP) for "
                f"rollout.stall_timeout_s={limit_s:g} s"
            )

    def check_answers(self, timeout_s: float) -> None:
        """Raise EngineLost where the scheduler does not answer within `timeout_s`."""
        try:
            # Goes through the scheduler's loop, between two of its batches.
            self._running_client().get("/server_info", timeout_s=timeout_s)
        except TimeoutError:
            raise self.lost(
                f"the SGLang server hangs: its scheduler gave no sign for rollout.stall_timeout_s="
                f"{timeout_s:g} s"
            ) from None
        except OSError:
            self.check_alive(wait_s=REAP_S)

    def too_late(self, what: str) -> RuntimeError:
        """Return what to raise if a request has had no answer for too long, as `what` says.

        EngineLost if all schedulers are idle, as when the detokenizer hangs: the answer will never
        come. RunFailed if they are busy. Raises EngineLost if they do not respond.
        """
        if not self._num_requests():
            return self.lost(f"the SGLang server is idle but has not answered: {what}")
        return RunFailed(
            f"generate: {what}, and the engine is still working on it; raise "
            f"rollout.request_timeout_s, or ask for shorter answers or for fewer at a time; its log "
            f"is {self.process.log_path}"
        )

    def _num_requests(self) -> int:
        """Return how many requests the schedulers run or have queued."""
        try:
            _, text = self._running_client().get("/v1/loads", timeout_s=self._patience.least_s)
        except OSError as error:
            raise self.lost(f"the SGLang server hangs: {error}") from None
        loads = json.loads(text)["loads"]
        return sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in loads)

    def lost(self, what: str) -> EngineLost:
        """Clear away what is left of the server, and return what to raise. Of several threads that find
        it lost the first one does so."""
        with self._losing:
            if self.client is None and self.loss is not None:
                return self.loss
            return self._lose(what)

    def _lose(self, what: str) -> EngineLost:
        error = self._with_log(EngineLost(f"engine: {what}; {self.process.why()}"))
        self.loss = error  # before the rest: other threads ask meanwhile
        self.client = None
        self.process.stop()
        return error

    def _with_log(self, error: Failure) -> Failure:
        """Return the error with the last lines of the log, which a traceback of it shows."""
        error.add_note(self.process.log_tail())
        return error

    def _running_client(self) -> HttpClient:
        """Raises EngineLost where another thread has found the server lost."""
        client = self.client
        if client is None:
            raise self.loss or EngineLost("engine: the SGLang server was stopped")
        return client

    def room(self) -> tuple[int, int]:
        """Return how many tokens the KV cache holds and how many requests can run at once, over all
        replicas of the attention."""
        states = self._states()
        return (
            sum(int(state["memory_usage"]["token_capacity"]) for state in states),
            sum(int(state["effective_max_running_requests_per_dp"]) for state in states),
        )

    def cache_of_one(self) -> tuple[int, int]:
        """Return how many tokens the KV cache of the smallest replica holds, and the size of a page."""
        states = self._states()
        return (
            min(int(state["memory_usage"]["token_capacity"]) for state in states),
            max(int(state.get("page_size") or 1) for state in states),
        )

    def _states(self) -> list[dict[str, Any]]:
        _, text = self._running_client().get("/server_info", timeout_s=CONTROL_TIMEOUT_S)
        return json.loads(text)["internal_states"]

    def offers(self, path: str) -> bool:
        """Whether the server knows a POST endpoint; a GET tells without doing it."""
        status, _ = self._running_client().get(path, timeout_s=CONTROL_TIMEOUT_S)
        return status != 404

    def _wait_until_ready(
        self, timeout_s: float, meanwhile: Callable[[], None] | None
    ) -> HttpClient:
        deadline, next_look = time.monotonic() + timeout_s, 0.0
        client = HttpClient(self.process.port, self._api_key)
        while not _answers(client, "/model_info"):
            self._check_start()
            if time.monotonic() > next_look:
                if self.process.dead_part():
                    self._end_start()
                self._refuse_halted()
                self.process.note_parts()
                self.process.note_shared_memory()
                next_look = time.monotonic() + WATCH_S
            if time.monotonic() > deadline:
                text = (
                    f"engine: the SGLang server is not ready after rollout.start_timeout_s="
                    f"{timeout_s:g} s; {self.process.why()}"
                )
                raise self._with_log(EngineGone(text))
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
        """Raise EngineGone where the server has ended."""
        code = self.process.exit_code()
        if code is not None:
            text = f"engine: the SGLang server died while starting, {self.process.ending(code)}"
            raise self._with_log(EngineGone(text))

    def _refuse_halted(self) -> None:
        """Raise EngineGone if one of the starting processes is stopped for too long."""
        if part := self.process.halted_part(limit_s := self._patience.least_s):
            text = (
                f"engine: the SGLang server's {part} is stopped (SIGSTOP) while it starts, for "
                f"rollout.stall_timeout_s={limit_s:g} s; {self.process.why()}"
            )
            raise self._with_log(EngineGone(text))

    def _end_start(self) -> None:
        """Raise EngineGone: one of its processes has ended. SGLang has a moment to say why."""
        deadline = time.monotonic() + REAP_S
        while time.monotonic() < deadline:
            self._check_start()
            time.sleep(READY_POLL_S)
        text = f"engine: the SGLang server's {self.process.dead_part()} died while starting"
        raise self._with_log(EngineGone(f"{text}; {self.process.why()}"))


def _answers(client: HttpClient, path: str) -> bool:
    try:
        status, _ = client.get(path, timeout_s=5.0)
    except OSError:
        return False
    return status == 200

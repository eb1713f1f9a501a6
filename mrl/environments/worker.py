"""Run the user's environments in a separate process that exchanges lines of JSON with the runner.

Request                                               Reply
{"reset": episode, "prompt", "seed", "columns"}       {"observation"}
{"step": episode, "action"}                           {"observation", "reward", "done"}
{"end": episode}                                      {}
{"cancel": number of a request}                       {"cancelled": true}, to that request

A reply may also be `{"error": text}`, after which the episode must be ended. Requests are taken in the
order in which they come, but many of them may be unanswered at a time. A method of an environment that
is not `async` occupies the process until it returns; `async` ones of several episodes run concurrently
in one event loop. As soon as a call has turned out to be `async`, the process sends `{"awaits": true}`
with the number of the request; while there are such calls, it sends `{"begun": true}` before others.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mrl.environments.base import Environment, Observation, StepResult, resolve_environment
from mrl.errors import InputError
from mrl.system.json_text import unpaired_surrogate
from mrl.system.worker_connection import WorkerConnection, describe


def checked_observation(observation: Any) -> Observation:
    """Return the observation if it is a string, or a list of messages with role and content.

    Raises ValueError otherwise, and also for a string with an unpaired surrogate, which tokenizers
    cannot encode.
    """
    if isinstance(observation, (str, list)) and (half := unpaired_surrogate(observation)):
        raise ValueError(
            f"observation contains {half}, half of a surrogate pair and not a character; remove it, "
            "for example with text.encode(errors='replace').decode()"
        )
    if isinstance(observation, str):
        return observation
    if not isinstance(observation, list) or not observation:
        raise ValueError(f"observation: got {observation!r}, expected text or a list of messages")
    for message in observation:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(
                f"observation: got the message {message!r}, expected `role` and `content` as text"
            )
    return observation


def checked_result(result: Any) -> dict[str, Any]:
    """Return the reply to a step. Raises ValueError unless `result` is a valid StepResult."""
    if not isinstance(result, StepResult):
        raise ValueError(f"step() returned {type(result).__name__}, expected a StepResult")
    if isinstance(result.reward, (str, bytes)) or not hasattr(result.reward, "__float__"):
        raise ValueError(f"reward is {result.reward!r}, expected a number")
    reward = float(result.reward)
    if not math.isfinite(reward) or abs(reward) > 3.4e38:
        raise ValueError(f"reward is {reward}, expected a finite number")
    if not hasattr(result.done, "__bool__"):  # the text "False" would end the episode
        raise ValueError(f"done is {result.done!r:.200}, expected True or False")
    if result.done:
        return {"observation": None, "reward": reward, "done": True}
    if result.observation is None:
        raise ValueError("observation is None and done is False, expected something to read next")
    return {
        "observation": checked_observation(result.observation),
        "reward": reward,
        "done": False,
    }


class Episodes:
    """The environments of this process, one per episode number."""

    def __init__(
        self,
        factory: Callable[..., Environment],
        arguments: dict[str, Any],
        send: Callable[[dict[str, Any], int], None],
    ) -> None:
        """`send(message, number)` sends a message about the request of this number."""
        self._factory = factory
        self._arguments = arguments
        self._send = send
        self._loop = asyncio.new_event_loop()
        """One event loop for all calls, so that clients opened by an environment stay usable."""
        self._requests: deque[tuple[int, dict[str, Any]]] = deque()
        self._live: dict[int, Environment] = {}
        self._running: dict[int, tuple[int, asyncio.Task[None]]] = {}
        """By the number of a request: its episode, and the task that will answer it."""
        self._cancelled: dict[int, asyncio.Task[None]] = {}
        """Tasks that were cancelled and may still run, by episode. They answer nothing."""

    def make(self) -> Environment:
        return self._factory(**self._arguments)

    def serve(self, connection: WorkerConnection) -> None:
        """Answer requests until the parent process closes the connection."""
        asyncio.set_event_loop(self._loop)
        has_ended = False

        def read() -> None:
            nonlocal has_ended
            requests = connection.receive()
            has_ended = requests is None
            for number, request in requests or ():
                if "cancel" in request:
                    self._cancel(request["cancel"])
                else:
                    self._requests.append((number, request))
            self._loop.stop()

        self._loop.add_reader(connection, read)
        while not has_ended:
            self._run_loop()
            while self._requests and not has_ended:
                # Outside of the loop, because code that is not async may run a loop of its own.
                self._take(*self._requests.popleft())
                if self._running or self._cancelled:
                    self._loop.call_soon(self._loop.stop)
                    self._run_loop()  # once, so that what awaits advances, too

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        except SystemExit as error:  # of a task that the user's code has started
            print(f"environment: a task of it raised {describe(error)}", file=sys.stderr)

    def _take(self, number: int, request: dict[str, Any]) -> None:
        """Answer a request (see the module's docstring), now or later. Its number is `number`."""
        if "end" in request:
            self._begin(number, request["end"], partial(self._close, request["end"]), _nothing)
        elif "reset" in request:
            self._begin(number, request["reset"], partial(self._reset, request), _reset_reply)
        else:
            self._begin(number, request["step"], partial(self._step, request), checked_result)

    def _step(self, request: dict[str, Any]) -> Any:
        return self._live[request["step"]].step(request["action"])

    def _reset(self, request: dict[str, Any]) -> Any:
        environment = self._live[request["reset"]] = self.make()
        return environment.reset(request["prompt"], request["seed"], **request["columns"])

    def _begin(
        self,
        number: int,
        episode: int,
        call: Callable[[], Any],
        check: Callable[[Any], dict[str, Any]],
    ) -> None:
        """Call user code. Answer with `check(result)`, at once or when the result can be awaited."""
        if self._running or self._cancelled:
            self._send({"begun": True}, number)
        try:
            result = call()
            if inspect.isawaitable(result):
                self._send({"awaits": True}, number)
                task = self._loop.create_task(self._await(number, result, check))
                self._running[number] = episode, task
                return
            reply = _sendable(check(result))
        except (Exception, SystemExit) as error:  # user code may raise anything
            reply = {"error": describe(error)}
        self._send(reply, number)

    async def _await(
        self, number: int, result: Awaitable[Any], check: Callable[[Any], dict[str, Any]]
    ) -> None:
        try:
            reply = _sendable(check(await result))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            reply = {"error": describe(error)}
        if self._running.pop(number, None) is not None:
            self._send(reply, number)

    def _cancel(self, number: int) -> None:
        """Cancel the task that would answer request `number`, unless it has just done so."""
        if (found := self._running.pop(number, None)) is None:
            return
        episode, task = found
        task.cancel()
        self._cancelled[episode] = task
        self._send({"cancelled": True}, number)

    def _close(self, episode: int) -> Awaitable[None] | None:
        """Forget an episode and call close() on its environment, if it has one.

        If close() raises, the error is only printed, because the episode already has a result or an
        error.
        """
        environment, task = self._live.pop(episode, None), self._cancelled.pop(episode, None)
        if task is not None and not task.done():
            return self._close_after(task, environment)
        with _printing(environment):
            closed = _closed(environment)
            return None if closed is None else self._finish_closing(environment, closed)
        return None

    async def _close_after(self, task: asyncio.Task[None], environment: Any) -> None:
        """Wait until a cancelled task has ended, and close its environment."""
        await asyncio.wait([task])
        with _printing(environment):
            if (closed := _closed(environment)) is not None:
                await closed

    async def _finish_closing(self, environment: Any, closed: Awaitable[Any]) -> None:
        with _printing(environment):
            await closed


def _closed(environment: Any) -> Awaitable[Any] | None:
    """Call close() on an environment, if it has one. Return what must be awaited, if anything."""
    close = getattr(environment, "close", None)
    result = None if close is None else close()
    return result if inspect.isawaitable(result) else None


@contextmanager
def _printing(environment: Any) -> Iterator[None]:
    """Print an error of close() instead of raising it."""
    try:
        yield
    except BaseException as error:  # user code may raise anything
        name = type(environment).__name__
        print(f"environment {name}: close() failed: {describe(error)}", file=sys.stderr)


def _sendable(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the reply. Raises TypeError or ValueError if it cannot be sent; the episode then fails."""
    json.dumps(reply)
    return reply


def _reset_reply(observation: Any) -> dict[str, Any]:
    return {"observation": None if observation is None else checked_observation(observation)}


def _nothing(result: None) -> dict[str, Any]:
    return {}


def serve(spec: str, arguments: str, connection: WorkerConnection) -> None:
    """Answer requests until the parent process closes the connection.

    If the environment cannot be created, this sends `{"input_error": text}` instead and returns.
    """
    try:
        episodes = Episodes(resolve_environment(spec), json.loads(arguments), connection.send)
    except InputError as error:
        connection.send({"input_error": str(error)})
        return
    try:
        episodes.make()  # wrong arguments would fail every episode
    except (Exception, SystemExit) as error:
        line = (
            f"environment {spec!r} cannot be created with arguments {arguments}: {describe(error)}"
        )
        connection.send({"input_error": line})
        return
    connection.send({"ready": True})
    episodes.serve(connection)


def main() -> None:
    spec, parent_pid, arguments = sys.argv[1:]
    serve(spec, arguments, WorkerConnection(f"environment {spec!r}", int(parent_pid)))


if __name__ == "__main__":
    main()

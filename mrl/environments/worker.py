"""Run the user's environments in a separate process that exchanges lines of JSON with the runner.

Request                                               Reply
{"reset": episode, "prompt", "seed", "columns"}       {"observation"}
{"step": episode, "action"}                           {"observation", "reward", "done"}
{"end": [episodes]}                                   {}

A reply may also be `{"error": text}`, after which the episode is over.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
from collections.abc import Callable
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

    def __init__(self, factory: Callable[..., Environment], arguments: dict[str, Any]) -> None:
        self._factory = factory
        self._arguments = arguments
        self._live: dict[int, Environment] = {}
        # One event loop for all calls, so that clients opened by an environment stay usable.
        self._loop = asyncio.Runner()

    def make(self) -> Environment:
        return self._factory(**self._arguments)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of the runner (see the module's docstring).

        An exception from the environment ends its episode and is re-raised.
        """
        if "end" in request:
            for number in request["end"]:
                self._end(number)
            return {}
        number = request["reset"] if "reset" in request else request["step"]
        try:
            reply = self._reset(request) if "reset" in request else self._step(request)
            json.dumps(reply)  # an answer that is not JSON fails the episode
        except BaseException:
            self._end(number)
            raise
        if reply.get("done"):
            self._end(number)
        return reply

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        environment = self._live[request["reset"]] = self.make()
        observation = self._finish(
            environment.reset(request["prompt"], request["seed"], **request["columns"])
        )
        return {"observation": None if observation is None else checked_observation(observation)}

    def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        environment = self._live[request["step"]]
        return checked_result(self._finish(environment.step(request["action"])))

    def _end(self, number: int) -> None:
        """Forget an episode and call close() on its environment.

        If close() raises, the error is only printed, because the episode already has a result or an
        error.
        """
        environment = self._live.pop(number, None)
        try:
            close = getattr(environment, "close", None)
            if close is not None:
                self._finish(close())
        except BaseException as error:  # user code may raise anything
            name = type(environment).__name__
            print(f"environment {name}: close() failed: {describe(error)}", file=sys.stderr)

    def _finish(self, result: Any) -> Any:
        return self._loop.run(_await(result)) if inspect.isawaitable(result) else result


async def _await(result: Any) -> Any:
    return await result


def serve(spec: str, arguments: str, connection: WorkerConnection) -> None:
    """Answer requests until the parent process closes the connection.

    If the environment cannot be created, this sends `{"input_error": text}` instead and returns.
    """
    try:
        episodes = Episodes(resolve_environment(spec), json.loads(arguments))
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
    for request in connection.requests():
        try:
            reply = episodes.answer(request)
        except (Exception, SystemExit) as error:  # user code may raise anything
            reply = {"error": describe(error)}
        connection.send(reply)


def main() -> None:
    spec, parent_pid, arguments = sys.argv[1:]
    serve(spec, arguments, WorkerConnection(f"environment {spec!r}", int(parent_pid)))


if __name__ == "__main__":
    main()

"""The worker process that runs a reward function and communicates in JSON lines (no pickle).

The first line of output is `{"ready": true}` or `{"input_error": text}`. Each request `{"prompts",
"completions", "columns"}` is answered by `{"rewards": [...]}`, or by `{"error", "broken", "kind"}`
if the call fails. `error` is a message. `broken` is true if scoring fewer samples at a time would
not help. `kind` is the kind of failure (`mrl.rewards.base`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import sys
from types import SimpleNamespace
from typing import Any

from mrl.errors import InputError
from mrl.rewards.base import (
    BrokenReward,
    Entry,
    NotANumber,
    NotFinite,
    RewardError,
    RewardFunction,
    total_of,
)
from mrl.rewards.resolve import resolve_reward
from mrl.system.worker_connection import WorkerConnection, describe

PART_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")
MAX_PARTS = 32
"""Maximum number of parts of a reward; each is a metric of the run."""


def call_reward(function: RewardFunction, request: dict[str, Any]) -> list[Entry]:
    """Call the function once, and return one entry per sample.

    An entry is a Python float, a dict of named floats, or None. Raises BrokenReward if the result
    is not a list (or another iterable) with one entry per completion, and NotANumber or NotFinite
    for an invalid entry.
    """
    columns = request["columns"]
    if "step" in request and getattr(function, "takes_trainer_state", False):
        columns = {**columns, "trainer_state": SimpleNamespace(global_step=request["step"])}
    result = function(request["prompts"], request["completions"], **columns)
    if inspect.isawaitable(result):
        result = asyncio.run(_await(result))
    if isinstance(result, (str, bytes, dict)) or not hasattr(result, "__iter__"):
        raise BrokenReward(f"returned {type(result).__name__}, expected a list of numbers or None")
    rewards = list(result)
    if len(rewards) != len(request["completions"]):
        raise BrokenReward(
            f"returned {len(rewards)} rewards for {len(request['completions'])} completions"
        )
    return [_entry(reward, f"reward {index}") for index, reward in enumerate(rewards)]


def _entry(reward: Any, what: str) -> Entry:
    if not isinstance(reward, dict):
        return _number(reward, what)
    for name in reward:
        if not isinstance(name, str) or not PART_NAME.fullmatch(name):
            raise NotANumber(
                f"{what} has a part {name!r}, expected a name like {PART_NAME.pattern}"
            )
    if not 0 < len(reward) <= MAX_PARTS:
        raise NotANumber(f"{what} has {len(reward)} parts, expected 1 to {MAX_PARTS}")
    parts = {name: _number(value, f"{what}[{name!r}]") for name, value in reward.items()}
    _number(total_of(parts), f"the sum of the parts of {what}")
    return parts


async def _await(result: Any) -> Any:
    return await result


def _number(reward: Any, what: str) -> float | None:
    if reward is None:
        return None
    if isinstance(reward, (str, bytes)) or not hasattr(reward, "__float__"):
        raise NotANumber(f"{what} is {reward!r}, expected a number or None")
    try:
        number = float(reward)
    except OverflowError:  # an integer with hundreds of digits
        raise NotFinite(f"{what} is too large, expected a finite number") from None
    if not math.isfinite(number) or abs(number) > 3.4e38:
        raise NotFinite(f"{what} is {number}, expected a finite number")
    return number


def serve(spec: str, timeout_s: float, connection: WorkerConnection) -> None:
    """Load the reward function, and answer requests until the process that sends them closes the
    connection.

    `timeout_s` is the time limit of one call to a reward server.
    """
    try:
        function = resolve_reward(spec, timeout_s)
        start_worker = getattr(function, "start_worker", None)
        if callable(start_worker):
            start_worker()
    except InputError as error:
        connection.send({"input_error": str(error)})
        return
    except Exception as error:  # from user code, or from loading a model
        connection.send({"input_error": f"reward {spec!r} cannot be started: {describe(error)}"})
        return
    connection.send({"ready": True})
    for request in connection.requests():
        connection.send(_answer(function, request))


def _answer(function: RewardFunction, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"rewards": call_reward(function, request)}
    except (Exception, SystemExit) as error:  # user code may raise anything
        broken = isinstance(error, BrokenReward)
        kind = error.kind if isinstance(error, RewardError) else RewardError.kind
        return {"error": describe(error), "broken": broken, "kind": kind}


def main() -> None:
    spec, parent, timeout_s = sys.argv[1:]
    serve(spec, float(timeout_s), WorkerConnection(f"reward {spec!r}", int(parent)))


if __name__ == "__main__":
    main()

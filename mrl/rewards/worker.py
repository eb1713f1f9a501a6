"""The process that runs the user's reward function: JSON lines in, JSON lines out, no pickle.

First line out: `{"ready": true}` or `{"input_error": text}`. Then per request
`{"prompts", "completions", "columns"}` one `{"rewards": [...]}` or `{"error": text}`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
from typing import Any, BinaryIO

from mrl.errors import InputError
from mrl.processes import describe, send, worker_pipes
from mrl.rewards.base import RewardFunction, resolve_reward


class BrokenReward(ValueError):
    """The function did not answer for each completion: scoring fewer at a time would hide it."""


def call_reward(function: RewardFunction, request: dict[str, Any]) -> list[float | None]:
    """Call once and check what comes back.

    Raises BrokenReward on a wrong type or length, ValueError on a wrong entry.
    """
    result = function(request["prompts"], request["completions"], **request["columns"])
    if inspect.isawaitable(result):
        result = asyncio.run(_await(result))
    if isinstance(result, (str, bytes)) or not hasattr(result, "__iter__"):
        raise BrokenReward(f"returned {type(result).__name__}, expected a list of numbers or None")
    rewards = list(result)
    if len(rewards) != len(request["completions"]):
        raise BrokenReward(
            f"returned {len(rewards)} rewards for {len(request['completions'])} completions"
        )
    return [_number(reward, index) for index, reward in enumerate(rewards)]


async def _await(result: Any) -> Any:
    return await result


def _number(reward: Any, index: int) -> float | None:
    if reward is None:
        return None
    if isinstance(reward, (str, bytes)) or not hasattr(reward, "__float__"):
        raise ValueError(f"reward {index} is {reward!r}, expected a number or None")
    number = float(reward)
    if not math.isfinite(number) or abs(number) > 3.4e38:
        raise ValueError(f"reward {index} is {number}, expected a finite number")
    return number


def serve(spec: str, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until the other side closes."""
    try:
        function = resolve_reward(spec)
    except InputError as error:
        send(replies, {"input_error": str(error)})
        return
    send(replies, {"ready": True})
    for line in requests:
        try:
            send(replies, {"rewards": call_reward(function, json.loads(line))})
        except (Exception, SystemExit) as error:  # user code: anything can happen
            broken = isinstance(error, BrokenReward)
            send(replies, {"error": describe(error), "broken": broken})


def main() -> None:
    serve(sys.argv[1], *worker_pipes(parent=int(sys.argv[2])))


if __name__ == "__main__":
    main()

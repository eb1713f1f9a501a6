"""Runs the user's reward function in a process: JSON lines in, JSON lines out, no pickle.

The first line out is `{"ready": true}` or `{"input_error": text}`. Each request
`{"prompts", "completions", "columns"}` is answered by `{"rewards": [...]}` or `{"error", "broken",
"kind"}`: a text, whether to score fewer at a time is useless, and the sort of fault.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
from typing import Any, BinaryIO

from mrl.errors import InputError
from mrl.rewards.base import (
    BrokenReward,
    NotANumber,
    NotFinite,
    RewardError,
    RewardFunction,
)
from mrl.rewards.resolve import resolve_reward
from mrl.system.processes import describe, send, worker_pipes


def call_reward(function: RewardFunction, request: dict[str, Any]) -> list[float | None]:
    """Call once and check what comes back.

    Raises BrokenReward on a wrong type or length, NotANumber or NotFinite on a wrong entry.
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
        raise NotANumber(f"reward {index} is {reward!r}, expected a number or None")
    number = float(reward)
    if not math.isfinite(number) or abs(number) > 3.4e38:
        raise NotFinite(f"reward {index} is {number}, expected a finite number")
    return number


def serve(spec: str, timeout_s: float, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until the other side closes; a call may take `timeout_s`."""
    try:
        function = resolve_reward(spec, timeout_s)
        start_worker = getattr(function, "start_worker", None)
        if callable(start_worker):
            start_worker()
    except InputError as error:
        send(replies, {"input_error": str(error)})
        return
    except Exception as error:  # user code, and what reads a model's files
        send(replies, {"input_error": f"reward {spec!r} does not start: {describe(error)}"})
        return
    send(replies, {"ready": True})
    for line in requests:
        try:
            send(replies, {"rewards": call_reward(function, json.loads(line))})
        except (Exception, SystemExit) as error:  # user code: anything can happen
            broken = isinstance(error, BrokenReward)
            kind = error.kind if isinstance(error, RewardError) else RewardError.kind
            send(replies, {"error": describe(error), "broken": broken, "kind": kind})


def main() -> None:
    spec, parent, timeout_s = sys.argv[1:]
    serve(spec, float(timeout_s), *worker_pipes(int(parent)))


if __name__ == "__main__":
    main()

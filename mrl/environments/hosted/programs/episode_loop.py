"""What every worker program does: it reads requests from its standard input and plays many episodes
at a time, in one event loop. It imports only the standard library.

The first line is the specification of the worker. Then come

Request                                                   Reply
{"play": number, "given", "base_url", "key", "model"}     {"done": number, "reward", "answer", "parts"}
{"cancel": number}                                        {"done": number, "error"}
{"ping": number}                                          {"pong": number}

The worker's own first line is `{"ready": true}` or `{"input_error": text}`. A reply may also be
`{"done": number, "error": text}`; the episode is then masked. The worker ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

MAX_LINE_BYTES = 64 << 20
MAX_REWARD = 3.4e38
"""The largest reward that float32 holds."""


class BadInput(Exception):
    """The worker cannot work as it was specified. The message is shown to the user."""


class EpisodeFailed(Exception):
    """An episode cannot be played to its end, and is masked. The message says why."""


@dataclass(frozen=True)
class Episode:
    """One episode that a worker has to play."""

    number: int
    given: dict[str, Any]
    """The row of the data, and `seed`."""
    base_url: str
    """The endpoint, where the policy answers."""
    key: str
    model: str


@dataclass(frozen=True)
class Played:
    """How an episode ended."""

    reward: float | None = None
    """The reward; None if mrl has to compute it from `answer`."""
    answer: str | None = None
    parts: dict[str, float] | None = None
    """Numbers that are logged beside the reward."""


Play = Callable[[Episode], Awaitable[Played]]
Open = Callable[[dict[str, Any]], AbstractAsyncContextManager[Play]]
"""Takes the specification of a worker, and yields the function that plays its episodes."""


class Channel:
    """The worker's standard input and output, which user code then no longer has."""

    def __init__(self) -> None:
        self.requests = os.fdopen(os.dup(0), "rb")
        self._replies = os.dup(1)
        self._pid = os.getpid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, Linux kills the worker before the trainer

    def send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # a process that user code forked, and that came back here
            os._exit(1)
        left = memoryview(json.dumps(message).encode() + b"\n")
        while left:
            left = left[os.write(self._replies, left) :]


def describe(error: BaseException) -> str:
    """Describe an error in one line of bounded length."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    try:
        text = " ".join(str(error).split())[:1000]
    except Exception as inner:  # user code again
        text = f"its str() raises {type(inner).__name__}"
    named = text if isinstance(error, (BadInput, EpisodeFailed)) else ""
    shown = named or f"{type(error).__name__}: {text}"
    return shown.encode(errors="backslashreplace").decode()


def run(open_worker: Open) -> None:
    """Play episodes as `open_worker` does, until the input ends."""
    channel = Channel()
    spec = json.loads(channel.requests.readline() or b"{}")
    try:
        asyncio.run(_serve(open_worker, spec, channel))
    except BadInput as error:
        channel.send({"input_error": describe(error)})


async def _serve(open_worker: Open, spec: dict[str, Any], channel: Channel) -> None:
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), channel.requests
    )
    playing: dict[int, asyncio.Task[None]] = {}
    async with AsyncExitStack() as stack:
        try:
            play = await stack.enter_async_context(open_worker(spec))
        except Exception as error:  # user code may raise anything
            raise BadInput(describe(error)) from error
        channel.send({"ready": True})
        while line := await lines.readline():
            message = json.loads(line)
            if "ping" in message:
                channel.send({"pong": message["ping"]})
            elif "cancel" in message:
                if (task := playing.get(message["cancel"])) is not None:
                    task.cancel()
            else:
                episode = Episode(message.pop("play"), **message)
                task = asyncio.create_task(_play(play, episode, channel))
                playing[episode.number] = task
                task.add_done_callback(lambda _, number=episode.number: playing.pop(number))
        for task in list(playing.values()):
            task.cancel()
        await asyncio.gather(*playing.values(), return_exceptions=True)


async def _play(play: Play, episode: Episode, channel: Channel) -> None:
    try:
        played = await play(episode)
        reply = {
            "reward": None if played.reward is None else checked_reward(played.reward),
            "answer": played.answer,
            "parts": {k: v for k, v in (played.parts or {}).items() if abs(v) <= MAX_REWARD},
        }
        json.dumps(reply)
    except asyncio.CancelledError:
        reply = {"error": "cancelled"}
    except BaseException as error:  # user code may raise anything
        reply = {"error": describe(error)}
    channel.send({"done": episode.number, **reply})


def checked_reward(value: Any) -> float:
    """Return a reward as a finite float. Raises EpisodeFailed if it is none."""
    try:
        reward = float(value)
    except (TypeError, ValueError):
        raise EpisodeFailed(f"the reward is {value!r:.200}, expected a number") from None
    if not math.isfinite(reward) or abs(reward) > MAX_REWARD:
        raise EpisodeFailed(f"the reward is {reward}, expected a finite number")
    return reward


def answer_once(make: Callable[[dict[str, Any]], Any]) -> None:
    """Write the lines that `make` yields for the specification, then `{"end": true}`, and end."""
    channel = Channel()
    spec = json.loads(channel.requests.readline() or b"{}")
    try:
        for message in make(spec):
            channel.send(message)
    except Exception as error:  # user code may raise anything
        channel.send({"input_error": describe(error)})
    else:
        channel.send({"end": True})


def main(open_worker: Open, once: dict[str, Callable[[dict[str, Any]], Any]]) -> None:
    """Run the worker, or answer the question that the first argument names."""
    question = sys.argv[1] if len(sys.argv) > 1 else ""
    if question:
        answer_once(once[question])
    else:
        run(open_worker)

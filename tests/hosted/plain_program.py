"""A worker program whose environment does what its row says, and needs only Python."""

import asyncio
import os
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "mrl/environments/hosted/programs"))

from episode_loop import BadInput, EpisodeFailed, Played, main


class Wordless(Exception):
    def __str__(self):
        raise KeyError


@asynccontextmanager
async def open_plain(spec):
    if "refuses" in spec:
        raise BadInput(spec["refuses"])
    if "raises" in spec:
        raise KeyError(spec["raises"])
    if "exits" in spec:
        print("last words", file=sys.stderr)
        os._exit(spec["exits"])
    if "slow_if" in spec and Path(spec["slow_if"]).exists():
        time.sleep(60)
    played = 0

    async def play(episode):
        nonlocal played
        played += 1
        number = played
        kind = episode.given["kind"]
        print("what user code prints")
        if kind == "raises":
            raise ValueError("on\npurpose")
        if kind == "wordless":
            raise Wordless
        if kind == "gives up":
            raise EpisodeFailed("there is no more")
        if kind == "exits":
            raise SystemExit(3)
        if kind == "dies":
            print("last words", file=sys.stderr, flush=True)
            os._exit(4)
        if kind == "waits":
            await asyncio.sleep(episode.given.get("s", 600))
        if kind == "blocks":
            time.sleep(episode.given.get("s", 600))
        if kind == "stays":
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(600)
        if kind == "forks" and os.fork() == 0:
            return Played(100.0)
        if kind == "answers":
            return Played(answer="said", parts={"a": 1.0, "none": float("nan"), "huge": -1e39})
        if kind == "lies":
            return Played(float(episode.given["reward"]))
        return Played(float(number), parts={"length": float(len(episode.key))})

    yield play


def counted(spec):
    for number in range(spec["count"]):
        yield {"number": number}
    if "raises" in spec:
        raise ValueError(spec["raises"])


if __name__ == "__main__":
    main(open_plain, {"count": counted})

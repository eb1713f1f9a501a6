"""The SGLang engine that dies once at a boundary of its life: `rollout.engine=tests.adversary.dying`.

`MRL_TEST_DEATH` is BOUNDARY:NUMBER:MARK: the engine is killed (SIGKILL to all of its processes) when it
comes to the boundary for the NUMBER-th time, and the file MARK says so, so that it dies once only,
whoever comes there next. A service makes its own engines: `python -m tests.adversary.dying serve ...`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from mrl.cli import main
from mrl.engines.base import Completion
from mrl.engines.sglang.connection import ServerConnection
from mrl.engines.sglang.endpoint import SGLangEndpoint
from mrl.engines.sglang.engine import Engine
from mrl.engines.sglang.server import SGLangServer
from mrl.types import WeightBucket

__all__ = ["Engine"]
VARIABLE = "MRL_TEST_DEATH"
BOUNDARIES = {
    "started": "the server has started, and nothing was asked of it",
    "wake": "it is told to take memory back",
    "awake": "it has taken memory back",
    "sync": "weights are about to come",
    "within sync": "the first bucket of weights has come",
    "synced": "all weights have come",
    "generate": "requests are about to come",
    "generating": "the first completion has come",
    "sleep": "it is told to give memory back",
    "asleep": "it has given memory back",
}
_counts: dict[str, int] = {}


def at(boundary: str, connection: ServerConnection) -> None:
    """Kill the engine where its time has come."""
    wanted, number, mark = os.environ[VARIABLE].split(":", 2)
    process_id = connection.process.pid
    if boundary != wanted or process_id is None:
        return
    _counts[boundary] = _counts.get(boundary, 0) + 1
    if _counts[boundary] < int(number):
        return
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return
    server = psutil.Process(process_id)
    for each in (server, *server.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def plant() -> None:
    """Look at every boundary, in this process and in those that are forked from it."""
    warm_up, wake, sleep = SGLangServer._warm_up, SGLangServer.wake, SGLangServer.sleep
    update, generate = SGLangEndpoint.update_weights, SGLangEndpoint.generate

    def warmed_up(self: SGLangServer) -> None:
        at("started", self.connection)
        warm_up(self)

    def woken(self: SGLangServer, *args: Any, **more: Any) -> None:
        at("wake", self.connection)
        wake(self, *args, **more)
        at("awake", self.connection)

    def put_to_sleep(self: SGLangServer, *args: Any, **more: Any) -> None:
        at("sleep", self.connection)
        sleep(self, *args, **more)
        at("asleep", self.connection)

    def watched(
        buckets: Iterable[WeightBucket], connection: ServerConnection
    ) -> Iterator[WeightBucket]:
        for number, bucket in enumerate(buckets):
            if number:
                at("within sync", connection)
            yield bucket
            if not number:
                at("within sync", connection)

    def updated(self: SGLangEndpoint, buckets: Iterable[WeightBucket], version: int) -> Any:
        at("sync", self._core.connection)
        report = update(self, watched(buckets, self._core.connection), version)
        at("synced", self._core.connection)
        return report

    def generated(self: SGLangEndpoint, *args: Any, **more: Any) -> Iterator[Completion]:
        at("generate", self._core.connection)
        return completions(self, generate(self, *args, **more))

    def completions(self: SGLangEndpoint, found: Iterator[Completion]) -> Iterator[Completion]:
        for number, each in enumerate(found):
            yield each
            if not number:
                at("generating", self._core.connection)

    SGLangServer._warm_up = warmed_up  # pyright: ignore
    SGLangServer.wake, SGLangServer.sleep = woken, put_to_sleep  # pyright: ignore
    SGLangEndpoint.update_weights, SGLangEndpoint.generate = updated, generated  # pyright: ignore


if VARIABLE in os.environ:
    plant()
if __name__ == "__main__":
    main(sys.argv[1:])

"""A free worker whose engine dies around an interrupting update, without a real engine."""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
import types
from typing import Any, cast

import pytest

from mrl.disaggregated.activity import ActivityLog
from mrl.disaggregated.engine_place import Restarts
from mrl.disaggregated.free_worker import FreeWorker, _Held
from mrl.disaggregated.wire import Wire
from mrl.disaggregated.worker import Event, Worker, _Measured
from mrl.errors import EngineGone
from mrl.rollout.base import EngineLost
from tests.waiting import wait_until


class _DeadEngine:
    """Every call finds that the server has died."""

    num_pauses = 0

    def pause(self, mode: str) -> None:
        self.num_pauses += 1
        raise EngineLost("pause: the engine is stopped")


class _Worker(FreeWorker):
    """Has one lease that runs, and newer weights that are about to come."""

    def __init__(self) -> None:
        self._events, self._work, self._staged, self._lost = queue.SimpleQueue(), {}, [], []
        self._interrupts, self._serves_adapter, self._pause_mode = True, False, "in_place"
        self._engine, self._activity = cast(Any, _DeadEngine()), ActivityLog("start")
        self._version, self._held, self._scored, self._asked = 3, None, set(), {"most": 4}
        self._has_lost_engine, self._most = False, 4
        self._wire = cast(Any, types.SimpleNamespace(send=lambda *frame: None))
        self._running = {"s:0": _Held("s:0", cast(Any, None), None)}
        self.replaced: list[int] = []
        self.num_finished = 0
        self._place = cast(Any, types.SimpleNamespace(begin_batch=self._count))

    def _count(self) -> None:
        self.num_finished += 1

    def _replace_engine(self) -> None:
        self.replaced.append(len(self._lost))
        self._lost, self._staged, self._has_lost_engine = [], [], False


@pytest.mark.parametrize("is_whole", [False, True], ids=["generating", "scoring"])
def test_an_engine_that_dies_before_an_interrupting_update_is_replaced(is_whole: bool) -> None:
    worker = _Worker()
    thread = threading.Thread(target=worker._heed_events, daemon=True)
    thread.start()
    worker._events.put(Event(staging=cast(Any, types.SimpleNamespace(version=4))))
    wait_until(lambda: worker._engine.num_pauses > 0)
    held = None if is_whole else worker._running["s:0"]  # a lease that scores misses nothing
    worker._events.put(Event({"type": "over", "lease_id": "s:0", "held": held}))
    worker._events.put(Event({"type": "stop"}))
    thread.join(10)
    assert not thread.is_alive(), "the main thread spins"
    assert worker.replaced == [0 if is_whole else 1]
    assert worker._engine.num_pauses == 1
    assert worker.num_finished == is_whole  # the losses of engines count from there


def test_engines_that_are_lost_without_a_finished_group_between_are_counted() -> None:
    """A prompt that kills every engine ends the run, instead of starting engines for ever."""
    worker = cast(Any, FreeWorker.__new__(FreeWorker))
    restarts = Restarts(0, max_restarts=3)
    worker._place = types.SimpleNamespace(
        number=0,
        replace=lambda error: restarts.start_another(lambda: None, error),
        begin_batch=restarts.begin_batch,
    )
    worker._activity, worker._measured = ActivityLog("start"), _Measured()
    worker._wire = types.SimpleNamespace(send=lambda *frame: None)
    worker._lost, worker._running, worker._staged, worker._scored = [], {}, [], set()
    worker._held, worker._load = object(), lambda staging: None
    for _ in range(3):
        worker._replace_engine()
    with pytest.raises(EngineGone, match=r"more than rollout\.max_restarts=3"):
        worker._replace_engine()
    worker._running = {"s:0": None}
    worker._heed(Event({"type": "over", "lease_id": "s:0", "held": None}))
    worker._replace_engine()


def test_the_supervisor_hears_of_a_worker_whose_connection_is_busy() -> None:
    """A large frame takes longer than `async.worker_timeout_s` on a slow network."""
    reader, writer = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    worker = cast(Any, Worker.__new__(Worker))
    worker._supervisor, worker._wire = writer, Wire(here)
    worker._version, worker._activity = None, ActivityLog("start")
    with worker._wire._lock:  # as while a frame is sent
        for say in [getattr(worker, name) for name in ("_pulse", "_report_progress")]:
            threading.Thread(target=say, daemon=True).start()
        for _ in range(3):
            assert select.select([reader], [], [], 30.0)[0], "no sign"
            os.read(reader, 1)
    worker._wire.close()
    for each in (here, there):
        each.close()

"""A free worker whose engine dies around an interrupting update, without a real engine."""

from __future__ import annotations

import os
import select
import socket
import threading
import types
from functools import partial
from typing import Any, cast

import pytest

from mrl.engine_pool.metrics import EngineMetrics
from mrl.engine_pool.remote.activity import ActivityLog
from mrl.engine_pool.remote.driver import EngineDriver, Functions, StagedVersions
from mrl.engine_pool.remote.engine_owner import EngineOwner
from mrl.engine_pool.remote.wire import Wire
from mrl.engine_pool.remote.worker import Worker
from mrl.engine_pool.remote.worker_leases import Lease, Leases
from mrl.engines.base import EngineLost
from mrl.errors import EngineGone
from tests.waiting import wait_until

SILENT_WIRE = cast(Any, types.SimpleNamespace(send=lambda *frame: None))
LEASE = Lease("s:0", cast(Any, None), None)


class _DeadEngine:
    """Every call finds that the server has died."""

    num_pauses = 0

    def pause(self, mode: str) -> None:
        self.num_pauses += 1
        raise EngineLost("pause: the engine is stopped")


def make_driver(owner: Any) -> EngineDriver:
    driver = cast(Any, EngineDriver.__new__(EngineDriver))
    driver.engine = types.SimpleNamespace(owner=owner, endpoint=None)
    driver.wire, driver.main, driver.works = SILENT_WIRE, Functions(), {}
    driver.versions = StagedVersions([], cast(Any, None), SILENT_WIRE, driver.main)
    driver.version, driver.activity = 3, ActivityLog("start")
    driver._metrics = EngineMetrics()
    return driver


def make_leases(driver: EngineDriver, kind: type[Leases] = Leases) -> Any:
    """Return leases of which one runs."""
    leases = cast(Any, kind.__new__(kind))
    leases._driver, leases._running = driver, {"s:0": LEASE}
    leases._interrupts, leases._serves_adapter, leases._pause_mode = True, False, "in_place"
    leases._scored, leases._interrupted, leases._is_engine_lost = set(), [], False
    leases._asked, leases._max_leases = {"most": 4}, 4
    return leases


class _Leases(Leases):
    """Counts how often the engine is replaced."""

    replaced: list[int]

    def _replace_engine(self) -> None:
        self.replaced.append(len(self._interrupted))
        self._driver.versions.waiting.clear()
        self._interrupted, self._is_engine_lost = [], False


@pytest.mark.parametrize("is_whole", [False, True], ids=["generating", "scoring"])
def test_an_engine_that_dies_before_an_interrupting_update_is_replaced(is_whole: bool) -> None:
    engine, finished = _DeadEngine(), []
    owner = types.SimpleNamespace(server=engine, reset_losses=lambda: finished.append(1))
    driver = make_driver(owner)
    leases = make_leases(driver, _Leases)
    leases.replaced = []
    worker = cast(Any, Worker.__new__(Worker))
    worker.driver, worker._schedule, worker._main = driver, leases, driver.main
    worker._is_over = False
    thread = threading.Thread(target=worker._work, daemon=True)
    thread.start()
    staging = cast(Any, types.SimpleNamespace(version=4))
    driver.main.put(lambda: driver.versions.waiting.append(staging))
    wait_until(lambda: engine.num_pauses > 0)
    # A lease that scores misses nothing.
    driver.main.put(partial(leases._end, LEASE, is_engine_lost=not is_whole))
    driver.main.put(partial(worker._handle, {"type": "stop"}, b""))
    thread.join(10)
    assert not thread.is_alive(), "the main thread spins"
    assert leases.replaced == [0 if is_whole else 1]
    assert engine.num_pauses == 1
    assert len(finished) == is_whole  # the losses of engines count from there


def test_engines_that_are_lost_without_a_finished_group_between_are_counted() -> None:
    """A prompt that kills every engine ends the run, instead of starting engines for ever."""
    server = cast(Any, types.SimpleNamespace(start=lambda: None))
    driver = cast(Any, make_driver(EngineOwner(server, 0, max_restarts=3)))
    driver.versions.loaded, driver.load = object(), lambda staging: None
    leases = make_leases(driver)
    leases._running = {}
    for _ in range(3):
        leases._replace_engine()
    with pytest.raises(EngineGone, match=r"more than rollout\.max_restarts=3"):
        leases._replace_engine()
    leases._running = {"s:0": LEASE}
    leases._end(LEASE, is_engine_lost=False)
    leases._replace_engine()


def test_the_supervisor_hears_of_a_worker_whose_connection_is_busy() -> None:
    """A large frame takes longer than `async.worker_timeout_s` on a slow network."""
    reader, writer = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    worker = cast(Any, Worker.__new__(Worker))
    worker._pulse_pipe, worker._wire = writer, Wire(here)
    worker.driver = types.SimpleNamespace(version=None, activity=ActivityLog("start"))
    with worker._wire._lock:  # as while a frame is sent
        for say in [getattr(worker, name) for name in ("_pulse", "_report_progress")]:
            threading.Thread(target=say, daemon=True).start()
        for _ in range(3):
            assert select.select([reader], [], [], 30.0)[0], "no sign"
            os.read(reader, 1)
    worker._wire.close()
    for each in (here, there):
        each.close()

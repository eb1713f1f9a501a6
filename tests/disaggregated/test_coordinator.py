"""The trainer's coordinator: who may join, what a lost worker leaves to the next, what ends a run."""

from __future__ import annotations

import dataclasses
import errno
import socket
import threading
import types
from collections.abc import Iterator
from typing import Any, cast

import pytest

from mrl.config.asynchronous import AsyncConfig
from mrl.engine_pool.elastic.membership import Membership
from mrl.engine_pool.metrics import EngineMetrics
from mrl.engine_pool.remote.coordinator import Coordinator
from mrl.engine_pool.remote.listener import AuthenticatedListener
from mrl.engine_pool.remote.messages import Delivered, Work
from mrl.engine_pool.remote.wire import Wire, WireClosed
from mrl.errors import EngineGone, InputError, RankLost, RunFailed
from mrl.scheduling.schedule import FixedSchedule
from tests.sample_groups import group
from tests.waiting import wait_until

HERE = [socket.gethostname()]


@pytest.fixture(autouse=True)
def _short_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers here stop no engine."""
    monkeypatch.setattr("mrl.engine_pool.remote.connections.GOODBYE_S", 0.1)


def fixed(config: AsyncConfig) -> Coordinator[Any]:
    """The coordinator of one engine by a fixed schedule."""
    return Coordinator(Membership(1), config, HERE, FixedSchedule(1))


@pytest.fixture
def coordinator() -> Iterator[Coordinator[Any]]:
    made = fixed(AsyncConfig(max_worker_restarts=1))
    yield made
    made.close()


class Joined:
    """What a worker says and hears, without an engine."""

    def __init__(self, coordinator: Coordinator[Any], token: str = "", engine: int = 0) -> None:
        self.wire = Wire(socket.create_connection(coordinator.address))
        self.wire.send({"type": "hello", "token": token or coordinator.token, "engine": engine})
        self.welcome, _ = self.wire.receive()

    def started(self) -> Joined:
        self.wire.send({"type": "started"})
        return self

    def heard(self, kind: str) -> tuple[dict[str, Any], bytes]:
        message, body = self.wire.receive()
        assert message["type"] == kind
        return message, body

    def deliver(self, work_id: int) -> None:
        self.wire.send(*Delivered([group([1.0, 0.0], 3)], 1).frame(work_id, 0))
        self.wire.send({"type": "measured", "metrics": {"rollout/engine_restarts": 2}})
        self.wire.send({"type": "done", "work_id": work_id})


def test_a_stranger_is_not_told_anything(coordinator: Coordinator[Any]) -> None:
    with pytest.raises(WireClosed):
        Joined(coordinator, "another token")
    stranger = socket.create_connection(coordinator.address)
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert stranger.recv(100) == b""


def test_strangers_who_say_nothing_keep_no_worker_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.engine_pool.remote.listener.MOST_STRANGERS", 2)
    coordinator = fixed(AsyncConfig())
    try:
        silent = [socket.create_connection(coordinator.address) for _ in range(5)]
        assert [one.recv(1) for one in silent[:3]] == [b""] * 3
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
        worker = Joined(coordinator).started()
        coordinator.wait_until_started(60)
        assert not worker.wire.is_closed
    finally:
        coordinator.close()


def test_a_process_that_was_out_of_files_lets_workers_in_again() -> None:
    accepting = AuthenticatedListener(HERE, lambda wire, hello: wire.send({"type": "welcome"}))
    listener, calls = accepting._listener, []

    def accept() -> tuple[socket.socket, Any]:
        calls.append(1)
        if len(calls) < 3:
            raise OSError(errno.EMFILE, "too many open files")
        return listener.accept()

    accepting._listener = cast(
        Any,
        types.SimpleNamespace(accept=accept, shutdown=listener.shutdown, close=listener.close),
    )
    accepting.open()
    wire = Wire(socket.create_connection(accepting.address))
    wire.send({"type": "hello", "token": accepting.token})
    assert wire.receive()[0] == {"type": "welcome"}
    accepting.close()


def test_work_is_given_and_delivered(coordinator: Coordinator[Any]) -> None:
    worker = Joined(coordinator).started()
    coordinator.wait_until_started(10)
    work = Work(coordinator.new_id(), 0, "batch", 4, 1)
    coordinator.assign(work)
    assert Work.of_frame(*worker.heard("work")) == work
    coordinator.wait_until_free(4)
    (pair,) = coordinator.begin_update(4)
    assert pair.name == worker.welcome["pair"]
    worker.heard("work")  # again, as it is the worker's first version
    assert worker.heard("receive")[0]["version"] == 4
    assert coordinator.begin_update(4) == []
    worker.deliver(work.work_id)
    assert coordinator.wait_for([work.work_id], 4)
    (groups, num_failed) = coordinator.take(work.work_id)[0].finish()
    assert [g.samples[0].group_id for g in groups] == [3]
    assert num_failed == 1
    assert coordinator.metrics()["rollout/engine_restarts"] == 2
    assert coordinator.metrics()["rollout/engine_restarts"] == 0  # of the next step


def test_the_next_worker_does_what_a_lost_one_left(
    coordinator: Coordinator[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    first = Joined(coordinator).started()
    coordinator.wait_until_started(10)
    work = Work(coordinator.new_id(), 0, "batch", 2, 1)
    coordinator.assign(work)
    coordinator.begin_update(2)
    first.wire.close()
    second = Joined(coordinator).started()
    assert not coordinator.wait_for([work.work_id], 3)  # it lacks the weights
    assert coordinator.num_lost == 1
    (pair,) = coordinator.begin_update(3)
    assert pair.name == second.welcome["pair"] != first.welcome["pair"]
    assert Work.of_frame(*second.heard("work")) == dataclasses.replace(work, version=3)
    assert "weights 3 generate what weights 2 were to" in capfd.readouterr().out
    second.deliver(work.work_id)
    assert coordinator.wait_for([work.work_id], 3)


def test_a_worker_that_falls_silent_is_lost_and_too_many_end_the_run() -> None:
    coordinator = fixed(AsyncConfig(worker_timeout_s=0.2, max_worker_restarts=1))
    try:
        coordinator.assign(Work(coordinator.new_id(), 0, "batch", 0, 1))
        first = Joined(coordinator)
        with pytest.raises(RunFailed, match=r"did not start within 0\.5 s"):
            coordinator.wait_until_started(0.5)
        assert coordinator.num_lost == 1
        second = Joined(coordinator)
        with pytest.raises(
            EngineGone, match=r"lost 2 times .*async.max_worker_restarts=1; .* no sign"
        ):
            coordinator.wait_until_started(10)
        for worker in (first, second):
            with pytest.raises(WireClosed):
                worker.wire.receive()
    finally:
        coordinator.close()


def test_a_trainer_that_was_busy_reads_before_it_loses_a_worker(
    coordinator: Coordinator[Any],
) -> None:
    worker = Joined(coordinator).started()
    coordinator.wait_until_started(60)
    (peer,) = coordinator._workers.values()
    with coordinator._lock:  # the thread that reads stands still
        for _ in range(100):
            worker.wire.send({"type": "free"})
        wait_until(lambda: peer.wire.has_unread)
        peer.wire.heard -= 1000
        coordinator._connections.check()
        assert not peer.is_lost
    wait_until(lambda: not peer.wire.has_unread)
    peer.wire.heard -= 1000
    with coordinator._lock:
        coordinator._connections.check()
    assert peer.is_lost


def test_an_engine_without_a_worker_ends_the_run(
    coordinator: Coordinator[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Joined(coordinator).wire.close()
    wait_until(lambda: coordinator.num_lost)
    coordinator.poll([], 0)
    monkeypatch.setattr("mrl.engine_pool.remote.connections.ABSENT_S", -1)
    with pytest.raises(RankLost, match="rollout engine 0 has had no worker for"):
        coordinator.poll([], 0)
    another = Joined(coordinator)
    coordinator.poll([], 0)
    another.wire.close()


def test_two_workers_of_one_engine_are_not_there_at_a_time(coordinator: Coordinator[Any]) -> None:
    first, second = Joined(coordinator).started(), Joined(coordinator).started()
    with pytest.raises(WireClosed):
        first.wire.receive()
    coordinator.wait_until_started(10)
    assert coordinator.num_lost == 1
    assert not second.wire.is_closed


def test_an_error_of_a_worker_ends_the_run(coordinator: Coordinator[Any]) -> None:
    worker = Joined(coordinator).started()
    coordinator.wait_until_started(10)
    coordinator.begin_update(0)  # so that wait_for waits for the work, and for nothing else
    worker.wire.send({"type": "failed", "error": "InputError", "text": "no such reward"})
    with pytest.raises(InputError, match="rollout engine 0: no such reward"):
        coordinator.wait_for([1], 0)


@pytest.mark.parametrize("message", [{"type": "nonsense"}, {"typ": 1}, {"type": "part"}])
def test_a_message_that_is_none_loses_the_worker(
    coordinator: Coordinator[Any], message: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    worker = Joined(coordinator).started()
    coordinator.wait_until_started(10)
    worker.wire.send(message)
    with pytest.raises(WireClosed):
        worker.wire.receive()
    wait_until(lambda: coordinator.num_lost)
    said = " ".join(capfd.readouterr().out.split())
    assert "rollout engine 0: its worker is lost: its message could not be read" in said


def test_a_worker_is_lost_at_once_whatever_is_wrong_with_its_message(
    coordinator: Coordinator[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("nobody foresaw it")

    monkeypatch.setattr(EngineMetrics, "from_dict", fail)
    worker = Joined(coordinator).started()
    coordinator.wait_until_started(10)
    worker.wire.send({"type": "measured", "metrics": {}})
    with pytest.raises(WireClosed):
        worker.wire.receive()
    wait_until(lambda: coordinator.num_lost)


def test_workers_are_sent_home(
    coordinator: Coordinator[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrl.engine_pool.remote.connections.GOODBYE_S", 10)
    worker = Joined(coordinator).started()
    coordinator.wait_until_started(10)
    closing = threading.Thread(target=coordinator.close)
    closing.start()
    worker.heard("stop")
    worker.wire.close()
    closing.join(10)
    assert not closing.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(coordinator.address)


def test_what_an_engine_does_and_which_weights_it_has_is_measured(
    coordinator: Coordinator[Any],
) -> None:
    worker = Joined(coordinator).started()
    coordinator.wait_until_started(10)
    coordinator.begin_update(4)
    worker.heard("receive")
    activity = {"now": "bound", "seconds": {"load": 0.0, "bound": 0.0}, "spans": []}
    worker.wire.send({"type": "pulse", "progress": 1, "version": 3, "activity": activity})
    wait_until(lambda: coordinator.metrics()["async/versions_in_flight"] == 1)
    found = coordinator.metrics()
    assert found["async/engine_lag"] == 1
    wait_until(lambda: coordinator.metrics()["time/engine_bound_s"] > 0)
    worker.wire.close()
    wait_until(lambda: coordinator.metrics()["async/versions_in_flight"] == 0)
    wait_until(lambda: coordinator.metrics()["time/engine_start_s"] > 0)
    assert coordinator.metrics()["async/lost_workers"] == 1


def test_a_finished_batch_of_a_fixed_schedule_is_in_the_queue(
    coordinator: Coordinator[Any],
) -> None:
    worker = Joined(coordinator).started()
    coordinator.wait_until_started(10)
    coordinator.begin_update(0)
    work = Work(coordinator.new_id(), 0, "batch", 0, 1)
    coordinator.assign(work)
    assert coordinator.metrics()["async/leased_groups"] == 1
    worker.deliver(work.work_id)
    assert coordinator.wait_for([work.work_id], 0)
    found = coordinator.metrics()
    assert (found["async/leased_groups"], found["async/queued_groups"]) == (0, 1)
    coordinator.take(work.work_id)
    assert coordinator.metrics()["async/queued_groups"] == 0

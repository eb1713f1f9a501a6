"""What a supervisor does with workers that are slow, stopped, or never join."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from mrl.config import RolloutConfig
from mrl.config.asynchronous import AsyncConfig
from mrl.engine_pool.elastic.membership import Membership
from mrl.engine_pool.remote import supervisor
from mrl.engine_pool.remote.coordinator import Coordinator
from mrl.engine_pool.remote.engine_workers import Job, wait_for_silence, wait_for_the_trainer
from mrl.engine_pool.remote.rendezvous import publish_address
from mrl.engine_pool.remote.supervisor import _SIGNALS, supervise
from mrl.engine_pool.remote.wire import WAITS
from mrl.errors import EngineGone, ExitCode
from mrl.preflight.roles import Roles
from mrl.scheduling.schedule import FixedSchedule
from tests.waiting import wait_until


@pytest.fixture
def signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def coordinator() -> Iterator[Coordinator[Any]]:
    made = Coordinator(Membership(1), AsyncConfig(), [socket.gethostname()], FixedSchedule(1))
    yield made
    made.close()


def test_workers_that_end_before_they_join_are_counted(
    coordinator: Coordinator[Any], signals_restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ENDED_S", 0.2)
    store = dist.HashStore()
    publish_address(
        dist.PrefixStore(supervisor.PREFIX, store), coordinator.address, coordinator.token
    )
    job = Job(
        "mrl.no_such_worker", {}, RolloutConfig(max_response_len=8, max_restarts=2), 60.0, 60.0
    )
    with ThreadPoolExecutor() as pool:

        def trains() -> None:
            try:
                coordinator.wait_until_started(60)
            finally:
                coordinator.close()

        trainer = pool.submit(trains)
        assert supervise(job, Roles(1, 1), 1, store) == ExitCode.LOST_ENGINE
        with pytest.raises(
            EngineGone, match=r"3 workers in a row ended .* with code 1; see the mess"
        ):
            trainer.result(60)


def test_a_worker_may_import_for_longer_than_it_may_be_silent_later() -> None:
    reader, writer = os.pipe()
    begin = time.monotonic()
    assert wait_for_silence(reader, os.getpid(), 0.5, 0.1) == (
        "sent no heartbeat for 0.5 s",
        False,
    )
    assert time.monotonic() - begin > 0.4
    os.write(writer, b".")
    assert wait_for_silence(reader, os.getpid(), 60.0, 0.1) == (
        "sent no heartbeat for 0.1 s",
        True,
    )
    os.close(writer)
    assert wait_for_silence(reader, os.getpid(), 60.0, 60.0) == ("", False)
    os.close(reader)


def test_a_worker_that_is_stopped_while_it_imports_does_not_have_the_time_of_a_start() -> None:
    reader, writer = os.pipe()
    with subprocess.Popen(["sleep", "60"]) as worker:
        worker.send_signal(signal.SIGSTOP)
        said = wait_for_silence(reader, worker.pid, 60.0, 0.5)
        worker.kill()
    assert said == ("is stopped (SIGSTOP) for 0.5 s", False)
    os.close(reader)
    os.close(writer)


def test_strangers_do_not_end_a_rank_that_shares_an_engine(
    coordinator: Coordinator[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrl.engine_pool.remote.listener.MOST_STRANGERS", 1)
    address, hello = {"server": coordinator.address}, {"type": WAITS, "token": coordinator.token}
    waits = threading.Thread(target=wait_for_the_trainer, args=(address, hello), daemon=True)
    waits.start()
    wait_until(lambda: coordinator._connections._listener._waiting, "it shows the token")
    strangers = [socket.create_connection(coordinator.address) for _ in range(4)]
    assert [one.recv(1) for one in strangers[:3]] == [b""] * 3
    assert waits.is_alive()
    for wire in coordinator._connections._listener._waiting:
        wire.close()
    waits.join(10)
    assert not waits.is_alive()


@pytest.mark.release
def test_a_worker_is_not_silent_while_its_supervisor_was_stopped() -> None:
    reader, writer = os.pipe()
    stop = threading.Event()

    def pulse() -> None:
        while not stop.wait(0.05):
            os.write(writer, b".")
        os.close(writer)

    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(writer)
        os._exit(len(wait_for_silence(reader, parent, 30.0, 1.0)[0]) > 0)
    thread = threading.Thread(target=pulse)
    thread.start()
    time.sleep(0.3)
    os.kill(child, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(child, signal.SIGCONT)
    time.sleep(0.3)
    stop.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    os.close(reader)

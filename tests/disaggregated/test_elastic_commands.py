"""`mrl engines`: where engines may run, who starts them, and what the commands say."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.cli import main
from mrl.config import RolloutConfig
from mrl.engine_pool.elastic.client import ask_engines
from mrl.engine_pool.elastic.control import open_control
from mrl.engine_pool.elastic.membership import Membership
from mrl.engine_pool.elastic.places import HostRank, Place, choose_places
from mrl.engine_pool.remote.coordinator import Coordinator
from mrl.engine_pool.remote.engine_host import EngineHost
from mrl.engine_pool.remote.engine_workers import EngineWorkers, Job
from mrl.errors import ExitCode, InputError
from mrl.web.unix_socket import SOCKET
from tests.disaggregated.elastic_job import Worker, begin, fixed, states
from tests.waiting import wait_until

NODE_A = HostRank(Place(0, "a", ("0", "1")), ("4", "5", "0", "1"))
NODE_B = HostRank(Place(1, "b", ("0", "1")), ("0", "1"))
CPU_C, CPU_D = (HostRank(Place(n, host)) for n, host in ((2, "c"), (3, "d")))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.engine_pool.remote.connections.GOODBYE_S", 0.1)
    monkeypatch.setattr("mrl.commands.engines.POLL_S", 0.02)


def test_engines_on_cpus_are_spread_over_the_hosts() -> None:
    used = [CPU_C.own]
    found = choose_places([CPU_C, CPU_D], used, 4, 1)
    assert [place.host for place in found] == ["d", "c", "d", "c"]
    assert {place.host for place in choose_places([CPU_C, CPU_D], [], 3, 1, "c")} == {"c"}


def test_an_engine_on_gpus_takes_a_place_that_was_left_or_gpus_that_are_named() -> None:
    ranks, used = [NODE_A, NODE_B], [NODE_A.own]
    assert choose_places(ranks, used, 1, 2) == [NODE_B.own]
    two = choose_places(ranks, used, 2, 2, "b", ("0", "1", "6", "7"))
    assert two == [Place(1, "b", ("0", "1")), Place(1, "b", ("6", "7"))]
    assert two[1].text() == "b, GPU 6,7"


@pytest.mark.parametrize(
    ("ranks", "count", "host", "gpus", "why"),
    [
        ([CPU_C, CPU_D], 1, "x", (), "host 'x' has no rollout rank .* expected one of c, d"),
        ([CPU_C], 1, None, ("0", "1"), "engines of host c run on CPUs"),
        ([NODE_A], 1, None, (), "removed engines have left 0 place"),
        ([NODE_A, NODE_B], 1, None, ("6", "7"), "has the hosts a, b; choose one"),
        ([NODE_B], 1, "b", ("6",), "got 6, expected 2 different ids"),
        ([NODE_B], 1, "b", ("6", "6"), "got 6,6, expected 2 different ids"),
        ([NODE_A], 1, "a", ("1", "6"), "GPU 1 of a is used by a, GPU 0,1"),
        ([NODE_A], 1, "a", ("6", "4"), "a rank that trains uses GPU 4 of a"),
        *(
            ([NODE_A], 1, "a", ("6", odd), "expected ids as in CUDA_VISIBLE_DEVICES")
            for odd in ("", "04", "4,5", " 4", "4\n", "-1", "\N{ARABIC-INDIC DIGIT FOUR}")
        ),
    ],
)
def test_what_has_no_room_is_refused_with_the_reason(
    ranks: list[HostRank], count: int, host: str | None, gpus: tuple[str, ...], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        choose_places(ranks, [NODE_A.own], count, 2, host, gpus)


@pytest.fixture
def host() -> Iterator[Callable[..., tuple[Coordinator[Any], EngineHost]]]:
    """`host(module)`: a run with one engine, and the thread that starts further ones."""
    made: list[Any] = []

    def make(module: str) -> tuple[Coordinator[Any], EngineHost]:
        coordinator = fixed(1)
        made.append(coordinator)
        made.append(begin(coordinator, 1))
        address = {"server": coordinator.address, "token": coordinator.token}
        settings = {**address, "engine": 0, "parent": os.getpid()}
        job = Job(module, {}, RolloutConfig(max_response_len=8), 60.0, 60.0)
        ran = EngineHost(EngineWorkers(job, settings))
        wait_until(lambda: coordinator.membership._ranks)
        return coordinator, ran

    yield make
    made[0].close()


def test_a_rank_tells_why_an_engine_did_not_start(host: Callable[..., Any]) -> None:
    coordinator, ran = host("mrl.no_such_worker")
    assert coordinator.membership.add() == [1]
    wait_until(lambda: states(coordinator.membership)[1] == "failed")
    (row,) = coordinator.membership.describe()["ended"]
    assert (
        row["why"] == "its worker ended with code 1 before it joined; see the messages of the job"
    )
    assert row["place"] == socket.gethostname()
    ran.close()


def test_a_rank_ends_the_worker_of_an_engine_that_is_removed_while_it_starts(
    host: Callable[..., Any],
) -> None:
    coordinator, ran = host("tests.disaggregated.sleeping_worker")

    def sleeping() -> list[psutil.Process]:
        children = psutil.Process().children()
        return [each for each in children if "sleeping_worker" in " ".join(each.cmdline())]

    coordinator.membership.add(2)
    wait_until(lambda: len(sleeping()) == 2)
    coordinator.membership.remove(1)
    wait_until(lambda: states(coordinator.membership)[1] == "left")
    assert len(sleeping()) == 1
    coordinator.close()  # ends the other one
    assert ran.wait_until_over()
    wait_until(lambda: not sleeping())
    ran.close()


def test_what_the_commands_say(
    host: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator, _ = host("tests.disaggregated.sleeping_worker")
    control = open_control(tmp_path, coordinator.membership)
    assert control is not None
    run = str(tmp_path)
    try:
        assert stat.S_IMODE((tmp_path / SOCKET).stat().st_mode) == 0o600
        main(["engines", "add", run, "--no-wait"])
        main(["engines", "list", run])
        printed = capsys.readouterr().out
        assert f"engine 1 starts on {socket.gethostname()}" in printed
        assert printed.count("serving") == printed.count("starting") == 1
        joins = threading.Timer(0.1, lambda: self_made.append(Worker(coordinator, 1)))
        self_made: list[Worker] = []
        joins.start()
        joins.join()
        wait_until(lambda: self_made and 1 in coordinator._workers)
        main(["engines", "remove", run, "1"])
        assert "engine 1 has left; 1 engine(s) are there" in capsys.readouterr().out
        for words, why in (
            (["remove", run, "0"], "engine 0 is the last one that serves"),
            (["remove", run, "9"], "there is no engine 9; the job has 0"),
            (["add", run, "--host", "x"], "host 'x' has no rollout rank of this job"),
            (["add", run, "--gpus", "0"], "run on CPUs; leave --gpus out"),
            (["add", run, "--count", "65"], "--count: got 65, expected 1 to 64"),
            (["list", str(tmp_path / "none")], "is the folder of no run and of no service"),
        ):
            with pytest.raises(SystemExit) as refused:
                main(["engines", *words])
            assert refused.value.code == ExitCode.BAD_INPUT
            assert why in capsys.readouterr().err
        with pytest.raises(InputError, match="count: Input should be a valid integer"):
            ask_engines(tmp_path, "POST", "/engines", {"count": "two"})
        with pytest.raises(InputError, match="an engine has a number, got 'x'"):
            ask_engines(tmp_path, "DELETE", "/engines/x")
        assert ask_engines(tmp_path, "GET", "/openapi.json")["openapi"].startswith("3.1")
    finally:
        control.close()
    assert not (tmp_path / SOCKET).exists()


def test_where_nobody_answers_the_command_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for placement, why in (
        ("colocated", "its engines share the devices of the trainer"),
        ("disaggregated", "no job answers in"),
    ):
        (tmp_path / "config.yaml").write_text(json.dumps({"rollout": {"placement": placement}}))
        with pytest.raises(SystemExit) as refused:
            main(["engines", "list", str(tmp_path)])
        assert refused.value.code == ExitCode.BAD_INPUT
        assert why in capsys.readouterr().err


def test_a_run_whose_folder_takes_no_socket_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert open_control(tmp_path / "none", Membership(1)) is None
    assert "the run goes on, and mrl engines cannot reach it" in capfd.readouterr().out

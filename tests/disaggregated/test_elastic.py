"""Engines that are added and removed while a job goes on: what the coordinator does, without them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mrl.engine_pool.elastic.membership import NoEngine
from mrl.engine_pool.remote.coordinator import Coordinator
from mrl.engine_pool.remote.driver import EngineDriver
from mrl.engine_pool.remote.messages import Work
from mrl.engine_pool.remote.wire import WireClosed
from mrl.errors import InputError
from tests.disaggregated.elastic_job import (
    Worker,
    begin,
    fixed,
    parts,
    send_weights,
    states,
    with_rank,
)
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _short_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers here stop no engine."""
    monkeypatch.setattr("mrl.engine_pool.remote.connections.GOODBYE_S", 0.1)


@pytest.fixture
def one() -> Iterator[Coordinator[Any]]:
    made = fixed(1)
    yield made
    made.close()


@pytest.fixture
def two() -> Iterator[Coordinator[Any]]:
    made = fixed(2)
    yield made
    made.close()


def test_an_added_engine_gets_weights_beside_the_others_and_work_from_the_next_step_on(
    one: Coordinator[Any],
) -> None:
    (first,) = begin(one, 1)
    rank = with_rank(one)
    assert one.membership.add() == [1]
    assert rank.heard() == ("start", 1)
    assert states(one.membership) == {0: "serving", 1: "starting"}
    second = Worker(one, 1)
    wait_until(lambda: one._workers[1].can_receive)
    ids = one.assign_parts(parts(1))  # a step in which it takes no part
    work = first.heard_work()
    assert (work.num_parts, len(ids)) == (1, 1)
    assert send_weights(one, 1) == [0, 1]
    assert second.heard("receive")[0]["version"] == 1
    assert send_weights(one, 1) == []
    first.heard("receive")
    first.deliver(work)
    first.say_loaded(1)
    wait_until(lambda: one._workers[0].can_receive)
    assert one.poll(ids, 2).can_proceed  # nobody waits for the second, which is still loading
    one.assign_parts(parts(2))
    assert first.heard_work().num_parts == 1
    second.say_loaded(1)
    wait_until(lambda: one._workers[1].version == 1)
    assert states(one.membership)[1] == "starting"
    one.assign_parts(parts(2))
    got = [first.heard_work(), second.heard_work()]
    assert [(work.part, work.num_parts) for work in got] == [(0, 2), (1, 2)]
    assert states(one.membership) == {0: "serving", 1: "serving"}
    assert one.metrics()["rollout/num_engines"] == 2
    wait_until(lambda: one._workers[1].can_receive)
    assert send_weights(one, 2) == [0, 1]


def test_an_engine_that_cannot_start_says_why_and_the_run_goes_on(one: Coordinator[Any]) -> None:
    own = begin(one, 1)
    rank = with_rank(one)
    assert one.membership.add(3) == [1, 2, 3]
    assert [rank.heard() for _ in range(3)] == [("start", 1), ("start", 2), ("start", 3)]
    reports = Worker(one, 1)
    reports.wire.send({"type": "failed", "error": "RunFailed", "text": "the GPU is gone"})
    wait_until(lambda: states(one.membership)[1] == "failed")
    assert [rank.heard(), rank.heard()] == [("leave", 1), ("kill", 1)]
    rank.say_ended(2, "its worker ended with code 1")
    dies = Worker(one, 3)
    wait_until(lambda: 3 in one._workers)
    dies.wire.send({"type": "dies", "text": "RuntimeError: other weights"})
    wait_until(
        lambda: states(one.membership) == {0: "serving", 1: "failed", 2: "failed", 3: "failed"}
    )
    why = {row["number"]: row["why"] for row in one.membership.describe()["ended"]}
    assert why[1] == "rollout engine 1: the GPU is gone"
    assert why[2] == "its worker ended with code 1"
    assert why[3] == "its worker was lost: RuntimeError: other weights"
    one.poll([], 0)  # raises nothing
    assert one.num_lost == 0
    with pytest.raises(WireClosed):
        Worker(one, 1)
    assert not own[0].wire.is_closed


def test_a_lost_rank_ends_the_engines_that_it_starts(one: Coordinator[Any]) -> None:
    own = begin(one, 1)
    rank = with_rank(one)
    one.membership.add()
    rank.wire.close()
    wait_until(lambda: states(one.membership)[1] == "failed")
    with pytest.raises(InputError, match="no rollout rank of this job has connected"):
        one.membership.add()
    assert not own[0].wire.is_closed


def test_a_removed_engine_finishes_its_work_and_gets_the_weights_for_it(
    two: Coordinator[Any],
) -> None:
    first, second = begin(two, 2)
    rank = with_rank(two, 1)
    ids = two.assign_parts(parts(1))
    work = second.heard_work()
    two.membership.remove(1)
    assert rank.heard() == ("leave", 1)
    assert states(two.membership)[1] == "leaving"
    assert send_weights(two, 1) == [0, 1]
    second.heard("receive")
    later = two.assign_parts(parts(2))
    assert len(later) == 1  # the first engine alone
    second.say_loaded(1)
    wait_until(lambda: two._workers[1].can_receive)
    first.heard_work()
    first.heard("receive")
    first.say_loaded(1)
    wait_until(lambda: two._workers[0].can_receive)
    assert send_weights(two, 2) == [0]
    second.deliver(work)
    second.heard("stop")
    wait_until(lambda: ids[1] in two._items.done)
    assert states(two.membership)[1] == "leaving"  # until its process has ended
    rank.say_ended(1)
    wait_until(lambda: states(two.membership) == {0: "serving", 1: "left"})
    second.wire.close()
    two.poll([], 2)
    assert two.num_lost == 0
    assert two.metrics()["rollout/num_engines"] == 1


def test_an_engine_without_work_leaves_at_once_unless_weights_are_on_their_way(
    two: Coordinator[Any],
) -> None:
    _, second = begin(two, 2)
    with_rank(two, 1)
    two.begin_update(1)
    two.membership.remove(1)
    assert 1 in two._workers
    two.end_update([])
    assert 1 not in two._workers
    second.heard("receive")
    second.heard("stop")


@pytest.mark.parametrize("how", ["now", "killed"])
def test_others_do_what_an_engine_leaves_behind(two: Coordinator[Any], how: str) -> None:
    first, second = begin(two, 2)
    rank = with_rank(two, 1)
    two.assign_parts(parts(1))
    send_weights(two, 1)
    own, left = first.heard_work(), second.heard_work()
    first.heard("receive")
    two.membership.remove(1, now=how == "now")
    if how == "now":
        assert [rank.heard(), rank.heard()] == [("leave", 1), ("kill", 1)]
    second.wire.close()
    given = first.heard_work()
    assert (given.work_id, given.version, given.part) == (left.work_id, 1, 1)
    for work in (own, given):
        first.deliver(work)
    assert two.wait_for([own.work_id, left.work_id], 1)
    assert two.num_lost == 0
    assert two._connections._absent_since == {}


def test_a_leaving_engine_holds_newer_weights_back_so_that_others_can_do_its_work(
    two: Coordinator[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = begin(two, 2)
    with_rank(two, 1)
    two.assign_parts(parts(0))
    first.deliver(first.heard_work())
    left = second.heard_work()
    two._workers[1].can_receive = False  # its only buffer holds the weights that it generates with
    two.membership.remove(1)
    assert not two.poll([], 1).can_proceed
    assert send_weights(two, 1) == []
    second.wire.close()
    assert first.heard_work() == left.__class__(**{**vars(left), "engine": 0})
    assert "other bits" not in capfd.readouterr().out


def test_work_for_weights_that_nobody_has_any_more_is_done_by_newer_ones_with_a_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    two = fixed(2, ahead=2)
    try:
        first, second = begin(two, 2)
        with_rank(two, 1)
        two.assign_parts(parts(0))
        send_weights(two, 1)  # there is a second buffer
        first.heard_work()
        first.heard("receive")
        two.membership.remove(1, now=True)
        assert first.heard_work().version == 1
        assert "with other bits" in capfd.readouterr().out
        second.wire.close()
    finally:
        two.close()


def test_work_of_the_oldest_weights_is_done_first() -> None:
    driver = EngineDriver.__new__(EngineDriver)
    driver.works = {n: Work(n, 0, "batch", v) for n, v in ((1, 5), (2, 6), (3, 5), (4, 4))}
    order = []
    while (work := driver.next_work) is not None:
        order.append(work.work_id)
        del driver.works[work.work_id]
    assert order == [4, 1, 3, 2]


def test_the_last_engine_stays(two: Coordinator[Any]) -> None:
    for number in (0, 1):
        with_rank(two, number)
    own = begin(two, 2)
    with pytest.raises(NoEngine, match="there is no engine 7; the job has 0, 1"):
        two.membership.remove(7)
    refused = []

    def remove(number: int) -> None:
        try:
            two.membership.remove(number)
        except InputError as error:
            refused.append(str(error))

    both = [threading.Thread(target=remove, args=(n,)) for n in (0, 1)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    (why,) = refused
    assert "is the last one that serves; add another one first" in why
    two.membership.add()  # one that is starting does not serve yet
    with pytest.raises(InputError, match="is the last one"):
        two.membership.remove(*two._engines.serving)
    assert len(own) == 2


def test_an_engine_that_is_starting_is_removed_at_once(one: Coordinator[Any]) -> None:
    own = begin(one, 1)
    rank = with_rank(one)
    one.membership.add(2)
    worker = Worker(one, 1)
    wait_until(lambda: 1 in one._workers)
    for number in (1, 2):
        one.membership.remove(number)
    assert [rank.heard() for _ in range(6)] == [
        ("start", 1), ("start", 2), ("leave", 1), ("kill", 1), ("leave", 2), ("kill", 2),
    ]  # fmt: skip
    with pytest.raises(WireClosed):
        worker.wire.receive()
    for number in (1, 2):
        rank.say_ended(number, "its worker was killed by signal 9")
    wait_until(lambda: states(one.membership) == {0: "serving", 1: "left", 2: "left"})
    assert one._engines.serving == {0}
    assert not own[0].wire.is_closed


def test_a_second_removal_with_now_does_not_wait_for_the_first(two: Coordinator[Any]) -> None:
    first, second = begin(two, 2)
    rank = with_rank(two, 1)
    two.assign_parts(parts(0))
    second.heard_work()
    two.membership.remove(1)
    two.membership.remove(1, now=True)
    assert [rank.heard()[0] for _ in range(3)] == ["leave", "leave", "kill"]
    first.heard_work()
    assert first.heard_work().part == 1
    two.membership.remove(1)  # it is on its way: nothing happens
    assert two._items.of_engine(1) == []


def test_a_lost_engine_that_is_removed_is_not_waited_for(two: Coordinator[Any]) -> None:
    first, second = begin(two, 2)
    with_rank(two, 1)
    two.assign_parts(parts(0))
    first.heard_work()
    second.wire.close()
    wait_until(lambda: 1 not in two._workers)
    assert states(two.membership)[1] == "lost"
    assert not two.poll([], 1).can_proceed
    two.membership.remove(1)
    assert first.heard_work().part == 1
    assert two.poll([], 1).can_proceed
    with pytest.raises(WireClosed):
        Worker(two, 1)  # its next worker came too late


def test_the_end_of_a_run_does_not_wait_for_an_engine_that_starts(
    one: Coordinator[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrl.engine_pool.remote.connections.GOODBYE_S", 100.0)
    (first,) = begin(one, 1)
    rank = with_rank(one)
    one.membership.add()
    second = Worker(one, 1)
    wait_until(lambda: 1 in one._workers)
    ends = threading.Thread(target=one.close)
    ends.start()
    first.heard("stop")
    first.wire.close()
    ends.join(60)
    assert not ends.is_alive()
    with pytest.raises(WireClosed):
        second.wire.receive()
    assert [rank.heard()[0] for _ in range(3)] == ["start", "leave", "kill"]
    assert states(one.membership)[1] == "failed"
    assert rank.wire.receive()[0] == {"type": "over"}

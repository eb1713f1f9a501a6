"""Engines are started again until none is lost: one rank alone, and ranks that count together."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from mrl.engine_pool import restarts as module
from mrl.engine_pool.restarts import IN_BATCH, IN_STEP, Restarts
from mrl.engines.base import EngineLost
from mrl.errors import EngineGone, InputError


@pytest.fixture(autouse=True)
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(module.console, "warning", found.append)
    return found


def explained(text: str) -> EngineLost:
    error = EngineLost(text)
    error.is_explained = True
    return error


def failing(*errors: Exception) -> Callable[[], None]:
    """Return a start that raises these errors in turn, and then succeeds."""
    left = list(errors)

    def start() -> None:
        if left:
            raise left.pop(0)

    return start


def test_an_engine_is_started_until_it_runs(warnings: list[str]) -> None:
    restarts = Restarts(IN_BATCH, 3, 5)
    restarts.lost = EngineLost("it died")
    assert restarts.replace(failing(EngineLost("again"), RuntimeError("no port"))) == 3
    assert restarts.lost is None
    another = "rollout engine 5: starting another one"
    assert warnings == ["it died", another, "again", another, "no port", another]


def test_losses_are_counted_until_the_next_reset() -> None:
    restarts = Restarts(IN_BATCH, 1, 0)
    for _ in range(2):
        restarts.lost = EngineLost("it died")
        assert restarts.replace(failing()) == 1
        restarts.reset()
    restarts.lost = EngineLost("it died")
    with pytest.raises(EngineGone) as found:
        restarts.replace(failing(EngineLost("it hangs")))
    assert str(found.value) == (
        "2 engines were lost in one batch, more than rollout.max_restarts=1; it hangs"
    )


def test_a_loss_that_is_explained_does_not_count() -> None:
    restarts = Restarts(IN_BATCH, 1, 0)
    for _ in range(3):
        restarts.lost = explained("its request ended it")
        assert restarts.replace(failing()) == 1
    restarts.lost = EngineLost("it died")
    assert restarts.replace(failing()) == 1


def test_bad_input_at_a_start_ends_it() -> None:
    restarts = Restarts(IN_BATCH, 3, 0)
    restarts.lost = EngineLost("it died")
    with pytest.raises(InputError, match="no such model"):
        restarts.replace(failing(InputError("no such model")))


class Ranks:
    """Ranks that add up numbers, each in a thread of its own."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30.0)
        self._given: list[int] = []
        self._lock = threading.Lock()

    def sum_up(self, number: int) -> int:
        with self._lock:
            self._given.append(int(number))
        self._barrier.wait()
        total = sum(self._given)
        if self._barrier.wait() == 0:
            self._given.clear()
        self._barrier.wait()
        return total

    def run(self, parts: list[Callable[[], int]]) -> list[int | Exception]:
        found: dict[int, int | Exception] = {}

        def call(rank: int) -> None:
            try:
                found[rank] = parts[rank]()
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [found[rank] for rank in range(len(parts))]


@pytest.mark.parametrize("limit", [3, 2])
def test_ranks_count_together_and_fail_together(limit: int, warnings: list[str]) -> None:
    """Engine 0 is lost twice and engine 1 once. Rank 2 leads no engine, but engine 1 spans it."""
    ranks = Ranks(3)
    lost: list[EngineLost | None] = [EngineLost("zero"), EngineLost("one"), EngineLost("one")]
    starts: list[list[Exception]] = [[EngineLost("zero again")], [], []]
    num_started = [0, 0, 0]

    def part(rank: int) -> Callable[[], int]:
        number = rank if rank < 2 else None
        restarts = Restarts(IN_STEP, limit, number, sum_up=ranks.sum_up)
        restarts.lost = lost[rank]
        start = failing(*starts[rank])

        def counted() -> None:
            num_started[rank] += 1
            start()

        return lambda: restarts.replace(counted, restarts.count_lost())

    found = ranks.run([part(rank) for rank in range(3)])
    if limit == 3:
        assert found == [3, 3, 3]
        assert num_started == [2, 1, 1]
        assert sorted(warnings) == sorted([
            "zero", "one", "zero again", "rollout engine 1: starting another one",
            *["rollout engine 0: starting another one"] * 2,
        ])  # fmt: skip
    else:
        begin = "3 rollout engines were lost in one step, more than rollout.max_restarts=2; "
        other = begin + "see the messages of other ranks"
        assert [str(error) for error in found] == [begin + "zero again", other, other]
        assert all(isinstance(error, EngineGone) for error in found)


def test_no_rank_has_lost_an_engine() -> None:
    restarts = Restarts(IN_STEP, 0, 0)
    assert restarts.count_lost() == 0


def test_a_loss_of_another_node_of_the_engine_becomes_known() -> None:
    restarts = Restarts(IN_STEP, 1, 0, share_loss=lambda lost: lost or EngineLost("node 1 died"))
    assert restarts.count_lost() == 1
    assert str(restarts.lost) == "node 1 died"

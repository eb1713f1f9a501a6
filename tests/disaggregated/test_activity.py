"""What a worker does, by its own clock and by the trainer's: the seconds of a run add up."""

from __future__ import annotations

import itertools
import random
import threading
from collections import defaultdict
from typing import Any

import pytest

from mrl.engine_pool.remote.activity import MAX_SPANS, ActivityLog
from mrl.engine_pool.remote.engine_times import GUESS_S, EngineTimes
from mrl.run.activities import ACTIVITIES, IDLE, idle_shares, main_cause, seconds_key


class Time:
    """A clock that stands still until a test moves it."""

    def __init__(self, at: float = 0.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def test_every_second_counts_to_one_activity() -> None:
    now = Time(5.0)
    log = ActivityLog("start", now)
    now.at = 7.0
    log.enter("generate")
    now.at = 8.0
    with log.during("load"):
        now.at = 8.5
        with log.during("start"):
            now.at = 10.5
        now.at = 11.0
    now.at = 12.0
    log.enter("generate")  # as before: the span goes on
    now.at = 13.0
    taken = log.take()
    assert taken["now"] == "generate"
    assert taken["seconds"] == {"start": 4.0, "generate": 3.0, "load": 1.0}
    assert taken["spans"] == [
        (8.0, 6.0, "start"), (6.0, 5.0, "generate"), (5.0, 4.5, "load"), (4.5, 2.5, "start"),
        (2.5, 2.0, "load"), (2.0, 0.0, "generate"),
    ]  # fmt: skip
    now.at = 13.5
    assert log.take() == {
        "now": "generate", "seconds": {"generate": 0.5}, "spans": [(0.5, 0.0, "generate")],
    }  # fmt: skip
    assert log.take()["spans"] == []
    with pytest.raises(ValueError, match=r"got the activity 'dream', expected one of \['generate'"):
        log.enter("dream")


def test_spans_are_bounded_and_their_seconds_are_not() -> None:
    now = Time()
    log = ActivityLog("bound", now)
    for second in range(1000):
        now.at = second + 1.0
        log.enter("generate" if second % 2 else "bound")
    taken = log.take()
    assert len(taken["spans"]) == MAX_SPANS
    assert sum(taken["seconds"].values()) == 1000.0


def test_a_change_wakes_who_waits_for_it() -> None:
    log = ActivityLog("start")
    woken = threading.Thread(target=log.wait, args=(60.0,))
    woken.start()
    log.enter("bound")
    woken.join(10.0)
    assert not woken.is_alive()


def taken_by_activity(times: EngineTimes) -> dict[str, float]:
    seconds = times.take_seconds()
    assert set(seconds) == {seconds_key(name) for name in ACTIVITIES}
    return {name: value for name in ACTIVITIES if (value := seconds[seconds_key(name)])}


@pytest.mark.parametrize("seed", range(5))
def test_the_trainer_counts_what_workers_report_wherever_its_clock_stands(seed: int) -> None:
    """Reports and steps come at any time; clocks differ by a day; messages take up to 20 ms."""
    draw = random.Random(seed)
    here, there = Time(1e9), Time(500.0)
    times = EngineTimes(range(2), here)
    logs = [ActivityLog("bound", there) for _ in range(2)]
    true: dict[str, float] = defaultdict(float)
    counted: dict[str, float] = defaultdict(float)
    doing = ["bound", "bound"]
    steps: list[dict[str, float]] = []
    for _ in range(400):
        wait = draw.choice([0.01, 0.1, 0.7])
        here.at += wait
        there.at += wait
        for number in range(2):
            true[doing[number]] += wait / 2
        number = draw.randrange(2)
        doing[number] = draw.choice(list(ACTIVITIES))
        logs[number].enter(doing[number])
        message = logs[number].take()
        here.at += (late := draw.random() * 0.02)
        times.report(number, message)
        here.at -= late
        if draw.random() < 0.1:
            steps.append(taken_by_activity(times))
            for name, seconds in steps[-1].items():
                counted[name] += seconds
    for number in range(2):
        times.report(number, logs[number].take())
    for name, seconds in taken_by_activity(times).items():
        counted[name] += seconds
    assert len(steps) > 10
    assert all(value >= 0 for step in steps for value in step.values())
    assert sum(counted.values()) == pytest.approx(here.at - 1e9, rel=0.02)
    for name in ACTIVITIES:
        assert counted[name] == pytest.approx(true[name], abs=0.03 * sum(true.values()))
    spans = times.take_spans()
    for each in spans:
        assert all(one.end <= other.begin for one, other in itertools.pairwise(each))
        assert 1e9 - 0.1 < each[0].begin < each[-1].end < here.at + 0.1
    total = sum(span.end - span.begin for each in spans for span in each) / 2
    assert total == pytest.approx(here.at - 1e9, rel=0.02)


def report(now: str, **seconds: float) -> dict[str, Any]:
    """What a worker says that did these things in this order."""
    spans, age = [], 0.0
    for name, lasted in reversed(seconds.items()):
        spans.insert(0, (age + lasted, age, name))
        age += lasted
    return {"now": now, "seconds": seconds, "spans": spans}


def test_what_goes_on_counts_before_it_is_reported_and_not_twice() -> None:
    now = Time(100.0)
    times = EngineTimes([0], now)
    times.report(0, report("generate"))
    now.at = 101.0
    assert taken_by_activity(times) == {"generate": 1.0}
    now.at = 103.0
    times.report(0, report("bound", generate=1.5, bound=1.5))
    assert taken_by_activity(times) == {"generate": 0.5, "bound": 1.5}
    now.at = 110.0  # a worker that has fallen silent
    assert taken_by_activity(times) == {"bound": GUESS_S}


def test_an_engine_without_a_worker_is_being_started() -> None:
    now = Time()
    times = EngineTimes([0], now)
    now.at = 30.0
    times.restart()  # what was before does not count
    now.at = 31.0
    times.report(0, report("generate", start=25.0, generate=3.0))
    assert taken_by_activity(times) == {"generate": 1.0}
    now.at = 32.0
    times.lose(0)
    now.at = 40.0
    assert taken_by_activity(times) == {"start": 9.0}
    now.at = 45.0
    times.report(0, report("weights", start=6.0, weights=1.0))
    assert taken_by_activity(times) == {"start": 4.0, "weights": 1.0}
    assert [(s.begin, s.end, s.activity) for s in times.take_spans()[0]] == [
        (30.0, 31.0, "generate"), (31.0, 44.0, "start"), (44.0, 45.0, "weights"),
    ]  # fmt: skip
    assert times.take_spans() == [[]]


def test_a_long_step_keeps_its_longest_spans() -> None:
    now = Time()
    times = EngineTimes(range(1000), now)
    for second in range(200):
        now.at += 2.0
        lasted = 1.9 if second == 150 else 0.5
        times.report(0, report("bound", generate=2.0 - lasted, bound=lasted))
    spans = times.take_spans()[0]
    assert len(spans) == 8
    assert max(s.end - s.begin for s in spans if s.activity == "bound") == pytest.approx(1.9)
    assert spans == sorted(spans)
    assert sum(times.take_seconds().values()) == pytest.approx(400.0)


@pytest.mark.parametrize(
    "message",
    [
        {"now": "dream", "seconds": {}, "spans": []},
        {"now": "load", "seconds": {"dream": 1.0}, "spans": []},
        {"now": "load", "seconds": {}, "spans": [[1.0, 0.0, "dream"]]},
        {"now": "load", "seconds": {"load": "long"}, "spans": []},
    ],
)
def test_a_report_that_is_none_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"dream|long"):
        EngineTimes([0]).report(0, message)


def test_shares_of_a_step() -> None:
    metrics = {seconds_key(name): 0.0 for name in ACTIVITIES} | {
        "time/engine_generate_s": 6.0, "time/engine_load_s": 1.0, "time/engine_bound_s": 2.0,
        "time/engine_score_s": 1.0, "time/batch_wait_s": 3.0, "time/step_s": 12.0,
    }  # fmt: skip
    shares = idle_shares(metrics)
    assert shares == {"async/rollout_idle_share": 0.3, "async/trainer_idle_share": 0.25}
    assert main_cause(metrics) == "bound"
    assert main_cause(metrics | {seconds_key(name): 0.0 for name in IDLE}) == ""
    assert idle_shares({"time/step_s": 12.0}) == {}  # colocated

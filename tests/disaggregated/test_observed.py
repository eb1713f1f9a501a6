"""What a real run says of its time: who waited for whom, by two clocks, and the rows of a timeline."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from mrl.run.activities import ACTIVITIES, seconds_key
from mrl.run.folder import RunFolder
from mrl.run.timeline import Timeline
from mrl.scheduling.staleness import count_by_staleness, in_flight
from mrl.system.clock import Clock
from tests.disaggregated.test_runs import APART, model, rows, train
from tests.sample_groups import group

__all__ = ["model"]


def test_versions_and_groups_in_flight() -> None:
    assert in_flight(5, [4, None, 5], [3, 4, 4], 5) == {
        "async/leased_groups": 5, "async/queued_groups": 3, "async/queue_age": 3,
        "async/versions_in_flight": 3, "async/engine_lag": 1,
    }  # fmt: skip
    assert set(in_flight(0, [None], [], 0).values()) == {0.0}


def test_groups_are_counted_by_their_oldest_token() -> None:
    groups = [group([1.0], 0), group([0.0], 1)]
    version = groups[0].samples[0].weight_versions[0].version
    assert count_by_staleness(groups, version + 1, 2) == {
        "async/staleness/0": 0, "async/staleness/1": 2, "async/staleness/2": 0,
    }  # fmt: skip


def test_a_clock_knows_when_the_outermost_parts_were() -> None:
    clock = Clock()
    with clock.part("rollout"), clock.part("recovery"):
        pass
    with clock.part("train"):
        pass
    assert [name for _, _, name in clock.spans] == ["rollout", "train"]
    assert set(clock.seconds) == {"rollout", "recovery", "train"}
    assert clock.spans[0][1] <= clock.spans[1][0] + 1e-3


def test_a_timeline_drops_the_steps_that_are_done_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rewind(0)  # there is none yet
    assert not folder.timeline.file.exists()
    for step in (0, 1, 2, 3):
        trainer = [(100.0 + step, 100.5 + step, "rollout"), (100.5 + step, 101.0 + step, "train")]
        folder.timeline.add(step, trainer, [[(99.75 + step, 100.25 + step, "load")], []])
    with folder.timeline.file.open("a") as file:
        file.write('{"step": 4, "begi')  # killed here
    folder.rewind(2)
    folder.timeline.add(2, [(300.0, 301.0, "rollout")], [])
    found = Timeline(folder.timeline.file).read()
    assert [row["step"] for row in found] == [0, 1, 2]
    assert found[1] == {
        "step": 1, "begin": 101.0, "trainer": [[0.0, 0.5, "rollout"], [0.5, 1.0, "train"]],
        "engines": [[[-0.25, 0.25, "load"]], []],
    }  # fmt: skip
    assert found[2]["begin"] == 300.0


def test_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    good = '{"step": 7, "begin": 1.0, "trainer": [], "engines": []}\n'
    bad = ["null\n", "{}\n", '{"step": 1}\n', good.replace("[]", "{}"), good.replace("1.0", '"x"')]
    (tmp_path / "timeline.jsonl").write_text("".join(bad) + good)
    assert [row["step"] for row in Timeline(tmp_path / "timeline.jsonl").read()] == [7]


def ends_of_rollout(timeline: list[dict[str, Any]]) -> list[float]:
    """When the trainer had the batch of each step, by its own clock."""
    return [
        row["begin"] + max(end for _, end, name in row["trainer"] if name == "rollout")
        for row in timeline
    ]


@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bound", [0, 1])
def test_the_activities_of_an_engine_add_up_to_the_time(
    bound: int, model: Path, tmp_path: Path
) -> None:
    """The worker's clock against the trainer's, whose step ends where it has its batch."""
    output = tmp_path / "run"
    more = () if not bound else ("algorithm.importance=tis",)
    train(model, output, 2, *APART, f"async.max_staleness={bound}", "train.num_steps=8", *more)
    found, timeline = rows(output), RunFolder(output).timeline.read()
    assert [row["step"] for row in timeline] == list(range(8))
    taken = ends_of_rollout(timeline)
    seconds = [sum(row[seconds_key(name)] for name in ACTIVITIES) for row in found]
    for (before, after), said in zip(itertools.pairwise(taken), seconds[1:], strict=True):
        assert said == pytest.approx(after - before, rel=0.03, abs=0.2)
    assert sum(seconds[1:]) == pytest.approx(taken[-1] - taken[0], rel=0.03)
    spans = [
        (row["begin"] + begin, row["begin"] + end, name)
        for row in timeline
        for begin, end, name in row["engines"][0]
    ]
    assert all(one[1] <= other[0] + 2e-3 for one, other in itertools.pairwise(spans))
    drawn = sum(end - begin for begin, end, _ in spans)
    assert drawn == pytest.approx(spans[-1][1] - spans[0][0], rel=0.03)
    assert found[0]["time/engine_start_s"] < 0.5  # the wait for the first start is of no step
    for row in found:
        assert 0 <= row["async/rollout_idle_share"] <= 1
        assert 0 < row["async/trainer_idle_share"] <= 1
        assert row["async/versions_in_flight"] <= bound + 2
        assert row["async/engine_lag"] <= bound
    if not bound:  # they wait for each other
        assert sum(row["time/engine_bound_s"] for row in found[1:]) > 0.5 * sum(
            row["time/train_s"] for row in found[:-1]
        )
    log = output.with_suffix(".log").read_text()
    assert log.count("rollout idle ") == log.count("trainer waits ") == 8

"""Episodes of one worker process that wait, hang and die while others of it are in a step."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from mrl.environments import StepResult
from mrl.environments.episodes import EpisodeFailed
from mrl.environments.runner import EnvironmentRunner
from mrl.errors import RunFailed
from mrl.rewards.budget import Budget
from tests.environments.playing import Playing
from tests.environments.test_runner import closing, config_of, playing, start
from tests.waiting import only_bad_hurries, wait_until

__all__ = ["only_bad_hurries"]

ZOO = Path(__file__).with_name("waiting_zoo.py")


@contextlib.contextmanager
def mixed(folder, num=3, name="Mixed", **settings):
    """Episodes of the zoo's Mixed, and a function: the seeds of those that were closed."""
    playing_them, closed = closing(f"{ZOO}:{name}", folder / "closed", **settings)
    with playing_them as episodes:
        episodes.begin({n: start(n) for n in range(num)})
        yield episodes, closed


def test_async_steps_of_one_process_run_together():
    with playing(f"{ZOO}:Together", arguments={"num": 20}) as episodes:
        episodes.begin({n: start() for n in range(20)})
        results = episodes.step(dict.fromkeys(range(20), "a"))
        assert results == dict.fromkeys(range(20), StepResult("1:a", 1.0))


@pytest.mark.usefixtures("ends_at_once")
def test_who_waits_holds_nobody_of_its_process(tmp_path):
    with mixed(tmp_path) as (episodes, closed):
        episodes.ask(0, "waits")
        for turn in range(3):
            assert episodes.step({1: "a", 2: "b"}) == {
                1: StepResult(f"{turn + 1}:a", 1.0),
                2: StepResult(f"{turn + 1}:b", 1.0),
            }
        episodes.end([1])
        assert closed() == {1}


def test_who_takes_too_long_is_cancelled_and_nobody_is_replayed(tmp_path):
    with mixed(tmp_path, time_limit_s=2) as (episodes, closed):
        episodes.ask(0, "waits")
        episodes.ask(1, "insists")
        assert episodes.step({2: "a"}) == {2: StepResult("1:a", 1.0)}
        late = dict(episodes.next() for _ in range(2))
        assert late == dict.fromkeys((0, 1), EpisodeFailed("no answer within 2 s, cancelled"))
        assert episodes.step({2: "b"}) == {2: StepResult("2:b", 1.0)}
        assert episodes.runner.num_replayed == 0
        episodes.end([0, 1])
        assert closed() == {0, 1}


@pytest.mark.usefixtures("only_bad_hurries")
@pytest.mark.parametrize(
    ("deed", "reason"), [("bad", "no answer within 0.5 s, killed"), ("dies", "code 7")]
)
def test_only_the_culprit_fails_among_many_in_a_step(deed, reason, tmp_path):
    """It is not known at first who it is: the requests are repeated one by one."""
    with mixed(tmp_path, 5, time_limit_s=0.5) as (episodes, closed):
        episodes.step(dict.fromkeys(range(5), "a"))
        actions = {0: "naps", 1: "naps", 2: deed, 3: "naps", 4: "naps"}
        results = episodes.step(actions)
        assert reason in results.pop(2).reason
        assert results == {n: StepResult("2:naps", 1.0) for n in (0, 1, 3, 4)}
        assert episodes.step({0: "b"}) == {0: StepResult("3:b", 1.0)}
        assert episodes.runner.num_failed == 1
        episodes.end([2])
        assert closed() == set()  # its process was lost


def test_a_step_waits_for_others_of_its_process_without_losing_time():
    """Steps that are not async take turns; the time of each begins with its own turn."""
    with playing(f"{ZOO}:Naps", time_limit_s=1.5) as episodes:
        episodes.begin({n: start() for n in range(6)})
        began = time.monotonic()
        results = episodes.step(dict.fromkeys(range(6), "0.3"))
        assert time.monotonic() - began >= 6 * 0.3  # more than the limit of each
        assert results == dict.fromkeys(range(6), StepResult("0.3", 1.0))


def test_a_step_may_run_a_loop_of_its_own():
    with playing(f"{ZOO}:OwnLoop") as episodes:
        episodes.begin({0: start(), 1: start()})
        for turn in (1, 2):
            assert episodes.step({0: "a", 1: "a"}) == dict.fromkeys(
                (0, 1), StepResult(f"{turn}:a", 1.0)
            )


def test_a_task_that_exits_fails_its_episode_alone(tmp_path):
    with mixed(tmp_path) as (episodes, _):
        results = episodes.step({0: "exits", 1: "naps"})
        assert results == {0: EpisodeFailed("SystemExit: 7"), 1: StepResult("1:naps", 1.0)}
        assert episodes.runner.num_replayed == 0


def test_an_episode_that_is_ended_in_a_step_is_closed_after_it(tmp_path):
    with mixed(tmp_path) as (episodes, closed):
        episodes.ask(0, "naps")
        calls = episodes.runner._workers[0]._calls
        wait_until(lambda: [call.state for call in calls._open.values()] == ["awaits"], "the step")
        episodes.end([0])  # its answer does not come
        assert closed() == {0}
        assert episodes.step({1: "a"}) == {1: StepResult("1:a", 1.0)}


def test_a_close_that_hangs_costs_its_process_and_no_episode(tmp_path, capfd):
    with mixed(tmp_path, name="ClosesNever", time_limit_s=2) as (episodes, closed):
        episodes.step({0: "a", 2: "a"})
        episodes.end([1])
        assert episodes.step({0: "b", 2: "b"}) == dict.fromkeys((0, 2), StepResult("2:b", 1.0))
        assert (episodes.runner.num_failed, episodes.runner.num_replayed) == (0, 2)
        episodes.end([0])
        assert closed() == {0}
    assert "close() of an episode: no answer within 2 s, killed" in capfd.readouterr().err


@pytest.mark.usefixtures("ends_at_once")
def test_a_new_episode_goes_where_least_is_to_be_done(tmp_path):
    with playing(f"{ZOO}:Naps", num_workers=2) as episodes:
        episodes.begin({0: start(), 1: start()})
        episodes.ask(0, "60")
        wait_until(lambda: any(w.is_held for w in episodes.runner._workers), "the long step")
        began = time.monotonic()
        episodes.begin({n: start() for n in range(2, 6)})
        episodes.step(dict.fromkeys(range(1, 6), "0.01"))
        assert time.monotonic() - began < 30
    with playing(f"{ZOO}:Which", num_workers=3) as episodes:
        episodes.begin({n: start() for n in range(6)})
        places = [r.observation for r in episodes.step(dict.fromkeys(range(6), "a")).values()]
        assert sorted(map(places.count, set(places))) == [2, 2, 2]


@pytest.mark.usefixtures("ends_at_once")
def test_no_request_is_left_without_an_answer_when_the_run_ends(tmp_path):
    with mixed(tmp_path) as (episodes, _):
        episodes.ask(0, "waits")
    assert episodes.next() == (0, EpisodeFailed("the run is ending"))
    assert episodes.step({1: "a"}) == {1: EpisodeFailed("the run is ending")}
    episodes.end([1])


def test_a_budget_that_is_used_up_ends_the_run(tmp_path):
    """The process with the call that used it up is killed; whoever asks next gets the error."""
    config = config_of(f"{ZOO}:Naps", time_limit_s=60)
    with EnvironmentRunner(config, Budget(3.0)) as runner:
        episodes = Playing(runner)
        episodes.begin({0: start(), 1: start()})
        began = time.monotonic()
        episodes.ask(0, "3600")
        assert "no answer within" in episodes.next()[1].reason
        assert time.monotonic() - began < 30
        with pytest.raises(RunFailed, match="have used the 3 s per step that the service allows"):
            episodes.step({1: "0"})


def test_a_process_that_dies_between_two_steps_costs_no_episode(tmp_path):
    with playing(f"{ZOO}:Which") as episodes:
        episodes.begin({0: start(), 1: start()})
        pid = int(episodes.step({0: "a"})[0].observation)
        episodes.step({1: "a"})
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the process")
        results = episodes.step({0: "a", 1: "a"})
        assert all("its answers differed" in result.reason for result in results.values())

"""Worker processes that misbehave: their episodes have no reward, and nothing of them is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mrl.config import EnvironmentConfig
from mrl.environments.command import MARK
from mrl.environments.hosted import pool, worker
from mrl.environments.hosted.pool import EpisodeWorkers
from mrl.errors import InputError, RunFailed
from mrl.system.process_search import find_by_variable
from tests.waiting import wait_until

PROGRAM = Path(__file__).parent / "plain_program.py"
KEYS = {
    "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
    "OPENAI_API_KEY": "key",
    "OPENAI_MODEL": "policy",
}


def make_config(**settings) -> EnvironmentConfig:
    return EnvironmentConfig(verifiers="plain", **{"episode_limit_s": 60, **settings})


@pytest.fixture
def plain(monkeypatch):
    """Workers of plain_program.py."""
    monkeypatch.setattr(pool, "worker_command", lambda config: [sys.executable, str(PROGRAM)])
    monkeypatch.setattr(pool, "worker_spec", lambda config: config.arguments)


@pytest.fixture
def workers(plain):
    with EpisodeWorkers(make_config()) as workers:
        yield workers


def run(workers, kind, **given):
    return workers.run({"kind": kind, **given}, KEYS)


def test_episodes_share_a_process(workers):
    """The environment counts its episodes."""
    outcomes = [run(workers, "good") for _ in range(3)]
    assert [outcome.reward for outcome in outcomes] == [1, 2, 3]
    assert outcomes[0].parts == {"length": 3}
    outcome = run(workers, "answers")
    assert (outcome.answer, outcome.parts, outcome.error) == ("said", {"a": 1}, "")


def test_many_at_a_time(workers):
    start = time.monotonic()
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda _: run(workers, "waits", s=1), range(16)))
    assert sorted(outcome.reward for outcome in found) == list(range(1, 17))
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("kind", "given", "error"),
    [
        ("raises", {}, "ValueError: on purpose"),
        ("gives up", {}, "there is no more"),
        ("exits", {}, "SystemExit: 3"),
        ("wordless", {}, "Wordless: its str() raises KeyError"),
        ("lies", {"reward": "nan"}, "the reward is nan, expected a finite number"),
        ("lies", {"reward": "1e39"}, "the reward is 1e+39, expected a finite number"),
    ],
)
def test_an_episode_that_fails_takes_no_other_with_it(workers, kind, given, error):
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(run, workers, "waits", s=0.5)
        outcome = run(workers, kind, **given)
        assert (outcome.reward, outcome.error) == (None, error)
        assert other.result().reward is not None


def test_a_process_that_dies_is_replaced(workers):
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(run, workers, "waits")
        time.sleep(0.2)
        lost = "its worker exited with code 4: last words"
        assert run(workers, "dies").error == lost
        assert other.result().error == lost
    assert run(workers, "good").reward == 1


def test_others_play_while_a_process_is_replaced(plain, tmp_path):
    slow = tmp_path / "slow"
    config = make_config(num_workers=2, arguments={"slow_if": str(slow)})
    with EpisodeWorkers(config) as workers:
        slow.touch()
        run(workers, "dies")
        begun_at = time.monotonic()
        assert run(workers, "good").reward == 1
        assert time.monotonic() - begun_at < 30
        mark = workers._mark
    assert not find_by_variable(MARK, mark)


def test_close_waits_for_a_replacement_that_starts_late(plain, monkeypatch):
    """A process that begins after the other workers were killed does not stay behind."""
    with EpisodeWorkers(make_config(num_workers=2)) as workers:
        run(workers, "dies")
        start_one = workers._start_one

        def start_late():
            workers._closed.wait()
            time.sleep(0.3)
            return start_one()

        monkeypatch.setattr(workers, "_start_one", start_late)
        assert run(workers, "good").reward == 1
        (replacement,) = workers._replacements.values()
    assert replacement.done()
    assert not find_by_variable(MARK, workers._mark)


def test_a_worker_that_cannot_be_replaced_is_told_and_not_tried_at_every_episode(
    plain, monkeypatch, capfd
):
    with EpisodeWorkers(make_config(num_workers=2)) as workers:
        run(workers, "dies")
        calls = []

        def fail():
            calls.append(1)
            raise RunFailed("no memory")

        monkeypatch.setattr(workers, "_start_one", fail)
        assert run(workers, "good").reward == 1
        wait_until(lambda: not workers._replacements)
        assert [run(workers, "good").reward for _ in range(3)] == [2, 3, 4]
        assert len(calls) == 1
        assert "a lost worker was not replaced: no memory" in capfd.readouterr().err
        run(workers, "dies")
        assert "could not be started again: no memory" in run(workers, "good").error


def test_a_process_that_blocks_is_killed(plain):
    with EpisodeWorkers(make_config(time_limit_s=1)) as workers:
        outcome = run(workers, "blocks")
        assert "did not answer within environment.time_limit_s=1 s" in outcome.error
        assert run(workers, "good").reward == 1
    with EpisodeWorkers(make_config(time_limit_s=20)) as workers:
        assert run(workers, "blocks", s=3).reward == 1


def test_an_episode_that_takes_too_long_is_cancelled(plain):
    with EpisodeWorkers(make_config(episode_limit_s=0.5)) as workers:
        (before,) = workers._workers
        assert "no end within environment.episode_limit_s=0.5 s" in run(workers, "waits").error
        wait_until(lambda: not before.has_left_overs())
        workers.sweep()
        assert run(workers, "good").reward == 2
        run(workers, "stays")
        workers.sweep()
        assert before.is_lost
        assert run(workers, "good").reward == 1


def test_an_episode_ends_with_the_rollout(workers):
    stop = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(workers.run, {"kind": "waits"}, KEYS, time.monotonic, stop)
        time.sleep(0.2)
        stop.set()
        assert waiting.result().error == "the rollout is over"


def test_time_that_stands_still_does_not_count(plain):
    with EpisodeWorkers(make_config(episode_limit_s=0.5)) as workers:
        outcome = workers.run({"kind": "waits", "s": 1}, KEYS, lambda: 0.0)
    assert outcome.reward == 1


def test_a_fork_that_comes_back_is_no_episode(workers):
    assert run(workers, "forks").reward == 1
    assert run(workers, "good").reward == 2


def test_episodes_go_to_the_idle_worker(plain):
    with EpisodeWorkers(make_config(num_workers=2)) as workers:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _: run(workers, "waits", s=1), range(4)))
        assert sorted(outcome.reward for outcome in found) == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        (
            {"refuses": "it\nis not there"},
            InputError,
            "^environment verifiers 'plain': it is not there$",
        ),
        ({"raises": "x"}, InputError, "KeyError: 'x'"),
        ({"exits": 5}, RunFailed, "its worker exited with code 5: last words"),
    ],
)
def test_what_cannot_be_loaded_is_said_at_the_start(plain, arguments, kind, match):
    with pytest.raises(kind, match=match):
        EpisodeWorkers(make_config(arguments=arguments, num_workers=2))


def test_a_slow_start(plain, monkeypatch):
    monkeypatch.setattr(worker, "START_S", 0.01)
    with pytest.raises(RunFailed, match="was not ready within"):
        EpisodeWorkers(make_config())


def test_nothing_is_left(plain):
    with EpisodeWorkers(make_config(num_workers=2)) as workers:
        mark = workers._mark
        assert len(find_by_variable(MARK, mark)) == 2
    assert not find_by_variable(MARK, mark)


def test_workers_die_with_the_run(tmp_path):
    """Also if the run is killed."""
    script = f"""
import sys, time
from mrl.environments.hosted import pool, worker
pool.worker_command = lambda config: [sys.executable, {str(PROGRAM)!r}]
pool.worker_spec = lambda config: {{}}
from mrl.config import EnvironmentConfig
workers = pool.EpisodeWorkers(EnvironmentConfig(verifiers="plain"))
print(workers._mark, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process, process.stdout as out:
        mark = out.readline().strip()
        assert find_by_variable(MARK, mark)
        process.kill()
    wait_until(lambda: not find_by_variable(MARK, mark))


def test_a_question_is_answered_by_lines():
    def asked(**spec):
        given = json.dumps(spec).encode() + b"\n"
        done = subprocess.run(
            [sys.executable, str(PROGRAM), "count"], input=given, capture_output=True, check=True
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    assert asked(count=2) == [{"number": 0}, {"number": 1}, {"end": True}]
    assert asked(count=1, raises="x")[-1] == {"input_error": "ValueError: x"}
    assert os.environ.get("MRL_AGENTS") is None

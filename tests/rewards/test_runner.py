import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from mrl.errors import InputError, RunFailed
from mrl.rewards.runner import RewardRunner
from mrl.system.json_worker import JsonWorker
from mrl.types import Prompt, Sample, SampleGroup, VersionSpan
from tests.release import release
from tests.waiting import LIMIT_S, only_bad_hurries, wait_until

__all__ = ["only_bad_hurries"]

ZOO = Path(__file__).parent / "zoo.py"


def group(size=8, **columns):
    ids = torch.tensor([5, 1, 2])
    sample = Sample(0, ids, 1, ids > 2, torch.zeros(3), (VersionSpan(0, 1, 3),), "stop")
    return SampleGroup(Prompt("0", ids[:1], "p", columns, "f:1"), [sample] * size)


def children():
    return [p for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]


@pytest.fixture(autouse=True)
def _no_process_is_left():
    before = set(children())
    yield
    wait_until(lambda: set(children()) <= before, "the end of all processes")


@pytest.mark.parametrize("name", ["lengths", "slow_lengths"])
def test_sync_and_async(name):
    with RewardRunner(f"{ZOO}:{name}", 10) as runner:
        first, second = runner.score([group(2), group(1)], [["a", "abc"], ["ab"]])
    assert first.tolist() == [1, 3]
    assert second.tolist() == [2]
    assert first.dtype == torch.float32
    assert runner.report.num_failed == runner.report.num_unscored == 0


def test_where_memory_runs_out_the_worker_goes_first():
    """And not the trainer, which holds more of it."""
    with RewardRunner(f"{ZOO}:lengths", 10) as runner:
        assert Path(f"/proc/{runner._workers[0].pid}/oom_score_adj").read_text() == "1000\n"


def test_columns_and_completion_ids_arrive():
    with RewardRunner(f"{ZOO}:columns_seen", 10) as runner:
        (rewards,) = runner.score([group(2, answer=10, info={"x": 1})], [["", ""]])
        assert rewards.tolist() == [13, 13]
        with pytest.raises(InputError, match="f:1: column 'completions'"):
            runner.score([group(1, completions=3)], [["a"]])
        with pytest.raises(ValueError, match="expected 2 completions, got 1"):
            runner.score([group(2)], [["a"]])


def test_prints_do_not_corrupt_the_protocol(capfd):
    with RewardRunner(f"{ZOO}:prints", 10) as runner:
        (rewards,) = runner.score([group(3)], [["a", "b", "c"]])
    assert rewards.tolist() == [0.5] * 3
    out, err = capfd.readouterr()
    assert out == ""
    assert '{"rewards": [7]}' in err


def test_a_forked_child_that_comes_back_answers_nothing(capfd):
    """Its line would be read as the answer to the next call, and shift all later rewards."""
    texts = [["a", "abc"], ["ab"], ["abcd"], ["abcde"]]
    with RewardRunner(f"{ZOO}:forks", 10) as runner:
        for _ in range(3):
            rewards = runner.score([group(len(each)) for each in texts], texts)
            assert [each.tolist() for each in rewards] == [[1, 3], [2], [4], [5]]
            time.sleep(0.1)  # the children come back meanwhile
        assert runner.report.num_failed == 0
        assert runner._workers[0].num_returned_forks
    assert capfd.readouterr().err.count("forks' forked, and the child returned from the call") == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("forks_and_leaves", "worker process (exit code 0)"),
        ("writes_into_the_pipe", "is not an answer to the request: something else wrote into"),
        ("raises", "ZeroDivisionError: division by zero"),
        release("hangs", "no answer within 0.5 s, killed"),
        ("hangs_with_child", "no answer within 0.5 s, killed"),
        ("dies", "worker process (exit code 7)"),
        release("exits", "SystemExit: 7"),
        ("nan", "reward 5 is nan, expected a finite number"),
        release("infinite", "reward 5 is inf, expected a finite number"),
        release("text", "reward 5 is '1.0', expected a number or None"),
    ],
)
@pytest.mark.usefixtures("only_bad_hurries")
def test_only_the_culprit_is_masked(name, reason, tmp_path, monkeypatch):
    mark = str(tmp_path)  # other runs of the suite on this machine have orphans of their own
    monkeypatch.setenv("MRL_TEST_REWARD_CHILD", mark)
    texts = [["abc"] * 8 for _ in range(4)]
    texts[1][5] = "bad"
    with RewardRunner(f"{ZOO}:{name}", 0.5) as runner:
        rewards = torch.stack(runner.score([group() for _ in texts], texts))
        assert rewards.isnan().nonzero().tolist() == [[1, 5]]
        assert bool((rewards[~rewards.isnan()] == 3).all())
        assert runner.report.num_failed == 1
        assert runner.report.num_repeated == 1
        assert runner.report.num_unscored == 0
        assert reason in runner.report.first_error
        runner.score([group(1)], [["abc"]])
        assert runner.report.num_failed == 0

    def orphans():
        return [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]

    wait_until(lambda: not orphans(), "the end of what the function started")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("too_few", "returned 7 rewards for 8 completions"),
        ("nothing", "returned NoneType, expected a list"),
    ],
)
def test_an_answer_that_is_not_one_a_completion_gives_none_of_them_a_reward(name, reason):
    """Scored one at a time it might look right, and a broken function would go unseen."""
    texts = [["abc"] * 8 for _ in range(32)]
    texts[1][5] = "bad"
    with RewardRunner(f"{ZOO}:{name}", 10) as runner:
        rewards = torch.stack(runner.score([group() for _ in texts], texts))
        assert rewards.isnan().sum(1).tolist() == [0, 8] + [0] * 30
        assert runner.report.num_failed == 8
        assert reason in runner.report.first_error


def test_the_limit_counts_the_samples_of_all_engines():
    texts = [["bad"] + ["abc"] * 7]
    with RewardRunner(f"{ZOO}:raises", 10) as runner:
        (rewards,) = runner.score([group()], texts, step_samples=20)
        assert rewards.isnan().tolist() == [True] + [False] * 7
        with pytest.raises(RuntimeError, match="failed on 1 of 8 samples"):
            runner.score([group()], texts)


def test_none_masks_and_is_no_failure():
    with RewardRunner(f"{ZOO}:abstains", 10) as runner:
        (rewards,) = runner.score([group(2)], [["bad", "ab"]])
    assert rewards.isnan().tolist() == [True, False]
    assert (runner.report.num_failed, runner.report.num_unscored) == (0, 1)


def test_above_five_percent_the_run_stops_early():
    texts = [["bad"] * 20 for _ in range(2)]
    with RewardRunner(f"{ZOO}:raises", 10) as runner:
        with pytest.raises(RuntimeError) as caught:
            runner.score([group(20), group(20)], texts)
        assert runner.report.num_failed == 3  # 2 of 40 are 5%
    assert "zoo.py:raises' failed on 3 of 40 samples" in str(caught.value)
    assert "first error: f:1: ZeroDivisionError" in str(caught.value)


def test_a_large_request_does_not_block_on_the_pipe():
    with RewardRunner(f"{ZOO}:lengths", 30) as runner:
        (rewards,) = runner.score([group(4)], [["x" * 3_000_000] * 4])
    assert rewards.tolist() == [3_000_000] * 4


def test_a_stopped_worker_cannot_hold_the_trainer(monkeypatch):
    call, limits = JsonWorker.call, itertools.chain([0.5], itertools.repeat(LIMIT_S))
    monkeypatch.setattr(
        JsonWorker, "call", lambda self, request, timeout_s: call(self, request, next(limits))
    )
    before = set(children())
    with RewardRunner(f"{ZOO}:lengths", 0.5) as runner:
        (worker,) = set(children()) - before
        os.kill(worker.pid, signal.SIGSTOP)
        texts = [["x" * 1_000_000] * 2]
        (rewards,) = runner.score([group(2)], texts)
    assert rewards.tolist() == [1_000_000] * 2
    assert runner.report.num_failed == 0


def test_load_errors_come_from_the_start(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="did you mean 'first_char'"):
        RewardRunner("first_cha", 10)
    (tmp_path / "dies.py").write_text("import os; os._exit(9)")
    with pytest.raises(InputError, match=r"its import ended the worker process \(exit code 9\)"):
        RewardRunner(f"{tmp_path}/dies.py:f", 10)
    (tmp_path / "dies.py").write_text("import os; os.kill(os.getpid(), 19)")
    monkeypatch.setattr("mrl.rewards.worker_calls.START_TIMEOUT_S", 1.5)
    with pytest.raises(RunFailed, match=r"its worker was stopped \(SIGSTOP\) while"):
        RewardRunner(f"{tmp_path}/dies.py:f", 10)
    killed = {"os.kill(os.getpid(), 9)": -9, "os.kill(os.getpid(), 15)": -15}
    killed |= {"os._exit(137)": 137}  # as the guard of another user passes it on
    for ends, code in killed.items():
        (tmp_path / "dies.py").write_text(f"import os; {ends}")
        with pytest.raises(RunFailed, match=rf"\(exit code {code}\): the host ran out of memory"):
            RewardRunner(f"{tmp_path}/dies.py:f", 10)


def test_fast_enough_for_every_step():
    groups, texts = [group() for _ in range(16)], [["abc" * 100] * 8] * 16
    with RewardRunner("first_char", 10) as runner:
        worker = psutil.Process(runner._workers[0].pid)

        def cpu_seconds():  # a busy machine takes more time, but not for us
            times = worker.cpu_times()
            return time.process_time() + times.user + times.system

        start = cpu_seconds()
        for _ in range(20):
            runner.score(groups, texts)
        assert (cpu_seconds() - start) / 20 < 0.05


def scores_for_ever(name, pids):
    runner = RewardRunner(f"{ZOO}:{name}", 1000)
    pids.send(runner._workers[0].pid)
    runner.score([group(1)], [["bad"]])
    time.sleep(1000)


@pytest.mark.parametrize("name", [release("lengths"), "hangs"])
def test_worker_dies_with_a_trainer_that_is_killed(name):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    trainer = context.Process(target=scores_for_ever, args=(name, there))
    trainer.start()
    worker = psutil.Process(here.recv())
    time.sleep(0.3)
    assert worker.is_running()
    trainer.kill()
    trainer.join()
    gone, alive = psutil.wait_procs([worker], timeout=LIMIT_S)
    assert gone
    assert not alive

"""What a run starts does not die of a signal that is meant for its ranks."""

import os
import signal
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from mrl.engines.sglang.process import ServerProcess
from mrl.errors import InputError
from mrl.system.json_worker import JsonWorker
from mrl.system.process_search import find_by_variable
from mrl.system.processes import deferring_interrupts
from mrl.system.worker_process import MARK, WorkerLost
from tests.waiting import LIMIT_S, wait_until


@pytest.mark.parametrize("error", [None, OSError("full")])
def test_ctrl_c_waits_for_the_end_of_a_block(error: OSError | None) -> None:
    done = []

    def cleans_up() -> None:
        with deferring_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(signal.getsignal(signal.SIGINT))
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt) as caught:
        cleans_up()
    assert caught.value.__context__ is error
    assert signal.default_int_handler not in done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_fork_does_not_get_the_ctrl_c_of_its_parent() -> None:
    child = -1
    try:
        with deferring_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            child = os.fork()
        code = 0
    except KeyboardInterrupt:
        code = 1
    if child == 0:
        os._exit(code)
    assert (code, os.waitpid(child, 0)[1]) == (1, 0)


def test_a_worker_never_gets_sigusr1() -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    worker = JsonWorker("tests.system.blocked_worker", "a worker", "spec")
    try:
        assert worker.call({}, LIMIT_S) == {"blocked": [signal.SIGUSR1]}
    finally:
        worker.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ('"x" * 3_000_000', "the answer has more than 1 MiB"),
        ('"not json\\n"', "b'not json', expected a JSON object"),
        ('"[1]\\n"', "expected a JSON object"),
        ('"[" * 100_000 + "\\n"', "expected a JSON object"),
    ],
)
def test_what_is_no_answer_ends_the_worker(
    says: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line without an end must not fill the trainer's memory, nor one that is no JSON end the run."""
    monkeypatch.setattr("mrl.system.worker_process.MAX_REPLY_BYTES", 1 << 20)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "odd_worker.py").write_text(
        "import sys, time\n"
        "print('{\"ready\": true}', flush=True)\n"
        f"for _ in sys.stdin:\n    sys.stdout.write({says})\n    sys.stdout.flush()\n"
        "    time.sleep(1000)\n"
    )
    with closing(JsonWorker("odd_worker", "a worker", "spec")) as worker:
        with pytest.raises(WorkerLost) as lost:
            worker.call({}, LIMIT_S)
        assert text in str(lost.value)
        assert worker.pid is None
    with closing(JsonWorker("odd_worker", "a worker", "spec")) as worker:
        (tmp_path / "odd_worker.py").write_text(f"print({says}, flush=True)\n")
        with pytest.raises(InputError, match="a worker: during its start "):
            worker.start()


def test_an_engine_never_gets_sigusr1(tmp_path: Path) -> None:
    server = ServerProcess({}, {}, tmp_path / "log")
    server.start()
    try:
        status = Path(f"/proc/{server.pid}/status").read_text()
    finally:
        server.stop()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert blocked == 1 << (signal.SIGUSR1 - 1)


LEAVES = """
import json, os, sys
print('{"ready": true}', flush=True)
for line in sys.stdin:
    if os.fork() == 0:
        os.setsid()  # killpg does not reach it
        if os.fork() == 0:  # nor does who looks for children of the worker
            os.execvp("sleep", ["sleep", "1000"])
        os._exit(0)
    os.wait()
    print(json.dumps({**json.loads(line), "done": 1}), flush=True)
"""


@pytest.mark.parametrize("dies", [False, True], ids=["closed", "dies"])
def test_what_a_worker_leaves_in_a_session_of_its_own_ends_with_it(
    dies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "leaving_worker.py").write_text(LEAVES)
    with closing(JsonWorker("leaving_worker", "a worker", "spec")) as worker:
        assert worker.call({}, LIMIT_S) == {"done": 1}

        def what_it_left() -> set[int]:
            return {*find_by_variable(MARK, worker._process.mark)} - {worker.pid}

        wait_until(what_it_left)  # a process shows no variables while it starts sleep
        (left,) = what_it_left()
        if dies:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(WorkerLost, match="exit code -9"):  # its child holds the pipe
                worker.call({}, LIMIT_S)
            assert not find_by_variable(MARK, worker._process.mark)
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE

"""SIGUSR1 before there is a run to stop: it is remembered, and ends no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.system.stop import HANGUP, NOBODY, SIGNAL, TERMINATION, StopRequest, remembering_signals
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
STUB = """
import os, runpy, signal, sys, types
class Cli(types.ModuleType):
    @property
    def main(self):  # as torch is imported
        os.kill(os.getpid(), signal.SIGUSR1)
        return lambda: print("alive")
sys.modules["mrl.cli"] = Cli("mrl.cli")
sys.argv = ["mrl", *sys.argv[1:]]
runpy.run_module("mrl", run_name="__main__")
"""


def test_a_signal_that_came_before_the_run_counts_once() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with remembering_signals():
        os.kill(os.getpid(), signal.SIGUSR1)
        first = StopRequest()
        with first.handling_signals():
            assert first.source == SIGNAL
    assert signal.getsignal(signal.SIGUSR1) == before
    second = StopRequest()
    with remembering_signals(), second.handling_signals():
        assert second.source == NOBODY  # another run of this process


def test_the_command_survives_the_signal_from_its_first_import_on() -> None:
    def run(command: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", STUB, command]
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(words, env=environ, capture_output=True, text=True, check=False)

    assert run("train").stdout == "alive\n"
    assert run("check").returncode == -signal.SIGUSR1


@pytest.mark.parametrize(
    ("number", "who"), [(signal.SIGHUP, HANGUP), (signal.SIGTERM, TERMINATION)]
)
def test_sigterm_and_sighup_ask_the_run_to_stop_and_handlers_return(
    number: signal.Signals, who: int
) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # these tests may run under nohup
    try:
        request = StopRequest(limit_s=3600.0)
        with request.handling_signals():
            os.kill(os.getpid(), number)
            wait_until(lambda: request.source == who)  # another thread may get it first
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_hangup_is_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        request = StopRequest()
        with request.handling_signals():  # under nohup
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.source == NOBODY
    finally:
        signal.signal(signal.SIGHUP, before)


STOPPABLE = """
import os, signal, threading
from mrl.system.stop import StopRequest
request = StopRequest(LIMIT, lambda: 4)
with request.handling_signals():
    CODE
    while True:
        signal.pause()
"""


def run_stoppable(code: str, limit_s: float, **env: str) -> subprocess.CompletedProcess[str]:
    text = STOPPABLE.replace("CODE", code).replace("LIMIT", str(limit_s))
    return subprocess.run(
        [sys.executable, "-c", text], env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_a_step_that_does_not_end_in_time_says_what_is_lost() -> None:
    done = run_stoppable("os.kill(os.getpid(), signal.SIGTERM)", 0.1)
    assert done.returncode == 143
    assert done.stderr == (
        "mrl: SIGTERM: the step was not finished and saved within checkpoint.stop_limit_s=0.1 s; 4 "
        "steps are saved, later training is lost; start again to continue\n"
    )


def test_a_rank_whose_sibling_is_gone_ends_at_once() -> None:
    env = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "500"}
    done = run_stoppable("os.kill(os.getpid(), signal.SIGTERM)", 3600.0, **env)
    assert (done.returncode, done.stderr) == (143, "")


def test_a_fork_of_the_run_dies_of_sigterm_and_tells_nobody() -> None:
    code = (
        "pid = os.fork()\n    pid or os.kill(os.getpid(), signal.SIGTERM)\n"
        "    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "    os._exit(9 if status == -15 and not request.source else 1)"
    )
    assert run_stoppable(code, 0.0).returncode == 9

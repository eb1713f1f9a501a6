"""SIGUSR1 before there is a run to stop: it is remembered, and ends no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from mrl.system.stop import NOBODY, SIGNAL, StopRequest, remembering_signals

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
        with first.heeding_signals():
            assert first.asked == SIGNAL
    assert signal.getsignal(signal.SIGUSR1) == before
    second = StopRequest()
    with remembering_signals(), second.heeding_signals():
        assert second.asked == NOBODY  # another run of this process


def test_the_command_survives_the_signal_from_its_first_import_on() -> None:
    def run(command: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", STUB, command]
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(words, env=environ, capture_output=True, text=True, check=False)

    assert run("train").stdout == "alive\n"
    assert run("check").returncode == -signal.SIGUSR1

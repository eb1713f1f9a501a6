"""A rank of `mrl train` that hangs itself at a given moment: a trial of benchmarks/watchdog.py.

It takes the arguments of `mrl`; the variable `MRL_TRIAL` holds a `Trial` as JSON. The moment lies in
the phase that the trial names. The rank notes it before it hangs, so that the benchmark knows where and
when that was without a look at what the watchdog reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

VARIABLE = "MRL_TRIAL"
PLACES = {
    "start": ("mrl.trainer", "Trainer.__post_init__"),
    "sync": ("mrl.engine_pool.local", "LocalPool.sync"),
    "rollout": ("mrl.engine_pool.local", "LocalPool.rollout"),
    "logprobs": ("parallel.megatron_model", "MegatronModel.forward_only"),
    "train": ("mrl.learn.updates", "Updates.take"),
    "save": ("parallel.checkpoint.checkpoints", "Checkpoints.save"),
}
"""What runs from the beginning to the end of each phase, or of a part of it: module and function."""
FIRST_S = 0.2
KINDS = ("stopped", "held")
"""`stopped`: SIGSTOP of the rank. `held`: a thread keeps Python's lock and sleeps."""


@dataclass(frozen=True)
class Trial:
    """A trial says which rank hangs, how and when."""

    rank: int
    phase: str
    kind: str
    occurrence: int
    """How many times the rank has been through the phase before."""
    share: float
    """The moment in the phase, as a share of the seconds that it took the last time, or `FIRST_S`."""
    note: str
    """The file to which the rank writes the time, in seconds since 1970."""


class _Hang:
    """A `_Hang` is around each call of the phase's function, and hangs the process in one of them."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.num_calls = 0
        self.last_s = FIRST_S
        self._lock = threading.Lock()
        self._call = -1
        """The number of the call that runs; -1 between two calls."""

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            begin = time.monotonic()
            self._call = self.num_calls
            if self._call >= self.trial.occurrence:  # again where an earlier call was too short
                target, number = self._at_the_moment, self._call
                threading.Thread(target=target, args=(number,), daemon=True).start()
            try:
                result = function(*args, **options)
                if self.trial.phase == "start":  # which comes once, and may be short
                    with self._lock:  # the other thread may be about to
                        self._hang()
                return result
            finally:
                with self._lock:
                    self._call = -1
                self.num_calls += 1
                self.last_s = time.monotonic() - begin

        return call

    def _at_the_moment(self, number: int) -> None:
        time.sleep(self.trial.share * self.last_s)
        with self._lock:  # the function cannot return meanwhile
            if self._call == number:
                self._hang()

    def _hang(self) -> None:
        Path(self.trial.note).write_text(str(time.time()))
        if self.trial.kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600)  # continued for its stacks
        while True:
            ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps Python's lock


def plant(trial: Trial) -> None:
    """Replace the function of the trial's phase by one that hangs at the trial's moment."""
    module, path = PLACES[trial.phase]
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
    setattr(owner, name, _Hang(trial).around(getattr(owner, name)))


def main() -> None:
    """Plant the trial where this is its rank, and run `mrl`."""
    from mrl.cli import main as run_mrl

    trial = Trial(**json.loads(os.environ[VARIABLE]))
    if int(os.environ.get("RANK", "0")) == trial.rank:
        from parallel import prepare

        prepare()
        plant(trial)
    sys.argv[0] = "mrl"
    run_mrl()


def encoded(trial: Trial) -> str:
    """Return the value of the variable."""
    return json.dumps(dataclasses.asdict(trial))


def end_marked(mark: str) -> int:
    """Kill what the trial with the note `mark` left, found by its environment; return how many
    processes that were."""
    deadline = time.monotonic() + 5  # those of an engine end after their trainer
    while (left := list(_marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(left)


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_left = process.status() != psutil.STATUS_ZOMBIE
            if is_left and f'"{mark}"' in process.environ().get(VARIABLE, ""):
                yield process


if __name__ == "__main__":
    main()

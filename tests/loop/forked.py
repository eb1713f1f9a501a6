"""Commands as forks of the test process, which has spent 6 CPU seconds on their imports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mrl.cli import main
from tests.ranks import start_fork


class Command:
    """A running `mrl ARGUMENTS`, or another program: the part of subprocess.Popen that the tests use.

    Its output is in the files `stdout` and `stderr` of `folder`, and `env` is its environment,
    which /proc/PID/environ does not show: `processes_of` finds forks by the files that they hold.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        directory: Path | None = None,
        entry: Callable[[list[str]], None] = main,
    ) -> None:
        """Start it, in `directory` or in the current one."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.args = folder, list(arguments)
        self._process = start_fork(_run, self.args, dict(env), folder, directory, entry)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, minus the signal where one killed it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        code = self.poll()
        if code is None:
            self._process.kill()
            raise subprocess.TimeoutExpired(self.args, timeout_s)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def finish(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        code = self.wait(timeout_s)
        texts = ((self.folder / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(self.args, code, *texts)


def _run(
    arguments: list[str],
    env: dict[str, str],
    folder: Path,
    directory: Path | None,
    entry: Callable[[list[str]], None],
) -> None:
    for name, fd in (("stdout", 1), ("stderr", 2)):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, fd)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
    if directory is not None:
        os.chdir(directory)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["mrl", *arguments]
    entry(arguments)

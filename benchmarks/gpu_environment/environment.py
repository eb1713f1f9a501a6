"""An environment with the GPU stack, made by the command of docs/install.md, without a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.libcuda import write_libcuda

COPIED = ("tests", "benchmarks", "launch", "csrc", "requirements", "docs", "pyproject.toml")
"""What the parts read of the checkout; mrl is left out, so that they import the installed one."""
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "filelock", "hypothesis", "pybind11")


@dataclass(frozen=True)
class Beside:
    """A command that runs while others do."""

    process: subprocess.Popen[bytes]
    log: Path

    def until(self, holds: Callable[[], bool], limit_s: float) -> None:
        """Wait until `holds()`. Raises RuntimeError, with the end of the log, if the command ends
        first or `limit_s` pass."""
        deadline = time.monotonic() + limit_s
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline:
                ends = _ends(self.log.read_text(errors="replace"))
                raise RuntimeError(f"{ends}\nended with {self.process.poll()}: {self.process.args}")
            time.sleep(1)


@dataclass(frozen=True)
class Environment:
    """The folders of one environment."""

    checkout: Path
    """The checkout of mrl that is installed."""
    folder: Path
    """Holds all that follows."""

    @property
    def site(self) -> Path:
        """The environment's bin folder."""
        return self.folder / "env" / "bin"

    @property
    def work(self) -> Path:
        """The folder of all commands: a copy of the checkout's tests and recipes, without mrl."""
        return self.folder / "work"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of every command."""
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return kept | {
            "PATH": f"{self.site}{os.pathsep}{kept.get('PATH', '')}",
            "LD_LIBRARY_PATH": str(self.folder / "driver"),
            "PYTHONPATH": str(self.folder / "tools"),
            "OMP_NUM_THREADS": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def run(self, *command: str, limit_s: float, check: bool = True) -> str:
        """Run a command in `work` and return what it printed. Raises RuntimeError with the end of its
        output where it fails (if `check`) or takes longer than `limit_s`."""
        try:
            done = subprocess.run(
                command, cwd=self.work, env=self.variables, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            printed = error.stdout or b""
            text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
            raise RuntimeError(f"{_ends(text)}\nno end after {limit_s:g} s: {command}") from None
        if check and done.returncode != 0:
            raise RuntimeError(f"{_ends(done.stdout)}\nexit code {done.returncode}: {command}")
        return done.stdout

    @contextmanager
    def beside(self, *command: str) -> Iterator[Beside]:
        """Run a command during the block; it gets SIGTERM at the end."""
        log = self.folder / "beside.log"
        with open(log, "wb") as sink:
            process = subprocess.Popen(
                command, cwd=self.work, env=self.variables, stdin=subprocess.DEVNULL, stdout=sink,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            yield Beside(process, log)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def documented_command(page: str) -> str:
    """Return the command of docs/install.md that installs mrl for GPUs."""
    lines = re.findall(r"^(.*pip install -c requirements/gpu\.txt '\.\[gpu\]')", page, re.MULTILINE)
    if not lines:
        raise ValueError("docs/install.md has no `pip install -c requirements/gpu.txt '.[gpu]'`")
    return lines[0]


def install(environment: Environment, python: str) -> str:
    """Make the environment with `python` and return the command that was run in it."""
    checkout, folder = environment.checkout, environment.folder
    command = documented_command((checkout / "docs" / "install.md").read_text())
    environment.work.mkdir(parents=True, exist_ok=True)
    if not (environment.site / "python").exists():
        subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
    # setuptools would also pack what an older build left there.
    shutil.rmtree(checkout / "build" / "lib", ignore_errors=True)
    environment.run("bash", "-ec", f"cd '{checkout}'; {command}", limit_s=3600)
    tools = ("-m", "pip", "install", "--quiet", "--upgrade", "--target", str(folder / "tools"))
    environment.run(str(environment.site / "python"), *tools, *TOOLS, limit_s=600)
    _copy_outside(environment)
    driver = folder / "driver"
    driver.mkdir(exist_ok=True)
    libraries = (path for path in (folder / "env").rglob("*.so*") if path.is_file())
    write_libcuda(driver, libraries)
    return command


def _copy_outside(environment: Environment) -> None:
    shutil.rmtree(environment.work)
    environment.work.mkdir()
    for name in COPIED:
        source, target = environment.checkout / name, environment.work / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copyfile(source, target)


def _ends(text: str, num_lines: int = 40) -> str:
    return "\n".join(text.splitlines()[-num_lines:])

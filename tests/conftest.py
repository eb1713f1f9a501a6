"""Several pytest workers, one suite: what is dear is made once, and what is long begins first.

Under pytest-xdist (`make test` runs three workers) each worker has session fixtures of its own;
`made_once` gives all of them the same folder. A file stays on one worker (`--dist loadfile`), so
module fixtures are not doubled, and the tests of a file still run in their order.

`make test` leaves out what is marked `release`, and `make test-all` runs everything.
"""

from __future__ import annotations

import gc
import os

# Where it is set, every Python that a test starts compiles mrl's files again.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# Before torch is imported, and for all that the tests start: forked ranks cannot use the threads of
# their parent and would wait for them.
os.environ["OMP_NUM_THREADS"] = "1"
# As `parallel.prepare` does on CPUs, which is too late once a test has imported torch._dynamo:
# Megatron would compile functions of a few lines with g++ in every rank.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from tests.checkout import left_files
from tests.engine_starts import use_template

# Until all tests are collected: what is imported and collected stays, and looking for garbage in it
# again and again takes a fifth of the time. See `pytest_collection_finish`.
gc.disable()
sys.dont_write_bytecode = False  # else each worker compiles and rewrites every file of tests
# A test is not wrong because the other worker has the machine.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

ROOT = Path(__file__).parents[1]
THERE_BEFORE = pytest.StashKey[set[str]]()
"""The files of the checkout that belong to no commit, before the first test."""
LEFT = pytest.StashKey[list[str]]()
"""Those that the tests have added."""
DURATIONS = ROOT / "tests/durations.json"
"""Seconds that each file of tests took, by its path: `make test-times` writes it."""
RELEASE_S = 20.0
"""Seconds for each test marked `release`; `DURATIONS` does not have them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help=f"write {DURATIONS.name}")


def pytest_configure(config: pytest.Config) -> None:
    use_template()
    if not hasattr(config, "workerinput"):  # the one process that all workers report to
        config.stash[THERE_BEFORE] = left_files(ROOT)
        if config.getoption("numprocesses", None):  # it collects nothing
            gc.enable()


def pytest_collection_finish() -> None:
    """Look for garbage again, but not among what is there now: `gc.freeze` leaves it out. Forks then
    share its memory for longer, too."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before the terminal shows how the session ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where the tests have left files in the checkout: the next commit would take them along."""
    stash = session.config.stash
    if THERE_BEFORE in stash and (new := left_files(ROOT) - stash[THERE_BEFORE]):
        stash[LEFT] = sorted(new)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)  # after `-m` has chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files by their measured times, longest first; those without one come before them.

    A long file that began last would leave the other workers idle.
    """
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    files = [file_of(item.nodeid) for item in items]
    durations = {name: known.get(name, float("inf")) for name in files}
    for name, item in zip(files, items, strict=True):
        if item.get_closest_marker("release"):
            durations[name] += RELEASE_S
    items.sort(key=lambda item: -durations[file_of(item.nodeid)])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what the tests have left in the checkout, and write the seconds of each file where
    `--write-durations` asks for it."""
    for name in terminalreporter.config.stash.get(LEFT, []):
        terminalreporter.write_line(
            f"ERROR: the tests left {name} in the checkout; write below tmp_path", red=True
        )
    if not terminalreporter.config.getoption("--write-durations"):
        return
    # A file of release tests alone takes nothing of `make test`.
    seconds = {str(f.relative_to(ROOT)): 0.0 for f in (ROOT / "tests").rglob("test_*.py")}
    reports = [report for key in terminalreporter.stats for report in terminalreporter.stats[key]]
    for report in reports:
        if isinstance(report, pytest.TestReport):
            name = file_of(report.nodeid)
            seconds[name] = seconds.get(name, 0.0) + report.duration
    rounded = {name: round(seconds[name], 1) for name in sorted(seconds)}
    DURATIONS.write_text(json.dumps(rounded, indent=1) + "\n")


def file_of(node_id: str) -> str:
    return node_id.split("::", maxsplit=1)[0]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`made_once(name, make)`: the folder `name` of this session, filled by `make(folder)` once.

    The first worker to ask calls `make`, the others wait; the folder is not to be changed later.
    Where `make` raises, the next one to ask starts again with an empty folder.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return get

"""Several pytest workers, one suite: what is dear is made once, and what is long begins first.

Under pytest-xdist (`make test` runs two workers) each worker has session fixtures of its own;
`made_once` gives all of them the same folder. A file stays on one worker (`--dist loadfile`), so
module fixtures are not doubled, and the tests of a file still run in their order.
"""

from __future__ import annotations

import os

# Before torch is imported, and for all that the tests start: forked ranks cannot use the threads of
# their parent and would wait for them.
os.environ["OMP_NUM_THREADS"] = "1"

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

# A test is not wrong because the other worker has the machine.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

LONG_FIRST = ("loop", "rollout", "kernels", "parallel")
"""Folders whose tests take long, longest first: one that began last would leave a worker idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return LONG_FIRST.index(folder) if folder in LONG_FIRST else len(LONG_FIRST)

    items.sort(key=place)


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

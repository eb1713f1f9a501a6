"""A service that is killed at random moments continues with every tenant, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mrl.engines.sglang.leftovers import shared_memory_files
from mrl.toy_model import write_toy_model
from tests.loop.test_run import processes_of
from tests.tenants.serving import LIMIT_S, Service, require_same_bits, rows_of, wait_for

pytestmark = [pytest.mark.timeout(3000), pytest.mark.release]

SHARED_MEMORY = Path("/dev/shm")
KILLS = int(os.environ.get("MRL_TENANT_KILLS", "3"))
"""Ten take four minutes on two cores."""
NUM_STEPS = 6 * max(1, KILLS // 3)
GONE_S = 60.0


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


def num_rows(service: Service) -> int:
    files = (service.run_of(name) / "metrics.jsonl" for name in ("ann", "bob"))
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())


def wait_gone(folder: Path) -> None:
    """Return when no process of the service is left."""
    deadline = time.monotonic() + GONE_S
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def kill_at(service: Service, process: subprocess.Popen[bytes], numbers: random.Random) -> str:
    """Kill the service at a random moment of its start, or of the rounds after its first row; return
    the moment. The service may be done before."""
    begun, before, in_rounds = time.monotonic(), num_rows(service), numbers.random() < 0.7
    later = numbers.uniform(0, 6)
    while in_rounds and num_rows(service) == before and process.poll() is None:
        assert time.monotonic() < begun + LIMIT_S
        time.sleep(0.02)
    time.sleep(later if in_rounds else 4 * later)
    process.send_signal(signal.SIGKILL)
    process.wait()
    after = f"{later:.1f} s after a row" if in_rounds else f"{4 * later:.1f} s after the start"
    return f"{after}, with {num_rows(service)} rows"


@pytest.mark.parametrize("seed", [1])
def test_every_tenant_survives_kills(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    service = Service(tmp_path / "service", model)
    service.write()
    monkeypatch.setenv("MRL_TEST_RUN", str(service.folder))
    shared, numbers = set(SHARED_MEMORY.iterdir()), random.Random(seed)
    service.add("ann", "bob", num_steps=NUM_STEPS)
    for number in range(KILLS):
        print(f"kill {number}: {kill_at(service, service.start('--until-done'), numbers)}")
        wait_gone(service.folder)
    service.run()
    assert {state for state, _ in service.states().values()} == {"done"}
    wait_gone(service.folder)
    of_others = shared_memory_files(psutil.process_iter())  # of tests beside this one
    assert not set(SHARED_MEMORY.glob("sgl*")) - shared - of_others
    for name in ("ann", "bob"):
        service.train_alone(name, tmp_path / name)
        require_same_bits(service.run_of(name), tmp_path / name)


def test_engines_that_are_lost_in_other_rounds_are_replaced(model: Path, tmp_path: Path) -> None:
    """Four engines are lost, one in a round at most: `rollout.max_restarts` counts those of a round."""
    service = Service(tmp_path / "service", model)
    service.write()
    service.add("ann", "bob", num_steps=NUM_STEPS)
    process = service.start("--until-done")
    for number in range(4):
        wait_for(lambda number=number: num_rows(service) >= 2 * (number + 1), process)
        for each in psutil.Process(process.pid).children(recursive=True):
            if each.name().startswith("sglang::sched"):
                each.kill()
    assert process.wait(LIMIT_S) == 0
    lost = "rollout/engine_restarts"
    for name in ("ann", "bob"):
        restarts = [row[lost] for row in rows_of(service.run_of(name))]
        assert sum(restarts) >= 4
        service.train_alone(name, tmp_path / name)
        require_same_bits(service.run_of(name), tmp_path / name, but=[lost])


def test_a_tenant_whose_work_ends_the_process_is_left_out_at_the_fourth_start(
    model: Path, tmp_path: Path
) -> None:
    service = Service(tmp_path / "service", model)
    service.write()
    code = tmp_path / "exits.py"
    code.write_text(
        "import os\nfrom mrl.algorithms.grpo import *\n\ndef loss(*_):\n    os._exit(9)\n"
    )
    service.add("exits", num_steps=2, algorithm={"name": str(code)})
    service.add("bob", num_steps=5)
    codes = [service.start("--until-done").wait(LIMIT_S) for _ in range(3)]
    assert codes == [9, 9, 9]
    service.run()
    states = service.states()
    assert states["bob"] == ("done", "")
    assert states["exits"][0] == "paused"
    assert "the service ended 3 times during this tenant's work" in states["exits"][1]
    service.train_alone("bob", tmp_path / "bob")
    require_same_bits(service.run_of("bob"), tmp_path / "bob")

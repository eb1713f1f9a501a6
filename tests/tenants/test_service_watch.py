"""A service that hangs is ended by the watchdog, which says in whose work, and waiting is no hang."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.errors import ExitCode
from mrl.run.failure import read_failure
from mrl.toy_model import write_toy_model
from tests.tenants.serving import LIMIT_S, Service, rows_of, wait_for
from tests.watch.ranks import ranks_of, stop_in

pytestmark = [pytest.mark.timeout(1200), pytest.mark.release]
IDLE_LIMIT_S = 6.0
HANGS = "import time\nfrom mrl.algorithms.grpo import *\n\ndef loss(*_):\n    time.sleep(10_000)\n"


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


def test_a_tenant_that_hangs_ends_the_service_and_an_idle_service_goes_on(
    model: Path, tmp_path: Path
) -> None:
    service = Service(tmp_path / "service", model)
    service.write(watch={"limits": {"log": IDLE_LIMIT_S, "train": 8.0}})
    service.add("bob", num_steps=1)
    process = service.start()
    wait_for(lambda: service.states()["bob"][0] == "done", process)
    time.sleep(2.5 * IDLE_LIMIT_S)
    assert process.poll() is None
    code = tmp_path / "hangs.py"
    code.write_text(HANGS)
    service.client().add("hangs", service.recipe("hangs", 2, algorithm={"name": str(code)}))
    assert process.wait(LIMIT_S) == -9  # no launcher is there to give it a code
    found = read_failure(service.folder)
    assert found is not None
    assert found.exit_code == ExitCode.HUNG_RANK
    assert (found.tenant, found.phase, found.step) == ("hangs", "train", 0)
    assert "in loss" in "".join(found.log_tail)
    assert json.loads((service.folder / "under_way.json").read_text())["under_way"] == "hangs"
    assert "of tenant hangs" in service.folder.with_suffix(".log").read_text()


def test_a_stopped_rank_ends_the_service_which_then_continues(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model, ranks=2)
    service.write(watch={"limits": {"train": 4.0}})
    service.add("ann", num_steps=3)
    process = service.start("--until-done")
    wait_for(lambda: len(ranks_of(process.pid)) == 2, process)
    pulse = stop_in(ranks_of(process.pid)[1], "train", 1, 0.01, LIMIT_S)
    assert pulse is not None
    assert pulse.tenant == "ann"
    assert process.wait(LIMIT_S) == ExitCode.HUNG_RANK
    found = read_failure(service.folder)
    assert found is not None
    assert found.tenant == "ann"
    assert "is stopped (SIGSTOP)" in found.what
    service.run()
    assert service.states()["ann"][0] == "done"
    assert [row["step"] for row in rows_of(service.run_of("ann"))] == [0, 1, 2]
    assert read_failure(service.folder) is None  # that of an earlier start is put away

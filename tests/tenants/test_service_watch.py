"""A service that hangs is ended by the watchdog, which says in whose work, and waiting is no hang."""

from __future__ import annotations

import json
import signal
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
    assert json.loads((service.folder / "under_way.json").read_text())["under_way"].endswith(
        "-hangs"
    )
    assert "of tenant hangs" in service.folder.with_suffix(".log").read_text()


def test_a_stop_limit_ends_what_does_not_end_by_itself(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model)
    service.write(checkpoint={"stop_limit_s": 1.0})
    code = tmp_path / "hangs.py"
    code.write_text(HANGS)
    service.add("hangs", num_steps=2, algorithm={"name": str(code)})
    process = service.start()
    row = service.folder / "under_way.json"
    wait_for(lambda: row.exists() and '-hangs", "step": 0' in row.read_text(), process)
    time.sleep(5)  # into the loss
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == ExitCode.TERMINATED
    said = service.folder.with_suffix(".log").read_text()
    assert "not over and saved after checkpoint.stop_limit_s=1 s; every tenant goes back" in said


def test_a_tenant_that_fails_on_one_rank_is_paused_at_the_fourth_start(
    model: Path, tmp_path: Path
) -> None:
    """The other rank waits for it in a collective of the update."""
    service = Service(tmp_path / "service", model, ranks=2)
    service.write()
    code = tmp_path / "apart.py"
    code.write_text(
        "import os\nfrom mrl.algorithms import grpo\nfrom mrl.algorithms.grpo import *\n"
        "from mrl.service import consensus\nconsensus.ALONE_S = 3.0\n\n"
        "def loss(logprobs, batch, config):\n"
        "    if os.environ['RANK'] == '1':\n        raise ValueError('no loss on this rank')\n"
        "    return grpo.loss(logprobs, batch, config)\n"
    )
    service.add("apart", num_steps=2, algorithm={"name": str(code)})
    service.add("bob", num_steps=5)
    for _ in range(3):
        assert service.start("--until-done").wait(LIMIT_S) == ExitCode.HUNG_RANK
        found = read_failure(service.folder)
        assert found is not None
        assert "rank 1 failed alone (no loss on this rank)" in found.what
        assert (found.rank, found.tenant) == (1, "apart")
    service.run()
    states = service.states()
    assert states["bob"] == ("done", "")
    assert states["apart"][0] == "paused"
    assert "the service ended 3 times during this tenant's work" in states["apart"][1]


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

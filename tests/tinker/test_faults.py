"""The unmodified SDK, and what happens to it in the middle of its work."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.toy_model import write_toy_model
from tests.tenants.serving import wait_for
from tests.tenants.test_service_disaggregated import kill_all
from tests.tinker.running import (
    key_of,
    needs_sdk,
    result_of,
    run_program,
    served,
    start_program,
    tinker_service,
)

pytestmark = [needs_sdk, pytest.mark.timeout(900), pytest.mark.release]


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


@pytest.mark.parametrize("rollout", [{}, {"placement": "disaggregated", "num_ranks": 1}])
def test_clients_go_on_after_the_service_was_killed(
    model: Path, tmp_path: Path, rollout: dict[str, Any]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = {"batch_invariant": True, "context_len": 64, "max_total_tokens": 2048}
    more = {"control": {"tinker": port}, "rollout": {**sizes, **rollout}}
    service = tinker_service(tmp_path, model, ranks=2 if rollout else 1, **more)
    key, programs = key_of(service), {}
    with served(service) as (url, process):
        for name in ("goes_on", "loses", "loads"):
            (tmp_path / name).mkdir()
            words = url, key, str(tmp_path / name)
            programs[name] = start_program(f"fault_programs.{name}", *words)
        for name in programs:
            wait_for((tmp_path / name / "ready").exists, process)
        kill_all(process.pid)
    with served(service) as (url, process):
        for name in programs:
            (tmp_path / name / "go").touch()
        found = {name: result_of(each) for name, each in programs.items()}
        (tmp_path / "whole").mkdir()
        (tmp_path / "whole" / "go").touch()
        whole = run_program("fault_programs.goes_on", url, key, str(tmp_path / "whole"))
    assert found["goes_on"]["steps"] == whole["steps"]
    kind, says = found["loses"]["refused"]
    assert (kind, "lost" in says) == ("APIStatusError", True), says
    assert found["loses"]["loss"] > 0
    before, after = found["loads"]["losses"]
    assert before == after


def test_a_batch_that_is_refused_in_part(model: Path, tmp_path: Path) -> None:
    service = tinker_service(tmp_path, model)
    with served(service) as (url, _):
        found = run_program("fault_programs.partial", url, key_of(service))
    kind, says = found["refused"]
    assert (kind, "vocabulary" in says) == ("BadRequestError", True), says
    assert "the next optim_step of this model will fail" in says
    kind, says = found["step"]
    assert (kind, "begin the step again" in says) == ("RequestFailedError", True), says
    one, other = found["norms"]
    assert one == other > 0


def test_a_pause_in_the_middle(model: Path, tmp_path: Path) -> None:
    """Samplers go on from their checkpoints, and gradients are named as lost."""
    service = tinker_service(tmp_path, model)
    with served(service) as (url, process):
        key, control = key_of(service), service.client()
        program = start_program("fault_programs.pauses", url, key, str(tmp_path))
        wait_for((tmp_path / "ready").exists, process)
        (name,) = [each["name"] for each in control.tenants()]
        control.pause(name)
        (tmp_path / "paused").touch()
        wait_for((tmp_path / "sampled").exists, process)
        control.resume(name)
        (tmp_path / "go").touch()
        found = result_of(program)
    assert found["samples"][0] == found["samples"][1]
    assert "the model is paused" in found["paused"][1]
    assert "was lost" in found["resumed"][1]

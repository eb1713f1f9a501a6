"""An engine dies at each boundary of its life, in every placement: what is trained stays the same.

Long forms only: each case is a run with a real engine. What may be lost is the time of a new start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import ExitCode
from mrl.run.folder import RunFolder
from mrl.toy_model import write_toy_model
from tests.adversary.dying import BOUNDARIES, VARIABLE
from tests.disaggregated.test_runs import APART, bits, command, rows, start
from tests.tenants.serving import ROOT, Service, require_same_bits

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

LIMIT_S = 400
NUM_STEPS = 4
STEPS = (f"train.num_steps={NUM_STEPS}", "checkpoint.save_every=2")
DYING = "rollout.engine=tests.adversary.dying"
NUMBER = 3
"""Which visit to the boundary is the last; the first ones belong to the start."""
AWAKE = [name for name in BOUNDARIES if "sleep" not in name and "wake" not in name]
"""An engine with devices of its own never sleeps."""
FIXED = (*APART, "async.deterministic=true", "async.max_staleness=1", "algorithm.importance=tis")
FREE = (*APART, "async.max_staleness=2", "algorithm.importance=tis")
INTERRUPTED = (*FREE, "async.in_flight_updates=interrupt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "model"
    write_toy_model(folder)
    return folder


def death(boundary: str, mark: Path) -> str:
    """Return what makes an engine die; it starts once only, so there its first visit counts."""
    return f"{boundary}:{1 if boundary == 'started' else NUMBER}:{mark}"


def finish(words: list[str], log: Path, boundary: str) -> None:
    """Run a command to its end. One whose engine dies in its start may end with the code for that,
    and then goes on with the next start."""
    code = start(words, log).wait(LIMIT_S)
    if boundary == "started" and code == ExitCode.LOST_ENGINE:
        code = start(words, log).wait(LIMIT_S)
    assert code == 0, log.read_text()[-3000:]


def trained(
    model: Path, output: Path, *keys: str, boundary: str = "", monkeypatch: Any = None
) -> str:
    """Train to the end, with an engine that dies once; return what was printed."""
    ranks, mark = (2 if APART[0] in keys else 1), output.with_suffix(".died")
    words = command(model, output, ranks, *STEPS, *keys)
    if boundary:
        words.append(DYING)
        monkeypatch.setenv(VARIABLE, death(boundary, mark))
        monkeypatch.setenv(
            "PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        )
    log = output.with_suffix(".log")
    finish(words, log, boundary)
    printed = log.read_text()
    if boundary:
        assert mark.exists(), f"the engine never came to {boundary}"
    assert [row["step"] for row in rows(output)] == list(range(NUM_STEPS))
    return printed


@pytest.fixture(scope="module")
def calm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs without a death, made once for their keys."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*keys: str) -> Path:
        if keys not in made:
            made[keys] = tmp_path_factory.mktemp("calm") / "run"
            trained(model, made[keys], *keys)
        return made[keys]

    return get


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_colocated(
    boundary: str, model: Path, calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    trained(model, output, boundary=boundary, monkeypatch=monkeypatch)
    assert bits(output, NUM_STEPS) == bits(calm(), NUM_STEPS)


@pytest.mark.parametrize("boundary", AWAKE)
def test_disaggregated_with_a_fixed_schedule(
    boundary: str, model: Path, calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    trained(model, output, *FIXED, boundary=boundary, monkeypatch=monkeypatch)
    assert bits(output, NUM_STEPS) == bits(calm(*FIXED), NUM_STEPS)


@pytest.mark.parametrize("keys", [FREE, INTERRUPTED], ids=["finish", "interrupt"])
@pytest.mark.parametrize("boundary", AWAKE)
def test_free_workers(
    boundary: str,
    keys: tuple[str, ...],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every group is whole and within its bound, and no prompt is trained twice."""
    output = tmp_path / "run"
    trained(model, output, *keys, boundary=boundary, monkeypatch=monkeypatch)
    lines = [line for step in range(NUM_STEPS) for line in RunFolder(output).read_rollouts(step)]
    prompts = {line["prompt_id"] for line in lines}
    assert (len(lines), len(prompts)) == (NUM_STEPS * 16, NUM_STEPS * 4)
    assert all(row["staleness/max"] <= 2 for row in rows(output))


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_service(
    boundary: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tenants train while the engine dies; each has the bits of a service without a death."""
    services = [Service(tmp_path / name, model) for name in ("dies", "calm")]
    mark = tmp_path / "died"
    for service in services:
        service.write()
        service.add("ann", "bob", num_steps=NUM_STEPS)
        log = service.folder.with_suffix(".log")
        if service is services[0]:
            monkeypatch.setenv(VARIABLE, death(boundary, mark))
        else:
            monkeypatch.delenv(VARIABLE)
        words = [sys.executable, "-W", "ignore", "-m", "tests.adversary.dying"]
        finish([*words, "serve", str(service.config), "--until-done"], log, boundary)
    assert mark.exists(), f"the engine never came to {boundary}"
    for name in ("ann", "bob"):
        ours, theirs = (service.run_of(name) for service in services)
        require_same_bits(ours, theirs, but=["rollout/engine_restarts"])

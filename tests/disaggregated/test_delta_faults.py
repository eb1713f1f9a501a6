"""Runs with deltas and a real engine in which a worker, its engine or a delta fails: the same bits.

Every sync compares the digests of trainer and engine, and would end the run.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.async_cases import LATE
from mrl.drill.job import kill
from mrl.errors import ExitCode
from mrl.toy_model import write_toy_model
from tests.disaggregated.faulty_deltas import FAULTS, VERSION
from tests.disaggregated.test_runs import (
    APART,
    LIMIT_S,
    bits,
    command,
    num_rows,
    processes_of,
    rows,
    start,
    train,
    wait_for,
    workers_of,
)

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

STEPS = 5
BF16 = ("model.dtype=bfloat16", "optimizer.lr=1e-5")
DELTA = ("rollout.weight_encoding=delta", "rollout.full_sync_every=100000")
NUM_EXPERTS = 64
"""So many that the model has several buckets, the smallest of which is 1 MiB."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "model"
    write_toy_model(folder, num_experts=NUM_EXPERTS)
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The checkpoint of a calm run that sends every version whole."""
    output = tmp_path_factory.mktemp("whole") / "run"
    train(model, output, 2, *APART, *BF16, f"train.num_steps={STEPS}")
    return bits(output, STEPS)


def total(found: list[dict[str, Any]], key: str) -> float:
    return sum(row.get(key, 0.0) for row in found)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_middle_of_a_delta_is_healed(
    fault: str,
    model: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the successor of a lost worker gets the whole model; a restarted engine loads from the
    worker's memory; and of a version with wrong deltas, each bucket whose delta is wrong is sent whole.
    """
    output, done = tmp_path / "run", tmp_path / "done"
    monkeypatch.setenv("MRL_FAULT", fault)
    monkeypatch.setenv("MRL_FAULT_DONE", str(done))
    keys = (*APART, *BF16, *DELTA, f"train.num_steps={STEPS}")
    engine = "rollout.engine=tests.disaggregated.faulty_deltas"
    log = output.with_suffix(".log")
    code = start(command(model, output, 2, *keys, engine), log).wait(LIMIT_S)
    assert code == 0, log.read_text()[-3000:]
    assert done.exists()
    assert bits(output, STEPS) == whole
    found = rows(output)
    assert found[-1]["async/lost_workers"] == (fault == "worker")
    assert total(found, "rollout/engine_restarts") == fault.startswith("engine")
    assert total(found, "rollout/sync_full_workers") == 1 + (fault == "worker")
    resent = [row["rollout/sync_resent_buckets"] for row in found]
    if fault == "every_bucket":
        assert resent[VERSION] > 1
        assert found[VERSION]["rollout/sync_sent_share"] > 1.0
    else:
        assert resent[VERSION] == (fault == "one_bit")
    assert sum(resent) == resent[VERSION]
    assert processes_of(output) == []


def test_workers_that_join_or_restart_between_deltas_get_the_whole(
    model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """One engine begins, another comes late, is killed later, and comes again."""
    output, key = tmp_path / "run", "rollout/sync_full_workers"
    free = ("async.max_staleness=2", "algorithm.importance=tis", "train.num_steps=100000")
    words = command(model, output, 3, *APART, *LATE, *BF16, *DELTA, *free)
    process = start(words, output.with_suffix(".log"))
    request.addfinalizer(lambda: kill(processes_of(output)))  # it has no last step
    wait_for(lambda: len(workers_of(output)) == 2, process)
    late = workers_of(output)[-1]
    late.suspend()  # before it has joined
    wait_for(lambda: num_rows(output) >= 4, process)
    alone = rows(output)
    assert [row.get(key, 0.0) for row in alone] == [1.0] + [0.0] * (len(alone) - 1)
    late.resume()
    wait_for(lambda: total(rows(output), key) > total(alone, key), process)
    joined = rows(output)
    assert joined[-1]["async/engines"] == 2
    late.kill()
    wait_for(lambda: rows(output)[-1]["async/lost_workers"] == 1, process)
    wait_for(lambda: total(rows(output), key) > total(joined, key), process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(LIMIT_S) == ExitCode.SAVED, output.with_suffix(".log").read_text()[-3000:]
    found = rows(output)
    assert total(found, "rollout/sync_resent_buckets") == 0
    assert any(row.get("rollout/sync_sent_share", 1.0) < 0.1 for row in found[len(joined) :])
    assert processes_of(output) == []

"""The metrics of engines are joined over workers and over the rounds of a step."""

from __future__ import annotations

import pytest

from mrl.engine_pool.metrics import EngineMetrics, join_rounds


def test_keys_and_a_round_trip() -> None:
    metrics = EngineMetrics(1, 2.0, 3.0, 0.5, 100)
    assert metrics.as_dict() == {
        "rollout/engine_restarts": 1.0, "time/recovery_s": 2.0, "time/verify_s": 3.0,
        "rollout/canary_abs_mean": 0.5, "rollout/sync_bytes": 100.0,
    }  # fmt: skip
    assert EngineMetrics.from_dict(metrics.as_dict()) == metrics


def test_workers_and_rounds() -> None:
    first, second = EngineMetrics(1, 2.0, 3.0, 0.5, 100), EngineMetrics(2, 1.0, 4.0, 0.1, 50)
    workers = EngineMetrics.from_dict(first.as_dict())
    workers.add_worker(second)
    assert workers == EngineMetrics(3, 2.0, 4.0, 0.5, 100)
    rounds = EngineMetrics.from_dict(join_rounds(first.as_dict(), second.as_dict()))
    assert rounds == EngineMetrics(3, 3.0, 7.0, 0.5, 50)


def test_rounds_by_key() -> None:
    one = {
        "rollout/engine_restarts": 1.0,
        "time/engine_load_s": 2.0,
        "rollout/canary_abs_mean": 0.5,
    }
    other = {
        "rollout/engine_restarts": 2.0,
        "time/engine_load_s": 1.0,
        "rollout/canary_abs_mean": 0.1,
    }
    first, second = one | {"async/queue_age": 3.0}, other | {"async/queue_age": 1.0, "new": 4.0}
    assert join_rounds(first, second) == {
        "rollout/engine_restarts": 3, "time/engine_load_s": 3.0, "rollout/canary_abs_mean": 0.5,
        "async/queue_age": 1.0, "new": 4.0,
    }  # fmt: skip


def test_a_reset_keeps_the_bytes_of_the_newest_sync() -> None:
    metrics = EngineMetrics(1, 2.0, 3.0, 0.5, 100)
    metrics.reset()
    assert metrics == EngineMetrics(sync_bytes=100)


def test_times_of_blocks_count_unless_they_raise() -> None:
    metrics = EngineMetrics()
    with metrics.recovering(), metrics.verifying():
        pass
    assert 0 < metrics.verify_s < metrics.recovery_s < 1
    before = metrics.verify_s
    with pytest.raises(RuntimeError), metrics.verifying():
        raise RuntimeError
    assert metrics.verify_s == before


def test_a_step_in_which_no_engine_reports_has_the_bytes_of_the_step_before() -> None:
    measured = EngineMetrics()
    measured.add_worker(EngineMetrics(num_restarts=1, sync_bytes=100))
    assert measured.take() == EngineMetrics(num_restarts=1, sync_bytes=100)
    assert measured.take() == EngineMetrics(sync_bytes=100)  # its engine was removed
    measured.add_worker(EngineMetrics(sync_bytes=20))
    assert measured.take() == EngineMetrics(sync_bytes=20)

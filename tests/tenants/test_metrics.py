"""The metrics of a service from the sums of its gates."""

from __future__ import annotations

import pytest

from mrl.service.metrics import add_up, engine_metrics, trainer_shares

ONE = {
    "seconds": 10.0, "room_s": 80.0, "sent_s": 9.0, "running_s": 8.0, "cache_s": 200.0, "held_s": 53.0,
    "counted_s": 90.0, "busy_s": 6.0, "mix_s": 7.0, "ada/sent_s": 5.0, "ada/waited_s": 0.0,
    "ada/requests": 2.0, "ada/tokens": 8.0, "bob/sent_s": 4.0, "bob/waited_s": 2.0, "bob/requests": 1.0,
    "bob/tokens": 4.0,
}  # fmt: skip
IDLE = {"seconds": 10.0, "room_s": 80.0, "cache_s": 200.0, "running_s": 0.0, "sent_s": 0.0}


def test_an_engine_alone():
    assert engine_metrics(ONE) == {
        "service/engine_occupancy": 0.1,
        "service/running_requests": 0.8,
        "service/kv_occupancy": 53 / 200,
        "service/kv_counted": 0.45,
        "service/batch_tenants": 7 / 6,
        "service/ada/tokens": 8.0,
        "service/ada/batch_share": 5 / 9,
        "service/ada/gate_wait_s": 0.0,
        "service/bob/tokens": 4.0,
        "service/bob/batch_share": 4 / 9,
        "service/bob/gate_wait_s": 2.0,
    }


def test_engines_and_phases_add_up():
    """An engine that idles halves the means of the time, and no mean of what there was."""
    both, alone = engine_metrics(add_up([ONE, IDLE])), engine_metrics(ONE)
    halved = {"engine_occupancy", "running_requests", "kv_occupancy", "kv_counted"}
    for key, value in alone.items():
        part = key.removeprefix("service/")
        assert both[key] == pytest.approx(value / 2 if part in halved else value), key
    assert add_up([ONE, {"cec/tokens": 3.0}])["cec/tokens"] == 3.0


def test_what_there_was_nothing_of_has_no_key():
    assert engine_metrics({}) == {}
    assert engine_metrics(IDLE) == {
        "service/engine_occupancy": 0.0,
        "service/running_requests": 0.0,
        "service/kv_occupancy": 0.0,
        "service/kv_counted": 0.0,
    }
    assert trainer_shares({}) == trainer_shares({"ada": 0.0}) == {}


def test_shares_of_memory_end_at_one():
    """Requests that share a prompt can seem to hold more than there is."""
    assert engine_metrics({**ONE, "held_s": 500.0})["service/kv_occupancy"] == 1.0


def test_shares_of_the_trainer():
    assert trainer_shares({"ada": 3.0, "bob": 1.0}) == {
        "service/ada/trainer_share": 0.75,
        "service/bob/trainer_share": 0.25,
    }

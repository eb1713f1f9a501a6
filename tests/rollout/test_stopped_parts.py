"""A process of an engine that is stopped is found in every phase, whichever it is."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
from rollout_helpers import make_buckets, make_engine, make_requests
from test_rollout_server import running

from mrl.engines.base import EngineLost, SamplingParams
from mrl.errors import EngineGone

pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]


def use(engine, phase, toy_weights):
    """What a run does with an engine in a phase. Without its detokenizer an engine still takes weights:
    only what generates then needs it."""
    if phase == "asleep":
        engine.wake()
    for version in range(1, 1000 if phase == "asleep" else 2):
        if phase != "rollout":
            engine.endpoint.update_weights(make_buckets(toy_weights, version), version)
        list(engine.endpoint.generate(make_requests(8, SamplingParams(480, 480))))


@pytest.mark.parametrize("name", ["scheduler", "detok", "server"])
def test_a_process_of_the_engine_that_is_stopped_is_found_in_each_phase(
    name, toy_folder, toy_weights, tmp_path
):
    """While it starts, in a weight sync, in a rollout, and asleep."""
    engine = make_engine(toy_folder, tmp_path / "engine.log", stall_timeout_s=4.0)

    def part():
        process = engine.connection.process
        tree = [psutil.Process(process.pid)] if name == "server" else process.tree()
        return next((p for p in tree if name == "server" or p.name()[8:].startswith(name)), None)

    def stop_as_it_starts():
        while not (found := part() if engine.connection.process.pid else None):
            time.sleep(0.05)
        time.sleep(1.0)
        found.suspend()

    threading.Thread(target=stop_as_it_starts, daemon=True).start()
    begin = time.monotonic()
    with pytest.raises((EngineGone, EngineLost), match=r"is stopped \(SIGSTOP\)"):
        engine.start()
    assert time.monotonic() - begin < 100
    for phase in ("sync", "rollout", "asleep"):
        engine.start()
        tree = engine.connection.process.tree()
        if phase == "asleep":
            engine.sleep(2)
        part().suspend()
        begin = time.monotonic()
        with pytest.raises(
            EngineLost, match=r"is stopped|did not answer|no answer|took no request"
        ):
            use(engine, phase, toy_weights)
        assert time.monotonic() - begin < 30, phase
        assert not running(tree)


def test_an_engine_that_keeps_answers_back_is_lost(toy_folder, tmp_path, monkeypatch):
    """Its detokenizer hangs; the scheduler is through with the requests, and answers as before."""
    engine = make_engine(toy_folder, tmp_path / "engine.log", request_timeout_s=1.5)
    engine.start()
    monkeypatch.setattr(engine.connection.process, "halted_part", lambda limit_s: None)
    tree = engine.connection.process.tree()
    next(p for p in tree if p.name().startswith("sglang::detok")).suspend()
    with pytest.raises(EngineLost, match=r"is idle but has not answered: .* for 8 of 8 samples"):
        list(engine.endpoint.generate(make_requests(8, SamplingParams(2, 2))))
    assert not running(tree)


def test_a_scheduler_that_hangs_unstopped_gives_no_sign(toy_folder, tmp_path, monkeypatch):
    engine = make_engine(toy_folder, tmp_path / "engine.log", stall_timeout_s=4.0)
    engine.start()
    tree = engine.connection.process.tree()
    monkeypatch.setattr(engine.connection.process, "halted_part", lambda limit_s: None)
    completions = engine.endpoint.generate(make_requests(8, SamplingParams(480, 480)))
    for process in tree:
        process.suspend()
    with pytest.raises(EngineLost, match=r"did not answer within rollout\.stall_timeout_s=4 s"):
        list(completions)
    assert not running(tree)

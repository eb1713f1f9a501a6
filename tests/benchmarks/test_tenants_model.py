"""The model of many tenants at the article's sizes: its engine by hand, and its shortest form."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from benchmarks.tenants_engine import COLOCATED, SPLIT, Assumptions, Engine, Request
from benchmarks.tenants_model import main, simulate

FIGURES = Assumptions()


def test_sizes_are_those_of_the_model() -> None:
    assert FIGURES.kv_bytes == 2 * 36 * 8 * 128 * 2 == 147_456
    assert FIGURES.capacity(SPLIT) == int((0.85 * 96e9 - 8.04e9 - 4e9) / 147_456)


def test_an_engine_decodes_as_fast_as_the_roofline_says() -> None:
    engine = Engine(FIGURES, SPLIT)
    engine.waiting["a"] = deque([Request("a", 0, 100), Request("a", 0, 300)])
    engine.admit()
    assert [request.length for request in engine.event()] == [100]
    assert [request.length for request in engine.event()] == [300]
    step = 0.003 + (8.04e9 + 132e6) / 2.8e12
    read = sum(200 + n for n in range(100)) + sum(200 + n for n in range(300))
    prefill = 2 * 2 * 4.02e9 * 200 / (989e12 * 0.4)
    assert engine.now == pytest.approx(300 * step + read * 147_456 / 2.8e12 + prefill)
    assert engine.held == 0


def test_a_full_engine_retracts_and_loses_nothing() -> None:
    small = replace(FIGURES, gpu_bytes=24e9)  # 57,000 tokens
    engine = Engine(small, SPLIT)
    for _ in range(300):  # what was seen so far was short
        engine.admission.finished("a", 300)
    engine.waiting["a"] = deque(Request("a", 0, 20_000) for _ in range(5))
    engine.admit()
    finished = []
    while engine.running:
        finished += engine.event()
        assert engine.held <= engine.capacity
    assert len(finished) == 5
    assert engine.retracted > 0
    assert (engine.held, engine.waiting["a"]) == (0, deque())


def test_waiting_until_a_time_changes_no_result() -> None:
    engines = [Engine(FIGURES, SPLIT), Engine(FIGURES, SPLIT)]
    for engine in engines:
        engine.waiting["a"] = deque(Request("a", n, 50 * n + 1) for n in range(9))
        engine.admit()
    for n in range(100):
        engines[1].wait_until(min(0.01 * n, engines[1].next_time()))
    ends = []
    for engine in engines:
        while engine.running:
            engine.event()
        ends.append(engine.now)
    assert ends[0] == pytest.approx(ends[1])


def test_the_shortest_form(capsys: pytest.CaptureFixture[str]) -> None:
    figures = main(["--sizes", "8", "--steps", "1", "--seeds", "1"])
    assert len(figures["rows"]) == 9
    for row in figures["rows"]:
        assert (row["ratio"] == 1) == (row["num_tenants"] == 1 and row["mode"] != SPLIT)
        assert 0 < row["occupancy"] <= 1
        assert 0 <= row["idle"] < 1
        expected = 3600 / (row["num_gpus"] * row["step_s"])
        assert row["steps_per_gpu_hour"] == pytest.approx(expected)
    assert "| split, asynchronous | 8 | 3 |" in capsys.readouterr().out


def test_engines_are_idle_because_of_long_tails() -> None:
    idle = {
        sigma: simulate(COLOCATED, 8, 1, 2, replace(FIGURES, sigma=sigma)).idle
        for sigma in (0.01, 1.0)
    }
    assert idle[0.01] < 0.05
    assert idle[1.0] > 0.15

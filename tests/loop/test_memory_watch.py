"""The leak alarm: a real process that leaks is told once, one that does not never is."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest
import torch

from mrl.system.memory_watch import MIN_CYCLES, WARN_CYCLES, MemoryWatch, ProcessTree, leak_slope

MIB = 2**20
LEAKING = """
import sys
kept = []
for line in sys.stdin:
    block = bytearray(SIZE)
    block[::4096] = b"x" * len(block[::4096])
    if KEEP: kept.append(block)
    print("done", flush=True)
"""


def watch(bound: float = 4 * MIB) -> tuple[MemoryWatch, list[str]]:
    told: list[str] = []
    return MemoryWatch(torch.device("cpu"), told.append, bound_bytes=bound), told


@pytest.mark.parametrize(("keep", "expected"), [(True, 8 * MIB), (False, 0)])
def test_a_real_process_that_leaks(keep, expected) -> None:
    """The leak is in a child of the watched process, as SGLang's schedulers are."""
    code = LEAKING.replace("SIZE", str(8 * MIB)).replace("KEEP", str(keep))
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    engine = subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    memory, told = watch()
    try:
        for _ in range(WARN_CYCLES + 2):
            engine.stdin.write(b"go\n")
            engine.stdin.flush()
            engine.stdout.readline()
            memory.read("asleep", engine.pid)
            metrics = memory.metrics()
    finally:
        engine.stdin.close()
        engine.wait(20)
    slopes = {(leak.phase, leak.kind): leak.bytes_per_cycle for leak in memory.leaks()}
    assert slopes.get(("asleep", "engine_rss"), 0.0) == pytest.approx(
        expected, rel=0.05, abs=MIB / 4
    )
    about_engine = [text for text in told if "engine_rss" in text]
    assert len(about_engine) == (1 if keep else 0)
    if keep:
        assert "'asleep' grew by 8.0 MiB per step over the last 24 steps" in about_engine[0]
        assert float(metrics["memory/leak_bytes_per_cycle"].value) == pytest.approx(
            8 * MIB, rel=0.05
        )
    assert float(metrics["memory/engine_rss_bytes"].value) > 0
    assert float(metrics["memory/trainer_rss_bytes"].value) > 10 * MIB


def test_slope_of_series() -> None:
    noise = random.Random(0)
    level = [1e9 + noise.uniform(-5e7, 5e7) for _ in range(32)]
    assert leak_slope(level) == 0
    assert leak_slope([1e9] * 32) == 0
    rising = [value + 2e7 * i for i, value in enumerate(level)]
    assert leak_slope(rising) == pytest.approx(2e7, rel=0.2)
    assert leak_slope(rising[: MIN_CYCLES - 1]) == 0
    assert leak_slope(rising[::-1]) == 0
    assert leak_slope([1e9] * 16 + [2e9] * 16) == 0  # one step up
    assert leak_slope([1e6 * i + (1e9 if i == 20 else 0) for i in range(32)]) == pytest.approx(1e6)


def test_phases_are_told_apart_and_each_once() -> None:
    memory, told = watch(bound=100)
    for cycle in range(30):
        memory.add("awake", {"device_used": 5000.0})
        memory.add("asleep", {"device_used": 1000.0 + 200 * cycle})
        memory.metrics()
    assert len(told) == 1
    assert "device_used at phase 'asleep'" in told[0]
    assert "memory/asleep/engine_device_bytes" in told[0]


def test_a_leak_below_the_bound_is_a_number_and_no_warning() -> None:
    memory, told = watch(bound=300)
    for cycle in range(12):
        memory.add("asleep", {"device_used": 200.0 * cycle})
        metrics = memory.metrics()
    assert told == []
    assert float(metrics["memory/leak_bytes_per_cycle"].value) == 200


def test_a_process_that_is_gone_and_the_cost_of_a_step() -> None:
    tree = ProcessTree()
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert tree.rss(done.pid) == 0
    assert tree.rss(None) == 0
    memory, _ = watch()
    for cycle in range(40):
        for phase in ("awake", "asleep", "train"):
            memory.add(phase, {"trainer_rss": 1e9 + cycle, "engine_rss": 1e9, "device_used": 1e9})
    start = time.process_time()
    for _ in range(10):
        memory.metrics()
    assert (time.process_time() - start) / 10 < 0.02  # 9 series of 32: below 1 ms on an idle core


def test_an_engine_that_was_started_anew_starts_its_series_anew() -> None:
    memory, _ = watch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for _ in range(5):
            memory.read("asleep", other.pid)
        assert len(memory._series["asleep", "engine_rss"]) == 3
        memory.read("asleep", None)
        assert ("asleep", "engine_rss") not in memory._series
        assert len(memory._series["asleep", "trainer_rss"]) == 4


def test_the_first_steps_of_a_run_with_longer_and_longer_answers_are_no_leak() -> None:
    """Resident bytes of a trainer of SmolLM2-135M, in MB, which stay as they are later."""
    memory, warnings = watch()
    read = [7470, 8454, 8454, 8454, 8453, 8453, 8466, 8631, 8454, 8638, 8735, 8785, *[8785] * 28]
    for value in read:
        memory.add("awake", {"trainer_rss": value * 1e6})
        memory.metrics()
    assert warnings == []

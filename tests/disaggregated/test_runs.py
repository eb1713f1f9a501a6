"""Whole disaggregated runs with a real engine: the bits of colocated ones, kept bounds, no loss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.async_cases import LATE, PLANTED
from benchmarks.planted_versions import VARIABLE
from mrl.drill.job import kill
from mrl.errors import ExitCode
from mrl.run.folder import RunFolder
from mrl.toy_model import write_toy_model

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
APART = ("rollout.placement=disaggregated", "rollout.num_ranks=1")
AHEAD = (*APART, "async.deterministic=true", "algorithm.importance=tis")

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "model"
    write_toy_model(folder)
    return folder


def command(model: Path, output: Path, ranks: int, *more: str) -> list[str]:
    launcher = [sys.executable, "-m", "mrl.launch", "--standalone", f"--nproc-per-node={ranks}"]
    keys = [
        f"model.path={model}", f"output_dir={output}", "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4", "rollout.max_response_len=12", "rollout.min_response_len=0",
        *more,
    ]  # fmt: skip
    recipe = str(ROOT / "launch/recipes/toy_moe.yaml")
    return [*launcher, "-m", "mrl", "train", recipe, *keys]


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as sink:
        return subprocess.Popen(
            words, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def train(model: Path, output: Path, ranks: int, *more: str) -> None:
    log = output.with_suffix(".log")
    code = start(command(model, output, ranks, *more), log).wait(LIMIT_S)
    printed = log.read_text()
    assert code == 0, printed[-3000:]
    assert "UserWarning" not in printed  # Megatron's, of a worker


def rows(output: Path) -> list[dict[str, Any]]:
    """The whole lines: the last one may be on its way."""
    *whole, _ = (output / "metrics.jsonl").read_text().split("\n")
    return [json.loads(line) for line in whole]


def bits(output: Path, step: int) -> dict[str, bytes]:
    """The tensors of a checkpoint: weights and optimizer."""
    folder = output / "checkpoints" / f"iter_{step:07d}"
    found = {file.name: file.read_bytes() for file in sorted(folder.glob("*.distcp"))}
    assert found
    return found


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, "the run ended before"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def num_rows(output: Path) -> int:
    file = output / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def processes_of(output: Path) -> list[psutil.Process]:
    """The processes below the launcher of a run, found by the run's folder in a command line."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        if any(f"output_dir={output}" in word for word in each.info["cmdline"] or ()):
            with suppress(psutil.NoSuchProcess):  # it may end meanwhile
                found += [each, *each.children(recursive=True)]
    return list(dict.fromkeys(found))


def workers_of(output: Path) -> list[psutil.Process]:
    found = []
    for each in processes_of(output):
        with suppress(psutil.NoSuchProcess):
            if each.cmdline()[-2:] == ["-m", "mrl.engine_pool.remote"]:
                found.append(each)
    return found


def test_staleness_0_has_the_bits_of_a_colocated_run(model: Path, tmp_path: Path) -> None:
    steps = "train.num_steps=20"
    train(model, tmp_path / "colocated", 1, steps)
    train(model, tmp_path / "apart", 2, steps, *APART)
    assert bits(tmp_path / "apart", 20) == bits(tmp_path / "colocated", 20)
    for own, other in zip(rows(tmp_path / "apart"), rows(tmp_path / "colocated"), strict=True):
        assert own["routing/replay_coverage"] == 1.0
        assert own["staleness/max"] == 0
        for key in other.keys() & own.keys():
            if not key.startswith(("time/", "throughput/", "memory/")):
                assert own[key] == other[key], key


@pytest.mark.parametrize("bound", [1, 2])
def test_a_fixed_schedule_repeats_its_bits_also_after_a_kill(
    bound: int, model: Path, tmp_path: Path
) -> None:
    keys = (*AHEAD, f"async.max_staleness={bound}", "train.num_steps=6", "checkpoint.save_every=2")
    train(model, tmp_path / "one", 2, *keys)
    train(model, tmp_path / "two", 2, *keys)
    assert bits(tmp_path / "one", 6) == bits(tmp_path / "two", 6)
    assert max(row["staleness/max"] for row in rows(tmp_path / "one")) == bound
    killed = tmp_path / "killed"
    process = start(command(model, killed, 2, *keys), killed.with_suffix(".log"))
    wait_for((killed / "checkpoints/iter_0000002").exists, process)
    kill(processes_of(killed))
    process.wait()
    train(model, killed, 2, *keys)
    assert bits(killed, 6) == bits(tmp_path / "one", 6)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_that_is_lost_is_replaced(how: int, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    keys = (*APART, "train.num_steps=6", "async.worker_timeout_s=15")
    process = start(command(model, output, 2, *keys), output.with_suffix(".log"))
    wait_for(lambda: num_rows(output) >= 2, process)
    (worker,) = workers_of(output)
    worker.send_signal(how)
    assert process.wait(LIMIT_S) == 0, output.with_suffix(".log").read_text()[-3000:]
    train(model, tmp_path / "calm", 2, *APART, "train.num_steps=6")
    assert bits(output, 6) == bits(tmp_path / "calm", 6)  # its batch was generated anew, whole
    assert rows(output)[-1]["async/lost_workers"] == 1
    assert processes_of(output) == []


def test_deltas_give_the_bits_of_whole_versions_also_after_a_kill(
    model: Path, tmp_path: Path
) -> None:
    """Each sync compares the digests of trainer and engine, and would end the run."""
    keys = (*APART, "model.dtype=bfloat16", "optimizer.lr=1e-5", "train.num_steps=12")
    deltas = (*keys, "rollout.weight_encoding=delta", "rollout.full_sync_every=5")
    train(model, tmp_path / "full", 2, *keys)
    train(model, tmp_path / "delta", 2, *deltas)
    assert bits(tmp_path / "delta", 12) == bits(tmp_path / "full", 12)
    full = [row["rollout/sync_full_workers"] for row in rows(tmp_path / "delta")]
    assert full == [float(step % 5 == 0) for step in range(12)]
    for row in rows(tmp_path / "delta"):
        assert row["rollout/sync_resent_buckets"] == 0
        if not row["rollout/sync_full_workers"]:
            assert 0 < row["rollout/sync_changed_share"] < row["rollout/sync_sent_share"] < 0.6
    assert "rollout/sync_sent_bytes" not in rows(tmp_path / "full")[0]
    killed = tmp_path / "killed"
    process = start(command(model, killed, 2, *deltas), killed.with_suffix(".log"))
    wait_for(lambda: num_rows(killed) >= 2, process)
    (worker,) = workers_of(killed)
    worker.kill()
    assert process.wait(LIMIT_S) == 0, killed.with_suffix(".log").read_text()[-3000:]
    assert bits(killed, 12) == bits(tmp_path / "full", 12)
    found = rows(killed)
    assert found[-1]["async/lost_workers"] == 1
    assert sum(row["rollout/sync_full_workers"] for row in found) > sum(full)


@pytest.mark.parametrize(
    ("bound", "more"),
    [
        (1, ()),
        (2, ("async.in_flight_updates=interrupt",)),
        (4, ("async.in_flight_updates=interrupt", "async.kv=recompute", "async.at_bound=drop")),
    ],
    ids=["finish", "interrupt-keep", "interrupt-recompute"],
)
def test_engines_that_run_freely_keep_their_bound(
    bound: int, more: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    keys = (*APART, f"async.max_staleness={bound}", "algorithm.importance=tis", *more)
    train(model, output, 2, *keys, "train.num_steps=20", "diagnosis.save_tokens_every=1")
    seen = set()
    for row in rows(output):
        assert row["routing/captured_coverage"] == 1.0
        if not row["routing/stale_rows"]:  # which updates in mid-flight make
            assert row["routing/replay_coverage"] == 1.0
        assert row["staleness/max"] <= bound
        for sample in RunFolder(output).read_rollouts(int(row["step"])):
            seen.add((row["step"], sample["prompt_id"]))
        assert sum(row[f"async/staleness/{age}"] for age in range(bound + 1)) == 4
    assert len(seen) == 20 * 4  # every prompt once: the toy has 512


def test_a_free_run_that_is_killed_continues_with_its_queue(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    keys = (*APART, "async.max_staleness=2", "algorithm.importance=tis", "checkpoint.save_every=2")
    words = command(model, output, 2, *keys, "train.num_steps=10")
    process = start(words, output.with_suffix(".log"))
    wait_for(lambda: num_rows(output) >= 5, process)
    kill(processes_of(output))
    process.wait()
    assert start(words, output.with_suffix(".log")).wait(LIMIT_S) == 0
    steps = [row["step"] for row in RunFolder(output).timeline.read()]
    assert [row["step"] for row in rows(output)] == list(range(10)) == steps
    trained = [
        line["prompt_id"] for step in range(10) for line in RunFolder(output).read_rollouts(step)
    ]
    assert len(trained) == 10 * 16
    assert len(set(trained)) == 10 * 4
    assert all(row["staleness/max"] <= 2 for row in rows(output))
    assert rows(output)[-1]["async/lost_workers"] == 0
    assert processes_of(output) == []


GAME = "{name: guess_letter, arguments: {turns: 3, letters: abcdefgh, repeats: 4}, max_turns: 3}"


@pytest.mark.parametrize("updates", ["finish", "interrupt"])
def test_conversations_in_a_free_run(updates: str, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    train(
        model, output, 2, *APART, "reward=null", f"environment={GAME}", "train.num_steps=8",
        "async.max_staleness=2", f"async.in_flight_updates={updates}", "algorithm.importance=tis",
    )  # fmt: skip
    seen = set()
    for row in rows(output):
        assert row["episode/num_turns"] == 3
        assert row["reward/abstained"] == 0
        assert row["routing/captured_coverage"] == 1.0
        assert row["staleness/max"] <= 2
        for sample in RunFolder(output).read_rollouts(int(row["step"])):
            seen.add((row["step"], sample["prompt_id"]))
    assert len(seen) == 8 * 4
    assert processes_of(output) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_an_engine_that_is_wrong_about_its_weights_ends_the_run(
    fault: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, fault)
    output = tmp_path / "run"
    keys = (
        *(*APART, "async.max_staleness=2", "algorithm.importance=tis", "train.num_steps=60"),
        *("async.in_flight_updates=interrupt", "rollout.engine=benchmarks.planted_versions"),
    )
    log = output.with_suffix(".log")
    assert start(command(model, output, 2, *keys), log).wait(LIMIT_S) == ExitCode.FAILED
    assert PLANTED[fault] in " ".join(log.read_text().split())
    assert "Traceback" not in log.read_text()
    assert num_rows(output) >= 1
    assert processes_of(output) == []


def test_an_engine_that_comes_late_gets_weights_and_leases(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    more = ("async.max_staleness=2", "algorithm.importance=tis", "train.num_steps=100000")
    process = start(command(model, output, 3, *APART, *LATE, *more), output.with_suffix(".log"))
    wait_for(lambda: len(workers_of(output)) == 2, process)
    late = workers_of(output)[-1]
    late.suspend()  # before it has joined
    wait_for(lambda: num_rows(output) >= 3, process)
    alone = rows(output)
    assert all(row["async/engines"] == 1 for row in alone)
    assert all(row["async/leased_groups"] <= 1 for row in alone)
    late.resume()
    wait_for(lambda: rows(output)[-1]["async/leased_groups"] == 2, process)  # one each
    process.send_signal(signal.SIGUSR1)
    assert process.wait(LIMIT_S) == ExitCode.SAVED, output.with_suffix(".log").read_text()[-3000:]
    assert rows(output)[-1]["async/engines"] == 2
    assert all(row["staleness/max"] <= 2 for row in rows(output))
    assert processes_of(output) == []


def test_whole_samples_of_a_killed_worker_are_not_generated_anew(
    model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    keys = (
        *(*APART, "async.max_staleness=4", "algorithm.importance=tis", "train.num_steps=100000"),
        *(
            "rollout.max_response_len=100",
            "rollout.samples_per_prompt=8",
            "async.groups_in_flight=4",
        ),
    )
    process = start(command(model, output, 2, *keys), output.with_suffix(".log"))
    for number in range(5):
        done = num_rows(output)
        wait_for(lambda done=done: num_rows(output) >= done + 2, process)
        if rows(output)[-1]["async/kept_tokens"]:
            break
        assert number < 4, "no sample was kept over four kills"
        time.sleep(
            0.6 * rows(output)[-1]["time/step_s"]
        )  # some samples of a group are whole by then
        (worker,) = workers_of(output)
        worker.kill()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(LIMIT_S) == ExitCode.SAVED
    assert rows(output)[-1]["async/duplicates"] == 0
    trained = [
        line["prompt_id"]
        for row in rows(output)
        for line in RunFolder(output).read_rollouts(int(row["step"]))
    ]
    assert len(trained) == 8 * len(set(trained))
    assert all(row["staleness/max"] <= 4 for row in rows(output))
    assert processes_of(output) == []

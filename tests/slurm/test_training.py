"""A real run with real engines on two nodes of a real SLURM, through one fault after the other."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mrl.toy_model import write_toy_model
from parallel.checkpoint.manifest import folder_name
from parallel.checkpoint.saved_tensors import SavedTensors
from tests.loop.conftest import REPOSITORY, TOY_RECIPE, Toy
from tests.slurm.cluster import Cluster, Tracker, free_ports, why_not, why_not_tracked
from tests.slurm.rows import Bench, in_reverse

REASON = why_not()
pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(1500),
]
NUM_STEPS = 6
LIMIT_S = 400.0


SHARED_EXPERTS = ("parallel.expert_model_parallel_size=2",)
APART = ("rollout.placement=disaggregated", "rollout.num_ranks=1")


@contextmanager
def run(
    folder: Path,
    tracker: Tracker,
    toy: Toy,
    *more: str,
    options: Callable[[list[str]], list[str]] | None = None,
) -> Iterator[Bench]:
    """Submit a run of NUM_STEPS steps on two nodes with a rank each, which share the experts unless
    `more` says otherwise."""
    folder.mkdir()
    with Cluster(2, tracker) as cluster:
        bench = Bench(cluster, cluster.names, folder, free_ports(1)[0], LIMIT_S)
        try:
            overrides = [word for word in toy.overrides(bench.out) if "output_dir" not in word]
            bench.start(
                str(TOY_RECIPE),
                *overrides,
                f"data.path={REPOSITORY / 'launch/recipes/data/first_char.jsonl'}",
                f"train.num_steps={NUM_STEPS}",
                "checkpoint.save_every=1",
                *(more or SHARED_EXPERTS),
                options=options(bench.nodes) if options else None,
                PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                PYTHONPATH=str(REPOSITORY),
                TORCHDYNAMO_DISABLE="1",
            )
            yield bench
        except AssertionError as error:
            raise AssertionError(bench.told()) from error


def weights(bench: Bench) -> dict[str, torch.Tensor]:
    """Return all tensors of the last checkpoint, those of Adam among them, without random states."""
    saved = SavedTensors(bench.out / "checkpoints" / folder_name(NUM_STEPS))
    return {key: saved[key] for key in saved if not key.startswith("random.")}


def rewards(bench: Bench) -> list[Any]:
    rows = map(json.loads, (bench.out / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["reward/mean"], row["grad_norm"]) for row in rows]


def rank_runs(bench: Bench, rank: int) -> bool:
    try:
        return bench.pid_of_rank(rank) > 0
    except AssertionError:
        return False


@pytest.fixture(scope="module")
def toy(made_once: Callable[..., Path]) -> Toy:
    return Toy(made_once("toy", write_toy_model))


@pytest.fixture(scope="module")
def uninterrupted(
    toy: Toy, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    with run(tmp_path_factory.mktemp("uninterrupted") / "run", "linuxproc", toy) as bench:
        bench.check_end("COMPLETED", restarts=0)
        return weights(bench), rewards(bench)


def test_a_run_through_signals_ends_with_the_same_bits(
    toy: Toy, tmp_path: Path, uninterrupted: Any
) -> None:
    """proctrack/linuxproc signals the whole tree of a task, engines and workers included."""
    with run(tmp_path / "run", "linuxproc", toy) as bench:
        bench.wait_for(lambda: rank_runs(bench, 1), "the second rank starts")
        bench.scancel("--signal=USR1")
        bench.wait_for(lambda: bench.job().restarts == 1 and bench.step() >= 2, "step 2")
        bench.scancel("--signal=USR1")
        bench.wait_for(lambda: bench.job().restarts == 2 and bench.step() >= 4, "step 4")
        bench.scancel("--batch", "--signal=USR1")
        bench.check_end("COMPLETED", restarts=3)
        printed = "".join(log.read_text() for log in (bench.out / "logs").glob("node_*"))
        assert printed.count("SIGUSR1: stopped before the first step") == 1
        assert printed.count("SIGUSR1: saved a checkpoint") == 2
        assert_same(bench, uninterrupted)


def test_a_run_through_losses_ends_with_the_same_bits(
    toy: Toy, tmp_path: Path, uninterrupted: Any
) -> None:
    if reason := why_not_tracked("cgroup"):
        pytest.skip(reason)
    with run(tmp_path / "run", "cgroup", toy) as bench:
        bench.wait_for(lambda: bench.step() >= 1, "step 1")
        os.kill(bench.pid_of_rank(1), signal.SIGKILL)
        bench.wait_for(lambda: bench.job().restarts == 1 and bench.step() >= 3, "step 3")
        name = bench.nodes[1]
        bench.cluster.kill_node(name)
        bench.wait_for(lambda: bench.cluster.is_down(name), "SLURM takes the node for dead")
        bench.cluster.start_node(name)
        # SLURM may send the end of the first start once more to the node that came back.
        bench.check_end("COMPLETED", restarts=(2, 3))
        assert_same(bench, uninterrupted)


def test_the_components_of_a_job_have_the_roles_in_their_order(toy: Toy, tmp_path: Path) -> None:
    """The first component trains and the second one leads the engine, whatever their nodes' names."""
    more = (*APART, "async.max_staleness=1", "algorithm.importance=tis")
    with run(tmp_path / "run", "linuxproc", toy, *more, options=in_reverse) as bench:
        bench.wait_for(lambda: bench.step() >= 1, "step 1")
        (worker,) = [
            process
            for process in psutil.process_iter(["cmdline", "environ"])
            if (process.info["cmdline"] or [])[-2:] == ["-m", "mrl.engine_pool.remote"]
            and (process.info["environ"] or {}).get("TMPDIR") == str(bench.folder)
        ]
        assert worker.info["environ"]["SLURMD_NODENAME"] == bench.nodes[0]
        trainer = psutil.Process(bench.pid_of_rank(0))
        assert trainer.environ()["SLURMD_NODENAME"] == bench.nodes[1]
        os.kill(bench.pid_of_rank(1), signal.SIGKILL)  # the rollout rank
        bench.check_end("COMPLETED", restarts=1)
        rows = [json.loads(line) for line in (bench.out / "metrics.jsonl").open()]
        assert [row["step"] for row in rows] == list(range(NUM_STEPS))
        assert all(row["staleness/max"] <= 1 for row in rows)


def assert_same(bench: Bench, uninterrupted: tuple[dict[str, torch.Tensor], list[Any]]) -> None:
    ours, (theirs, their_rewards) = weights(bench), uninterrupted
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert rewards(bench) == their_rewards

"""A rank is lost: the next start continues from a snapshot or a checkpoint, with the same bits."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.config import load_recipe
from mrl.jobs.train import train
from mrl.run.callbacks import Callback
from mrl.run.compare import MACHINE
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.checkpoint.snapshot_note import NOTE
from parallel.mesh import world_size
from tests.loop.conftest import REPOSITORY, TOY_RECIPE, Toy, environment
from tests.loop.test_run import metrics, processes_of
from tests.ranks import run_ranks

STEPS = 4
LAYOUT = ("parallel.expert_model_parallel_size=2", "optimizer.use_distributed_optimizer=true")


class Killed(Callback):
    """Rank 1 is killed once step `step` is done, before anything of it is saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: int, metrics: dict[str, float], groups: Any) -> bool:
        if step == self.step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return False


def trained_on_node(overrides: list[str], folder: Path, num_nodes: int, killed_at: int) -> None:
    node = int(os.environ["RANK"]) % num_nodes
    own = [*overrides, f"checkpoint.snapshot_folder={folder / f'node{node}'}"]
    train(load_recipe(TOY_RECIPE, own), world_size(), [Killed(killed_at)])


def overrides_of(toy: Toy, recorded: Path, output: Path, *more: str) -> list[str]:
    saved = f"debug.load_rollouts={recorded / 'rollouts'}"
    return toy.overrides(output, saved, f"train.num_steps={STEPS}", *LAYOUT, *more)


def starts(run: Path) -> list[int]:
    """Return the steps that were done at each start."""
    lines = (run / "history.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def assert_same(run: Path, whole: Path) -> None:
    """Metrics and the final checkpoint are the same bits."""
    rows = [
        [{k: v for k, v in row.items() if not k.startswith(MACHINE)} for row in metrics(each)]
        for each in (run, whole)
    ]
    assert [row["step"] for row in rows[0]] == list(range(STEPS))
    assert rows[0] == rows[1]
    ours, theirs = (SavedTensors(r / f"checkpoints/iter_{STEPS:07d}") for r in (run, whole))
    assert set(ours) == set(theirs)
    assert [key for key in theirs if not ours[key].equal(theirs[key])] == []


@pytest.fixture(scope="module")
def whole(toy: Toy, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing happens to, without snapshots."""
    folder = tmp_path_factory.mktemp("whole")
    overrides = overrides_of(toy, recorded, folder / "run")
    run_ranks(2, trained_on_node, overrides, folder, 1, -1, folder=folder / "out")
    return folder / "run"


@pytest.mark.timeout(300)
@pytest.mark.release
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_lost_rank_costs_one_step(
    num_nodes: int, toy: Toy, recorded: Path, whole: Path, tmp_path: Path
) -> None:
    """The folder of the second node is lost, too, where there are two nodes."""
    run = tmp_path / "run"
    keys = ("checkpoint.save_every=0", "checkpoint.snapshot_every=1")
    overrides = overrides_of(toy, recorded, run, *keys)
    args = (overrides, tmp_path, num_nodes, 2)
    with pytest.raises(AssertionError):
        run_ranks(2, trained_on_node, *args, folder=tmp_path / "out")
    assert len(metrics(run)) in (2, 3)  # rank 0 may have been faster
    assert json.loads((run / "checkpoints" / NOTE).read_text())["step"] == 2
    if num_nodes == 2:
        shutil.rmtree(tmp_path / "node1")
    run_ranks(2, trained_on_node, overrides, tmp_path, num_nodes, -1, folder=tmp_path / "out2")
    # Rank 0 of the second start looks at its own node only.
    assert starts(run) == [0, 2]
    assert_same(run, whole)
    rows = metrics(run)
    assert rows[1]["time/snapshot_s"] > 0
    assert rows[1]["memory/snapshot_bytes"] > 0
    assert not (run / "checkpoints" / NOTE).exists()
    assert list(tmp_path.glob("node*/*")) == []


@pytest.mark.release
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("keys", "most_lost"),
    [
        (("checkpoint.save_every=0", "checkpoint.snapshot_every=1"), 1),
        (("checkpoint.save_every=2", "checkpoint.async_save=false"), 2),
    ],
)
def test_the_launcher_starts_the_ranks_again(
    keys: tuple[str, ...], most_lost: int, toy: Toy, recorded: Path, whole: Path, tmp_path: Path
) -> None:
    """`mrl.launch` after kill -9 of a random rank at a random moment."""
    run, chance = tmp_path / "run", random.Random()
    overrides = overrides_of(toy, recorded, run, *keys)
    words = [sys.executable, "-m", "mrl.launch", "--standalone", "--nproc-per-node", "2"]
    more = ["--max-restarts", "2", "-m", "mrl", "train", str(TOY_RECIPE), *overrides]
    folder = f"checkpoint.snapshot_folder={tmp_path / 'node'}"
    process = subprocess.Popen(
        [*words, *more, folder], cwd=REPOSITORY, env=environment(MRL_TEST_RUN=str(run)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wanted = chance.randrange(1, STEPS)
    while process.poll() is None:
        done = len(metrics(run)) if (run / "metrics.jsonl").exists() else 0
        if done >= wanted:
            break
        time.sleep(0.01)
    ranks = [p for p in psutil.Process(process.pid).children() if "train" in p.cmdline()]
    chance.choice(ranks).kill()
    printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0, printed
    assert "mrl: starting the ranks again, restart 1 of 2" in printed
    assert len(starts(run)) == 2
    assert done - most_lost <= starts(run)[1] <= done + 1, (done, starts(run))
    assert_same(run, whole)
    assert processes_of(run) == []
    assert list(tmp_path.glob("node/*")) == []

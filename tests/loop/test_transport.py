"""A weight transport is one new file: it is found by its name, and trains with a real engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mrl.system import plugins
from mrl.weight_sync import transports
from tests.loop.conftest import COMMAND_TIMEOUT_S, REPOSITORY, TOY_RECIPE, Toy, environment, trained
from tests.ranks import run_ranks

TRANSPORTS = Path("mrl/weight_sync/transports")
FILE = """
import os

from mrl.engines.sglang.weights.disk import DiskPush
from mrl.weight_sync.rank_pair import PairReceiver as Receiver
from mrl.weight_sync.rank_pair import PairSender


def note(text):
    with open(os.environ["MRL_TEST_NOTES"], "a") as file:
        file.write(text + " ")


class Push(DiskPush):
    def push(self, bucket):
        note("push")
        super().push(bucket)


class Sender(PairSender):
    def send(self, *args):
        note("send")
        return super().send(*args)
"""


def with_one_more(folder: Path) -> None:
    """Make `folder` a copy of this repository, of links, with the transport noted.py."""
    (folder / TRANSPORTS).mkdir(parents=True)
    (folder / TRANSPORTS / "noted.py").write_text(FILE)
    for inner in (TRANSPORTS, *TRANSPORTS.parents):
        for each in (REPOSITORY / inner).iterdir():
            link = folder / inner / each.name
            if not link.exists() and each.name != "__pycache__":
                link.symlink_to(each)


def trained_in(copy: Path, overrides: list[str]) -> None:
    """Train on this rank with the transports of another checkout, less the imports of a new Python."""
    plugins._ROOT = copy
    transports.__path__[:] = [str(copy / TRANSPORTS)]
    trained(overrides)


def test_a_new_file_is_a_transport(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, copy = tmp_path / "notes", tmp_path / "copy"
    with_one_more(copy)
    monkeypatch.setenv("MRL_TEST_NOTES", str(notes))
    overrides = toy.overrides(tmp_path / "run", "rollout.weight_sync=noted", "train.num_steps=1")
    run_ranks(1, trained_in, copy, overrides, folder=tmp_path / "out")
    assert set(notes.read_text().split()) == {"push"}
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.release
@pytest.mark.parametrize(
    ("world", "more", "expected"),
    [
        (1, (), {"push"}),
        (2, ("rollout.placement=disaggregated", "rollout.num_ranks=1"), {"push", "send"}),
    ],
    ids=["colocated", "disaggregated"],
)
def test_a_new_file_is_all_that_another_transport_needs(
    toy: Toy, tmp_path: Path, world: int, more: tuple[str, ...], expected: set[str]
) -> None:
    notes, copy = tmp_path / "notes", tmp_path / "copy"
    with_one_more(copy)
    overrides = toy.overrides(
        tmp_path / "run", "rollout.weight_sync=noted", "train.num_steps=1", *more
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}",
         "-m", "mrl", "train", str(TOY_RECIPE), *overrides],
        cwd=copy,
        env=environment(PYTHONPATH=str(copy), MRL_TEST_NOTES=str(notes)),
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(notes.read_text().split()) == expected
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 1

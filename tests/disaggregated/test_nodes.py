"""Disaggregated runs on several nodes: engines that stay on theirs, and ways between networks."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from mrl.config import Recipe, load_recipe
from mrl.engine_pool.remote.supervisor import HOST, job_of_run, read_hosts, supervise
from mrl.errors import ExitCode, InputError
from mrl.preflight.roles import check_engine_on_node, roles_of
from mrl.toy_model import write_toy_model
from tests.disaggregated.test_runs import LIMIT_S, processes_of, rows
from tests.loop.conftest import environment
from tests.loop.test_partition import ADDRESSES, Network, network

__all__ = ["network"]  # a fixture
ROOT = Path(__file__).parents[2]
APART = ("rollout.placement=disaggregated", "rollout.num_ranks=2")
PAIRS = (*APART, "rollout.tensor_parallel_size=2")


def recipe(*more: str) -> Recipe:
    return load_recipe(ROOT / "launch/recipes/toy_moe.yaml", list(more))


def test_engines_fill_the_rollout_ranks_whatever_the_node_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # one trainer, an engine of two
    given = recipe(*PAIRS)
    layout = roles_of(given, 3).engine_layout(given.rollout)
    assert (layout.num_engines, layout.ranks, layout.num_nodes) == (1, 2, 1)


def test_an_engine_that_would_leave_its_node_is_refused() -> None:
    given = recipe(*PAIRS)
    roles = roles_of(given, 4)
    check_engine_on_node(roles, given.rollout, 2, last=3)
    check_engine_on_node(roles, given.rollout, 3, last=3)  # does not lead
    with pytest.raises(
        InputError, match="spans the ranks 2 to 3, and the node of rank 2 ends with"
    ):
        check_engine_on_node(roles, given.rollout, 2, last=2)


def test_rank_0_raises_what_a_rollout_rank_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    given = recipe(*PAIRS)
    store = dist.HashStore()
    with pytest.raises(InputError) as found:
        supervise(job_of_run(given, ()), roles_of(given, 3), 1, store)
    with pytest.raises(InputError, match="must be on one node") as again:
        read_hosts(dist.PrefixStore("mrl_rollout", store), 1)
    assert str(again.value) == str(found.value)


def test_hosts_are_told_apart_by_their_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    here = socket.gethostname()
    monkeypatch.setattr("mrl.engine_pool.remote.supervisor.own_network", lambda: "this")
    published = [(here, "this"), ("other", "this"), (here, "another"), ("other", "another")]
    for number, (host, own) in enumerate(published):
        store.set(f"{HOST}_{number}", f'{{"host": "{host}", "network": "{own}", "error": ""}}')
    assert read_hosts(store, 4) == [here, here, "", "other"]


LAUNCHER = """
import sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set_timeout(timedelta(seconds=100))
print(store.port, flush=True)
store.get("mrl_rollout/host_0")
"""


def test_a_rollout_rank_whose_trainers_never_come_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their launcher has ended, and with it the store in which the ranks meet."""
    monkeypatch.setattr("mrl.engine_pool.remote.supervisor.ENDED_S", 0.1)
    given = recipe(*APART)
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        port = int(launcher.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        assert supervise(job_of_run(given, ()), roles_of(given, 3), 1, store) == ExitCode.LOST_RANK
    assert "the trainers are gone" in capsys.readouterr().out


@pytest.mark.release
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("bound", [0, 1])
def test_trainer_and_engine_meet_across_networks(
    bound: int, network: Network, tmp_path: Path
) -> None:
    """Nothing of either network namespace reaches a loopback address of the other."""
    model, output = tmp_path / "model", tmp_path / "run"
    write_toy_model(model)
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", ADDRESSES[0]]
    keys = [
        f"model.path={model}", f"output_dir={output}", "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4", "rollout.max_response_len=12", "rollout.min_response_len=0",
        "rollout.placement=disaggregated", "rollout.num_ranks=1", f"async.max_staleness={bound}",
        "algorithm.importance=tis", "train.num_steps=4",
    ]  # fmt: skip
    launchers = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", name, sys.executable, "-m", "mrl.launch", *words),
                *("--master-port", "29500", "--node-rank", str(number)),
                *("-m", "mrl", "train", str(ROOT / "launch/recipes/toy_moe.yaml"), *keys),
            ],
            cwd=ROOT,
            env=environment(PYTHONPATH=str(ROOT)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, name in enumerate(network.names)
    ]
    printed = [launcher.communicate(timeout=LIMIT_S)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], printed
    assert [row["step"] for row in rows(output)] == list(range(4))
    assert max(row["staleness/max"] for row in rows(output)) <= bound
    assert processes_of(output) == []

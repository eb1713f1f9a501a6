"""The network between two nodes is cut: both sides end, and only that of rank 0 writes the report.

Each node is a network namespace of this machine; a bridge in a third one joins them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from mrl.watch.connection import SILENT_S
from tests.loop.conftest import REPOSITORY, TOY_RECIPE, Toy, environment
from tests.loop.test_run import metrics, processes_of
from tests.loop.test_watchdog import rank_of

ADDRESSES = ("10.77.7.1", "10.77.7.2")


def why_not() -> str | None:
    """Return why no network namespaces can be made here; None where they can."""
    if shutil.which("ip") is None:
        return "no ip: install iproute2"
    name = f"mrl{os.getpid()}t"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this container may not make network namespaces: run the tests as root"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@dataclass
class Network:
    """Two namespaces that reach each other."""

    names: list[str]
    switch: str

    def cut(self) -> None:
        """Let nothing pass any more; both sides keep their interface and address."""
        ip("-n", self.switch, "link", "set", "port1", "down")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    *names, switch = [f"mrl{os.getpid()}{letter}" for letter in "abs"]
    with ExitStack() as undo:
        for name in (*names, switch):
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            port = f"port{number}"
            peer = ("peer", "name", port, "netns", switch)
            ip("link", "add", "veth", "netns", name, "type", "veth", *peer)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "veth")
            ip("-n", name, "link", "set", "veth", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Network(names, switch)


@pytest.mark.release
@pytest.mark.timeout(500)
def test_a_cut_network_ends_both_sides(
    network: Network, toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    overrides = toy.overrides(
        output,
        f"debug.load_rollouts={recorded / 'rollouts'}",
        "parallel.expert_model_parallel_size=2",
        "train.num_steps=4",
        "checkpoint.save_every=1",
    )
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    words += ["--rdzv-endpoint", f"{ADDRESSES[0]}:29500"]
    launchers = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", name, sys.executable, "-m", "mrl.launch", *words),
                *("--local-addr", address, f"--rdzv-conf=is_host={int(name == network.names[0])}"),
                *("-m", "mrl", "train", str(TOY_RECIPE), *overrides),
            ],
            cwd=REPOSITORY,
            env=environment(
                MRL_TEST_RUN=str(output), PYTHONPATH=str(REPOSITORY), GLOO_SOCKET_IFNAME="veth"
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, address in zip(network.names, ADDRESSES, strict=True)
    ]
    ranks = dict(map(rank_of, launchers))
    while ranks[0].pulse().step < 1:
        time.sleep(0.05)
    network.cut()
    begin = time.monotonic()
    printed = [launcher.communicate(timeout=3 * SILENT_S)[0] for launcher in launchers]
    assert SILENT_S - 5 < time.monotonic() - begin < 2 * SILENT_S
    assert [launcher.returncode for launcher in launchers] == [71, 71], printed
    assert sum("the node of rank 0 (" in text for text in printed) == 1, printed
    found = json.loads((output / "failure.json").read_text())
    assert "sends nothing" in found["what"]
    assert (found["rank"], found["exit_code"]) == (1, 71)
    assert len(metrics(output)) <= 2
    assert processes_of(output) == []

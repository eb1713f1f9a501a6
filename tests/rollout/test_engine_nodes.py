"""One engine over two "nodes" of this machine: they start, fail and stop together.

The servers are those of recording_sglang/; real ones over two nodes are in `make conformance`. The two
ranks are threads here, and meet at a barrier instead of gloo.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from mrl.config import ModelConfig, RolloutConfig
from mrl.engine_pool import engine_nodes
from mrl.engine_pool.engine_nodes import EngineNodes, free_address
from mrl.engines.base import START_ATTEMPTS, EngineConfig, EngineLost
from mrl.engines.sglang import process
from mrl.engines.sglang.connection import ServerConnection
from mrl.engines.sglang.engine import Engine
from mrl.engines.sglang.http import HttpClient
from mrl.engines.sglang.node import EngineNode
from mrl.preflight.engine_layout import EngineLayout

RECORDING_SGLANG = Path(__file__).parent / "recording_sglang"


class Ranks:
    """Two ranks of one engine, each the leader of its node."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._barrier = threading.Barrier(2)
        self._said: list = [None, None]
        config = EngineConfig(
            model=ModelConfig(path=str(model)),
            rollout=RolloutConfig(max_response_len=8, tensor_parallel_size=2, start_timeout_s=60),
            log_path=folder / "a.log",
            return_routes=False,
            gpu_ids=("0",),
            num_nodes=2,
            seed=7,
        )
        self.engine = Engine(config)
        self.node = EngineNode(replace(config, log_path=folder / "b.log", gpu_ids=("3",)), 1)
        self._nodes = [
            EngineNodes(self.engine, None, lambda own: self._exchange(0, own)),
            EngineNodes(None, self.node, lambda own: self._exchange(1, own)),
        ]

    def _exchange(self, rank: int, own):
        self._said[rank] = own
        self._barrier.wait(60)
        said = list(self._said)
        self._barrier.wait(60)
        return said

    def both(self, action) -> list:
        """What `action` gives, or raises, on each rank."""

        def run(nodes):
            try:
                return action(nodes)
            except RuntimeError as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, self._nodes))

    def stop(self) -> None:
        for nodes in self._nodes:
            nodes.stop()


@pytest.fixture
def ranks(toy_folder, tmp_path, monkeypatch):
    (tmp_path / "held.json").write_text("{}")
    monkeypatch.setenv("PYTHONPATH", str(RECORDING_SGLANG))
    monkeypatch.setenv("MRL_RECORD", str(tmp_path / "record.jsonl"))
    monkeypatch.setenv("MRL_RECORD_HELD", str(tmp_path / "held.json"))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    ranks = Ranks(toy_folder, tmp_path)
    yield ranks
    ranks.stop()


def test_both_nodes_start_and_a_loss_of_one_replaces_both(ranks, tmp_path) -> None:
    assert ranks.both(lambda nodes: nodes.start()) == [None, None]
    assert ranks.both(lambda nodes: nodes.share_loss(None)) == [None, None]
    first = [ranks.engine.process_id, ranks.node.process_id]
    psutil.Process(first[1]).kill()
    psutil.Process(first[1]).wait(10)
    lost = ranks.both(lambda nodes: nodes.share_loss(None))
    assert all(isinstance(one, EngineLost) and "node 1 of the engine" in str(one) for one in lost)
    assert not any(psutil.pid_exists(pid) for pid in first)
    assert ranks.both(lambda nodes: nodes.start()) == [None, None]
    assert ranks.engine.endpoint.weight_version == 0
    lines = map(json.loads, (tmp_path / "record.jsonl").read_text().splitlines())
    starts = [body for path, body in lines if path == "START"]
    assert len(starts) == 4
    for pair in (starts[:2], starts[2:]):
        args = sorted((body["args"] for body in pair), key=lambda one: one["node_rank"])
        assert [one["node_rank"] for one in args] == [0, 1]
        assert {one["nnodes"] for one in args} == {2}
        assert len({(one["dist_init_addr"], one["random_seed"]) for one in args}) == 1
        # No rank of another node could open a file in this node's /tmp.
        assert not any(
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE" in one["environment"] for one in pair
        )
        gpus = {
            one["args"]["node_rank"]: one["environment"]["CUDA_VISIBLE_DEVICES"] for one in pair
        }
        assert gpus == {0: "0", 1: "3"}
    assert starts[0]["args"]["random_seed"] != starts[2]["args"]["random_seed"]


@pytest.mark.release  # test_another_port_where_one_was_just_taken sees the retry of a server
def test_a_port_that_was_just_taken_starts_both_nodes_again(ranks, tmp_path, monkeypatch) -> None:
    free_port = process._free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = itertools.chain([taken.getsockname()[1]] * 2, iter(free_port, None))
        monkeypatch.setattr(process, "_free_port", lambda: next(ports))
        assert ranks.both(lambda nodes: nodes.start()) == [None, None]
    assert "Address already in use" in (tmp_path / "a.log").read_text()
    record = map(json.loads, (tmp_path / "record.jsonl").read_text().splitlines())
    assert [path for path, _ in record].count("START") == 4


def test_a_node_that_cannot_start_ends_the_wait_of_the_other(ranks, monkeypatch) -> None:
    monkeypatch.setenv("MRL_RECORD_NODE_FAILS", "1")
    errors = ranks.both(lambda nodes: nodes.start())
    assert all("no room on this node" in str(error) for error in errors)
    assert ranks.engine.process_id is ranks.node.process_id is None


def test_an_address_is_one_that_other_nodes_reach(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    host, _, port = free_address().rpartition(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 65536


def test_each_engine_gets_the_gpus_of_its_own_ranks(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    made_of = lambda config: SimpleNamespace(config=config, endpoint=None)  # noqa: E731
    monkeypatch.setattr(engine_nodes, "load_engine", lambda name: made_of)
    rollout = SimpleNamespace(engine="sglang", weight_sync="tensor")
    recipe = SimpleNamespace(rollout=rollout, model=None, captures_routes=False, seed=1, lora=None)
    layout = EngineLayout(2, 2, 2)
    plan = SimpleNamespace(recipe=recipe, engines=layout, resume_step=None, engine_threads=1)
    made = [
        engine_nodes.make_engine(
            plan,
            rank,
            torch.device("cuda", rank),
            SimpleNamespace(logs=tmp_path),
            lambda own: [own],
        ).server
        for rank in range(4)
    ]
    assert [each and each.config.gpu_ids for each in made] == [["4", "5"], None, ["6", "7"], None]


@pytest.mark.parametrize(
    "line", ["[Errno 98] Address already in use", "Port is already in use. ..."]
)
def test_another_port_where_one_was_just_taken(monkeypatch, tmp_path, line) -> None:
    starts = []
    server = ServerConnection({}, {}, tmp_path / "log")
    monkeypatch.setattr(server.process, "start", lambda: starts.append(1))
    monkeypatch.setattr(server.process, "log_text", lambda: line)
    monkeypatch.setattr(server.process, "exit_code", lambda: 1)
    with pytest.raises(RuntimeError, match="died while starting"):
        server.start(60.0, {})
    assert len(starts) == START_ATTEMPTS


def test_a_request_ends_when_a_process_of_the_server_dies(monkeypatch, tmp_path) -> None:
    """The server itself holds the connection and never answers, as without its detokenizer."""
    server = ServerConnection({}, {}, tmp_path / "log")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server.client = HttpClient(silent.getsockname()[1], "key")
        held: list[socket.socket] = []

        def hang_up() -> None:
            held[0].close()

        accept = threading.Thread(target=lambda: held.append(silent.accept()[0]))
        accept.start()
        monkeypatch.setattr("mrl.engines.sglang.connection.WATCH_S", 0.02)
        monkeypatch.setattr(server.process, "dead_part", lambda: "process 7" if held else None)
        monkeypatch.setattr(server.process, "kill", hang_up)
        with pytest.raises(EngineLost, match="process 7 died"):
            server.post("/generate", {}, timeout_s=30.0)
        accept.join()

"""The server process: its secrets, its sockets, its determinism, its life and its death."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from rollout_helpers import (
    generate,
    load_oracle,
    make_buckets,
    make_engine,
    make_prompts,
    make_requests,
    score,
)

from mrl.engines.base import EngineLost, SamplingParams
from mrl.engines.sglang.http import HttpClient
from mrl.engines.sglang.leftovers import shared_memory_files
from mrl.errors import RunFailed
from mrl.run.rollouts import decode_groups, encode_groups
from tests.engine_starts import REAL
from tests.release import release
from tests.waiting import wait_until

NUM_PROMPTS, NUM_SAMPLES = 4, 2


def bits(groups):
    """Everything that a rollout returns, as one bytes string a sample."""
    return [
        b"".join(
            t.numpy().tobytes()
            for t in (s.token_ids, s.rollout_logprobs, s.loss_mask, s.routing.expert_ids)
        )
        for group in groups
        for s in group.samples
    ]


def running(tree):
    """Leave out zombies: a container's first process may not reap them."""

    def runs(process):
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [process for process in tree if runs(process)]


def rollout(engine):
    return generate(
        engine,
        make_prompts(NUM_PROMPTS, seed=9),
        samples_per_prompt=NUM_SAMPLES,
        sampling=SamplingParams(24),
        seed=11,
    )


@pytest.fixture(scope="module")
def fresh(toy_folder, tmp_path_factory):
    """A second server, side by side with the shared one, until a test here gives it up."""
    engine = make_engine(toy_folder, tmp_path_factory.mktemp("fresh") / "engine.log")
    engine.start()
    yield engine
    engine.stop()


def test_rollout_is_a_function_of_weights_prompts_and_seed(engine, fresh, toy_weights):
    """Bitwise: a server that has served others, and a fresh one with the same weights."""
    first = bits(rollout(fresh))
    others = SamplingParams(10, temperature=0.5)
    generate(engine, make_prompts(5), samples_per_prompt=3, sampling=others, seed=0)
    noise = [(name, tensor + 0.1) for name, tensor in toy_weights]
    engine.endpoint.update_weights(make_buckets(noise, 8), 8)
    rollout(engine)
    engine.endpoint.update_weights(make_buckets(toy_weights, 0), 0)
    assert len(first) == 8
    assert bits(rollout(engine)) == first
    assert len(set(first)) == 8


@pytest.mark.parametrize("every_method", [False, release(True)])
def test_every_endpoint_wants_the_key(fresh, every_method):
    """Also those that SGLang leaves open. `make test` tries a path's own method and OPTIONS."""
    client, port = fresh.connection.client, fresh.connection.process.port
    status, text = client.get("/openapi.json", timeout_s=10)
    assert status == 200
    paths = json.loads(text)["paths"]
    assert {"/health", "/health_generate", "/generate", "/update_weights_from_tensor"} <= set(paths)
    assert len(paths) > 50
    for key in ("", "wrong"):
        stranger = HttpClient(port, key)
        for path in [*paths, "/ready", "/metrics", "/docs", "/no_such_path"]:
            one = "OPTIONS" if key else "POST" if "post" in paths.get(path, ()) else "GET"
            for method in ("GET", "POST", "OPTIONS") if every_method else (one,):
                status, _ = stranger._request(method, path, b"{}", 60)
                assert status in (401, 403), (method, path)
    assert client.get("/model_info", timeout_s=10)[0] == 200


def test_key_is_nowhere_to_be_read(fresh, tmp_path):
    server = fresh.connection
    key = server._api_key.encode()
    assert len(key) >= 32
    tree = server.process.tree()
    assert len(tree) >= 3
    # The search below finds what is there. (A process that gives itself a title may write it over the
    # start of its environment, and what a fork of the template is given is not in /proc/PID/environ.)
    if os.environ.get(REAL) == "1":
        assert b"TMPDIR=" in Path(f"/proc/{tree[0].pid}/environ").read_bytes()
    given = server.process._child_environment(tmp_path)
    assert given["TMPDIR"] == str(tmp_path)
    assert not [name for name, value in given.items() if server._api_key in value]
    for process in tree:
        for name in ("cmdline", "environ"):
            assert key not in Path(f"/proc/{process.pid}/{name}").read_bytes()
    log = server.process.log_path.read_bytes()
    assert log
    assert key not in log


def test_all_sockets_are_loopback(fresh):
    listening = [
        connection.laddr
        for process in fresh.connection.process.tree()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert fresh.connection.process.port in {address.port for address in listening}
    assert {address.ip for address in listening} == {"127.0.0.1"}


class Relay(socketserver.ThreadingTCPServer):
    """Answers 500 to the first generate requests of a server, and hangs up on the next ones."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, *, refuse: int = 0, hang_up: int = 0) -> None:
        self.port, self.refuse, self.hang_up = port, refuse, hang_up
        super().__init__(("127.0.0.1", 0), RelayHandler)


def whole(request):
    """Whether all of the request is here, the body too."""
    head, end, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    return bool(end) and len(body) >= (int(length[1]) if length else 0)


class RelayHandler(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        head = b""
        while not whole(head):
            head += self.request.recv(65536)
        if b"POST /generate" in head and self.server.refuse:
            self.server.refuse -= 1
            self.request.sendall(b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\noops")
            return
        with socket.create_connection(("127.0.0.1", self.server.port)) as upstream:
            upstream.sendall(head)
            if b"POST /generate" in head and self.server.hang_up:
                self.server.hang_up -= 1
                self.request.sendall(upstream.recv(2000))  # the head, and a piece of an answer
                return
            while answer := upstream.recv(65536):
                self.request.sendall(answer)


@contextlib.contextmanager
def relayed(engine, **trouble):
    """The engine behind a relay."""
    server = engine.connection
    direct = server.client
    with Relay(server.process.port, **trouble) as relay:
        threading.Thread(target=relay.serve_forever, args=(0.01,), daemon=True).start()
        server.client = HttpClient(relay.server_address[1], server._api_key)
        yield relay
        if server.client is not None:
            server.client = direct
        relay.shutdown()


def test_refused_and_broken_requests_are_sent_again(engine):
    expected = [s.token_ids.tolist() for g in rollout(engine) for s in g.samples]
    for trouble in ({"refuse": 2}, {"hang_up": 2}):
        with relayed(engine, **trouble) as relay:
            assert [s.token_ids.tolist() for g in rollout(engine) for s in g.samples] == expected
            assert not relay.refuse
            assert not relay.hang_up


def test_requests_that_fail_again_and_again(fresh):
    """Runs last on this server: it is given up."""
    tree = fresh.connection.process.tree()
    with relayed(fresh, refuse=100), pytest.raises(EngineLost, match=r"3 times: .*status 500"):
        rollout(fresh)
    assert not running(tree)


def detokenizer_of(engine):
    tree = engine.connection.process.tree()
    return next(p for p in tree if p.name().startswith("sglang::detok"))


@pytest.mark.release  # test_a_request_ends_when_a_process_of_the_server_dies has a stand-in
def test_maimed_server(toy_folder, tmp_path):
    """SGLang needs 15 seconds to see that its detokenizer is gone: longer than the time limit here."""
    engine = make_engine(toy_folder, tmp_path / "engine.log", stall_timeout_s=4.0)
    engine.start()
    detokenizer = detokenizer_of(engine)
    completions = engine.endpoint.generate(make_requests(2, SamplingParams(480, 480)))
    detokenizer.suspend()  # no answer comes before it is killed
    threading.Timer(0.3, detokenizer.kill).start()
    with pytest.raises(EngineLost, match=f"process {detokenizer.pid} died"):
        list(completions)


@pytest.mark.release  # test_timeouts.py names a part that is stopped after the limit
def test_hung_server(toy_folder, tmp_path):
    """SGLang never sees that its detokenizer is stopped: the scheduler answers as before."""
    engine = make_engine(toy_folder, tmp_path / "engine.log", stall_timeout_s=4.0)
    engine.start()
    tree = engine.connection.process.tree()
    requests = make_requests(2, SamplingParams(200, 200))
    requests.append(make_requests(1, SamplingParams(2, 2), seed=1)[0])
    completions = engine.endpoint.generate(requests)
    assert next(completions).request_id == "1-0"
    detokenizer_of(engine).suspend()
    lost = r"\(sglang::detok.*is stopped .* rollout\.stall_timeout_s=4 s"
    with pytest.raises(EngineLost, match=lost):
        list(completions)
    assert not running(tree)


def test_time_limit_of_all_requests(engine, monkeypatch):
    hurried = engine.core.config.model_copy(update={"request_timeout_s": 1.5})
    long = make_requests(8, SamplingParams(480, 480))
    with monkeypatch.context() as patch:
        patch.setattr(engine.endpoint.in_flight, "_config", hurried)
        with pytest.raises(RunFailed, match=r"=1\.5 s for 8 of 8 samples, and the engine"):
            list(engine.endpoint.generate(long))
    assert list(engine.endpoint.generate(make_requests(1, SamplingParams(2, 2))))


def test_updates_leak_no_shared_memory(engine, toy_weights):
    """torch names its files torch_<pid>_...; other processes of this machine have some too."""
    pids = [os.getpid(), *(process.pid for process in engine.connection.process.tree())]
    ours = tuple(f"torch_{pid}_" for pid in pids)
    for version in range(3):
        engine.endpoint.update_weights(make_buckets(toy_weights, version), version)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(ours)]


def test_stale_weights_are_refused(engine):
    body = {"new_version": "99", "abort_all_requests": True}
    engine.connection.post("/update_weight_version", body)
    with pytest.raises(RuntimeError, match="weight version 99, expected 0"):
        list(engine.endpoint.generate(make_requests(1, SamplingParams(2, 2))))


def test_rollouts_survive_encoding(engine):
    groups = rollout(engine)
    for group, copy in zip(groups, decode_groups(encode_groups(groups)), strict=True):
        for sample, twin in zip(group.samples, copy.samples, strict=True):
            assert torch.equal(sample.routing.expert_ids, twin.routing.expert_ids)
            assert torch.equal(sample.rollout_logprobs, twin.rollout_logprobs)
            assert sample.weight_versions == twin.weight_versions


@pytest.mark.release  # test_weight_sync.py has two ranks, and tests above what is left
def test_two_ranks_then_stop_leaves_nothing(toy_folder, toy_weights, tmp_path):
    engine = make_engine(toy_folder, tmp_path / "engine.log", tensor_parallel_size=2)
    engine.stop()
    engine.start()
    tree = engine.connection.process.tree()
    shared_memory = shared_memory_files(tree)
    assert shared_memory
    scratch = engine.connection.process._scratch.path
    engine.sleep(2)
    engine.wake()
    engine.endpoint.update_weights(make_buckets(toy_weights, 1), 1)
    oracle = load_oracle(toy_folder)
    for group in generate(
        engine, make_prompts(2), samples_per_prompt=2, sampling=SamplingParams(16), seed=1
    ):
        for sample in group.samples:
            logprobs, routes = score(oracle, sample.token_ids, sample.prompt_len, 1.0)
            got = sample.rollout_logprobs[sample.prompt_len :]
            assert (got - logprobs).abs().max() < 1e-5
            ids = sample.routing.expert_ids.long()
            assert torch.equal(ids.sort(-1).values, routes.sort(-1).values)
    engine.stop()
    engine.stop()
    assert not running(tree)
    assert not scratch.exists()
    assert not [file for file in shared_memory if file.exists()]


TRAINER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from rollout_helpers import make_engine
engine = make_engine(Path(sys.argv[2]), Path(sys.argv[3]))
engine.start()
print(engine.connection.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.release
def test_kill_of_the_trainer_leaves_nothing(toy_folder, tmp_path):
    trainer = subprocess.Popen(
        [
            *(sys.executable, "-c", TRAINER),
            *(str(Path(__file__).parent), str(toy_folder), str(tmp_path / "engine.log")),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert trainer.stdout is not None
    server = psutil.Process(int(trainer.stdout.readline()))
    tree = [server, *server.children(recursive=True)]
    assert len(tree) >= 3
    shared_memory = shared_memory_files(tree)
    assert shared_memory
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not running(tree), f"the end of {tree}")
    assert not [file for file in shared_memory if file.exists()]

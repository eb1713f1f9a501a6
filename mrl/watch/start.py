"""Starts the watchdog of a run: each rank opens its page, and the first of a node starts a monitor."""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl.config import Recipe, ServiceConfig
from mrl.config.rollout import EngineConfig
from mrl.config.watch import WatchConfig
from mrl.system import heartbeat
from mrl.system.processes import children_without_usr1
from mrl.system.rendezvous import listen_for
from mrl.watch.collectives import noting_collectives
from mrl.watch.monitor import DONE

_ROOT = Path(__file__).parents[2]
_MONITOR = (
    f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from mrl.watch.monitor import main; main()"
)
_Node = tuple[str, str, str]
_FILES_S = 600.0
"""How long a file system may take over a save without being called hung."""


@contextmanager
def watching(
    config: WatchConfig, least: Mapping[str, float], folder: Path, command: str
) -> Iterator[None]:
    """Watch the ranks during the block; `command` continues the run in `folder`. A collective.

    `least`: the seconds that the own waits of a phase may take, by its name.
    """
    if not config.enabled:
        yield
        return
    with ExitStack() as undo:
        page = heartbeat.open_page()
        undo.callback(heartbeat.close_page)
        undo.enter_context(noting_collectives())
        stacks = _heed_stacks(undo)
        own = {"rank": dist.get_rank(), "pid": os.getpid(), "page": page, "stacks": stacks}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (_node(), own))
        nodes: dict[_Node, list[dict[str, Any]]] = {}
        for node, rank in ranks:
            nodes.setdefault(node, []).append(rank)
        server, line = _meet(nodes, undo)
        job = {"parent": os.getpid(), "ranks": nodes[_node()], "folder": str(folder)}
        job |= {"command": command, **line}
        if own["rank"] == 0:
            job["limits"] = {
                "given": config.limits,
                "least": dict(least),
                "first_s": config.first_limit_s,
            }
        monitor = None
        if nodes[_node()][0]["rank"] == own["rank"]:
            monitor = _start_monitor(job, undo, server)
        yield
        heartbeat.leave()
        if monitor is not None:
            _write(monitor, DONE)


def _node() -> _Node:
    """Return what tells nodes apart: the host, the launcher where a host has several, and the kernel
    with its process numbers, as hosts may share a name."""
    kernel = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        kernel = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname(), os.environ.get("GROUP_RANK", "0"), kernel


def _meet(
    nodes: dict[_Node, list[dict[str, Any]]], undo: ExitStack
) -> tuple[socket.socket | None, dict[str, Any]]:
    """Return what the monitors of several nodes need to find each other: (the socket at which rank 0's
    listens, on rank 0, what its job says). A collective where there are several."""
    if len(nodes) == 1:
        return None, {"nodes": []}
    server, own = None, list(nodes).index(_node())
    said: list[Any] = [None]
    if dist.get_rank() == 0:
        server = undo.enter_context(listen_for({host for host, *_ in nodes}))
        said = [(secrets.token_hex(32), server.getsockname()[:2])]
    dist.broadcast_object_list(said)
    token, (host, port) = said[0]
    first = next(iter(nodes))[0]
    if server is not None:
        rest = [
            {"host": name, "ranks": [rank["rank"] for rank in ranks]}
            for (name, *_), ranks in list(nodes.items())[1:]
        ]
        return server, {"nodes": rest, "token": token, "server": server.fileno()}
    # This node may know rank 0 by another address than rank 0 itself does.
    known = dict.fromkeys((host, os.environ.get("MASTER_ADDR", ""), first))
    addresses = [[each, port] for each in known if each]
    return None, {"node": own - 1, "token": token, "addresses": addresses, "host": first}


def least_limits(recipe: Recipe) -> dict[str, float]:
    """Return, by phase, the seconds that its own waits may take by the recipe: calls of an engine, the
    start of another one, reward calls. The watchdog must not end what these would recover."""
    rewards = (recipe.rollout.samples_per_prompt + 1) * recipe.reward_timeout_s
    return _least_limits(recipe.watch, recipe.rollout, rewards)


def least_limits_of_service(config: ServiceConfig) -> dict[str, float]:
    """Return what `least_limits` does for a service, whose tenants' rewards have a limit for a step."""
    return _least_limits(config.watch, config.rollout, config.tenants.max_reward_s)


def _least_limits(watch: WatchConfig, rollout: EngineConfig, rewards: float) -> dict[str, float]:
    engine = rollout.stall_timeout_s + rollout.start_timeout_s
    request = rollout.request_timeout_s + engine
    return {
        "start": watch.first_limit_s,
        "sync": engine,
        "rollout": request + rewards,
        "evaluate": request + rewards,
        "score": rewards,
        "save": _FILES_S,
        "log": watch.first_limit_s,  # user code, as in callbacks, and trackers
    }


def _heed_stacks(undo: ExitStack) -> str:
    """Let SIGUSR2 write the stacks of all threads to a file without a name; return its path."""
    descriptor = os.memfd_create("mrl-stacks")
    undo.callback(os.close, descriptor)
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)
    undo.callback(faulthandler.unregister, signal.SIGUSR2)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _start_monitor(
    job: dict[str, Any], undo: ExitStack, server: socket.socket | None = None
) -> subprocess.Popen[bytes]:
    with children_without_usr1():
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _MONITOR],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=() if server is None else (server.fileno(),),
            start_new_session=True,  # Ctrl-C reaches the trainer alone
        )
    is_over = threading.Event()
    undo.callback(_stop_monitor, process)
    undo.callback(is_over.set)
    threading.Thread(target=_mind, args=(process, is_over), daemon=True).start()
    _write(process, json.dumps(job).encode() + b"\n")
    return process


def _mind(process: subprocess.Popen[bytes], is_over: threading.Event) -> None:
    """Say so where the monitor was killed or has failed, unless the run is over."""
    code = process.wait()
    if code and not is_over.is_set():
        print(
            f"mrl: the watchdog of this node ended with code {code}; a rank that hangs is not found "
            "any more, only the timeouts of collectives hold",
            file=sys.stderr,
            flush=True,
        )


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin
    with suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()


def _stop_monitor(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

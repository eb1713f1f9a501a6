"""Run a function on several ranks: forked after the heavy imports, joined by gloo on loopback."""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrl.system.processes import die_with_parent
from parallel import prepare

prepare()

import parallel.policy  # noqa: E402, F401  (import Megatron once, before the fork)

# The first backward pass decides whether autograd needs threads, after which no fork can train. It
# needs none on CPUs; but in a CUDA build FakeTensorMode, which some tests use, feigns GPUs.
torch.zeros(1, requires_grad=True).sum().backward()
gc.freeze()  # else each rank's garbage collection copies the pages of what is imported


def run_ranks(world: int, function: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """`function(*args)` on `world` ranks -> what each returned, in rank order.

    Values travel through torch.save files in `folder`. Fails with the first rank's traceback.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks: list[ForkProcess] = []
    with _store() as port:
        try:
            for rank in range(world):
                ranks.append(start_fork(_rank, rank, world, port, function, args, folder))
            # Where one rank fails, the others wait for it in a collective.
            while not any(rank.exitcode for rank in ranks):
                running = [rank.sentinel for rank in ranks if rank.exitcode is None]
                if not running:
                    break
                wait(running)
            if any(rank.exitcode for rank in ranks):
                raise AssertionError(_tracebacks(folder))
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


@contextmanager
def _store() -> Iterator[int]:
    """Yield the port of a store where ranks meet; nobody else can take it meanwhile.

    A process of its own holds it: a fork beside the store's threads would inherit their locks, for
    example that of the resolver, and then wait for ever.
    """
    here, there = Pipe(duplex=False)
    host = start_fork(_host_store, os.getpid(), there)
    there.close()  # a host that fails ends recv
    try:
        yield here.recv()
    finally:
        host.kill()
        host.join()


def _host_store(parent: int, port: Connection) -> None:
    die_with_parent(parent)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


def start_fork(function: Callable[..., Any], *args: Any) -> ForkProcess:
    """A copy of this process that runs `function(*args)`."""
    process = ForkProcess(target=_without_inherited_garbage, args=(function, *args))
    process.start()
    return process


def _without_inherited_garbage(function: Callable[..., Any], *args: Any) -> None:
    # A process group that an earlier test left in a reference cycle would join its thread, which
    # only the parent has: here that is any new thread with the same stack, and it need never end.
    gc.freeze()
    function(*args)


def _rank(
    rank: int, world: int, port: int, function: Callable[..., Any], args: tuple, folder: Path
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # no rank opens another store at this address
        TORCHELASTIC_RESTART_COUNT="0",
    )
    try:
        torch.save(function(*args), folder / f"{rank}.pt")
        from parallel.mesh import destroy_mesh

        destroy_mesh()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _tracebacks(folder: Path) -> str:
    return "\n".join(f"{f.stem}: {f.read_text()}" for f in sorted(folder.glob("*.error")))

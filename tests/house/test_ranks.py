"""What the tests' ranks inherit of the process that they are forked from."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import torch.distributed as dist

from tests.ranks import run_ranks


class Cycle:
    def __init__(self, held: object) -> None:
        self.held, self.own = held, self


def collect_beside_threads() -> int:
    for _ in range(8):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return gc.collect()


def test_garbage_with_threads_of_the_parent_is_left_alone(tmp_path: Path) -> None:
    """A store's destructor joins its thread. In a fork that is any thread with the same stack."""
    gc.disable()
    try:
        Cycle(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        run_ranks(1, collect_beside_threads, folder=tmp_path)
    finally:
        gc.enable()

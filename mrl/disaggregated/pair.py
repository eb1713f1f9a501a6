"""This module holds the process group of a trainer rank and a worker, over which weights travel.

Such a group stands beside torch's default one, and its two sides meet in the server's store under a
name of their own, so that the death of a worker breaks no other group and another worker can come in
its place. Headers travel over gloo; so do buckets, but between two GPUs over NCCL, whose part has not
run.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.system.rendezvous import address_towards

TRAINER, WORKER = 0, 1
"""Ranks in a group of two."""
PATIENCE = timedelta(days=1)
"""How long a worker waits for what the trainer does next, which may be a collective that another
worker holds up. The worker's connection with the server tells when the trainer is gone."""
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Read by the constructor of ProcessGroupNCCL (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). As
they are by default its watchdog ends the process where the other side is gone, and `wait` neither waits
for the device nor raises."""
_ENVIRONMENT = threading.Lock()


class PairGroup:
    """A `PairGroup` joins a trainer rank and a worker. One thread at a time uses it; `abort` is for
    any thread."""

    def __init__(
        self,
        store: dist.Store,
        host: str,
        name: str,
        rank: int,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        """Wait for the other side: the worker until the trainer begins, both then for `timeout_s`.

        `host` is where the store is, which decides the network. `device` is this side's: it holds the
        buckets where the other side has one of the same type, else the CPU does. Raises RuntimeError
        where the other side does not come.
        """
        self._other, self._timeout = 1 - rank, timedelta(seconds=timeout_s)
        self._is_aborted = False
        begun, answered = f"{name}_begun", f"{name}_answered"
        if rank == WORKER:
            store.wait([begun], PATIENCE)
            store.set(answered, device.type)
            other = store.get(begun).decode()
        else:
            store.set(begun, device.type)
            other = store.get(answered).decode()
        self.device = device if other == device.type else torch.device("cpu")
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = self._timeout
        own = address_towards(host) or host
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        meeting = dist.PrefixStore(f"{name}_gloo", store)
        self._gloo: Any = dist.ProcessGroupGloo(meeting, rank, 2, options)
        self._nccl: Any = None
        if self.device.type == "cuda":
            nccl_options: Any = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = self._timeout
            meeting = dist.PrefixStore(f"{name}_nccl", store)
            with _environment(_NCCL_SETTINGS):
                self._nccl = dist.ProcessGroupNCCL(meeting, rank, 2, nccl_options)

    def send_header(self, header: Mapping[str, Any]) -> None:
        """Send a JSON object. Raises RuntimeError where the other side is gone or does not take it."""
        data = torch.from_numpy(np.frombuffer(json.dumps(header).encode(), np.uint8).copy())
        for tensor in (torch.tensor([len(data)]), data):
            self._wait(self._gloo.send([tensor], self._other, 0), self._timeout)

    def receive_header(self) -> dict[str, Any]:
        """Wait for a JSON object. Raises RuntimeError where the other side is gone."""
        size = torch.zeros(1, dtype=torch.int64)
        self._wait(self._gloo.recv([size], self._other, 0), PATIENCE)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._wait(self._gloo.recv([data], self._other, 0), self._timeout)
        return json.loads(data.numpy().tobytes())

    def send(self, tensor: Tensor) -> None:
        """Send a tensor and wait until it has arrived. Raises RuntimeError where it has not."""
        if tensor.numel():
            tensor = tensor.to(self.device)
            self._wait((self._nccl or self._gloo).send([tensor], self._other, 0), self._timeout)

    def receive(self, tensor: Tensor) -> None:
        """Fill a tensor on the CPU. Raises RuntimeError where the other side is gone."""
        if not tensor.numel():
            return
        there = tensor if self._nccl is None else torch.empty_like(tensor, device=self.device)
        self._wait((self._nccl or self._gloo).recv([there], self._other, 0), self._timeout)
        if there is not tensor:
            tensor.copy_(there)

    def abort(self) -> None:
        """Make the next transfer, and one of NCCL that is on its way, raise RuntimeError. A transfer of
        gloo ends by its own time limit: torch cannot abort it."""
        self._is_aborted = True
        if self._nccl is not None:
            with suppress(RuntimeError):
                self._nccl.abort()

    def _wait(self, work: Any, timeout: timedelta) -> None:
        work.wait(timeout)
        if self._is_aborted:
            raise RuntimeError("the group was aborted")


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while; other groups of this process keep theirs."""
    with _ENVIRONMENT:
        former = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in former.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

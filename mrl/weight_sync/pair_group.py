"""A process group of one trainer rank and one worker, over which weights are sent.

The group is independent of torch's default group. Its two sides meet in the store of the trainer's
rank 0, under a name that only they use. Thus the death of a worker breaks no other group, and
another worker can take its place. Headers are sent over gloo. Buckets are sent over gloo too, or
over NCCL if both sides have a GPU; the NCCL path has not been run yet.
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
"""The ranks of the two sides in a `PairGroup`."""
WAIT_TIMEOUT = timedelta(days=1)
"""How long a worker waits for the trainer's next message, which may depend on a collective that another
worker delays. If the trainer dies, the worker learns this from its connection to the trainer's
server."""
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Environment variables that the constructor of ProcessGroupNCCL reads
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). With their default values, the watchdog of NCCL
groups ends the process when the other side is gone, and `wait` neither waits for the device nor
raises."""
_ENVIRONMENT = threading.Lock()


class PairGroup:
    """A process group of a trainer rank and a worker. Only one thread at a time may use it, except for
    `abort`, which any thread may call."""

    def __init__(
        self,
        store: dist.Store,
        host: str,
        name: str,
        rank: int,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        """Make the group. The worker waits up to WAIT_TIMEOUT for the trainer to begin. From then on
        each side waits up to `timeout_s` for the other side.

        The group uses the network interface through which `host`, the host of the store, is reached.
        `device` is this side's device. If the other side has a device of the same type, buckets are
        sent from and received on these devices, otherwise on the CPU. Raises RuntimeError if the other
        side does not join in time.
        """
        self._other, self._timeout = 1 - rank, timedelta(seconds=timeout_s)
        self._is_aborted = False
        begun, answered = f"{name}_begun", f"{name}_answered"
        if rank == WORKER:
            store.wait([begun], WAIT_TIMEOUT)
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
        gloo_store = dist.PrefixStore(f"{name}_gloo", store)
        self._gloo: Any = dist.ProcessGroupGloo(gloo_store, rank, 2, options)
        self._nccl: Any = None
        if self.device.type == "cuda":
            nccl_options: Any = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = self._timeout
            nccl_store = dist.PrefixStore(f"{name}_nccl", store)
            with _environment(_NCCL_SETTINGS):
                self._nccl = dist.ProcessGroupNCCL(nccl_store, rank, 2, nccl_options)

    def send_header(self, header: Mapping[str, Any]) -> None:
        """Send a JSON object. Raises RuntimeError if the other side is gone or does not receive it."""
        data = torch.from_numpy(np.frombuffer(json.dumps(header).encode(), np.uint8).copy())
        for tensor in (torch.tensor([len(data)]), data):
            self._wait(self._gloo.send([tensor], self._other, 0), self._timeout)

    def receive_header(self, *, is_answer: bool = False) -> dict[str, Any]:
        """Wait for a JSON object. `is_answer`: the other side sends it at once, so it must come within
        the group's time limit; otherwise the wait may take up to WAIT_TIMEOUT. Raises RuntimeError if
        the other side is gone, or the object does not come in time."""
        size = torch.zeros(1, dtype=torch.int64)
        limit = self._timeout if is_answer else WAIT_TIMEOUT
        self._wait(self._gloo.recv([size], self._other, 0), limit)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._wait(self._gloo.recv([data], self._other, 0), self._timeout)
        return json.loads(data.numpy().tobytes())

    def send(self, tensor: Tensor) -> None:
        """Send a tensor and wait until it has arrived. Raises RuntimeError if that fails."""
        if tensor.numel():
            tensor = tensor.to(self.device)
            self._wait((self._nccl or self._gloo).send([tensor], self._other, 0), self._timeout)

    def receive(self, tensor: Tensor) -> None:
        """Receive into `tensor`, which must be on the CPU. Raises RuntimeError if the other side is
        gone."""
        if not tensor.numel():
            return
        received = tensor if self._nccl is None else torch.empty_like(tensor, device=self.device)
        self._wait((self._nccl or self._gloo).recv([received], self._other, 0), self._timeout)
        if received is not tensor:
            tensor.copy_(received)

    def abort(self) -> None:
        """Make a running NCCL transfer and every later transfer raise RuntimeError. A running gloo
        transfer ends only at its own time limit, because torch cannot abort it."""
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
    """Set environment variables during the block, which only one thread at a time can enter."""
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

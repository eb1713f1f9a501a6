"""This module brings weights from the trainer to the workers, each over a process group of two.

The groups stand beside torch's default one and meet in the server's store under a name of their own, so
that the death of a worker breaks no other group, and another worker can come in its place. Headers
travel over gloo, buckets over gloo on CPUs and over NCCL on GPUs. NCCL's part has not run.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.disaggregated.staging import Canaries, Staging, flat_of, header_of
from mrl.run import console
from mrl.system.heartbeat import beat
from mrl.system.rendezvous import address_towards
from mrl.types import WeightBucket

TRAINER, WORKER = 0, 1
"""Ranks in a group of two."""
POLL_S = 0.001


class PairGroup:
    """A `PairGroup` joins a trainer rank and a worker. It is for one thread at a time."""

    def __init__(
        self, store: dist.Store, host: str, name: str, rank: int, timeout_s: float, *, nccl: bool
    ) -> None:
        """Wait for the other side. `host`: where the store is, which decides the network."""
        self._other, self._timeout_s = 1 - rank, timeout_s
        timeout = timedelta(seconds=timeout_s)
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timeout
        own = address_towards(host) or host
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        meeting = dist.PrefixStore(f"{name}_gloo", store)
        self._gloo: Any = dist.ProcessGroupGloo(meeting, rank, 2, options)
        self._nccl: Any = None
        if nccl:
            nccl_options: Any = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            meeting = dist.PrefixStore(f"{name}_nccl", store)
            self._nccl = dist.ProcessGroupNCCL(meeting, rank, 2, nccl_options)

    @property
    def device(self) -> torch.device:
        """The device of the tensors for `send` and `receive`."""
        return torch.device("cpu" if self._nccl is None else torch.cuda.current_device())

    def send_header(self, header: Mapping[str, Any]) -> None:
        """Send a JSON object. Raises RuntimeError where the other side is gone."""
        data = torch.from_numpy(np.frombuffer(json.dumps(header).encode(), np.uint8).copy())
        self._gloo.send([torch.tensor([len(data)])], self._other, 0).wait()
        self._gloo.send([data], self._other, 0).wait()

    def receive_header(self) -> dict[str, Any]:
        """Wait for a JSON object. Raises RuntimeError where the other side is gone."""
        size = torch.zeros(1, dtype=torch.int64)
        self._gloo.recv([size], self._other, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._gloo.recv([data], self._other, 0).wait()
        return json.loads(data.numpy().tobytes())

    def send(self, tensor: Tensor) -> Any:
        """Begin to send a tensor on `device`; `wait` ends it."""
        return (self._nccl or self._gloo).send([tensor], self._other, 0)

    def receive(self, tensor: Tensor) -> None:
        """Fill a tensor on `device`."""
        self.wait((self._nccl or self._gloo).recv([tensor], self._other, 0))

    def wait(self, work: Any) -> None:
        """Wait for a transfer. Raises RuntimeError where the other side is gone, or too slow."""
        if self._nccl is None:
            work.wait()
            return
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():  # wait() would only let the stream wait
            if time.monotonic() > deadline:
                self._nccl.abort()
                raise RuntimeError(f"a transfer of weights took more than {self._timeout_s:g} s")
            time.sleep(POLL_S)
        work.wait()  # raises what went wrong


class _Sending:
    """Sends one version to one worker; after a failure it does nothing more."""

    def __init__(self, name: str, join: Callable[[], PairGroup]) -> None:
        """`join` returns the group of the pair `name`, and may wait for the worker."""
        self.name, self._join = name, join
        self._group: PairGroup | None = None
        self._work: Any = None
        self._flat: Tensor | None = None
        """What is on its way, and must live until it is there."""
        self.is_failed = False

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch has no class of its own for a peer that is gone
            self.is_failed = True
            reason = str(error).splitlines()[0]
            console.warning(f"weights could not be sent to {self.name}: {reason}")

    def begin(self, version: int, canaries: Canaries) -> None:
        with self._noting():
            self._group = group = self._join()
            lengths = [len(sequence) for sequence in canaries.sequences]
            group.send_header({"version": version, "canaries": lengths})
            if lengths:
                tokens, logprobs = torch.cat(canaries.sequences), torch.cat(canaries.logprobs)
                for tensor in (tokens.to(torch.int64), logprobs.to(torch.float32)):
                    group.wait(group.send(tensor.to(group.device)))

    def push(self, header: Mapping[str, Any], flat: Tensor) -> None:
        """Begin to send a bucket; the one before it has arrived then."""
        if self.is_failed or self._group is None:
            return
        with self._noting():
            self.finish()
            self._group.send_header(header)
            self._flat = flat.to(self._group.device)
            self._work = self._group.send(self._flat)

    def finish(self) -> None:
        """Wait until the last bucket has arrived."""
        if self.is_failed or self._group is None or self._work is None:
            return
        with self._noting():
            self._group.wait(self._work)
            self._work = self._flat = None


class WeightSender:
    """Sends versions of the weights from one trainer rank to the workers that are its own."""

    def __init__(
        self, address: tuple[str, int], store: dist.Store | None, timeout_s: float
    ) -> None:
        """`address` is that of the server's store; `store` where this rank has it."""
        self._host, self._timeout_s = address[0], timeout_s
        self._store = store or _connect(address, timeout_s)
        self._groups: dict[str, PairGroup] = {}

    def send(
        self,
        buckets: Iterable[WeightBucket],
        version: int,
        names: Sequence[str],
        canaries: Canaries,
    ) -> list[str]:
        """Send a version to the pairs of `names` and return those that failed, after a warning.

        Drains `buckets`, which are a collective, whatever fails. Waits for the copies in the memory of
        the workers, and for no engine.
        """
        self._groups = {name: self._groups[name] for name in names if name in self._groups}
        sendings = [_Sending(name, functools.partial(self._join, name)) for name in names]
        for sending in sendings:
            sending.begin(version, canaries)
        for bucket in buckets:  # its memory is used again for the next but one
            header, flat = header_of(bucket), flat_of(bucket)
            for sending in sendings:
                sending.push(header, flat)
            beat()
        for sending in sendings:
            sending.finish()
        failed = [sending.name for sending in sendings if sending.is_failed]
        for name in failed:
            self._groups.pop(name, None)
        return failed

    def _join(self, name: str) -> PairGroup:
        if name not in self._groups:
            nccl = torch.cuda.is_available()
            self._groups[name] = PairGroup(
                self._store, self._host, name, TRAINER, self._timeout_s, nccl=nccl
            )
        return self._groups[name]

    def close(self) -> None:
        """Leave the groups."""
        self._groups = {}


class WeightReceiver:
    """Receives versions of the weights in a worker."""

    def __init__(self, address: tuple[str, int], name: str, timeout_s: float) -> None:
        """`name` is that of the pair, `address` that of the server's store."""
        self._host, self._name, self._timeout_s = address[0], name, timeout_s
        self._store = _connect(address, timeout_s)
        self._group: PairGroup | None = None

    def receive(self, staging: Staging, version: int) -> None:
        """Receive a version into `staging`. Raises RuntimeError where the trainer is gone, or sends
        another version; what came of it is not offered."""
        if self._group is None:
            nccl = torch.cuda.is_available()
            self._group = PairGroup(
                self._store, self._host, self._name, WORKER, self._timeout_s, nccl=nccl
            )
        group = self._group
        first = group.receive_header()
        if first["version"] != version:
            raise RuntimeError(f"got weights of version {first['version']}, expected {version}")
        staging.begin(version, self._canaries(group, first["canaries"]))
        while True:
            header = group.receive_header()
            room = staging.room(header)
            if group.device.type == "cpu":
                group.receive(room)
            else:
                received = torch.empty_like(room, device=group.device)
                group.receive(received)
                room.copy_(received)
            if header["is_last"]:
                break
        staging.finish()

    def _canaries(self, group: PairGroup, lengths: list[int]) -> Canaries | None:
        if not lengths:
            return None
        tokens = torch.empty(sum(lengths), dtype=torch.int64, device=group.device)
        logprobs = torch.empty(sum(lengths), dtype=torch.float32, device=group.device)
        group.receive(tokens)
        group.receive(logprobs)
        return Canaries(list(tokens.cpu().split(lengths)), list(logprobs.cpu().split(lengths)))

    def close(self) -> None:
        """Leave the group."""
        self._group = None


def _connect(address: tuple[str, int], timeout_s: float) -> dist.Store:
    host, port = address
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

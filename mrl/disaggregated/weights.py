"""This module brings versions of the weights from the trainer to the workers.

A trainer rank serves its workers at once, each by a thread and a group of two
(`mrl.disaggregated.pair`): one that dies, hangs or never comes costs the others a bounded wait, and
breaks nothing.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from mrl.disaggregated.pair import TRAINER, WORKER, PairGroup
from mrl.disaggregated.staging import Canaries, Staging, flat_of, header_of
from mrl.run import console
from mrl.system.heartbeat import beat
from mrl.types import WeightBucket
from parallel.mesh import local_device

Job = Callable[[PairGroup], None]
GRACE_S = 2.0
"""What a transfer has left to fail by its own time limit, and to say why."""
BEAT_S = 1.0


class _Sending:
    """Sends one version to one worker in a thread of its own; after a failure it does nothing more."""

    def __init__(self, name: str, join: Callable[[], PairGroup], timeout_s: float) -> None:
        """`join` returns the group of the pair, and may wait for the worker."""
        self.name = name
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._jobs: deque[Job | None] = deque()
        self._num_given = self._num_done = 0
        self.failure = ""
        self.group: PairGroup | None = None
        threading.Thread(target=self._run, args=(join,), name="mrl-weights", daemon=True).start()

    def give(self, job: Job | None) -> None:
        """Let the thread do `job` after the others; None ends it."""
        with self._changed:
            self._jobs.append(job)
            self._num_given += 1
            self._changed.notify_all()

    def wait(self, num_open: int = 0) -> None:
        """Wait until at most `num_open` jobs are not done, or the worker is given up."""
        deadline = time.monotonic() + self._timeout_s + GRACE_S
        with self._changed:
            while not self.failure and self._num_given - self._num_done > num_open:
                if time.monotonic() > deadline:
                    self.failure = f"it took nothing for {self._timeout_s:g} s"
                    break
                self._changed.wait(BEAT_S)
                beat()  # the wait is bounded
        if self.failure and self.group is not None:
            self.group.abort()

    def _run(self, join: Callable[[], PairGroup]) -> None:
        try:
            group = join()
            self.group = group
            while (job := self._next()) is not None:
                job(group)
                with self._changed:
                    self._num_done += 1
                    self._changed.notify_all()
        except Exception as error:  # whatever it is, the others and the export continue
            with self._changed:
                self.failure = self.failure or _reason(error)
                self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._jobs)
            return None if self.failure else self._jobs.popleft()


def transfer_device(*, sends_adapter: bool) -> torch.device:
    """Return where this rank's side of a transfer has its buckets.

    An adapter is small and goes to the engine through host memory whatever it comes in: on the CPU it
    needs no NCCL communicator, of which each tenant and worker would have one.
    """
    return torch.device("cpu") if sends_adapter else local_device()


class WeightSender:
    """Sends versions of the weights from one trainer rank to the workers that are its own."""

    def __init__(
        self,
        address: tuple[str, int],
        timeout_s: float,
        device: torch.device,
    ) -> None:
        """`address` is that of the server's store. `device` holds the buckets (`transfer_device`)."""
        self._address, self._timeout_s, self._device = address, timeout_s, device
        self._groups: dict[str, PairGroup] = {}

    def send(
        self,
        buckets: Iterable[WeightBucket],
        version: int,
        names: Sequence[str],
        canaries: Canaries,
    ) -> list[str]:
        """Send a version to the pairs of `names` and return those that failed, after a warning each.

        Drains `buckets`, which are a collective, whatever fails, and sends one while the next is built.
        Waits for the copies in the memory of the workers, and for no engine; for a worker that takes
        nothing `timeout_s`, once.
        """
        sendings = [_Sending(name, self._join(name), self._timeout_s) for name in names]
        try:
            for sending in sendings:
                sending.give(lambda group: _send_first(group, version, canaries))
            for sending in sendings:
                sending.wait()
            for bucket in buckets:
                job = _bucket_job(bucket)
                for sending in sendings:
                    sending.give(job)
                for sending in sendings:  # the next bucket may take the memory of the one before
                    sending.wait(num_open=1)
                beat()
            for sending in sendings:
                sending.wait()
        finally:
            for sending in sendings:
                sending.give(None)
        failed = [sending for sending in sendings if sending.failure]
        for sending in failed:
            console.warning(f"weights could not be sent to {sending.name}: {sending.failure}")
        for sending in sendings:
            self._groups.pop(sending.name, None)
        self._groups |= {s.name: s.group for s in sendings if s.group and not s.failure}
        return [sending.name for sending in failed]

    def keep(self, names: Collection[str]) -> None:
        """Leave the groups of all pairs but `names`: those whose workers are there."""
        self._groups = {name: group for name, group in self._groups.items() if name in names}

    def _join(self, name: str) -> Callable[[], PairGroup]:
        def join() -> PairGroup:
            # A client of its own: one that waits for a worker would keep the others from asking.
            store = _connect(self._address, self._timeout_s)
            host, timeout_s = self._address[0], self._timeout_s
            return PairGroup(store, host, name, TRAINER, timeout_s, self._device)

        former = self._groups.get(name)
        return join if former is None else lambda: former

    def close(self) -> None:
        """Leave the groups."""
        self._groups = {}


class WeightReceiver:
    """Receives versions of the weights in a worker."""

    def __init__(
        self,
        address: tuple[str, int],
        name: str,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        """`name` is that of the pair, `address` that of the server's store; `device` as
        the sender's."""
        self._host, self._name, self._timeout_s = address[0], name, timeout_s
        self._store = _connect(address, timeout_s)
        self._device = device
        self._group: PairGroup | None = None

    def receive(self, staging: Staging, version: int) -> None:
        """Receive a version into `staging`. Raises RuntimeError where the trainer is gone, or sends
        another version; what came of it is not offered."""
        if self._group is None:
            self._group = PairGroup(
                self._store, self._host, self._name, WORKER, self._timeout_s, self._device
            )
        group = self._group
        first = group.receive_header()
        if first["version"] != version:
            raise RuntimeError(f"got weights of version {first['version']}, expected {version}")
        staging.begin(version, _receive_canaries(group, first["canaries"]))
        is_last = False
        while not is_last:
            header = group.receive_header()
            group.receive(staging.room(header))
            is_last = header["is_last"]
        staging.finish()

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.abort()
        self._group = None


def _reason(error: Exception) -> str:
    """Return an error in one line, without gloo's place in its source and its advice."""
    line = (str(error).splitlines() or [repr(error)])[0]
    return re.sub(r"^\[\S*:\d+\] ", "", line).split(" This is typically")[0]


def _send_first(group: PairGroup, version: int, canaries: Canaries) -> None:
    lengths = [len(sequence) for sequence in canaries.sequences]
    group.send_header({"version": version, "canaries": lengths})
    if lengths:
        group.send(torch.cat(canaries.sequences).to(torch.int64))
        group.send(torch.cat(canaries.logprobs).to(torch.float32))


def _bucket_job(bucket: WeightBucket) -> Job:
    header, flat = header_of(bucket), flat_of(bucket)

    def send(group: PairGroup) -> None:
        group.send_header(header)
        group.send(flat)

    return send


def _receive_canaries(group: PairGroup, lengths: list[int]) -> Canaries | None:
    if not lengths:
        return None
    tokens = torch.empty(sum(lengths), dtype=torch.int64)
    logprobs = torch.empty(sum(lengths), dtype=torch.float32)
    group.receive(tokens)
    group.receive(logprobs)
    return Canaries(list(tokens.split(lengths)), list(logprobs.split(lengths)))


def _connect(address: tuple[str, int], timeout_s: float) -> dist.Store:
    host, port = address
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

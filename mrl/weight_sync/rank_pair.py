"""A transport that sends weights from the trainer to workers, over one process group for each worker.

A trainer rank sends to all of its workers at the same time. Each worker has a thread and a group of two
(`mrl.weight_sync.pair_group`). A worker that dies, hangs or never joins delays the other workers by a
bounded time, and has no other effect on them.

With deltas (`mrl.weight_sync.delta`), a worker also sends answers. At the beginning of a version it
says whether it holds the version to which the deltas apply. After each delta it says whether the
resulting bucket is correct. If the bucket is not correct, the trainer sends the whole bucket. Without
deltas a worker sends nothing.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mrl.engines.handles import flat_of
from mrl.run import console
from mrl.system.heartbeat import beat
from mrl.types import WeightBucket
from mrl.weight_sync.delta import Delta, LastVersion, Traffic
from mrl.weight_sync.load import Canaries
from mrl.weight_sync.pair_group import TRAINER, WORKER, PairGroup
from mrl.weight_sync.staging import Staging, header_of

Job = Callable[["_Sending", PairGroup], None]
GRACE_S = 2.0
"""Seconds that are added to a transfer's own time limit before the worker counts as failed. They
give a transfer that has reached its limit time to report its own error."""
BEAT_S = 1.0


class _Sending:
    """Sends one version of the weights to one worker, in a thread of its own. The thread ends at the
    first failure."""

    def __init__(self, name: str, join: Callable[[], PairGroup], timeout_s: float) -> None:
        """`join` returns the process group of the trainer rank and the worker. It may wait for the
        worker."""
        self.name = name
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._jobs: deque[Job | None] = deque()
        """The jobs that are not done, the oldest first. The first one may be running."""
        self.failure = ""
        self.group: PairGroup | None = None
        self.has_base = False
        """Whether the worker holds the version to which deltas can be applied."""
        self.traffic = Traffic()
        self._begun = time.monotonic()
        """When the running transfer began."""
        threading.Thread(target=self._run, args=(join,), name="mrl-weights", daemon=True).start()

    def add(self, job: Job | None) -> None:
        """Add a job for the thread. None ends the thread after the jobs before it."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def begin(self) -> None:
        """Begin the next transfer of a job: the time limit starts again. A job calls this before every
        message to the worker, and before it waits for an answer."""
        with self._changed:
            self._begun = time.monotonic()

    def wait(self, num_open: int = 0) -> None:
        """Wait until at most `num_open` jobs remain, or the worker has failed. A worker that
        exceeds the time limit in a transfer counts as failed."""
        start = time.monotonic()
        with self._changed:
            while not self.failure and len(self._jobs) > num_open:
                silent_s = time.monotonic() - max(start, self._begun)
                if silent_s > self._timeout_s + GRACE_S:
                    self.failure = f"it received nothing for {self._timeout_s:g} s"
                    break
                self._changed.wait(BEAT_S)
                beat()  # the wait is bounded: a job has at most three transfers
        if self.failure and self.group is not None:
            self.group.abort()

    def _run(self, join: Callable[[], PairGroup]) -> None:
        try:
            self.group = group = join()
            while (job := self._next()) is not None:
                job(self, group)
                with self._changed:
                    self._jobs.popleft()
                    self._changed.notify_all()
        except Exception as error:  # after any error, the other workers and the export continue
            with self._changed:
                self.failure = self.failure or _reason(error)
                self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._jobs)
            return None if self.failure else self._jobs[0]


class PairSender:
    """A `mrl.weight_sync.base.WeightSender` that uses one process group for each worker."""

    def __init__(
        self,
        address: tuple[str, int],
        timeout_s: float,
        device: torch.device,
        max_deltas: int = 0,
    ) -> None:
        """`address` is (host, port) of the store through which the trainer rank and a worker find
        each other. `device` is the device that holds the buckets. `max_deltas` is the largest number
        of versions in a row that a worker gets as deltas; 0 sends every version whole."""
        self._address, self._timeout_s, self._device = address, timeout_s, device
        self._groups: dict[str, PairGroup] = {}
        self._max_deltas = max_deltas
        self._num_deltas: dict[str, int] = {}
        """For each worker, the number of versions that it got as deltas since its last whole one."""
        self._last = LastVersion()
        self.traffic = Traffic()

    def send(
        self,
        buckets: Iterable[WeightBucket],
        version: int,
        names: Sequence[str],
        canaries: Canaries,
    ) -> list[str]:
        """Send a version of the weights to the workers `names`, as `WeightSender.send` describes. A
        bucket is sent while the next one is built.

        Wait until each worker either has the version in host memory or has failed, and return the names
        of those that failed. The engines load the version later. A worker that takes longer than
        `timeout_s` seconds for one transfer counts as failed, so it delays the send only once. A delta,
        the worker's answer to it, and the whole bucket that follows a wrong delta are three transfers.
        """
        self.traffic = Traffic()
        keeps = self._max_deltas > 0 and bool(names)
        base = self._last.version if keeps else None
        sendings = [_Sending(name, self._join(name), self._timeout_s) for name in names]
        try:
            for sending in sendings:
                is_due = self._num_deltas.get(sending.name, 0) >= self._max_deltas
                sending.add(_first_job(version, canaries, None if is_due else base))
            for sending in sendings:
                sending.wait()
            wants_delta = any(sending.has_base for sending in sendings)
            if keeps:
                self._last.begin(version)
            for bucket in buckets:
                delta = None
                if keeps:
                    delta = self._last.replace(bucket, self.traffic, wants_delta=wants_delta)
                whole = _bucket_job(bucket)
                changed = _delta_job(bucket, delta, whole) if delta else whole
                for sending in sendings:
                    sending.add(changed if sending.has_base else whole)
                for sending in sendings:  # the next bucket may take the memory of the one before
                    sending.wait(num_open=1)
                beat()
            for sending in sendings:
                sending.wait()
            if keeps:
                self._last.finish()
            for sending in sendings:
                number = self._num_deltas.get(sending.name, 0)
                self._num_deltas[sending.name] = number + 1 if sending.has_base else 0
        finally:
            for sending in sendings:
                sending.add(None)
        failed = [sending for sending in sendings if sending.failure]
        for sending in failed:
            console.warning(f"weights could not be sent to {sending.name}: {sending.failure}")
        for sending in sendings:
            self.traffic.add(sending.traffic)
            self._groups.pop(sending.name, None)
        self._groups |= {s.name: s.group for s in sendings if s.group and not s.failure}
        return [sending.name for sending in failed]

    def keep(self, names: Collection[str]) -> None:
        self._groups = {name: group for name, group in self._groups.items() if name in names}
        self._num_deltas = {name: num for name, num in self._num_deltas.items() if name in names}

    def _join(self, name: str) -> Callable[[], PairGroup]:
        def join() -> PairGroup:
            # Each thread needs its own client: a client that waits for a worker blocks all its users.
            store = _connect(self._address, self._timeout_s)
            host, timeout_s = self._address[0], self._timeout_s
            return PairGroup(store, host, name, TRAINER, timeout_s, self._device)

        former = self._groups.get(name)
        return join if former is None else lambda: former

    def close(self) -> None:
        self._groups = {}


class PairReceiver:
    """A `mrl.weight_sync.base.WeightReceiver` that uses a process group with one trainer rank."""

    def __init__(
        self, address: tuple[str, int], name: str, timeout_s: float, device: torch.device
    ) -> None:
        """`name` is the worker's name in `PairSender.send`. `address` is as in `PairSender`, and
        `device` is the device that receives the buckets."""
        self._host, self._name, self._timeout_s = address[0], name, timeout_s
        self._store = _connect(address, timeout_s)
        self._device = device
        self._group: PairGroup | None = None
        self._newest: Staging | None = None
        """The `Staging` that received a version last. It may be receiving the next version already."""
        self._receiving = threading.Lock()

    def receive(self, staging: Staging, version: int) -> None:
        with self._receiving:  # the version before may still be arriving, and become the base
            self._receive(staging, version)

    def _receive(self, staging: Staging, version: int) -> None:
        if self._group is None:
            self._group = PairGroup(
                self._store, self._host, self._name, WORKER, self._timeout_s, self._device
            )
        group = self._group
        first = group.receive_header()
        if first["version"] != version:
            raise RuntimeError(f"got weights of version {first['version']}, expected {version}")
        canaries, base = _receive_canaries(group, first), None
        if "base" in first:
            if self._newest is not None and self._newest.version == first["base"]:
                base = self._newest
            group.send_header({"has_base": base is not None})
        staging.begin(version, canaries, base)
        is_last = False
        while not is_last:
            header = group.receive_header()
            if "delta" in header and not _receive_delta(group, staging, header):
                continue  # the bucket follows whole
            if "delta" not in header:
                group.receive(staging.room(header))
            is_last = header["is_last"]
        staging.finish()
        self._newest = staging

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None


def _reason(error: Exception) -> str:
    """Return an error as one line, without the source position and the advice that gloo adds."""
    line = (str(error).splitlines() or [repr(error)])[0]
    return re.sub(r"^\[\S*:\d+\] ", "", line).split(" This is typically")[0]


def _first_job(version: int, canaries: Canaries, base: int | None) -> Job:
    """Return a job that announces a version and sends its canaries. If `base` is not None, the job also
    asks whether the worker holds the version `base`."""
    lengths = [len(sequence) for sequence in canaries.sequences]
    effect = canaries.quantization_abs_mean
    header = {"version": version, "canaries": lengths, "quantization_abs_mean": effect}

    def send(sending: _Sending, group: PairGroup) -> None:
        sending.begin()
        group.send_header(header if base is None else {**header, "base": base})
        if lengths:
            group.send(torch.cat(canaries.sequences).to(torch.int64))
            group.send(torch.cat(canaries.logprobs).to(torch.float32))
        if base is not None:
            sending.begin()
            sending.has_base = group.receive_header(is_answer=True)["has_base"]
        sending.traffic.num_full += not sending.has_base

    return send


def _bucket_job(bucket: WeightBucket) -> Job:
    header, flat = header_of(bucket), flat_of(bucket)

    def send(sending: _Sending, group: PairGroup) -> None:
        sending.begin()
        group.send_header(header)
        group.send(flat)
        sending.traffic.num_bytes += flat.numel()
        sending.traffic.full_bytes += flat.numel()

    return send


def _delta_job(bucket: WeightBucket, delta: Delta, whole: Job) -> Job:
    """Return a job that sends the delta of a bucket. If the worker does not get the right bucket from
    the delta, the job calls `whole`, which sends the whole bucket."""
    header = {**header_of(bucket), "delta": delta.header()}

    def send(sending: _Sending, group: PairGroup) -> None:
        sending.begin()
        group.send_header(header)
        group.send(delta.payload)
        sending.traffic.num_bytes += delta.payload.numel()
        sending.begin()
        if why := group.receive_header(is_answer=True)["why"]:
            console.warning(f"weights of {sending.name}: {why}; the bucket is sent whole")
            sending.traffic.num_resent += 1
            whole(sending, group)
        else:
            sending.traffic.full_bytes += bucket.num_bytes

    return send


def _receive_delta(group: PairGroup, staging: Staging, header: Mapping[str, Any]) -> bool:
    """Receive a delta, and make the next bucket of `staging` from it. Return whether the bucket is
    correct, and tell the trainer the same."""
    payload = torch.empty(int(header["delta"]["num_bytes"]), dtype=torch.uint8)
    group.receive(payload)
    why = staging.patch(header, payload)
    group.send_header({"why": why})
    return not why


def _receive_canaries(group: PairGroup, first: Mapping[str, Any]) -> Canaries | None:
    lengths = first["canaries"]
    if not lengths:
        return None
    tokens = torch.empty(sum(lengths), dtype=torch.int64)
    logprobs = torch.empty(sum(lengths), dtype=torch.float32)
    group.receive(tokens)
    group.receive(logprobs)
    effect = float(first["quantization_abs_mean"])
    return Canaries(list(tokens.split(lengths)), list(logprobs.split(lengths)), effect)


def _connect(address: tuple[str, int], timeout_s: float) -> dist.Store:
    host, port = address
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

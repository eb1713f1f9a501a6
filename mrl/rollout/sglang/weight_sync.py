"""One weight sync: every weight exactly once, pushed one of three ways, and proven to have arrived.

What proves it: names and shapes against the checkpoint's while buckets come (manifest.py), then the
digests of what the trainer holds against those of what the engine holds (held.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from mrl.kernels.digest import add_digests, digests_of
from mrl.rollout.base import SyncReport
from mrl.rollout.sglang.held import ACTION, check_held, held_digests
from mrl.rollout.sglang.manifest import Manifest
from mrl.rollout.sglang.weights import TensorPush
from mrl.rollout.sglang.weights_disk import DiskPush
from mrl.rollout.sglang.weights_distributed import DistributedPush
from mrl.types import WeightBucket

Method = Literal["tensor", "distributed", "disk"]


class Push(Protocol):
    """A push is a way for buckets to reach the engine."""

    def push(self, bucket: WeightBucket) -> None:
        """Return when the memory of all buckets before this one may be used again."""
        ...

    def finish(self) -> None:
        """Return when the memory of every bucket may be used again."""
        ...

    def settle(self) -> None:
        """Free what the update still held: every rank of the engine has said what it holds since."""
        ...

    def close(self) -> None:
        """Give back what is held between updates. Harmless when repeated."""
        ...


class Poster(Protocol):
    """What is asked of `mrl.rollout.sglang.server.Server`."""

    def post(self, path: str, body: dict[str, Any]) -> Any: ...

    def offers(self, path: str) -> bool: ...


class WeightSync:
    """A sync object serves one server from its start to its stop: make another after a restart."""

    def __init__(
        self,
        server: Poster,
        manifest: Manifest,
        *,
        num_ranks: int,
        method: Method = "tensor",
        folder: Path | None = None,
    ) -> None:
        """`num_ranks` tensor-parallel ranks; the files of `disk` go into `folder` for a while."""
        self._server = server
        self._manifest = manifest
        self._num_ranks = num_ranks
        self._push = _make_push(server, method, num_ranks, folder)
        # Tensor and distributed updates must be wrapped in a session since 0.5.23.
        self._has_session = method != "disk" and server.offers("/begin_weight_update")

    def update(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        """Load a whole model and prove it. Leaves `buckets` where it stopped: drain it if others wait.

        Raises ValueError where a bucket carries another version, or a weight is missing, unknown,
        repeated or of another shape; RuntimeError where the engine refuses a bucket, or holds other
        weights in the end than were sent. The engine's weights are a mixture then.
        """
        try:
            return self._update(iter(buckets), version)
        except BaseException:
            # What is left of a failed update must not meet the next one.
            self._push.close()
            raise

    def close(self) -> None:
        """Give back memory, files and the process group. Harmless when repeated."""
        self._push.close()

    def _update(self, buckets: Iterator[WeightBucket], version: int) -> SyncReport:
        self._manifest.begin()
        clock = SyncClock()
        sent: list[tuple[str, int]] = []
        num_bytes, source_s, complete = 0, 0.0, False
        with self._session():
            for bucket in buckets:
                if bucket.version != version:
                    raise ValueError(
                        f"update_weights: got a bucket of version {bucket.version}, expected {version}"
                    )
                self._manifest.check(bucket)
                if bucket.is_last:
                    self._manifest.check_complete()
                with clock.part("digest"):
                    sent += bucket.digest.items() if bucket.digest else digests_of(bucket.tensors)
                with clock.part("push"):
                    self._push.push(bucket)
                    if bucket.is_last:  # its memory may go when the end is asked for
                        self._push.finish()
                num_bytes += bucket.num_bytes
                source_s += bucket.digest_s
                complete = bucket.is_last
            self._manifest.check_complete()
            if not complete:
                raise ValueError("update_weights: the buckets ended without one that says is_last")
        with clock.part("digest"):
            self._check(add_digests(sent))
        self._push.settle()
        return SyncReport(num_bytes, clock.seconds["push"], clock.seconds["digest"] + source_s)

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        if not self._has_session:
            yield
            return
        self._server.post("/begin_weight_update", {"selector": "all"})
        try:
            yield
        except BaseException:
            # Left open it would refuse the next update; what it says now hides no other error. A bucket
            # that is still being loaded belongs to the session: first that one.
            self._push.close()
            with contextlib.suppress(RuntimeError, OSError):
                self._server.post("/end_weight_update", {})
            raise
        self._server.post("/end_weight_update", {})

    def _check(self, sent: dict[str, int]) -> None:
        answer = self._server.post("/weights_checker", {"action": ACTION})
        held, dtypes = held_digests(answer, self._num_ranks)
        expected = self._manifest.with_tied_output(sent, held)
        hint = self._manifest.dtype_hint(dtypes)
        check_held(expected, held, self._manifest.optional_places, hint)


def _make_push(server: Poster, method: Method, num_ranks: int, folder: Path | None) -> Push:
    if method == "disk":
        return DiskPush(server.post, folder)
    if method == "distributed":
        return DistributedPush(server.post, num_ranks)
    return TensorPush(server.post, num_ranks)


class SyncClock:
    """Adds up the seconds of the parts of an update: `push` and `digest`."""

    def __init__(self) -> None:
        self.seconds = {"push": 0.0, "digest": 0.0}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to part `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

"""Updates all weights of a server, with a proof that every weight has arrived exactly once.

The proof has two parts. While buckets arrive, names and shapes are compared with those of the
checkpoint (manifest.py). At the end, digests of the engine's weights are compared with digests of the
trainer's weights (digests.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from mrl.engines.base import SyncReport
from mrl.engines.sglang.connection import ServerConnection
from mrl.engines.sglang.digests import (
    ACTION,
    check_held,
    check_quantized,
    held_digests,
    quantized_modules,
)
from mrl.engines.sglang.manifest import Manifest
from mrl.engines.sglang.weights.base import MakePush
from mrl.engines.sglang.weights.tensor import TensorPush
from mrl.kernels.digest import add_digests, digests_of
from mrl.types import WeightBucket


class WeightUpdater:
    """Updates the weights of one server between its start and its stop. A restart needs a new
    object."""

    def __init__(
        self,
        connection: ServerConnection,
        manifest: Manifest,
        *,
        num_ranks: int,
        push: MakePush = TensorPush,
        folder: Path | None = None,
    ) -> None:
        """`push` makes the object that transfers buckets (see `MakePush`). `num_ranks` is the number of
        the server's tensor-parallel ranks. `folder` is for a push that writes files."""
        self._connection = connection
        self._manifest = manifest
        self._num_ranks = num_ranks
        self._push = push(connection.post, num_ranks, folder)
        self._has_session = self._push.needs_session and connection.offers("/begin_weight_update")

    def update(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        """Load a whole model, and prove that the engine holds it. After an error, `buckets` may have
        items left; the caller has to drain them if other ranks wait for this one.

        Raises ValueError if a bucket carries another version, or a weight is missing, unknown, repeated
        or of another shape; RuntimeError if the engine refuses a bucket, or ends up with weights other
        than those sent. After an error the engine's weights are a mixture of old and new.
        """
        try:
            return self._update(buckets, version)
        except BaseException:
            # The next update must not find remains of the failed one.
            self._push.close()
            raise

    def close(self) -> None:
        """Release memory and files. A second call does nothing."""
        self._push.close()

    def _update(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        clock = SyncClock()
        sent: list[tuple[str, int]] = []
        num_bytes, source_s = 0, 0.0
        with self._session():
            for bucket in self._manifest.arriving(buckets, version):
                with clock.part("digest"):
                    sent += bucket.digest.items() if bucket.digest else digests_of(bucket.tensors)
                with clock.part("push"):
                    self._push.push(bucket)
                    if bucket.is_last:  # its memory may be freed as soon as the loop goes on
                        self._push.finish()
                num_bytes += bucket.num_bytes
                source_s += bucket.digest_s
        with clock.part("digest"):
            self._check(add_digests(sent))
        self._push.settle()
        return SyncReport(num_bytes, clock.seconds["push"], clock.seconds["digest"] + source_s)

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        if not self._has_session:
            yield
            return
        self._connection.post("/begin_weight_update", {"selector": "all"})
        try:
            yield
        except BaseException:
            # An open session would make SGLang refuse the next update. A bucket that is still being
            # loaded belongs to the session, so wait for it first. Errors of the end are dropped: the
            # earlier one is raised.
            self._push.close()
            with contextlib.suppress(RuntimeError, OSError):
                self._connection.post("/end_weight_update", {})
            raise
        self._connection.post("/end_weight_update", {})

    def _check(self, sent: dict[str, int]) -> None:
        answer = self._connection.post("/weights_checker", {"action": ACTION})
        check_quantized(self._manifest.quantized_modules, quantized_modules(answer))
        held, dtypes = held_digests(answer, self._num_ranks)
        expected = self._manifest.with_tied_output(sent, held)
        hint = self._manifest.dtype_hint(dtypes)
        check_held(expected, held, self._manifest.optional_places, hint)


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

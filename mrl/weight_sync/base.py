"""The contract of a weight transport, which moves the buckets of an export from the trainer to engines.

On the engine's side there is always an iterator of `WeightBucket`, which
`mrl.weight_sync.load.WeightLoader` loads and verifies. mrl/weight_sync/transports/ has one file for
each transport.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from mrl.types import WeightBucket
from mrl.weight_sync.delta import Traffic
from mrl.weight_sync.load import Canaries
from mrl.weight_sync.staging import Staging


class WeightSender(Protocol):
    """A trainer rank's side of a transport: it sends versions of the weights to workers on other
    ranks."""

    traffic: Traffic
    """Counts of the bytes, buckets and elements that the last call of `send` sent or compared. Only
    read if `rollout.weight_encoding` is `delta`."""

    def send(
        self,
        buckets: Iterable[WeightBucket],
        version: int,
        names: Sequence[str],
        canaries: Canaries,
    ) -> list[str]:
        """Send a version of the weights to the workers `names`, with the canaries that verify it
        (see `mrl.weight_sync.load`). Return the names of the workers that failed.

        A warning is printed for each worker that failed. Iterating over `buckets` is a collective
        of trainer ranks, so the iterator is drained even if all workers fail. When bucket n + 2 is
        requested, the memory of bucket n may be reused.
        """
        ...

    def keep(self, names: Collection[str]) -> None:
        """Release what the sender holds for workers that are not in `names`. These workers are gone."""
        ...

    def close(self) -> None:
        """Release everything. A second call does nothing."""
        ...


class WeightReceiver(Protocol):
    """A worker's side of a transport: it receives versions of the weights."""

    def receive(self, staging: Staging, version: int) -> None:
        """Receive a version of the weights into `staging`. Raises RuntimeError if the trainer is
        gone or sends another version; `staging` then holds no complete version."""
        ...

    def close(self) -> None:
        """Release everything. A second call does nothing."""
        ...

"""The protocol of a weight push, which transfers buckets of weights to SGLang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from mrl.types import WeightBucket

Post = Callable[[str, dict[str, Any]], Any]
"""Posts a body to a path of the server, and returns the decoded answer."""


class WeightPush(Protocol):
    """Transfers buckets of weights to SGLang. One object serves all updates of one server."""

    needs_session: bool
    """Whether SGLang (since 0.5.23) requires a session around an update with this push:
    /begin_weight_update before it, /end_weight_update after it."""

    def push(self, bucket: WeightBucket) -> None:
        """Send a bucket. Return when the memory of all buckets before this one may be reused."""
        ...

    def finish(self) -> None:
        """Return when the memory of every bucket may be reused."""
        ...

    def settle(self) -> None:
        """Release memory or files of the update, after every rank of the engine has loaded the
        weights."""
        ...

    def close(self) -> None:
        """Release memory and files that are held between updates or left over from a failed update. A
        second call does nothing."""
        ...


MakePush = Callable[[Post, int, Path | None], WeightPush]
"""Makes the `WeightPush` of a server. The arguments are the server's `Post`, the number of its
tensor-parallel ranks, and a folder that the server can read (None for the system's folder for temporary
files)."""


def version_fields(bucket: WeightBucket) -> dict[str, Any]:
    """Return the fields that requests with weights have in common, whatever class of push sends them.
    Only the last bucket names the version. `flush_cache` is False, because SGLang dies if an update
    drops the prefix cache while requests are in flight; the endpoint drops the cache instead."""
    version = {"weight_version": str(bucket.version)} if bucket.is_last else {}
    return {"flush_cache": False, **version}

"""Records the prefixes that requests under each weight version have computed, to detect a stale prefix
cache.

SGLang reports how many tokens of a request it read from its prefix cache. Requests carry cache keys
that name their weight version (body.py), so these tokens must have been computed by another request
under the same version. That request begins with the same tokens, and read fewer of them from the cache.
If there is no such request, the cache returned keys and values that other weights computed.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor

from mrl.errors import WrongWeights


class KnownPrefixes:
    """The tokens of all requests of each weight version, sorted so that requests with the same prefix
    are neighbours. A token takes 4 bytes until its version is forgotten. The methods are
    safe to call from any thread."""

    def __init__(self) -> None:
        self._versions: dict[int, _Sequences] = {}
        self._lock = threading.Lock()

    def add(self, version: int, rid: str, token_ids: Tensor) -> None:
        """Record that request `rid`, with the tokens i64[P], may run under the weights `version`."""
        with self._lock:
            self._versions.setdefault(version, _Sequences()).add(rid, _as_bytes(token_ids))

    def finish(self, version: int, rid: str, token_ids: Tensor, num_cached: int | None) -> None:
        """Record all tokens i64[T] of a request, prompt and completion. `num_cached` is how many of
        these tokens came from the cache; None if unknown, as after a retraction."""
        with self._lock:
            sequences = self._versions.setdefault(version, _Sequences())
            sequences.remove(rid)
            sequences.add(rid, _as_bytes(token_ids), num_cached or 0)

    def check(self, version: int, rid: str, token_ids: Tensor, num_cached: int) -> None:
        """Raise WrongWeights if no request under `version` other than `rid` can have computed the first
        `num_cached` of the tokens, which `rid` read from the cache."""
        prefix = _as_bytes(token_ids[:num_cached])
        with self._lock:
            sequences = self._versions.setdefault(version, _Sequences())
            if num_cached and not sequences.has_author(rid, prefix, num_cached):
                raise WrongWeights(
                    f"{num_cached} tokens came from the prefix cache, and no request has computed them "
                    f"under weight version {version}: the engine used keys and values of older weights"
                )

    def discard(self, version: int, rid: str) -> None:
        """Forget a request that did not run under `version` after all."""
        with self._lock:
            if version in self._versions:
                self._versions[version].remove(rid)

    def keep(self, versions: Iterable[int]) -> None:
        """Forget all versions but these."""
        with self._lock:
            self._versions = {v: self._versions[v] for v in versions if v in self._versions}


class _Sequences:
    """The token sequences of the requests under one weight version."""

    def __init__(self) -> None:
        self._sorted: list[tuple[bytes, str]] = []
        self._tokens: dict[str, bytes] = {}
        self._num_cached: dict[str, int | None] = {}
        """For each request id, how many of the request's tokens came from the cache. None until the
        request is answered, because until then it may have computed all of its tokens."""

    def add(self, rid: str, tokens: bytes, num_cached: int | None = None) -> None:
        if rid not in self._tokens:
            self._tokens[rid] = tokens
            bisect.insort(self._sorted, (tokens, rid))
            self._num_cached[rid] = num_cached

    def remove(self, rid: str) -> None:
        tokens = self._tokens.pop(rid, None)
        if tokens is not None:
            del self._sorted[bisect.bisect_left(self._sorted, (tokens, rid))]
            del self._num_cached[rid]

    def has_author(self, rid: str, prefix: bytes, num_cached: int) -> bool:
        """Return whether a request other than `rid` has or may have computed `prefix`: its tokens
        start with `prefix`, and it did not read all of `prefix` from the cache. `num_cached` is the
        number of tokens of `prefix`."""
        for other in self._starting_with(prefix):
            known = self._num_cached[other]
            if other != rid and (known is None or known < num_cached):
                return True
        return False

    def _starting_with(self, prefix: bytes) -> Iterator[str]:
        start = bisect.bisect_left(self._sorted, (prefix, ""))
        for index in range(start, len(self._sorted)):
            tokens, rid = self._sorted[index]
            if not tokens.startswith(prefix):
                return
            yield rid


def _as_bytes(token_ids: Tensor) -> bytes:
    """Return the tokens as big-endian integers of 4 bytes, so that the byte strings of two sequences
    sort as the sequences do."""
    return token_ids.numpy().astype(np.dtype(">i4")).tobytes()

"""Records the prefixes that requests under each weight version have computed, to detect a stale prefix
cache.

SGLang reports how many tokens of a request it read from its prefix cache. Requests carry cache keys
that name their weight version (body.py), so these tokens must have been computed by another request
under the same version. That request begins with the same tokens, and read fewer of them from the cache.
If there is no such request, the cache returned keys and values that other weights computed.

An unanswered request may have computed any tokens that begin with its own, because its completion is
in SGLang's cache before the answer is here. If only unanswered requests can have computed a prefix, it
is looked up again when they are answered.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor

from mrl.errors import WrongWeights

_BYTES = 4
"""Bytes of a token."""


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
            self._of(version).add(rid, _as_bytes(token_ids))

    def finish(
        self, version: int, rid: str, token_ids: Tensor, num_cached: int | None, name: str = ""
    ) -> None:
        """Record all tokens i64[T] of a request that is answered, prompt and completion. `num_cached`
        is how many of these tokens came from the cache; None if unknown, as after a retraction.
        `name` is what error messages call the request.

        Raises WrongWeights if no request under `version` can have computed the first `num_cached`
        tokens, or the tokens that an earlier request read from the cache.
        """
        num_read = num_cached or 0
        with self._lock:
            sequences = self._of(version)
            before = sequences.remove(rid)
            sequences.add(rid, _as_bytes(token_ids), num_read)
            if num_read:
                sequences.unproved.setdefault(_as_bytes(token_ids[:num_read]), name)
            sequences.prove(before, version)

    def discard(self, version: int, rid: str) -> None:
        """Forget a request that did not run under `version` after all. Raises WrongWeights if no other
        request can have computed the tokens that an earlier request read from the cache."""
        with self._lock:
            if version in self._versions:
                sequences = self._versions[version]
                sequences.prove(sequences.remove(rid), version)

    def keep(self, versions: Iterable[int]) -> None:
        """Forget all versions but these."""
        with self._lock:
            self._versions = {v: self._versions[v] for v in versions if v in self._versions}

    def _of(self, version: int) -> _Sequences:
        return self._versions.setdefault(version, _Sequences())


class _Sequences:
    """The token sequences of the requests under one weight version."""

    def __init__(self) -> None:
        self._sorted: list[tuple[bytes, str]] = []
        self._tokens: dict[str, bytes] = {}
        self._unanswered: dict[str, bytes] = {}
        """The entries of `_tokens` whose completions are not known yet."""
        self._num_cached: dict[str, int] = {}
        """For each answered request, how many of its tokens came from the cache."""
        self._authors: dict[int, str] = {}
        """By the hash of a prefix, the answered request that was last found to have computed it. Many
        requests read the same prefix. An entry may be outdated, so it is checked before it is used."""
        self.unproved: dict[bytes, str] = {}
        """Prefixes that were read from the cache, and that so far only unanswered requests can have
        computed. The value is the name of the first request that has read the prefix."""

    def add(self, rid: str, tokens: bytes, num_cached: int | None = None) -> None:
        """Add a request. `num_cached` is None if it is not answered yet."""
        if rid in self._tokens:
            return
        self._tokens[rid] = tokens
        bisect.insort(self._sorted, (tokens, rid))
        if num_cached is None:
            self._unanswered[rid] = tokens
        else:
            self._num_cached[rid] = num_cached

    def remove(self, rid: str) -> bytes:
        """Forget a request, and return its tokens; empty if it is unknown."""
        tokens = self._tokens.pop(rid, None)
        if tokens is None:
            return b""
        del self._sorted[bisect.bisect_left(self._sorted, (tokens, rid))]
        self._unanswered.pop(rid, None)
        self._num_cached.pop(rid, None)
        return tokens

    def prove(self, tokens: bytes, version: int) -> None:
        """Look up who computed the unproved prefixes that a request with `tokens` may have computed
        while it was unanswered. Raises WrongWeights if nobody can have computed one of them."""
        related = [p for p in self.unproved if tokens.startswith(p) or p.startswith(tokens)]
        for prefix in related:
            num_tokens = len(prefix) // _BYTES
            if self._has_author(prefix):
                del self.unproved[prefix]
            elif not self._may_be_unanswered(prefix):
                name = self.unproved.pop(prefix)
                raise WrongWeights(
                    f"{name}: {num_tokens} tokens came from the prefix cache, and "
                    f"no request has computed them under weight version {version}: the engine used "
                    "keys and values of older weights"
                )

    def _may_be_unanswered(self, prefix: bytes) -> bool:
        """Return whether an unanswered request can have computed `prefix`."""
        return any(
            tokens.startswith(prefix) or prefix.startswith(tokens)
            for tokens in self._unanswered.values()
        )

    def _has_author(self, prefix: bytes) -> bool:
        """Return whether an answered request has computed `prefix`: its tokens start with `prefix`,
        and it did not read all of `prefix` from the cache."""
        key, num_tokens = hash(prefix), len(prefix) // _BYTES

        def has_computed(rid: str) -> bool:
            return self._num_cached.get(rid, num_tokens) < num_tokens

        last = self._authors.get(key)
        if last is not None and has_computed(last) and self._tokens[last].startswith(prefix):
            return True
        author = next(filter(has_computed, self._starting_with(prefix)), None)
        if author is None:
            return False
        self._authors[key] = author
        return True

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
    return token_ids.numpy().astype(np.dtype(f">i{_BYTES}")).tobytes()

"""The routes of a session's newest samples: the experts that the engine's router chose for each of
their tokens."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import torch
from torch import Tensor

from mrl.errors import InputError
from mrl.types import RoutingTrace, Sample

MAX_ROUTE_BYTES = 256 << 20
"""Maximum number of bytes of routes that each rank keeps for a session; the oldest routes are
dropped first."""


class Samples:
    """Keeps the routes of the newest samples, by sample id, so that training can replay them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Tensor, RoutingTrace]] = OrderedDict()
        self._newest: dict[bytes, str] = {}
        """The name of the newest kept sample with these tokens, by their digest."""
        self._num_bytes = 0

    def keep(self, name: str, sample: Sample) -> None:
        """Keep the routes of a sample, if it has any, and drop the oldest routes beyond the
        limit."""
        if sample.routing is None:
            return
        self._kept[name] = sample.token_ids, sample.routing
        self._newest[_digest(sample.token_ids)] = name
        self._num_bytes += sample.routing.num_bytes
        while self._num_bytes > MAX_ROUTE_BYTES and len(self._kept) > 1:
            dropped, (tokens, oldest) = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
            if self._newest.get(key := _digest(tokens)) == dropped:
                del self._newest[key]

    def find(self, name: str | None, tokens: Tensor) -> RoutingTrace | None:
        """Return the routes of the sample `name` if it is kept and has the tokens `tokens` i64[T], else
        those of the newest kept sample with these tokens; None if there is none."""
        if name in self._kept and torch.equal(self._kept[name][0], tokens):
            return self._kept[name][1]
        newest = self._newest.get(_digest(tokens))
        return None if newest is None else self._kept[newest][1]

    def routes_of(self, name: str, tokens: Tensor) -> RoutingTrace:
        """Return the routes of the sample with the id `name`. Raises InputError if the routes are
        not kept, or if `tokens` i64[T] differ from the tokens of the sample."""
        if (kept := self._kept.get(name)) is None:
            raise InputError(
                f"the routes of sample {name[:80]!r} are not kept: it is none of the newest samples "
                "since the session was opened; sample again, or leave `sample` out"
            )
        token_ids, routing = kept
        if not torch.equal(token_ids, tokens):
            raise InputError(
                f"the tokens are not those of sample {name}, its prompt and its answer; give the same "
                "ones, or leave `sample` out"
            )
        return routing


def _digest(tokens: Tensor) -> bytes:
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=16).digest()

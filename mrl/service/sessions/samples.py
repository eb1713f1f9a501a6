"""The routes of a session's newest samples: the experts that the engine's router chose for each of
their tokens."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from mrl.errors import InputError
from mrl.types import RoutingTrace, Sample

MAX_ROUTE_BYTES = 256 << 20
"""Maximum number of bytes of routes that each rank keeps for a session; the oldest routes are
dropped first."""


class _Kept(NamedTuple):
    """A sample that is kept."""

    tokens: Tensor
    logprobs: Tensor
    """f32[T]: the engine's; 0 for tokens that the policy did not sample."""
    routing: RoutingTrace

    def was_drawn_with(self, logprobs: Tensor) -> bool:
        """Return whether these are the log-probs of the tokens that the policy sampled."""
        return torch.equal(torch.where(self.logprobs == 0, 0.0, logprobs), self.logprobs)


class Match(NamedTuple):
    """The routes that a sequence replays."""

    routing: RoutingTrace | None = None
    """None if the trainer's routers choose."""
    is_ambiguous: bool = False
    """Whether other samples, with other routes, have the sequence's tokens, and nothing tells which of
    them it is."""


class Samples:
    """Keeps the routes of the newest samples, by sample id, so that training can replay them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._alike: dict[bytes, list[str]] = {}
        """The names of the kept samples with the same tokens, newest last, by the tokens' digest."""
        self._num_bytes = 0

    def keep(self, name: str, sample: Sample) -> None:
        """Keep the routes of a sample, if it has any, and drop the oldest routes beyond the
        limit."""
        if sample.routing is None:
            return
        self._kept[name] = _Kept(sample.token_ids, sample.rollout_logprobs, sample.routing)
        self._alike.setdefault(_digest(sample.token_ids), []).append(name)
        self._num_bytes += sample.routing.num_bytes
        while self._num_bytes > MAX_ROUTE_BYTES and len(self._kept) > 1:
            dropped, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.routing.num_bytes
            alike = self._alike[key := _digest(oldest.tokens)]
            alike.remove(dropped)
            if not alike:
                del self._alike[key]

    def find(self, name: str | None, tokens: Tensor, logprobs: Tensor | None) -> Match:
        """Return the routes of the sample `name` if it is kept and has the tokens `tokens` i64[T]. Else
        return those of the newest kept sample with these tokens, preferably of one with these
        `logprobs` f32[T] where the policy sampled; none if there is none."""
        if name in self._kept and torch.equal(self._kept[name].tokens, tokens):
            return Match(self._kept[name].routing)
        alike = [self._kept[each] for each in self._alike.get(_digest(tokens), ())]
        same = [each for each in alike if logprobs is not None and each.was_drawn_with(logprobs)]
        found = [each.routing for each in same or alike]
        if not found:
            return Match()
        *others, newest = found
        return Match(newest, any(not _same_routes(other, newest) for other in others))

    def routes_of(self, name: str, tokens: Tensor) -> RoutingTrace:
        """Return the routes of the sample with the id `name`. Raises InputError if the routes are
        not kept, or if `tokens` i64[T] differ from the tokens of the sample."""
        if (kept := self._kept.get(name)) is None:
            raise InputError(
                f"the routes of sample {name[:80]!r} are not kept: it is none of the newest samples "
                "since the session was opened; sample again, or leave `sample` out"
            )
        if not torch.equal(kept.tokens, tokens):
            raise InputError(
                f"the tokens are not those of sample {name}, its prompt and its answer; give the same "
                "ones, or leave `sample` out"
            )
        return kept.routing


def _same_routes(one: RoutingTrace, other: RoutingTrace) -> bool:
    return torch.equal(one.expert_ids, other.expert_ids)


def _digest(tokens: Tensor) -> bytes:
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=16).digest()

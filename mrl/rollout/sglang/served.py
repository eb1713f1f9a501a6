"""One policy on a server: its weights or the versions of its adapter, and the calls that use them.

An engine has one such policy, and an engine of tenants one for each of them. What they have in common
is in host.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from mrl.rollout.base import WEIGHTS, Completion, EngineLost, Request, SyncReport
from mrl.rollout.sglang.adapter.manifest import AdapterManifest
from mrl.rollout.sglang.adapter.sync import AdapterSync
from mrl.rollout.sglang.flight import LineUp
from mrl.rollout.sglang.flights import Flights
from mrl.rollout.sglang.host import Host
from mrl.rollout.sglang.requests import check_requests, check_sequences, sequence_logprobs
from mrl.rollout.sglang.weight_sync import WeightSync
from mrl.types import WeightBucket


class Served:
    """This is what `mrl.rollout.base.RolloutEngine` says of weights and requests."""

    def __init__(
        self,
        host: Host,
        *,
        name: str = "mrl",
        adapter: AdapterManifest | None = None,
        first_version: int | None = None,
        shares: bool = False,
        line_up: LineUp | None = None,
    ) -> None:
        """`adapter`: updates bring its matrices; `name` is what the engine calls it.

        `first_version` is that of the checkpoint's weights; with None requests need an update first.
        `shares`: requests of other policies run beside those of this one, so it never asks for the
        engine as a whole: it takes a new key where it would drop the prefix cache. `line_up`: requests
        wait at a gate.
        """
        self._host = host
        self._name = name
        self._adapter = adapter
        self._first_version = first_version
        self._shares = shares
        self._version: int | None = None
        self._is_lost = False
        """Whether the server was lost since the newest update."""
        self._num_caches = 0
        self.sync: WeightSync | AdapterSync | None = None
        """None until the server has started."""
        self.flights = Flights(
            host.server,
            host.routes,
            host.shape,
            host.config,
            None if adapter is None else self._adapter_name,
            shares_server=shares,
            line_up=line_up,
        )

    @property
    def weight_version(self) -> int | None:
        return None if self._host.server.client is None else self._version

    @property
    def state(self) -> str:
        """The state in words, for error messages."""
        if self._host.server.client is None:
            return "stopped"
        version = "no weights" if self._version is None else f"weight version {self._version}"
        state = ", paused" * self.flights.is_paused + ", generating" * self.flights.any_open
        return f"{self._host.memory_state}{state}, {version}"

    def begin(self) -> None:
        """Note that a server has started, with the checkpoint's weights and an empty prefix cache."""
        self._version = self._first_version
        num_ranks = self._host.config.tensor_parallel_size
        if self._adapter is None:
            self.sync = WeightSync(
                self._host.server,
                self._host.manifest,
                num_ranks=num_ranks,
                method=self._host.config.weight_sync,
                folder=self._host.weights_folder,
            )
            return
        self.sync = AdapterSync(
            self._host.server,
            self._adapter,
            num_ranks=num_ranks,
            name=self._name,
            stacks=self._host.stacks_experts and self._adapter.adapter.experts == "shared_outer",
        )

    def lose(self, error: EngineLost) -> None:
        """Note that the server is no more: open calls raise `error`."""
        self._is_lost |= self._version is not None
        self._version = None
        self.flights.lose_all(error)

    def end(self) -> None:
        """Give back what is held for updates, after the server has ended."""
        if self.sync is not None:
            self.sync.close()

    def drop_weights(self) -> None:
        """Note that the engine has dropped its weights."""
        self._version = None

    def _adapter_name(self, version: int) -> str | None:
        """Return the name by which requests of a version ask for it; None of the base alone."""
        return self.sync.name_of(version) if isinstance(self.sync, AdapterSync) else None

    def drop_unused(self) -> None:
        """Unload the versions of the adapter that no request uses, but while paused: a request that was
        told to end then holds its own until the scheduler turns."""
        if isinstance(self.sync, AdapterSync) and not self.flights.is_paused:
            self.sync.drop_unused(self.flights.versions_in_use())

    def _drop_cache(self) -> None:
        """Let the requests of the next call read nothing that was cached before it."""
        if self._shares:
            self._num_caches += 1
        elif not self.flights.is_cache_empty:
            self._host.flush()

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        is_idle = self.flights.begin_update(self._require_updatable, version)
        in_force = None
        try:
            self._version = None  # Until the last bucket is in, the weights are a mixture.
            assert self.sync is not None
            report = self.sync.update(buckets, version)
            if is_idle:  # SGLang cannot drop the cache of requests in flight
                self._drop_cache()
                self.flights.forget_cache()
            self._version = in_force = version
            self._is_lost = False
        finally:
            self.flights.end_update(in_force)
        self.drop_unused()
        return report

    def _require_updatable(self) -> None:
        self._host.require_running("update_weights")
        # An adapter comes beside the one that is in use, and touches nothing of it.
        if self._adapter is None and self.flights.any_open and not self.flights.is_paused:
            raise RuntimeError(f"update_weights: the engine is {self.state}; pause() it first")
        if WEIGHTS in self._host.memory.asleep:
            raise RuntimeError(
                f"update_weights: the engine is {self.state}; wake(['{WEIGHTS}']) first"
            )

    def generate(
        self,
        requests: Sequence[Request],
        *,
        reuse_cache: bool = False,
        beside_others: bool = False,
        stale_prefixes: bool = False,
    ) -> Iterator[Completion]:
        self._host.require_running("generate")
        if not beside_others:  # one beside others may wait for the weights
            self.require_ready("generate")
        check_requests(
            requests,
            self._host.context_len,
            cache_len=self._host.cache_len,
            vocab_size=self._host.vocab_size,
        )
        # Cached prefixes change the last bits of log-probs, and their routes are another request's.
        # The wait is for requests that an abort has ended and the scheduler has yet to drop.
        if not (reuse_cache or beside_others):
            self._drop_cache()
        is_keyed = self._shares or (beside_others and not stale_prefixes)
        cache = f"/{self._num_caches}" if self._shares and not beside_others else ""
        return self._completions(
            list(requests), is_alone=not beside_others, is_keyed=is_keyed, cache=cache
        )

    def _completions(
        self, requests: Sequence[Request], *, is_alone: bool, is_keyed: bool, cache: str
    ) -> Iterator[Completion]:
        # This runs when the first completion is asked for.
        opened = self.flights.begin(
            requests,
            lambda: self.ready_version(may_be_busy=not is_alone),
            is_alone=is_alone,
            is_keyed=is_keyed,
            cache=cache,
        )
        try:
            yield from self.flights.completions(opened)
        finally:
            # An abort reaches only a scheduler that turns.
            if is_alone and self.flights.is_paused and self.flights.any_open:
                with contextlib.suppress(RuntimeError):  # EngineLost among them
                    self.post_in_flight("/continue_generation", {})
                self.flights.resume()
            self.flights.end(opened)
            with contextlib.suppress(RuntimeError):  # the next update says what is wrong
                self.drop_unused()

    def sequence_logprobs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        server, config, vocab_size = self._host.server, self._host.config, self._host.vocab_size
        check_sequences(sequences, self._host.longest)
        if self._shares:  # requests of others may be in the queue before these
            version = self.ready_version("sequence_logprobs", may_be_busy=True)
            name, limit_s = self._adapter_name(version), config.request_timeout_s
            return sequence_logprobs(server, sequences, vocab_size, name, timeout_s=limit_s)
        with self.flights.quiet(lambda: self.require_ready("sequence_logprobs")):
            self._drop_cache()
            assert self._version is not None
            self.flights.fill_cache(self._version)
            name = self._adapter_name(self._version)
            return sequence_logprobs(server, sequences, vocab_size, name)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        for flight in self.flights.flights():
            flight.abort(request_ids)

    def post_in_flight(self, path: str, body: dict[str, Any]) -> None:
        """Post what a server with requests in flight must answer soon."""
        self._host.server.post(path, body, timeout_s=self._host.config.stall_timeout_s)

    def require_idle(self, action: str) -> None:
        """Raise RuntimeError where a call is open, or the engine is paused."""
        if self.flights.any_open:
            raise RuntimeError(
                f"{action}: the engine is {self.state}; finish or leave generate() first"
            )
        if self.flights.is_paused:
            raise RuntimeError(f"{action}: the engine is {self.state}; resume() it first")

    def require_ready(self, action: str) -> None:
        """Raise RuntimeError where the engine cannot generate for a call alone now."""
        self.ready_version(action)

    def ready_version(self, action: str = "generate", *, may_be_busy: bool = False) -> int:
        """Return the weight version. Raises RuntimeError where the engine cannot generate now."""
        self._host.require_running(action)
        if not may_be_busy:
            self.require_idle(action)
        if self._host.memory.asleep or self._version is None:
            kind = EngineLost if self._shares and self._is_lost else RuntimeError
            raise kind(
                f"{action}: the engine is {self.state}; wake() it and update_weights() first"
            )
        return self._version

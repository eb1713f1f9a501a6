"""One policy on an SGLang server: its weights or its adapter, and the calls that use them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from torch import Tensor

from mrl.engines.base import WEIGHTS, Completion, EngineLost, Request, SyncReport
from mrl.engines.gate import Gate
from mrl.engines.sglang.adapter.manifest import AdapterManifest
from mrl.engines.sglang.adapter.update import AdapterUpdater
from mrl.engines.sglang.core import ServerCore
from mrl.engines.sglang.in_flight import InFlightRequests
from mrl.engines.sglang.requests import check_requests, check_sequences, top_logprobs
from mrl.engines.sglang.weights.tensor import TensorPush
from mrl.engines.sglang.weights.update import WeightUpdater
from mrl.engines.top_logprobs import TopLogprobs
from mrl.types import WeightBucket


class SGLangEndpoint:
    """`mrl.engines.base.PolicyEndpoint` for SGLang.

    An endpoint behind a gate shares its server with other endpoints. All of its methods may be called
    while the other endpoints generate or update. If a call of generate() is not `concurrent`, this
    endpoint has no other open call, but the other endpoints may. Instead of flushing the prefix cache,
    such a call uses a new cache key, so it reads nothing that an earlier call has cached.
    """

    def __init__(
        self,
        core: ServerCore,
        *,
        name: str = "mrl",
        adapter: AdapterManifest | None = None,
        gate: Gate | None = None,
    ) -> None:
        """With an `adapter`, updates load its matrices, and SGLang's names of its versions begin with
        `name`. Without a gate, the endpoint starts with the checkpoint's weights as version 0. With a
        gate, it needs an update before its first request."""
        self.name = name
        self._core = core
        self._adapter = adapter
        self._shares_server = gate is not None
        self._version: int | None = None
        self._is_lost = False
        """Whether the server was lost after the newest update."""
        self._is_removed = False
        self._num_caches = 0
        self.updater: WeightUpdater | AdapterUpdater | None = None
        """The object that loads updates; None until the server has started."""
        self.in_flight = InFlightRequests(
            core.connection,
            core.routes,
            core.launch.shape,
            core.config,
            None if adapter is None else self._adapter_name,
            shares_server=self._shares_server,
            enqueue=None if gate is None else partial(gate.enqueue, name),
        )

    @property
    def weight_version(self) -> int | None:
        return self._version if self._core.has_server else None

    @property
    def state(self) -> str:
        """The state of the engine and this endpoint in words, for error messages."""
        if not self._core.has_server:
            return "stopped"
        version = "no weights" if self._version is None else f"weight version {self._version}"
        state = ", paused" * self.in_flight.is_paused + ", generating" * self.in_flight.any_open
        return f"{self._core.memory_state}{state}, {version}"

    def begin(self) -> None:
        """Record that a server has started, with the checkpoint's weights and an empty prefix cache."""
        core = self._core
        self._version = None if self._shares_server else 0
        if self._adapter is None:
            self.updater = WeightUpdater(
                core.connection,
                core.manifest,
                num_ranks=core.config.tensor_parallel_size,
                push=core.launch.config.weight_push or TensorPush,
                folder=core.weights_folder,
            )
            return
        assert core.launch.adapters is not None
        self.updater = AdapterUpdater(
            core.connection,
            self._adapter,
            num_ranks=core.config.tensor_parallel_size,
            name=self.name,
            stacks=core.launch.adapters.experts == self._adapter.adapter.experts == "shared_outer",
        )

    def lose(self, error: EngineLost) -> None:
        """Record that the server has ended, and make open calls raise `error`."""
        self._is_lost |= self._version is not None
        self._version = None
        self.in_flight.lose_all(error)

    def close(self) -> None:
        """Release the memory and files that updates have used. Called after the server has ended."""
        if self.updater is not None:
            self.updater.close()

    def remove(self) -> None:
        """Make all calls end with RuntimeError, and unload the versions of the adapter."""
        self._is_removed = True
        if not self._core.has_server:
            return
        self.in_flight.end_all(RuntimeError(f"endpoint {self.name!r} was removed from the engine"))
        if isinstance(self.updater, AdapterUpdater):
            self.updater.drop_all()

    def drop_weights(self) -> None:
        """Record that the engine has dropped its weights."""
        self._version = None

    def _adapter_name(self, version: int) -> str | None:
        """Return SGLang's name of a version of the adapter; None if requests use the base model without
        an adapter."""
        updater = self.updater
        return updater.name_of(version) if isinstance(updater, AdapterUpdater) else None

    def drop_unused(self) -> None:
        """Unload the versions of the adapter that no request uses. Do nothing while paused, because an
        aborted request keeps its version until the scheduler runs again."""
        if isinstance(self.updater, AdapterUpdater) and not self.in_flight.is_paused:
            self.updater.drop_unused(self.in_flight.versions_in_use())

    def _drop_cache(self) -> None:
        """Ensure that the next call reads nothing that earlier calls have cached."""
        if self._shares_server:
            self._num_caches += 1
        elif not self.in_flight.is_cache_empty:
            self._core.flush()
            self.in_flight.forget_cache()

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        is_idle = self.in_flight.begin_update(self._require_updatable, version)
        in_force = None
        try:
            self._version = None  # Until the last bucket is loaded, the weights are a mixture.
            assert self.updater is not None
            report = self.updater.update(buckets, version)
            if is_idle:  # SGLang cannot drop the cache of requests in flight
                self._drop_cache()
                self.in_flight.forget_cache()
            self._version = in_force = version
            self._is_lost = False
        finally:
            self.in_flight.end_update(in_force)
        self.drop_unused()
        return report

    def _require_updatable(self) -> None:
        self._require_present("update_weights")
        # An adapter is loaded next to the version in use, and leaves that one as it is.
        if self._adapter is None and self.in_flight.any_open and not self.in_flight.is_paused:
            raise RuntimeError(f"update_weights: the engine is {self.state}; pause() it first")
        if WEIGHTS in self._core.memory.asleep:
            raise RuntimeError(
                f"update_weights: the engine is {self.state}; wake(['{WEIGHTS}']) first"
            )

    def generate(
        self,
        requests: Sequence[Request],
        *,
        reuse_cache: bool = False,
        concurrent: bool = False,
        stale_prefixes: bool = False,
    ) -> Iterator[Completion]:
        self._core.require_running("generate")
        if not concurrent:  # a concurrent call may wait for the weights
            self.ready_version("generate")
        launch = self._core.launch
        check_requests(
            requests,
            context_len=launch.context_len,
            cache_len=self._core.cache_len,
            vocab_size=launch.vocab_size,
        )
        # Cached prefixes change the last bits of log-probs, and their routes are another request's.
        # The flush waits for requests that an abort has ended and the scheduler has yet to drop.
        if not (reuse_cache or concurrent):
            self._drop_cache()
        shares = self._shares_server
        return self._completions(
            list(requests),
            is_alone=not concurrent,
            is_keyed=shares or (concurrent and not stale_prefixes),
            cache=f"/{self._num_caches}" if shares and not concurrent else "",
        )

    def _completions(
        self, requests: Sequence[Request], *, is_alone: bool, is_keyed: bool, cache: str
    ) -> Iterator[Completion]:
        # This runs when the first completion is asked for.
        opened = self.in_flight.begin(
            requests,
            lambda: self.ready_version(may_be_busy=not is_alone),
            is_alone=is_alone,
            is_keyed=is_keyed,
            cache=cache,
        )
        try:
            yield from self.in_flight.completions(opened)
        finally:
            # An abort reaches a scheduler only while that is not paused.
            is_whole_server = is_alone and not self._shares_server
            if is_whole_server and self.in_flight.is_paused and self.in_flight.any_open:
                with contextlib.suppress(RuntimeError):  # EngineLost among them
                    self._core.post_in_flight("/continue_generation", {})
                self.in_flight.resume()
            self.in_flight.end(opened)
            with contextlib.suppress(RuntimeError):  # the next update says what is wrong
                self.drop_unused()

    def sequence_logprobs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        return [logprobs for logprobs, _ in self.top_logprobs(sequences, 0)]

    def top_logprobs(self, sequences: Sequence[Tensor], num_top: int) -> list[TopLogprobs]:
        core, vocab_size = self._core, self._core.launch.vocab_size
        check_sequences(sequences, core.longest)
        if self._shares_server:  # requests of others may be in the queue before these
            version = self.ready_version("sequence_logprobs", may_be_busy=True)
            name, limit_s = self._adapter_name(version), core.config.request_timeout_s
            return top_logprobs(
                core.connection, sequences, vocab_size, num_top, name, timeout_s=limit_s
            )
        with self.in_flight.quiet(lambda: self.ready_version("sequence_logprobs")):
            self._drop_cache()
            assert self._version is not None
            self.in_flight.fill_cache(self._version)
            name = self._adapter_name(self._version)
            return top_logprobs(core.connection, sequences, vocab_size, num_top, name)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.in_flight.abort(request_ids)

    def _require_present(self, action: str) -> None:
        if self._is_removed:
            raise RuntimeError(f"{action}: endpoint {self.name!r} was removed from the engine")
        self._core.require_running(action)

    def require_idle(self, action: str) -> None:
        """Raise RuntimeError if a call of generate() is open or the engine is paused. `action` begins
        the message."""
        if self.in_flight.any_open:
            raise RuntimeError(
                f"{action}: the engine is {self.state}; finish or leave generate() first"
            )
        if self.in_flight.is_paused:
            raise RuntimeError(f"{action}: the engine is {self.state}; resume() it first")

    def ready_version(self, action: str = "generate", *, may_be_busy: bool = False) -> int:
        """Return the weight version. Raises RuntimeError or EngineLost if the engine cannot generate
        now. Without `may_be_busy`, also raises RuntimeError while a call of generate() is open or the
        engine is paused."""
        self._require_present(action)
        if not may_be_busy:
            self.require_idle(action)
        if self._core.memory.asleep or self._version is None:
            kind = EngineLost if self._shares_server and self._is_lost else RuntimeError
            raise kind(
                f"{action}: the engine is {self.state}; wake() it and update_weights() first"
            )
        return self._version

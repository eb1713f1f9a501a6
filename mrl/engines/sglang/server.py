"""One SGLang server with its endpoints: a child process on loopback to which mrl speaks over HTTP.

A call of generate() flushes the prefix cache, and sends all requests as one streamed batch in a fixed
order, each with its own seed. As each answer finishes, its lengths and weight versions are checked, its
routes are decoded, and the completion is yielded.

A server without a gate has one endpoint. A server with a gate (mrl/engines/gate.py) serves tenants: the
base model is frozen, and every tenant has an endpoint with an adapter of its own. Requests of different
tenants share batches. Three things keep tenants apart:

- SGLang knows version 7 of tenant NAME as `NAME@7`, and its prefix cache keeps adapters apart by an id
  that is new at each load. In addition, each request has a cache key that depends on its weight version
  and, if the call is not concurrent, on the call (in_flight.py). Every answer is checked: WrongWeights
  is raised if a request read more tokens from the cache than earlier requests of its tenant have
  computed.
- Each endpoint has its own versions, calls and request ids. An abort names the requests of one tenant.
- No call of an endpoint stops the server, flushes its cache or waits for the requests of others.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mrl.config.adapter import Adapter, AdapterLimits
from mrl.engines.admission import UNLIMITED
from mrl.engines.base import MEMORY_TAGS, EngineConfig, EngineLost, PauseMode
from mrl.engines.gate import Gate
from mrl.engines.sglang.adapter.manifest import AdapterManifest
from mrl.engines.sglang.body import profile_request
from mrl.engines.sglang.core import ServerCore
from mrl.engines.sglang.endpoint import SGLangEndpoint
from mrl.engines.sglang.node import EngineNode
from mrl.engines.sglang.requests import longest_in_cache

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
PROMPT_LEN = 8
NEW_TOKENS = 3
"""New tokens of the warm-up request. The first token comes from the prefill, the others come from
decode steps, which use the CUDA graphs."""


class SGLangServer:
    """`mrl.engines.base.EngineServer` for SGLang; without a gate also `RolloutEngine`.

    Several servers can run at the same time. On CPUs, SGLang cannot release memory, so sleep and
    wake free nothing there. They still check the same rules as on GPUs, so that a run on a laptop
    finds the same errors.
    """

    Node = EngineNode
    """The class of the engine's process on each node other than the first."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        adapters: AdapterLimits | None = None,
        gate: Gate | None = None,
    ) -> None:
        """Start nothing yet. A server with a `gate` has no endpoint until `add_endpoint`. `adapters`
        are the limits for the adapters of its endpoints.

        Raises InputError for an unreadable model folder, a dense model with `return_routes`, a model
        that SGLang would run wrongly, and an adapter that SGLang does not serve.
        """
        self.core = ServerCore(config, adapters)
        self.connection, self.memory = self.core.connection, self.core.memory
        self.gate = gate
        self._endpoints: dict[str, SGLangEndpoint] = {}
        self._changing = threading.Lock()
        self._num_starts = 0
        if gate is None:
            adapter = config.adapter and AdapterManifest(
                self.core.manifest.required, config.adapter
            )
            self.endpoint = SGLangEndpoint(self.core, adapter=adapter)
            """The only endpoint."""
            self._endpoints[self.endpoint.name] = self.endpoint

    @property
    def endpoints(self) -> list[SGLangEndpoint]:
        """The endpoints, in the order in which they were added."""
        return list(self._endpoints.values())

    @property
    def process_id(self) -> int | None:
        return self.connection.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the server has started and is not lost."""
        return self.core.has_server and not self.core.is_starting

    @property
    def state(self) -> str:
        """The state in words, for error messages."""
        if self.gate is None:
            return self.endpoints[0].state
        num_open = sum(endpoint.in_flight.any_open for endpoint in self.endpoints)
        return self.core.memory_state + f", generating for {num_open}" * bool(num_open)

    def start(self, address: str = "", meanwhile: Callable[[], None] | None = None) -> None:
        if self.core.has_server:
            raise RuntimeError(f"engine: start() while it runs; it is {self.state}")
        self.core.is_starting = True
        try:
            self._start(address, meanwhile)
        finally:
            self.core.is_starting = False
        if self.gate is not None:
            self.gate.resize(*self.connection.room())

    def _start(self, address: str, meanwhile: Callable[[], None] | None) -> None:
        for endpoint in self.endpoints:
            endpoint.close()  # what it still holds of a server that was lost
            endpoint.lose(EngineLost("engine: it was lost or stopped, and is starting again"))
        settings = self.core.launch.start_settings(self._num_starts, address)
        self._num_starts += 1
        self.connection.start(self.core.config.start_timeout_s, settings, meanwhile)
        self.memory.reset(MEMORY_TAGS)
        try:
            self.core.cache_len = longest_in_cache(*self.connection.cache_of_one())
            for endpoint in self.endpoints:
                endpoint.begin()
            self._warm_up()
        except BaseException:
            self.stop()
            raise

    def _warm_up(self) -> None:
        """Run one prefill and a few decode steps on each data-parallel rank, so that SGLang compiles
        what it compiles at first use. Drop the prefix cache afterwards.

        SGLang's own warm-up (http_server.py, _execute_server_warmup) runs in a thread of the server,
        and only GET /health tells when it is done. mrl puts the engine to sleep right after its start,
        and release_memory_occupation asserts that the scheduler is idle (weight_updater.py). During
        SGLang's warm-up, release_memory_occupation would kill the scheduler, or unmap the memory of the
        running batch. This function instead blocks until its own request is answered.
        """
        config = self.core.config
        num_replicas = config.data_parallel_attention_size
        num_tokens = max(1, min(PROMPT_LEN, self.core.longest - NEW_TOKENS))
        body = {
            "input_ids": [list(range(num_tokens))] * num_replicas,
            # Log-probs and routes as in a step, because they run additional code.
            "sampling_params": {
                "max_new_tokens": NEW_TOKENS,
                "temperature": 1.0,
                "ignore_eos": True,
                "sampling_seed": 0,
            },
            "return_logprob": True,
            "return_routed_experts": self.core.launch.shape is not None,
        }
        answers = self.connection.post("/generate", body, timeout_s=config.start_timeout_s)
        lengths = [len(answer["output_ids"]) for answer in answers]
        if lengths != [NEW_TOKENS] * num_replicas:
            raise RuntimeError(
                f"engine: the first request brought {lengths} tokens, expected {NEW_TOKENS} on each of "
                f"{num_replicas} replica(s)"
            )
        self._flush()

    def stop(self) -> None:
        self.memory.reset()
        for endpoint in self.endpoints:
            endpoint.lose(EngineLost("engine: it was stopped"))
        self.connection.stop()
        for endpoint in self.endpoints:
            endpoint.close()  # after the stop, so that no call waits for a server that hangs

    def wake(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        self.core.require_running("wake")
        self.memory.wake(tags)

    def sleep(self, level: int = 2) -> None:
        self.core.require_running("sleep")
        endpoints = self.endpoints
        for endpoint in endpoints:
            endpoint.require_idle("sleep")
        self.memory.check_level(level, self.state)
        with contextlib.ExitStack() as stack:
            for endpoint in endpoints:
                check = partial(endpoint.require_idle, "sleep")
                stack.enter_context(endpoint.in_flight.quiet(check))
            self.memory.release(self._flush)
            if level == 2:
                for endpoint in endpoints:
                    endpoint.drop_weights()

    def _flush(self) -> None:
        self.core.flush()
        for endpoint in self.endpoints:
            endpoint.in_flight.forget_cache()

    def pause(self, mode: PauseMode = "in_place") -> None:
        self.core.require_running("pause")
        endpoints = self.endpoints
        # Those without weights have no requests.
        busy = [e for e in endpoints if e.weight_version is not None or e.in_flight.any_open]
        with contextlib.ExitStack() as undo:
            for endpoint in busy or endpoints:
                check = partial(endpoint.ready_version, "pause")
                endpoint.in_flight.pause(check, retract=mode == "retract")
                undo.callback(endpoint.in_flight.resume)
            self.core.post_in_flight("/pause_generation", {"mode": mode})
            undo.pop_all()

    def resume(self) -> None:
        paused = [endpoint for endpoint in self.endpoints if endpoint.in_flight.is_paused]
        if not paused:
            raise RuntimeError(f"resume: the engine is {self.state}; pause() it first")
        for endpoint in paused:
            if endpoint.weight_version is None:
                raise RuntimeError(
                    f"resume: the engine is {endpoint.state}; update_weights() first"
                )
        self.core.post_in_flight("/continue_generation", {})
        for endpoint in paused:
            endpoint.in_flight.resume()
            endpoint.drop_unused()

    def start_profile(self, folder: Path, name: str, *, with_stack: bool) -> None:
        for endpoint in self.endpoints:
            endpoint.require_idle("start_profile")
        self.connection.post("/start_profile", profile_request(folder, name, with_stack=with_stack))

    def stop_profile(self) -> None:
        # The answer comes when every scheduler has written its trace.
        limit_s = self.core.config.start_timeout_s
        self.connection.post("/stop_profile", {}, timeout_s=limit_s)

    def add_endpoint(
        self,
        name: str,
        adapter: Adapter,
        *,
        weight: float = 1.0,
        max_tokens_in_flight: int = UNLIMITED,
    ) -> SGLangEndpoint:
        """Add an endpoint for a tenant, before or after the start. It can generate after its first
        update.

        The gate's policy decides by `weight` and `max_tokens_in_flight` when to admit requests.
        `weight` is the size of the tenant's share of the engine, relative to the other tenants'
        weights. `max_tokens_in_flight` limits how many tokens, of prompts and answers, the tenant's
        requests in the engine may have together.

        Raises ValueError for a name that is malformed or taken, and InputError for an adapter that
        exceeds the engine's limits or that SGLang does not serve.
        """
        assert self.gate is not None
        assert self.core.launch.adapters is not None
        if not NAME.fullmatch(name):
            raise ValueError(f"endpoint: got the name {name!r}, expected {NAME.pattern}")
        self.core.launch.adapters.check(adapter)
        manifest = AdapterManifest(self.core.manifest.required, adapter)
        endpoint = SGLangEndpoint(self.core, name=name, adapter=manifest, gate=self.gate)
        with self._changing:
            if name in self._endpoints:
                raise ValueError(f"endpoint: {name!r} exists already, expected another name")
            self._endpoints[name] = endpoint
        self.gate.enter(name, weight=weight, max_tokens_in_flight=max_tokens_in_flight)
        if self.core.has_server:
            endpoint.begin()
        return endpoint

    def remove_endpoint(self, name: str) -> None:
        """Remove a tenant's endpoint: its open calls raise RuntimeError, and SGLang unloads its
        adapter.

        Raises ValueError for a name that does not exist, and RuntimeError if SGLang refuses.
        """
        assert self.gate is not None
        with self._changing:
            endpoint = self._endpoints.pop(name, None)
            if endpoint is None:
                raise ValueError(
                    f"endpoint: {name!r} does not exist, expected one of "
                    f"{', '.join(self._endpoints) or 'none'}"
                )
        self.gate.leave(name)
        endpoint.remove()

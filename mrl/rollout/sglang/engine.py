"""The SGLang engine drives a real SGLang server, a child process on loopback, over HTTP.

One rollout in five steps: flush the prefix cache, send all requests as one streamed batch in a fixed
order with a seed each, check every length and weight version of an answer as it finishes, decode its
routes, hand it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mrl.config import ModelConfig, RolloutConfig
from mrl.config.adapter import Adapter
from mrl.rollout.base import (
    MEMORY_TAGS,
    WEIGHTS,
    Completion,
    EngineLost,
    PauseMode,
    Request,
    SyncReport,
)
from mrl.rollout.sglang.adapter.manifest import AdapterManifest
from mrl.rollout.sglang.adapter.sync import AdapterSync
from mrl.rollout.sglang.body import profile_request
from mrl.rollout.sglang.flights import Flights
from mrl.rollout.sglang.launch import read_launch
from mrl.rollout.sglang.manifest import Manifest
from mrl.rollout.sglang.node import EngineNode
from mrl.rollout.sglang.occupation import Occupation
from mrl.rollout.sglang.patience import Patience
from mrl.rollout.sglang.requests import check_requests, sequence_logprobs
from mrl.rollout.sglang.route_memory import RouteReader
from mrl.rollout.sglang.server import Server
from mrl.rollout.sglang.warm_up import warm_up
from mrl.rollout.sglang.weight_sync import WeightSync
from mrl.types import WeightBucket

FLUSH_TIMEOUT_S = 60.0


class Engine:
    """This is `mrl.rollout.base.RolloutEngine` for SGLang. Several can run side by side.

    On CPUs SGLang gives no memory back: sleep and wake keep the state and its rules, so that a run
    on a laptop fails where one on GPUs would, but free nothing.
    """

    Node = EngineNode
    """Its process on each further node that it spans."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        config: RolloutConfig,
        log_path: Path,
        return_routes: bool = True,
        gpu_ids: Sequence[int | str] = (),
        seed: int = 0,
        first_version: int = 0,
        keep_weights_on_host: bool = False,
        num_nodes: int = 1,
        adapter: Adapter | None = None,
    ) -> None:
        """Nothing is started yet.

        `gpu_ids` are what CUDA_VISIBLE_DEVICES of the server will be, one for each of the ranks on
        this node, `config.tensor_parallel_size` over `num_nodes`; empty runs on CPUs. `first_version`
        is the version of the checkpoint's weights. SGLang's own seed follows from `seed`, with another
        one at each start(); it counts where sampling does not follow the seeds of the requests, on
        GPUs without deterministic inference. `keep_weights_on_host` allows sleep(1) on GPUs, for a
        copy of the weights in host memory. With an `adapter` updates bring its matrices, the weights
        stay the checkpoint's, and only sleep(1) is allowed.
        Raises InputError for an unreadable model folder, a dense model with `return_routes`, or one
        that SGLang would run wrongly, and for an adapter that it does not serve.
        """
        self._launch = read_launch(
            model,
            config,
            gpu_ids=gpu_ids,
            return_routes=return_routes,
            seed=seed,
            first_version=first_version,
            keep_weights_on_host=keep_weights_on_host or adapter is not None,
            num_nodes=num_nodes,
            adapter=adapter,
        )
        self._num_starts = 0
        self._manifest = Manifest(Path(model.path), self._launch.hf_config)
        self._config = config
        self._shape = self._launch.shape
        self._context_len = self._launch.context_len
        self._first_version = first_version
        self._adapter = adapter and AdapterManifest(self._manifest.required, adapter)
        self._routes = RouteReader()
        environment = self._launch.environment | self._routes.environment
        patience = Patience(config.start_timeout_s, config.stall_timeout_s)
        self._server = Server(self._launch.settings, environment, Path(log_path), patience)
        self._weights_folder = Path(log_path).with_suffix(".weights")
        """A folder of this engine alone, in the run's folder: /tmp may be small."""
        self._memory = Occupation(
            self._server,
            can_keep=keep_weights_on_host or not gpu_ids or adapter is not None,
            can_drop=adapter is None,
        )
        self._version: int | None = None
        self._flights = Flights(
            self._server, self._routes, self._shape, config, adapter and self._adapter_name
        )
        self._sync: WeightSync | AdapterSync | None = None

    @property
    def weight_version(self) -> int | None:
        return None if self._server.client is None else self._version

    @property
    def process_id(self) -> int | None:
        return self._server.process.pid

    @property
    def state(self) -> str:
        """The state in words, for error messages."""
        if self._server.client is None:
            return "stopped"
        asleep = ", ".join(self._memory.asleep)
        state = f"asleep ({asleep})" if asleep else "awake"
        state += ", paused" * self._flights.is_paused + ", generating" * self._flights.any_open
        version = "no weights" if self._version is None else f"weight version {self._version}"
        return f"{state}, {version}"

    def start(self, address: str = "", meanwhile: Callable[[], None] | None = None) -> None:
        if self._server.client is not None:
            raise RuntimeError(f"engine: start() while it runs; it is {self.state}")
        if self._sync is not None:
            self._sync.close()  # of a server that was lost
        self._flights.lose_all(EngineLost("engine: it was lost or stopped, and starts anew"))
        settings = self._launch.start_settings(self._num_starts, address)
        self._num_starts += 1
        self._server.start(self._config.start_timeout_s, settings, meanwhile)
        self._memory.reset(MEMORY_TAGS)
        self._version = self._first_version
        try:
            self._sync = self._new_sync()
            self._warm_up()
        except BaseException:
            self.stop()
            raise

    def _new_sync(self) -> WeightSync | AdapterSync:
        num_ranks = self._config.tensor_parallel_size
        if self._adapter is not None:
            return AdapterSync(self._server, self._adapter, num_ranks=num_ranks)
        return WeightSync(
            self._server,
            self._manifest,
            num_ranks=num_ranks,
            method=self._config.weight_sync,
            folder=self._weights_folder,
        )

    def _adapter_name(self, version: int) -> str | None:
        """Return the name by which requests of a version ask for it; None of the base alone."""
        return self._sync.name_of(version) if isinstance(self._sync, AdapterSync) else None

    def _drop_unused_adapters(self) -> None:
        """Unload the versions that no request uses, but while paused: a request that was told to end
        then holds its own until the scheduler turns."""
        if isinstance(self._sync, AdapterSync) and not self._flights.is_paused:
            self._sync.drop_unused(self._flights.versions_in_use())

    def _warm_up(self) -> None:
        """One request of ours, and an empty prefix cache after it."""
        self._flights.fill_cache(self._first_version)
        warm_up(
            self._server,
            num_replicas=self._config.data_parallel_attention_size,
            context_len=self._context_len,
            return_routes=self._shape is not None,
            timeout_s=self._config.start_timeout_s,
        )
        self._flush()

    def stop(self) -> None:
        self._memory.reset()
        self._version = None
        self._flights.lose_all(EngineLost("engine: it was stopped"))
        self._server.stop()
        if self._sync is not None:
            self._sync.close()  # after: it has nothing to say to a server that may hang

    def wake(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        self._require_running("wake")
        self._memory.wake(tags)

    def sleep(self, level: int = 2) -> None:
        self._require_running("sleep")
        self._require_idle("sleep")
        self._memory.check_level(level, self.state)
        with self._flights.quiet(lambda: self._require_idle("sleep")):
            self._memory.release(lambda: self._flush(always=True))
            if level == 2:
                self._version = None

    def _flush(self, *, always: bool = False) -> None:
        """Wait for the scheduler, then drop the prefix cache; takes 0.3 s on a CPU."""
        if always or not self._flights.is_cache_empty:
            path = f"/flush_cache?timeout={FLUSH_TIMEOUT_S:g}"
            self._server.post(path, {}, timeout_s=FLUSH_TIMEOUT_S + self._config.stall_timeout_s)
            self._flights.forget_cache()

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        is_idle = self._flights.begin_update(self._require_updatable, version)
        in_force = None
        try:
            self._version = None  # Until the last bucket is in, the weights are a mixture.
            assert self._sync is not None
            report = self._sync.update(buckets, version)
            if is_idle:  # SGLang cannot drop the cache of requests in flight
                self._flush()
            self._version = in_force = version
        finally:
            self._flights.end_update(in_force)
        self._drop_unused_adapters()
        return report

    def _require_updatable(self) -> None:
        self._require_running("update_weights")
        # An adapter comes beside the one that is in use, and touches nothing of it.
        if self._adapter is None and self._flights.any_open and not self._flights.is_paused:
            raise RuntimeError(f"update_weights: the engine is {self.state}; pause() it first")
        if WEIGHTS in self._memory.asleep:
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
        self._require_running("generate")
        if not beside_others:  # one beside others may wait for the weights
            self._require_ready("generate")
        check_requests(requests, self._context_len)
        # Cached prefixes change the last bits of log-probs, and their routes are another request's.
        # The wait is for requests that an abort has ended and the scheduler has yet to drop.
        if not (reuse_cache or beside_others):
            self._flush()
        is_keyed = beside_others and not stale_prefixes
        return self._completions(list(requests), is_alone=not beside_others, is_keyed=is_keyed)

    def _completions(
        self, requests: Sequence[Request], *, is_alone: bool, is_keyed: bool
    ) -> Iterator[Completion]:
        # This runs when the first completion is asked for.
        opened = self._flights.begin(
            requests,
            lambda: self._ready_version(may_be_busy=not is_alone),
            is_alone=is_alone,
            is_keyed=is_keyed,
        )
        try:
            yield from self._flights.completions(opened)
        finally:
            # An abort reaches only a scheduler that turns.
            if is_alone and self._flights.is_paused and self._flights.any_open:
                with contextlib.suppress(RuntimeError):  # EngineLost among them
                    self._post_in_flight("/continue_generation", {})
                self._flights.resume()
            self._flights.end(opened)
            with contextlib.suppress(RuntimeError):  # the next update says what is wrong
                self._drop_unused_adapters()

    def sequence_logprobs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        with self._flights.quiet(lambda: self._require_ready("sequence_logprobs")):
            self._flush()
            assert self._version is not None
            self._flights.fill_cache(self._version)
            return sequence_logprobs(self._server, sequences, self._adapter_name(self._version))

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        for flight in self._flights.flights():
            flight.abort(request_ids)

    def pause(self, mode: PauseMode = "in_place") -> None:
        self._require_running("pause")
        if not self._flights.any_open:
            self._require_ready("pause")
        self._flights.pause(retract=mode == "retract")
        try:
            self._post_in_flight("/pause_generation", {"mode": mode})
        except BaseException:
            self._flights.resume()
            raise

    def resume(self) -> None:
        if not self._flights.is_paused:
            raise RuntimeError(f"resume: the engine is {self.state}; pause() it first")
        if self._version is None:
            raise RuntimeError(f"resume: the engine is {self.state}; update_weights() first")
        self._post_in_flight("/continue_generation", {})
        self._flights.resume()
        self._drop_unused_adapters()

    def start_profile(self, folder: Path, name: str, *, with_stack: bool) -> None:
        self._require_idle("start_profile")
        self._server.post("/start_profile", profile_request(folder, name, with_stack=with_stack))

    def stop_profile(self) -> None:
        # The answer comes when every scheduler has written its trace.
        self._server.post("/stop_profile", {}, timeout_s=self._config.start_timeout_s)

    def _post_in_flight(self, path: str, body: dict[str, Any]) -> None:
        self._server.post(path, body, timeout_s=self._config.stall_timeout_s)

    def _require_running(self, action: str) -> None:
        if self._server.client is None:
            kind = RuntimeError if self._server.loss is None else EngineLost
            raise kind(f"{action}: the engine is {self.state}; start() it first")

    def _require_idle(self, action: str) -> None:
        if self._flights.any_open:
            raise RuntimeError(
                f"{action}: the engine is {self.state}; finish or leave generate() first"
            )
        if self._flights.is_paused:
            raise RuntimeError(f"{action}: the engine is {self.state}; resume() it first")

    def _require_ready(self, action: str) -> None:
        self._ready_version(action)

    def _ready_version(self, action: str = "generate", *, may_be_busy: bool = False) -> int:
        """Return the weight version. Raises RuntimeError where the engine cannot generate now."""
        self._require_running(action)
        if not may_be_busy:
            self._require_idle(action)
        if self._memory.asleep or self._version is None:
            raise RuntimeError(
                f"{action}: the engine is {self.state}; wake() it and update_weights() first"
            )
        return self._version

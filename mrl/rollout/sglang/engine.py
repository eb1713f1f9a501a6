"""The SGLang engine drives a real SGLang server, a child process on loopback, over HTTP.

One rollout in five steps: flush the prefix cache, send all requests as one streamed batch in a fixed
order with a seed each, check every length and weight version of an answer as it finishes, decode its
routes, hand it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from mrl.config import ModelConfig, RolloutConfig
from mrl.config.adapter import Adapter, AdapterLimits
from mrl.rollout.base import Completion, PauseMode, Request, SyncReport
from mrl.rollout.sglang.adapter.manifest import AdapterManifest
from mrl.rollout.sglang.host import Host
from mrl.rollout.sglang.node import EngineNode
from mrl.rollout.sglang.served import Served
from mrl.types import WeightBucket


class Engine(Host):
    """This is `mrl.rollout.base.RolloutEngine` for SGLang: a server with one policy."""

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
        super().__init__(
            model=model,
            config=config,
            log_path=log_path,
            return_routes=return_routes,
            gpu_ids=gpu_ids,
            seed=seed,
            first_version=first_version,
            keep_weights_on_host=keep_weights_on_host,
            num_nodes=num_nodes,
            adapters=None if adapter is None else AdapterLimits.around([adapter]),
        )
        manifest = adapter and AdapterManifest(self.manifest.required, adapter)
        self.served = Served(self, adapter=manifest, first_version=first_version)
        self.policies.append(self.served)

    @property
    def state(self) -> str:
        return self.served.state

    @property
    def weight_version(self) -> int | None:
        return self.served.weight_version

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        return self.served.update_weights(buckets, version)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        reuse_cache: bool = False,
        beside_others: bool = False,
        stale_prefixes: bool = False,
    ) -> Iterator[Completion]:
        return self.served.generate(
            requests,
            reuse_cache=reuse_cache,
            beside_others=beside_others,
            stale_prefixes=stale_prefixes,
        )

    def sequence_logprobs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        return self.served.sequence_logprobs(sequences)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.served.abort(request_ids)

    def pause(self, mode: PauseMode = "in_place") -> None:
        self.require_running("pause")
        flights = self.served.flights
        flights.pause(lambda: self.served.require_ready("pause"), retract=mode == "retract")
        try:
            self.served.post_in_flight("/pause_generation", {"mode": mode})
        except BaseException:
            flights.resume()
            raise

    def resume(self) -> None:
        served = self.served
        if not served.flights.is_paused:
            raise RuntimeError(f"resume: the engine is {served.state}; pause() it first")
        if served.weight_version is None:
            raise RuntimeError(f"resume: the engine is {served.state}; update_weights() first")
        served.post_in_flight("/continue_generation", {})
        served.flights.resume()
        served.drop_unused()

"""Syncs the weights of one policy to this rank's engine.

Digests prove that the engine holds the numbers that were sent (`PolicyEndpoint.update_weights`).
Canaries prove that the engine computes the same log-probs from them (`mrl.weight_sync.load`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mrl.config import ModelConfig, RolloutConfig
from mrl.engine_pool.local_engine import LocalEngine
from mrl.engine_pool.metrics import EngineMetrics
from mrl.engines.base import PolicyEndpoint
from mrl.errors import RunFailed
from mrl.exchange.sharing import sum_over_ranks
from mrl.system.shared_memory import SharedMemory
from mrl.types import Prompt
from mrl.weight_sync.engine_group import EngineGroup
from mrl.weight_sync.load import Canaries, CanaryMaker, WeightLoader
from mrl.weight_sync.quantize import quantized_buckets
from mrl.weight_sync.transports import local_buckets
from parallel.implementation import choose_dtype
from parallel.policy import Policy


class EnginePart:
    """Syncs one policy's weights to this rank's engine, which policies of other tenants may share.

    `prepare_sync`, `send` and `raise_failures` are collectives of all ranks. They do not use the
    engine if this rank has no endpoint, or if the engine is lost or not needed.
    """

    def __init__(
        self,
        engine: LocalEngine,
        endpoint: PolicyEndpoint | None,
        group: EngineGroup,
        config: RolloutConfig,
        model: ModelConfig,
        prompts: Sequence[Prompt],
        *,
        sends_adapter: bool,
        release: Callable[[], None],
    ) -> None:
        """`endpoint` is None if this rank leads no engine. `group` is the group of ranks that the
        engine spans. `sends_adapter`: whether the policy exports an adapter; then the engine reads
        only the leader's copy of the weights. `release` removes the policy from the engine, or
        stops an engine that serves no other policy."""
        self.engine, self.endpoint, self.release = engine, endpoint, release
        self.is_needed = True
        """Whether the engine has something to generate for this policy."""
        self.metrics = EngineMetrics()
        """Measurements of this policy's weight syncs."""
        self._config, self._group, self._sends_adapter = config, group, sends_adapter
        self._dtype = choose_dtype(config.engine_dtype(model))
        self._quantized = SharedMemory()
        """On CPUs, the memory for the buckets with quantised weights."""
        self._loader = WeightLoader(config, model, self.metrics)
        self._canary_maker = CanaryMaker(config, model, prompts)
        self._canaries: Canaries | None = None
        self._failure: Exception | None = None

    @property
    def active_endpoint(self) -> PolicyEndpoint | None:
        """The endpoint if this rank leads an engine that is needed and not lost, else None."""
        return self.endpoint if self.is_needed and not self.engine.is_lost else None

    def prepare_sync(self, policy: Policy) -> None:
        """Compute the trainer's log-probs of the canaries, which are token sequences whose
        log-probs the engine must reproduce after the sync. A collective.

        The policy must be on the device.
        """
        with self.metrics.verifying():
            self._canaries = self._canary_maker.make(policy)

    def send(self, policy: Policy, version: int, wake: Callable[[], None] | None = None) -> None:
        """Export the policy's weights, and load them into the engine, which compares their digests
        with those of the trainer. A collective.

        `wake` is called before the engine loads the weights. If a RuntimeError or ValueError
        occurs, it is raised later, by `raise_failures`, because every rank must take part in the
        export until its end.
        """
        bucket_bytes = self._config.weight_bucket_bytes(policy.export_bytes(self._dtype))
        buckets = local_buckets(
            self._config.weight_sync,
            quantized_buckets(
                policy.export(version, bucket_bytes, self._dtype),
                self._config.quantization,
                self._quantized,
            ),
            self._group,
            sends_adapter=self._sends_adapter,
        )
        self._failure = None
        try:
            if wake is not None:
                wake()
            if (endpoint := self.active_endpoint) is not None:
                with self.engine.noting_loss():
                    self._loader.update(endpoint, buckets, version)
        except (RuntimeError, ValueError) as error:
            self._failure = error
        finally:
            try:
                buckets.finish()  # the export's gathers are collectives of all ranks
            except (RuntimeError, ValueError) as error:
                self._failure = self._failure or error

    def raise_failures(self) -> None:
        """Raise on every rank if `send` failed on any rank. A lost engine does not count as a
        failure.

        A collective; no rank returns before all ranks have called it.
        """
        if sum_over_ranks(self._failure is not None):
            raise self._failure or RunFailed(
                "a weight sync failed on another rank; see its message"
            )

    def check_sync(self) -> None:
        """Raise RunFailed if the engine's log-probs of the canaries (see `prepare_sync`) differ
        from the trainer's by more than `rollout.canary_tolerance`. The engine must be awake."""
        if (endpoint := self.active_endpoint) is not None:
            with self.engine.noting_loss():
                self._loader.check_canaries(endpoint, self._canaries)

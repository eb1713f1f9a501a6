"""The weight sync: from the policy's export to an engine that is proven to hold the same model.

Digests prove that the engine holds the numbers that were sent (`RolloutEngine.update_weights`), and
canaries that it makes the same model of them (`mrl.collect.canary`). On one device the engine sleeps
while the trainer works, and the trainer's tensors are on the host while the engine generates:
`sync_weights` holds that order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from mrl.collect.canary import canary_sequences, check_canaries, default_tolerance
from mrl.collect.engine_slot import EngineSlot
from mrl.config import ModelConfig, RolloutConfig
from mrl.errors import RunFailed
from mrl.exchange.sharing import sum_over_ranks
from mrl.rollout.engine_group import EngineGroup, GatheredBuckets
from mrl.system.heartbeat import phase
from mrl.types import Prompt
from parallel.implementation import choose_dtype
from parallel.policy import Policy


class WeightSync:
    """Carries out the weight syncs of one rank.

    All ranks take part in `expect_canaries`, `export` and `raise_failures`; what concerns the engine
    does nothing on a rank whose slot is not active.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: ModelConfig,
        prompts: Sequence[Prompt],
        slot: EngineSlot,
        group: EngineGroup,
        *,
        sends_adapter: bool = False,
    ) -> None:
        """`group` joins the ranks that one engine spans. `sends_adapter`: the policy exports an
        adapter, of which the copy of the leader is enough."""
        self.slot = slot
        self._config = config
        self._group = group
        self._has_handles = (
            config.tensor_parallel_size > 1 and config.weight_sync == "tensor" and not sends_adapter
        )
        self._dtype = choose_dtype(config.engine_dtype(model))
        self._canaries = canary_sequences(prompts, config.canary_prompts)
        self._tolerance = config.canary_tolerance or default_tolerance(
            choose_dtype(model.dtype), self._dtype
        )
        self._expected: list[Tensor] = []
        self._failure: Exception | None = None
        self._num_bytes = 0
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what the syncs of the step before measured."""
        self._canary = 0.0
        self._verify_s = 0.0

    def expect_canaries(self, policy: Policy) -> None:
        """Compute the log-probs that the engine must give to the canaries. A collective."""
        with self._verifying():
            self._expected = policy.sequence_logprobs(self._canaries) if self._canaries else []

    @contextmanager
    def export(self, policy: Policy, version: int) -> Iterator[GatheredBuckets]:
        """Yield the buckets of the policy's weights to this rank's engine. A collective.

        A RuntimeError or ValueError inside the block is kept for `raise_failures`. Every rank takes
        part in the export until it ends, whatever fails.
        """
        bucket_bytes = self._config.weight_bucket_bytes(policy.export_bytes(self._dtype))
        buckets = GatheredBuckets(
            policy.export(version, bucket_bytes, self._dtype),
            self._group.exchange,
            has_handles=self._has_handles,
        )
        self._failure = None
        try:
            yield buckets
        except (RuntimeError, ValueError) as error:
            self._failure = error
        finally:
            try:
                buckets.finish()  # its gathers are collectives: every rank follows them to the end
            except (RuntimeError, ValueError) as error:
                self._failure = self._failure or error

    def update(self, buckets: GatheredBuckets, version: int) -> None:
        """Load the buckets into the engine, which compares digests. Raises what the engine raises."""
        engine = self.slot.engine
        if engine is not None and self.slot.is_active:
            with self.slot.noting_loss():
                report = engine.update_weights(buckets, version)
                self._verify_s += report.digest_s
                self._num_bytes = report.num_bytes

    def raise_failures(self) -> None:
        """Raise on every rank if the export failed on one of them; a lost engine is no failure.

        A collective, so it is a barrier too.
        """
        if sum_over_ranks(self._failure is not None):
            raise self._failure or RunFailed(
                "a weight sync failed on another rank; see its message"
            )

    def check_canaries(self) -> None:
        """Raise RunFailed where the engine gives the canaries other log-probs than the trainer."""
        engine = self.slot.engine
        if engine is None or not self.slot.is_active or not self._canaries:
            return
        with self.slot.noting_loss(), self._verifying():
            found = check_canaries(engine, self._canaries, self._expected, self._tolerance)
            self._canary = max(self._canary, found)

    def metrics(self) -> dict[str, float]:
        """Return the largest canary difference of the step's syncs, what verifying them took, and the
        bytes of the newest one."""
        return {
            "rollout/canary_abs_mean": self._canary,
            "rollout/sync_bytes": float(self._num_bytes),
            "time/verify_s": self._verify_s,
        }

    @contextmanager
    def _verifying(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._verify_s += time.perf_counter() - start


@phase("sync")
def sync_weights(policy: Policy, sync: WeightSync, version: int) -> None:
    """Give the device to the engine, which then holds the policy's weights as `version`.

    A collective. Where the engine has nothing to generate, or is lost, it stays asleep. Afterwards the
    policy is on the host. Raises RunFailed where the export fails or the canaries disagree.
    """
    policy.onload()  # a step that only rolled out left it on the host
    policy.offload_optimizer()
    sync.expect_canaries(policy)
    dist.barrier()  # an engine wakes on the devices of several ranks
    with sync.export(policy, version) as buckets:
        sync.slot.wake_weights()
        sync.update(buckets, version)
    policy.offload_parameters()
    sync.raise_failures()  # also the barrier before any engine's KV cache takes the memory
    sync.slot.wake_cache()
    sync.check_canaries()

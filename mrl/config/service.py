"""Configures a service: one base model, one layout and one engine for the adapters of many tenants.

A tenant is a recipe with a `lora` branch. The keys that a service and a recipe both have mean the same
in both and belong to the service; `mrl.tenants.agreement` compares them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from mrl.config.adapter import Experts
from mrl.config.asynchronous import WorkerConfig
from mrl.config.branch import Branch, one_or_several
from mrl.config.rollout import EngineConfig, RolloutConfig
from mrl.config.training import ModelConfig, MoeConfig, ParallelConfig
from mrl.config.watch import WatchConfig


class ServiceTrainConfig(Branch):
    recompute: bool = False
    """Full activation recompute: less memory, one more forward."""
    logprob_chunk_tokens: int = Field(default=1024, ge=0)
    """Loss tokens whose logits are held at a time, as in a recipe; 0 holds those of a whole
    micro-batch."""


class ServiceMoeConfig(Branch):
    capture_routes: bool = True
    """Ask the engine for the experts that it chose. Tenants with `moe.routing_replay: r3` or
    `diagnosis.capture_routes` need it."""
    replay: Literal["ids", "ids_order", "ids_weights", "ids_order_weights"] = "ids"
    """What is replayed of a route, as in a recipe."""
    load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """How the load of the experts is evened out, as in a recipe."""
    aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss, as in a recipe."""
    z_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss, as in a recipe."""


class LoraLimits(Branch):
    """What the adapters of tenants may be: the engine reserves memory for the largest."""

    max_rank: int = Field(default=32, ge=1)
    """The largest `lora.rank`."""
    targets: Literal["attention"] | tuple[str, ...] = "attention"
    """Modules outside the experts that an adapter may have: `attention`, or Hugging Face's names."""
    experts: tuple[Experts, ...] = ("none",)
    """Values that `lora.experts` may have beside `none`, which always fits. Any but `none` makes the
    engine reserve room for adapters of the experts in every slot."""
    slots: int = Field(default=4, ge=1)
    """Adapters that the engine computes with at a time. The others wait in the host's memory, and their
    requests wait for a slot."""

    @field_validator("experts", mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        return one_or_several(value)


class TenantLimits(Branch):
    """What each tenant may use. One that goes beyond it is refused, or paused with the reason."""

    max_number: int = Field(default=16, ge=1)
    """Tenants that are queued, running or paused."""
    max_tokens_in_flight: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers that the engine works on for one tenant at a time; null sets no
    limit."""
    max_micro_batch_tokens: int | None = Field(default=None, ge=1)
    """The largest `train.micro_batch_tokens`: its activations lie in the memory that all share. Null
    sets no limit."""
    max_adapter_bytes: int | None = Field(default=None, ge=1)
    """Bytes of an adapter's A and B in the dtype of the model; null sets no limit."""
    max_reward_s: float = Field(default=600.0, gt=0)
    """Wall seconds that the rewards and environments of a tenant may take in a step; also the largest
    `reward_timeout_s` and `environment.time_limit_s`."""
    reward_user: str | None = Field(default=None, min_length=1)
    """The user that rewards and environments run as, such as `nobody`; only root can give another than
    its own. The files that they need have to be readable for that user. Null is the user of the
    service."""
    max_disk_bytes: int | None = Field(default=None, ge=1)
    """Bytes in a tenant's output_dir; null sets no limit."""


class ScheduleConfig(Branch):
    max_wait_s: float = Field(default=1800.0, gt=0)
    """The longest wait of a tenant that has its samples, in seconds. It is kept where the load of all
    tenants allows that."""


class ServiceCheckpointConfig(Branch):
    stop_limit_s: float = Field(default=25.0, gt=0)
    """Seconds that SIGTERM and SIGHUP leave to end the round and save all tenants. After them the
    process ends, and every tenant goes back to its newest checkpoint. SIGUSR1 has no limit."""


class ControlConfig(Branch):
    tcp: int | None = Field(default=None, ge=1, le=65535)
    """A port on loopback where the control socket is reached too, with the token of
    `OUTPUT_DIR/token`; null opens none."""


class ServiceConfig(Branch):
    model_config = ConfigDict(serialize_by_alias=True)  # `async` is a word of Python

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Fields of Megatron's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig by
    their own names, for all tenants; see docs/megatron.md."""
    train: ServiceTrainConfig = ServiceTrainConfig()
    rollout: EngineConfig = EngineConfig()
    asynchronous: WorkerConfig = Field(default=WorkerConfig(), alias="async")
    moe: ServiceMoeConfig = ServiceMoeConfig()
    watch: WatchConfig = WatchConfig()
    lora: LoraLimits = LoraLimits()
    tenants: TenantLimits = TenantLimits()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: ServiceCheckpointConfig = ServiceCheckpointConfig()
    control: ControlConfig = ControlConfig()
    output_dir: str = Field(min_length=1)
    """The service folder. A service that was there already continues with its tenants."""

    @field_validator("model")
    @classmethod
    def _has_own_layers(cls, value: ModelConfig) -> ModelConfig:
        if value.transformer_impl == "transformer_engine":
            raise ValueError(
                "transformer_impl is transformer_engine, but adapters are built into mrl's own layers "
                "only; leave it at auto"
            )
        return value

    @property
    def longest_wait_s(self) -> float:
        """The time that a rank may wait for another: one engine may serve tenants that the other one
        does not have, with requests that wait for each other. The watchdog finds what hangs earlier."""
        return 600 + max(self.rollout.start_timeout_s, 8 * self.rollout.request_timeout_s)

    def rollout_config(self) -> RolloutConfig:
        """Return what an engine is made with. What a tenant decides has its default there; each request
        brings its own."""
        return RolloutConfig(**self.rollout.model_dump(), max_response_len=1)

    def moe_config(self) -> MoeConfig:
        """Return the `moe` branch of the base model."""
        return MoeConfig(
            **self.moe.model_dump(exclude={"capture_routes"}),
            routing_replay="r3" if self.moe.capture_routes else "off",
        )

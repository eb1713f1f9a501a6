"""Configuration of a service: one base model, one layout and one engine for the adapters of many
tenants.

A tenant is a recipe with a `lora` section. A key that occurs in both a service and a recipe has the
same meaning in both, and the service's value applies; `mrl.service.agreement` compares the values.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from mrl.config.adapter import Experts
from mrl.config.asynchronous import WorkerConfig
from mrl.config.branch import Branch, one_or_several
from mrl.config.rollout import RolloutConfig, SharedRolloutConfig
from mrl.config.training import ModelConfig, MoeConfig, ParallelConfig
from mrl.config.watch import WatchConfig


class ServiceTrainConfig(Branch):
    recompute: bool = False
    """Recompute all activations in the backward pass, which saves memory and costs one more forward
    pass."""
    logprob_chunk_tokens: int = Field(default=1024, ge=0)
    """Number of loss tokens whose logits are in memory at a time, as in a recipe; 0 keeps the
    logits of a complete micro-batch."""


class ServiceMoeConfig(Branch):
    capture_routes: bool = True
    """Request from the engine the experts that its router chose for each token. Tenants with
    `moe.routing_replay: r3` or `diagnosis.capture_routes` need this. A dense model has none: set it
    to false, and `moe.routing_replay` of its tenants to `off`."""
    replay: Literal["ids", "ids_order", "ids_weights", "ids_order_weights"] = "ids"
    """Which parts of a route are replayed, as in a recipe."""
    load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """How the load of the experts is balanced, as in a recipe."""
    aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss, as in a recipe."""
    z_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss, as in a recipe."""


class LoraLimits(Branch):
    """Limits of the adapters that tenants may have. The engine reserves memory for the largest
    adapter that these limits allow."""

    max_rank: int = Field(default=32, ge=1)
    """Maximum of `lora.rank`."""
    targets: Literal["attention"] | tuple[str, ...] = "attention"
    """Modules outside the experts that an adapter may update: `attention` for every attention
    projection, or a list of Hugging Face module names."""
    experts: tuple[Experts, ...] = ("none",)
    """Allowed values of `lora.experts`; `none` is always allowed. If another value is allowed too,
    the engine reserves memory for expert adapters in every slot."""
    slots: int = Field(default=4, ge=1)
    """Number of adapters that the engine computes with at a time. The other adapters stay in host
    memory, and their requests wait for a slot."""

    @field_validator("experts", mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        return one_or_several(value)


class TenantLimits(Branch):
    """Limits for each tenant. A tenant that exceeds a limit is refused, or paused with the reason."""

    max_number: int = Field(default=16, ge=1)
    """Maximum number of tenants that are queued, running or paused."""
    max_tokens_in_flight: int | None = Field(default=None, ge=1)
    """Maximum tokens of prompts and responses that the engine processes for one tenant at a time;
    null sets no limit."""
    max_micro_batch_tokens: int | None = Field(default=None, ge=1)
    """Maximum of `train.micro_batch_tokens`. The activations of a micro-batch take memory that all
    tenants share. Null sets no limit."""
    max_adapter_bytes: int | None = Field(default=None, ge=1)
    """Maximum size in bytes of an adapter's `A` and `B` matrices, in the dtype of the model; null
    sets no limit."""
    max_reward_s: float = Field(default=600.0, gt=0)
    """Wall-clock seconds that the rewards and environments of a tenant may take in a step; also the
    maximum of `reward_timeout_s` and `environment.time_limit_s`."""
    reward_user: str | None = Field(default=None, min_length=1)
    """The operating system's user that runs rewards and environments, such as `nobody`; null takes
    the user that runs the service. Only a service that runs as root can choose another user. That
    user must be able to read the files that rewards and environments need."""
    max_disk_bytes: int | None = Field(default=None, ge=1)
    """Maximum size in bytes of a tenant's output_dir; null sets no limit."""


class ScheduleConfig(Branch):
    max_wait_s: float = Field(default=1800.0, gt=0)
    """Longest time in seconds that a tenant whose samples are ready should wait to be trained. The
    service keeps to this time if the load of all tenants permits."""


class ServiceCheckpointConfig(Branch):
    stop_limit_s: float = Field(default=25.0, gt=0)
    """Seconds after SIGTERM or SIGHUP within which the service must finish the steps in progress
    and save all tenants. Otherwise the process ends, and every tenant returns to its newest
    checkpoint. After SIGUSR1 the service finishes and saves without a time limit."""


class ControlConfig(Branch):
    tcp: int | None = Field(default=None, ge=1, le=65535)
    """A loopback port on which the service answers the same requests as on its control socket.
    Callers must send the token in `OUTPUT_DIR/token`. Null opens no port."""
    tinker: int | None = Field(default=None, ge=0, le=65535)
    """A loopback port on which the service speaks the Tinker API. 0 takes a free port, which is
    written to `OUTPUT_DIR/tinker/address`. Callers must send a key that `mrl tenants key add` has
    made. Null opens no port."""
    tinker_save_every: int = Field(default=1, ge=0)
    """Number of optimizer steps after which a model of the Tinker API is saved, so that a killed
    service loses only what came later. It is also saved after each `load_state`. 0 saves models only
    when their clients ask for it."""


class ServiceConfig(Branch):
    model_config = ConfigDict(serialize_by_alias=True)  # `async` is a Python keyword

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Fields of Megatron's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig,
    under their own names, for all tenants; see docs/megatron.md."""
    train: ServiceTrainConfig = ServiceTrainConfig()
    rollout: SharedRolloutConfig = SharedRolloutConfig()
    asynchronous: WorkerConfig = Field(default=WorkerConfig(), alias="async")
    moe: ServiceMoeConfig = ServiceMoeConfig()
    watch: WatchConfig = WatchConfig()
    lora: LoraLimits = LoraLimits()
    tenants: TenantLimits = TenantLimits()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: ServiceCheckpointConfig = ServiceCheckpointConfig()
    control: ControlConfig = ControlConfig()
    output_dir: str = Field(min_length=1)
    """The service folder. If it contains a service, that service continues with its tenants."""

    @field_validator("model")
    @classmethod
    def _has_own_layers(cls, value: ModelConfig) -> ModelConfig:
        if value.transformer_impl == "transformer_engine":
            raise ValueError(
                "transformer_impl is transformer_engine, but adapters are built into mrl's own layers "
                "only; leave it at auto"
            )
        return value

    @field_validator("rollout")
    @classmethod
    def _unquantized(cls, value: SharedRolloutConfig) -> SharedRolloutConfig:
        if value.quantization != "none":
            raise ValueError(
                f"quantization is {value.quantization}, but adapters are not served on a quantised "
                "base; leave it at none"
            )
        return value

    @property
    def longest_wait_s(self) -> float:
        """Timeout in seconds for a rank that waits for another rank. It is long, because requests
        of one tenant may wait in an engine for requests of other tenants. The watchdog detects a
        hang earlier."""
        return 600 + max(self.rollout.start_timeout_s, 8 * self.rollout.request_timeout_s)

    def rollout_config(self) -> RolloutConfig:
        """Return the `rollout` section of a recipe with which the engine is built. Keys that the
        tenants set have placeholder values. No request uses these, because each request carries its
        tenant's values."""
        return RolloutConfig(**self.rollout.model_dump(), max_response_len=1)

    def moe_config(self) -> MoeConfig:
        """Return the `moe` section of a recipe with which the base model is built. Its
        `routing_replay` is `r3` if routes are captured, otherwise `off`."""
        return MoeConfig(
            **self.moe.model_dump(exclude={"capture_routes"}),
            routing_replay="r3" if self.moe.capture_routes else "off",
        )

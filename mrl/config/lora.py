"""Configuration of LoRA: which low-rank matrices are trained instead of the model's weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from mrl.config.adapter import Experts
from mrl.config.branch import Branch


class LoraConfig(Branch):
    rank: int = Field(default=32, ge=1)
    """Rank of every update: the matrix `A` is [rank, inputs] and `B` is [outputs, rank]."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update, which is `(alpha / rank) B A`."""
    targets: Literal["attention"] | tuple[str, ...] = "attention"
    """The modules outside the experts that get an update: `attention` for every attention
    projection, or a list of Hugging Face module names, such as `[q_proj, v_proj]`."""
    experts: Experts = "none"
    """`none` freezes the experts. With `per_expert`, each expert has a separate `A` and `B` for
    every projection. With `shared_outer`, the experts of a layer share the `A` of the gate and up
    projections and the `B` of the down projection."""
    dropout: float = 0.0
    """Only 0 is allowed: the engine has no dropout, so trainer and engine would be two different
    policies."""
    base_dtype: str | None = None
    """Only null is allowed: the base model is stored in `model.dtype`, as in the engine."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How `A` is initialised, as in PEFT: `kaiming` is uniform within `1 / sqrt(inputs)`,
    `gaussian` is normal with standard deviation `1 / rank`. `B` is initialised with 0, so training
    starts from the base model."""
    path: str | None = None
    """PEFT folder to start from (adapter_config.json and adapter_model.safetensors) instead of
    `init`. The adapter's rank, alpha and modules must equal the values in this section."""
    rollout: Literal["adapter", "merged"] = "adapter"
    """`adapter` sends `A` and `B` to the engine, which keeps the base model. `merged` adds the
    update to the base weights and sends the complete model, for engines that cannot serve adapters."""

    @field_validator("dropout")
    @classmethod
    def _has_no_dropout(cls, value: float) -> float:
        if value != 0:
            raise ValueError(
                "expected 0, because the engine has no dropout and would sample from another policy; "
                "leave it out"
            )
        return value

    @field_validator("base_dtype")
    @classmethod
    def _has_the_dtype_of_the_model(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError(
                "expected null, because a rounded base would differ from the model in the engine and "
                "in the checkpoint; set model.dtype, which all of them use"
            )
        return value

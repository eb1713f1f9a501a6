"""Configuration of LoRA: which low-rank matrices are trained instead of the model's weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from mrl.config.adapter import Experts
from mrl.config.branch import Branch


class LoraConfig(Branch):
    rank: int = Field(default=32, ge=1)
    """Rank of the update `B A` of every weight: `A` is [rank, inputs] and `B` is [outputs, rank]."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update: `(alpha / rank) B A` is added to the weight."""
    targets: Literal["attention"] | tuple[str, ...] = "attention"
    """The modules outside the experts that get a low-rank update: `attention` for every attention
    projection, or a list of Hugging Face module names, such as `[q_proj, v_proj]`."""
    experts: Experts = "none"
    """`none` freezes the experts. With `per_expert`, each expert has a separate `A` and `B` for
    every projection. With `shared_outer`, the experts of a layer share the `A` of the gate and up
    projections and the `B` of the down projection."""
    dropout: float = 0.0
    """Only 0 is allowed. The engine has no dropout, so with dropout the trainer's policy would
    differ from the engine's."""
    base_dtype: str | None = None
    """Only null is allowed: the base model is stored in `model.dtype`, as in the engine."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How `A` is initialised, as in PEFT. `kaiming`: uniform between `-1 / sqrt(inputs)` and
    `1 / sqrt(inputs)`. `gaussian`: normal with standard deviation `1 / rank`. `B` is initialised
    with 0, so training starts from the base model."""
    path: str | None = None
    """Folder of a PEFT adapter (adapter_config.json and adapter_model.safetensors) from which
    training starts, instead of `init`. The adapter's rank, alpha and modules must equal the values
    in this section."""
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
